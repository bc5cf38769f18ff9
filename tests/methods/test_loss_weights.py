"""Every weight of a term acts: it changes the loss by the weight times the term, computed in a slow
form, in every epoch of a ramp. And λ of mixup has the distribution that was asked for."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fakes import make_batch, slow_cross_entropy, softmax
from scipy import stats

from pseudoloss.config import METHOD_SETTINGS, Settings, describe_settings
from pseudoloss.methods import build, mixmatch
from pseudoloss.methods.base import Batch, Outputs
from pseudoloss.nn.views import Views

N, C, D = 48, 4, 5
EPOCHS, W = 12, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
B = len(INDEX)
SWAP = torch.tensor([2, 0, 5, 1, 3, 4])
OTHERS = torch.tensor([1, 2, 0, 4, 5, 3])
LAM = 0.7
VIEWS = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
RAMP = 3  # epochs, or steps


class Seen(NamedTuple):
    """What a loss was computed from."""

    outputs: dict[str, Outputs]
    batch: Batch
    state: Any  # before the loss

    def logits(self, role: str = "net", kind: str = "with_grad", view: int = 0) -> list[Any]:
        return getattr(self.outputs[role], kind)[view][0].double().tolist()


class Case(NamedTuple):
    """A weight, and the term that it belongs to."""

    method: str
    setting: str
    term: Callable[[Seen], float]
    more: dict[str, Any] = {}  # noqa: RUF012
    phase: int = -1
    entry: int = 0
    lam: float = LAM
    share: Callable[[int, float], float] = lambda epoch, weight: weight  # weight of an epoch
    epochs: tuple[int, ...] = (W,)
    weights: tuple[float, ...] = (0.3, 4.0)


def settings_of(method, **values):
    usual = {"epochs": EPOCHS, "warmup": W, "batch_size": B, "projection": D}
    return Settings(**(usual | {"method": method} | values))


def method_of(method, **values):
    return build(settings_of(method, **values), GIVEN, C, False)


def columns(method):
    return (C, D, 1) if method.decoder else (C, D)


def seen_by(method, step, epoch, lam):
    """Random outputs for the views of a step, the same whatever the settings."""
    rows = torch.cat([INDEX + i for i in range(len(step.streams))])
    partners = [torch.cat([p + i * B for i in range(len(step.streams))]) for p in (SWAP, OTHERS)]
    images = torch.zeros(len(rows), 3, 8, 8, dtype=torch.uint8)
    batch = make_batch(rows, GIVEN, images, [(p, lam) for p in partners], max(step.draws, 1))
    state = method.start(GIVEN, C)
    method.begin_epoch(state, epoch)
    random = torch.Generator().manual_seed(epoch)

    def some(views):
        widths = columns(method)
        return [tuple(torch.rand(len(v), k, generator=random) * 4 for k in widths) for v in views]

    shown = step.show(VIEWS, batch)
    return Seen({role: Outputs(*map(some, kinds)) for role, kinds in shown.items()}, batch, state)


def loss_and_seen(case, weight, epoch):
    values = {} if case.setting is None else {case.setting: weight}
    method = method_of(case.method, **(case.more | values))
    step = method.phases()[case.phase].steps[case.entry]
    seen = seen_by(method, step, epoch, case.lam)
    if "prototype_CD" in vars(seen.state):
        seen.state.prototype_CD.copy_(torch.linspace(-1, 1, C * D).view(C, D))
    if "u_N" in vars(seen.state):
        seen.state.u_N.copy_(torch.linspace(0, 1, N))
    if "seen_2" in vars(seen.state):
        seen.state.seen_2.fill_(epoch * B)
    return step.loss(seen.outputs, seen.batch, seen.state).item(), seen


# ----------------------------------------------------------------------------- terms, in slow forms


def probabilities(logits):
    return np.array([softmax(row) for row in logits])


def clipped(logits):
    return probabilities(logits).clip(1e-4, 1 - 1e-4)


def entropies(logits):
    p = probabilities(logits)
    return -(p * np.log(p)).sum(1)


def one_hot(classes):
    return np.eye(C)[np.asarray(classes)].tolist()


def agreement_with_the_average(seen):
    p = clipped(seen.logits())
    target = 0.1 * p / p.sum(1, keepdims=True)
    return np.mean([math.log(1 - t @ q) for t, q in zip(target, p, strict=True)])


def agreement_with_the_other_network(seen):
    """Of the second network with the average of the first."""
    target = 0.1 * probabilities(seen.logits("follows-first", "no_grad"))
    mixed = LAM * target + (1 - LAM) * target[SWAP.numpy()]
    p = clipped(seen.logits("second"))
    return np.mean([math.log(1 - t @ q) for t, q in zip(mixed, p, strict=True)])


def sigmoid_ramp(step, weight):
    """Of the step after so many."""
    return weight * math.exp(-5 * (1 - min((step + 1) / RAMP, 1)) ** 2)


def linear_ramp(epoch, weight):
    """In the middle of an epoch."""
    return weight * min(max((epoch - W + 0.5) / RAMP, 0), 1)


def error_of_guesses(role, helping=None):
    """Mean (p - guess)², over views, unlabelled images and classes; nothing is mixed."""

    def term(seen):
        free = [seen.logits(role, "no_grad", view) for view in range(2)]
        if helping:
            both = seen.logits(helping, "in_eval")
            free += [both[:B], both[B:]]
        sharp = np.mean([probabilities(view) for view in free], axis=0) ** 2  # T = 0.5
        sharp /= sharp.sum(1, keepdims=True)
        first, second = np.split(probabilities(seen.logits(role)), 2)
        return np.mean([(view[B:] - sharp) ** 2 for view in (first, second)])

    return term


def confidence(seen):
    return -entropies(seen.logits("first")).mean()


def imbalance(role="net"):
    def term(seen):
        mean = probabilities(seen.logits(role)).mean(0)
        return sum(math.log(1 / C / m) / C for m in mean)

    return term


def entropy_of_images(seen):
    u = seen.state.u_N[seen.batch.index_B].numpy()
    return np.mean((LAM * u + (1 - LAM) * u[SWAP.numpy()]) * entropies(seen.logits()))


def strong_loss(seen):
    return np.mean(slow_cross_entropy(seen.logits(view=1), one_hot(seen.batch.given_B)))


def rising(epoch, weight):
    """From the first epoch after the warm-up on."""
    return weight * min((epoch - W) / RAMP, 1)


def reconstruction(seen):
    return sum(float(view[2].mean()) for view in seen.outputs["net"].with_grad[:2])


def embeddings(seen):
    found = [view[1].double().numpy() for view in seen.outputs["net"].with_grad]
    return [z / np.linalg.norm(z, axis=1, keepdims=True) for z in found]


def instance_contrast(seen):
    weak, strong, *_ = embeddings(seen)
    losses = []
    for i in range(B):
        others = [weak[i] @ weak[j] / 0.3 for j in range(B) if j != i]
        row = [weak[i] @ z / 0.3 for z in strong] + others
        losses.append(-math.log(softmax(row)[i]))
    return np.mean(losses)


def prototype_contrast(seen):
    prototypes = seen.state.prototype_CD.double().numpy()
    labels = np.array(one_hot(seen.batch.given_B))
    losses = []
    for z, partners in zip(embeddings(seen)[2:], (SWAP, OTHERS), strict=True):
        mixed = LAM * labels + (1 - LAM) * labels[partners.numpy()]
        losses += slow_cross_entropy((z @ prototypes.T / 0.3).tolist(), mixed.tolist())
    return np.mean(losses)


def prototype_ramp(epoch, weight):
    """A weight below 1 does not fall any further."""
    return min(1 + epoch * max(weight - 1, 0) / RAMP, weight) if epoch else 0


def consistency_instead_of_classification(seen):
    """All labels are clean."""
    first, second = (seen.logits(view=view) for view in range(2))
    p, q = probabilities(first), probabilities(second)
    divergence = ((p - q) * np.log2(p / q)).sum(1).mean()
    labels = one_hot(seen.batch.given_B)
    fit = sum(np.mean(slow_cross_entropy(view, labels)) for view in (first, second))
    return divergence - fit


ALL_CLEAN = {"label_smoothing": 0.0, "clean_threshold": 0.01, "last_clean_threshold": 0.01}
MIXMATCH = {"ramp_epochs": RAMP}
RAMPED = (W, W + 1, W + RAMP, EPOCHS - 1)

CASES = [
    Case("elr", "elr_lambda", agreement_with_the_average),
    Case("elr", "elr_lambda", agreement_with_the_average, phase=0),
    Case(
        *("elr-plus", "elr_lambda", agreement_with_the_other_network, {"ramp_steps": RAMP}),
        entry=1,
        share=sigmoid_ramp,
        epochs=(0, 1, 2, 7),
    ),
    Case(
        *("divide-mix", "lambda_u", error_of_guesses("second", "first"), MIXMATCH),
        entry=1,
        lam=1.0,
        share=linear_ramp,
        epochs=RAMPED,
    ),
    Case("divide-mix", "warmup_penalty", confidence, phase=0),
    Case(
        *("evidential-mix", "lambda_u", error_of_guesses("classifier"), MIXMATCH),
        lam=1.0,
        share=linear_ramp,
        epochs=RAMPED,
    ),
    Case("dynamic-bootstrapping", "balance", imbalance()),
    Case("dsos", "entropy_weight", entropy_of_images),
    Case(
        "dsos",
        "entropy_weight",
        lambda seen: entropies(seen.logits()).mean(),
        {"as_released": True},
    ),
    Case("dsos", "entropy_weight", entropy_of_images, phase=0),
    Case("rrl", "reconstruction_weight", reconstruction),
    Case("rrl", "instance_weight", instance_contrast),
    Case(
        *("rrl", "prototype_weight", prototype_contrast, {"prototype_ramp": RAMP}),
        share=prototype_ramp,
        epochs=(0, 1, 2, RAMP, EPOCHS - 1),
    ),
    Case(
        *("rrl", "prototype_weight", prototype_contrast, {"prototype_ramp": 0}),
        epochs=(1, EPOCHS - 1),
    ),
    Case(
        *("jo-src", "consistency", consistency_instead_of_classification, ALL_CLEAN),
        weights=(0.3, 1.0),
    ),
    Case("pls", "balance", imbalance()),
    Case("pls-plus", "balance", imbalance()),
    Case("pls-plus", "strong_loss", strong_loss, epochs=(W, EPOCHS - 1)),
    Case(
        *("pls-plus", "strong_loss", strong_loss, {"strong_loss_ramp": RAMP}),
        share=rising,
        epochs=RAMPED,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method} {case.setting}")
def test_a_weight_changes_the_loss_by_its_term(case):
    for epoch in case.epochs:
        without, seen = loss_and_seen(case, 0.0, epoch)
        term = case.term(seen)
        assert abs(term) > 1e-3
        for weight in case.weights:
            found, _ = loss_and_seen(case, weight, epoch)
            wanted = case.share(epoch, weight) * term
            assert found - without == pytest.approx(wanted, rel=1e-4, abs=2e-5), (epoch, weight)


def test_no_weight_is_left_out():
    """A setting says in its help that it is a weight."""
    tested = {(case.method, case.setting) for case in CASES}
    for method in METHOD_SETTINGS:
        for name, (_, text) in describe_settings(method).items():
            if text.startswith("Weight of"):
                assert (method, name) in tested, f"{name} of {method} has no test above"


# ------------------------------------------------------------------------------------- λ of mixup

LAMBDAS = {  # whether λ is folded, and the entry of the main phase whose step has it
    "mixup": (True, 0),
    "elr-plus": (True, 0),
    "divide-mix": (True, 0),
    "evidential-mix": (True, 0),
    "pls-plus": (True, 0),
    "dynamic-bootstrapping": (False, 0),
    "rrl": (False, 0),
}


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0, 32.0])
@pytest.mark.parametrize("method", LAMBDAS)
def test_lambda_has_the_distribution_that_the_settings_name(method, alpha):
    folded, entry = LAMBDAS[method]
    u = np.linspace(0, 1, 1001)[1:-1]
    wanted = stats.beta.ppf(u, alpha, alpha)
    wanted = np.maximum(wanted, 1 - wanted) if folded else wanted
    step = method_of(method, mixup_alpha=alpha).phases()[-1].steps[entry]
    for rule in step.lambdas:
        found = rule(torch.from_numpy(u).float()).numpy()
        np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_no_lambda_is_left_out():
    with_alpha = {m for m in METHOD_SETTINGS if "mixup_alpha" in describe_settings(m)}
    assert with_alpha == set(LAMBDAS)


# The loss is linear in λ, where it is that of mixed labels alone.
LINEAR = {
    "mixup": {},
    "dynamic-bootstrapping": {"balance": 0},
    "dsos": {"entropy_weight": 0},
    "pls": {"balance": 0, "contrast": False, "correct": False},
    "pls, interpolated": {
        "weighting": "interpolated",
        "balance": 0,
        "contrast": False,
        "correct": False,
    },
    "pls-plus": {"balance": 0, "contrast": False, "correct": False},
    "rrl": {"prototype_ramp": 0},
}


@pytest.mark.parametrize("form", LINEAR)
def test_lambda_weighs_the_label_of_an_image_and_of_its_partner(form):
    changes, method = LINEAR[form], form.partition(",")[0]

    def loss(lam):
        case = Case(method, None, None, changes, lam=lam)
        return loss_and_seen(case, None, W)[0]

    own, partner = loss(1.0), loss(0.0)
    assert abs(own - partner) > 1e-3
    for lam in (0.5, 0.7, 0.95):
        wanted = lam * own + (1 - lam) * partner
        assert loss(lam) == pytest.approx(wanted, rel=1e-5), lam


@pytest.mark.parametrize("method", ["divide-mix", "evidential-mix"])
def test_lambda_weighs_both_targets_of_mixmatch(method):
    """Cross-entropy is linear in λ, the squared error is not."""

    def loss(lam):
        return loss_and_seen(Case(method, "lambda_u", None, lam=lam), 0.0, W)[0]

    own, partner = loss(1.0), loss(0.0)
    assert abs(own - partner) > 1e-3
    assert loss(0.7) == pytest.approx(0.7 * own + 0.3 * partner, rel=1e-5)


def test_ramps_of_mixmatch_end_at_one():
    assert [mixmatch.ramp_up(e, 4) for e in (-1, 0, 1, 4, 9)] == [0, 0, 0.25, 1, 1]
