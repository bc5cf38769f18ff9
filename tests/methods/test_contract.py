"""The steps: what each switch does, and that a step is what the equations say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pseudoloss.config import Settings
from pseudoloss.engine.trainer import see
from pseudoloss.methods import Batch, build, pls
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixup import cross_entropy, mix
from pseudoloss.nn.networks import Network
from pseudoloss.nn.networks import build as build_network
from pseudoloss.nn.views import WEAK_DRAWS, Views

N, B, C = 20, 6, 4


class Watched(nn.Module):
    """A network that remembers what it was shown, and in which mode."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.seen = []

    def forward(self, x):
        logits, projection = self.inner(x)
        self.seen.append((x.detach(), self.training, torch.is_grad_enabled(), logits, projection))
        return logits, projection

    together = Network.together
    fused = False


@pytest.fixture
def setting():
    torch.manual_seed(0)
    images = torch.randint(0, 256, (N, 3, 8, 8), dtype=torch.uint8)
    given = torch.arange(N) % C
    network = Watched(
        build_network("small-cnn", channels=3, size=(8, 8), classes=C, projection=5)
    ).train()
    views = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
    memory = Memory.of(given, C)
    memory.noisy_N[::2] = True
    memory.trust_N[::2] = torch.linspace(0.1, 0.9, N // 2)
    index = torch.tensor([4, 1, 10, 7, 18, 3])

    def batch(lam=0.7):
        return Batch(
            index_B=index,
            images_BCHW=images[index],
            given_B=given[index],
            partner_B=torch.tensor([2, 0, 5, 1, 3, 4]),
            lam=torch.tensor(lam),
            draws_BK=torch.rand(B, 36, generator=torch.Generator().manual_seed(1)),
        )

    def loss(lam=0.7, warm_up=False, **changes):
        method = build(Settings(**changes), given, C)
        part = method.warm_up if warm_up else method
        seen = see(network, part.show(views, batch(lam)), part.guess_in_eval)
        return part.loss(seen, batch(lam), memory)

    class Everything:
        pass

    Everything.loss, Everything.batch = staticmethod(loss), staticmethod(batch)
    Everything.network, Everything.views, Everything.memory = network, views, memory
    Everything.given, Everything.index = given, index
    return Everything


def test_the_step_is_the_sum_of_the_papers_terms(setting):
    """Algorithm 1, lines 11 to 27, written out once more around the network's own outputs."""
    loss = setting.loss()
    batch, index = setting.batch(), setting.index
    (first, *_), (second, *_), (mixed, *_), (strong, *_) = setting.network.seen
    _, _, guessing, logits1, _ = setting.network.seen[0]
    logits2 = setting.network.seen[1][3]
    assert not guessing
    torch.testing.assert_close(mixed, mix(first, batch.partner_B, batch.lam))
    assert not torch.equal(first, second)
    assert not torch.equal(first, strong)

    guess = (logits1.softmax(1) + logits2.softmax(1)) ** 2
    guess = guess / guess.sum(1, keepdim=True)
    torch.testing.assert_close(setting.memory.guesses(index), guess)
    noisy = setting.memory.noisy_N[index]
    target = torch.where(noisy[:, None], guess, F.one_hot(batch.given_B, C).float())
    w = setting.memory.trust_N[index]
    logits, weak_projection = setting.network.seen[2][3:]
    strong_projection = setting.network.seen[3][4]
    label = pls.contrastive_label(pls.class_of_mixed(target, batch.partner_B, batch.lam), w)
    wanted = (
        pls.classification_apart(logits, target, w, batch.partner_B, batch.lam)
        + pls.class_balance(logits, torch.full((C,), 1 / C))
        + pls.contrastive_loss(
            pls.feature_similarity(weak_projection, strong_projection, 0.2),
            pls.label_similarity(label, batch.partner_B, batch.lam),
        )
    )
    torch.testing.assert_close(loss, wanted)


def test_guessing_is_in_training_mode_as_released(setting):
    """Row 12: batch statistics count and the running ones move; or, on request, neither."""
    norm = setting.network.inner.backbone.norms[0]
    before = norm.num_batches_tracked.item()
    setting.loss()
    assert [mode for _, mode, *_ in setting.network.seen] == [True] * 4
    assert norm.num_batches_tracked.item() == before + 4
    setting.network.seen.clear()
    setting.loss(guess_mode="eval")
    assert [mode for _, mode, *_ in setting.network.seen] == [False, False, True, True]
    assert norm.num_batches_tracked.item() == before + 6
    assert setting.network.training


def test_only_the_mixed_and_the_strong_view_are_learnt_from(setting):
    setting.loss()
    assert [graded for _, _, graded, *_ in setting.network.seen] == [False, False, True, True]


def test_without_correction_nothing_is_guessed(setting):
    before = setting.memory.guesses(slice(None))
    setting.loss(correct=False)
    assert len(setting.network.seen) == 2
    assert torch.equal(setting.memory.guesses(slice(None)), before)
    assert build(Settings(correct=False), setting.given, C).guess is None
    assert build(Settings(), setting.given, C).guess is not None


def test_without_contrast_the_strong_view_is_not_seen(setting):
    setting.loss(contrast=False)
    assert len(setting.network.seen) == 3


def _parts(setting, **changes):
    """The loss, with the network's running statistics put back, so that runs can be compared."""
    state = {k: v.clone() for k, v in setting.network.state_dict().items()}
    value = setting.loss(**changes).item()
    setting.network.load_state_dict(state)
    return value


@pytest.mark.parametrize(
    "switch",
    [
        {"contrast": False},
        {"trust_in_classification": False},
        {"trust_in_contrast": False},
        {"balance": 0},
        {"correct": False},
        {"gamma": 1.0},
        {"mu": 0.5},
        {"guess_norm": "max"},
        {"weighting": "together"},
        {"weighting": "own"},
    ],
)
def test_every_switch_changes_the_loss(setting, switch):
    assert _parts(setting) != pytest.approx(_parts(setting, **switch), rel=1e-5)


def test_the_prior_of_the_given_labels(setting):
    skewed = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2, 3])
    method = build(Settings(balance_prior="given"), skewed, C)
    torch.testing.assert_close(method.prior_C, torch.tensor([0.6, 0.2, 0.1, 0.1]))
    method = build(Settings(), skewed, C)
    torch.testing.assert_close(method.prior_C, torch.full((4,), 0.25))


def test_own_class_is_chosen_by_its_setting():
    given = torch.arange(4)
    assert build(Settings(contrast_class="own"), given, 4).contrastive_class is pls.class_of_own
    assert build(Settings(), given, 4).contrastive_class is pls.class_of_mixed


def test_trust_off_in_both_is_trust_one(setting):
    off = _parts(setting, trust_in_classification=False, trust_in_contrast=False)
    setting.memory.trust_N.fill_(1)
    assert off == pytest.approx(_parts(setting), rel=1e-6)


def test_the_warm_up_is_mixup_on_the_given_labels(setting):
    loss = setting.loss(warm_up=True)
    seen, _, _, logits, _ = setting.network.seen[0]
    batch = setting.batch()
    view = setting.views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
    torch.testing.assert_close(seen, mix(view, batch.partner_B, batch.lam))
    target = mix(F.one_hot(batch.given_B, C).float(), batch.partner_B, batch.lam)
    torch.testing.assert_close(loss, cross_entropy(logits, target).mean())
    setting.network.seen.clear()
    torch.testing.assert_close(setting.loss(method="mixup").item(), loss.item())


def test_mixup_at_lambda_one_is_cross_entropy(setting):
    assert _parts(setting, method="ce") == pytest.approx(_parts(setting, method="mixup", lam=1.0))


def test_a_step_never_sees_what_it_should_not(setting):
    """Clean images keep their given labels however wrong the guesses are."""
    setting.memory.noisy_N.fill_(False)
    setting.memory.trust_N.fill_(1)
    target = F.one_hot(setting.batch().given_B, C).float()
    loss = setting.loss(contrast=False, balance=0)
    logits = setting.network.seen[-1][3]
    batch = setting.batch()
    wanted = cross_entropy(logits, mix(target, batch.partner_B, batch.lam)).mean()
    torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "ce"},
        {"method": "mixup"},
        {"correct": False, "contrast": False},
        {"guess_norm": "max", "weighting": "together", "contrast_class": "own", "balance": 0},
        {"trust_in_classification": False, "trust_in_contrast": False, "guess_mode": "eval"},
    ],
)
def test_views_and_losses_can_be_compiled_whole(setting, changes):
    """Without a break in the graph, and with the same result."""
    method = build(Settings(**changes), setting.given, C)
    batch, views = setting.batch(), setting.views
    for part in (method.warm_up, method):
        show, loss = (
            torch.compile(call, dynamic=False, fullgraph=True, backend="aot_eager")
            for call in (part.show, part.loss)
        )
        shown = show(views, batch)
        for compiled, plain in zip(shown, part.show(views, batch), strict=True):
            torch.testing.assert_close(compiled, plain)
        seen = see(setting.network, shown, part.guess_in_eval)
        wanted = part.loss(seen, batch, setting.memory)
        before = {name: t.clone() for name, t in setting.memory.tensors().items()}
        torch.testing.assert_close(loss(seen, batch, setting.memory), wanted)
        for name, tensor in setting.memory.tensors().items():
            assert torch.equal(tensor, before[name]), name
