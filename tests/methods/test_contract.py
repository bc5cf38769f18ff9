"""What the engine relies on, for every method; and that it knows none of them by name."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, FakeScorer, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import pseudoloss
from pseudoloss.config import METHOD_SETTINGS, Settings
from pseudoloss.methods import BUILDERS, build
from pseudoloss.methods.base import Mix, Outputs, tensors_of
from pseudoloss.nn.views import Views

N, B, C, D = 60, 6, 4, 5
EPOCHS, W = 9, 3
GIVEN = torch.arange(N) % C
WRONG = torch.arange(N) % 3 == 0
TRUE = torch.where(WRONG, (GIVEN + 1) % C, GIVEN)
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
OTHERS = torch.tensor([1, 2, 0, 4, 5, 3])
MIXES = ((SWAP, 0.7), (OTHERS, 0.4))
VIEWS = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)

# PLS with every departure from the defaults that changes a step.
PAPER = {
    "pseudo_label_norm": "max",
    "pseudo_label_mode": "eval",
    "weighting": "interpolated",
    "contrast_class": "own",
    "contrast_labels": "mixed",
    "contrast_mix": "separate",
    "balance": 0,
}
VARIANTS = {name: {"method": name} for name in METHOD_SETTINGS} | {"pls-paper": PAPER}
variants = pytest.mark.parametrize("variant", VARIANTS)


def method_of(variant, **changes):
    values = {"epochs": EPOCHS, "warmup": W} | VARIANTS[variant] | changes
    return build(Settings(**values), GIVEN, C, False)


def state_of(method):
    """A state as in the middle of a run: some labels are flagged."""
    state = method.start(GIVEN, C)
    state.noisy_N[::2] = True
    if hasattr(state, "trust_N"):
        state.trust_N[::2] = torch.linspace(0.1, 0.9, N // 2)
    method.begin_epoch(state, 5)
    return state


def images(seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8, generator=random)


def outputs_for(shown, seed=0):
    """Random outputs for the views that are shown; those with gradients are leaves."""
    random = torch.Generator().manual_seed(seed)

    def some(views, grad):
        return [
            tuple((2 * torch.randn(B, k, generator=random)).requires_grad_(grad) for k in (C, D))
            for _ in views
        ]

    return {
        role: Outputs(
            some(views.no_grad, False), some(views.with_grad, True), some(views.in_eval, False)
        )
        for role, views in shown.items()
    }


def scorer_of(method, seed=0, n=N):
    """Networks that predict the true labels, mostly."""
    random = torch.Generator().manual_seed(seed)

    def logits():
        return 4 * F.one_hot(TRUE[:n], C) + torch.randn(n, C, generator=random)

    plain = logits()
    return FakeScorer(
        GIVEN[:n],
        plain,
        weak=[logits(), logits()],
        roles={role: plain if i == 0 else logits() for i, role in enumerate(method.networks)},
        projections_ND=F.normalize(plain),
    )


# ----------------------------------------------------------------------------------- declarations


def test_every_method_has_settings_and_a_builder():
    assert BUILDERS.keys() == METHOD_SETTINGS.keys()


@variants
@pytest.mark.parametrize("warmup", [1, W, EPOCHS])
def test_the_phases_add_up_to_the_epochs(variant, warmup):
    phases = method_of(variant, warmup=warmup).phases()
    assert sum(phase.epochs for phase in phases) == EPOCHS
    assert (phases[0].name, phases[0].epochs) == ("warm-up", warmup)
    assert len({phase.name for phase in phases}) == len(phases)


@pytest.mark.parametrize(
    "name", [name for name, own in METHOD_SETTINGS.items() if not own.needs_warmup]
)
def test_other_methods_can_do_without_a_warm_up(name):
    method = method_of(name, warmup=0)
    assert [phase.epochs for phase in method.phases()] == [0, EPOCHS]
    assert method.scores_after(0)


@variants
def test_roles_are_those_of_networks_that_exist(variant):
    method = method_of(variant)
    every = {*method.networks, *method.ema}
    assert set(method.predicts) <= every
    assert len(set(method.networks)) == len(method.networks)
    for phase in method.phases():
        for step in phase.steps:
            assert set(step.trains) <= set(method.networks)
            shown = step.show(VIEWS, make_batch(INDEX, GIVEN, images(), MIXES))
            assert set(step.trains) <= shown.keys() <= every


# ----------------------------------------------------------------------------------------- steps


@variants
def test_the_loss_is_a_finite_number_with_gradients_for_every_trained_network(variant):
    method = method_of(variant)
    for phase in method.phases():
        for step in phase.steps:
            batch = make_batch(INDEX, GIVEN, images(), MIXES)
            outputs = outputs_for(step.show(VIEWS, batch))
            loss = step.loss(outputs, batch, state_of(method))
            assert loss.shape == ()
            assert loss.isfinite()
            loss.backward()
            for role in step.trains:
                logits, _ = outputs[role].with_grad[0]
                assert logits.grad.abs().sum() > 0


@variants
@settings(max_examples=10, deadline=None)
@given(order=st.permutations(list(range(B))).map(torch.tensor), seed=st.integers(0, 100))
def test_permuting_the_batch_keeps_the_loss_and_the_state(variant, order, seed):
    method = method_of(variant)
    (step,) = method.phases()[1].steps
    batch = make_batch(INDEX, GIVEN, images(), MIXES)
    outputs = outputs_for(step.show(VIEWS, batch), seed)
    place = order.argsort()
    moved_batch = batch._replace(
        index_B=batch.index_B[order],
        given_B=batch.given_B[order],
        mixes=tuple(Mix(place[mix.partner_B[order]], mix.lam) for mix in batch.mixes),
    )
    moved_outputs = {
        role: Outputs(*([(a[order], b[order]) for a, b in views] for views in found))
        for role, found in outputs.items()
    }
    state, moved_state = state_of(method), state_of(method)
    loss = step.loss(outputs, batch, state)
    torch.testing.assert_close(step.loss(moved_outputs, moved_batch, moved_state), loss)
    for name, value in tensors_of(state).items():
        torch.testing.assert_close(tensors_of(moved_state)[name], value, msg=name)


@variants
def test_a_step_draws_no_random_numbers(variant):
    """Those of the batch are all, and as many as the step declares suffice."""
    method = method_of(variant)
    for phase in method.phases():
        for step in phase.steps:
            mixes = MIXES[: len(step.lambdas)]
            batch = make_batch(INDEX, GIVEN, images(), mixes, draws=step.draws)
            before = torch.get_rng_state()
            outputs = outputs_for(step.show(VIEWS, batch))
            first, second = (step.loss(outputs, batch, state_of(method)) for _ in range(2))
            assert torch.equal(first, second)
            assert torch.equal(torch.get_rng_state(), before)


@variants
def test_a_state_is_filled_in_place(variant):
    """A captured step keeps seeing the same tensors."""
    method = method_of(variant)
    state = state_of(method)
    places = {name: value.data_ptr() for name, value in tensors_of(state).items()}
    kinds = {name: (value.dtype, value.shape) for name, value in tensors_of(state).items()}
    batch = make_batch(INDEX, GIVEN, images(), MIXES)
    scorer = scorer_of(method)
    for epoch in (W - 1, W, EPOCHS - 1):
        method.begin_epoch(state, epoch)
        (step,) = method.phases()[1].steps
        step.loss(outputs_for(step.show(VIEWS, batch)), batch, state)
        method.scoring(epoch).run(scorer, state)
    for name, value in tensors_of(state).items():
        assert value.data_ptr() == places[name], name
        assert (value.dtype, value.shape) == kinds[name], name


@variants
def test_views_and_losses_can_be_compiled_whole(variant):
    """Without a break in the graph, with the same result and the same state."""
    method = method_of(variant)
    (step,) = method.phases()[1].steps
    batch = make_batch(INDEX, GIVEN, images(), MIXES)
    show, loss = (
        torch.compile(call, dynamic=False, fullgraph=True, backend="aot_eager")
        for call in (step.show, step.loss)
    )
    plain = step.show(VIEWS, batch)
    for role, shown in show(VIEWS, batch).items():
        for compiled_views, plain_views in zip(shown, plain[role], strict=True):
            torch.testing.assert_close(compiled_views, plain_views)
    state, compiled_state = state_of(method), state_of(method)
    outputs = outputs_for(plain)
    wanted = step.loss(outputs, batch, state)
    torch.testing.assert_close(loss(outputs, batch, compiled_state), wanted)
    for name, value in tensors_of(state).items():
        torch.testing.assert_close(tensors_of(compiled_state)[name], value, msg=name)


@variants
def test_nothing_is_read_back_from_a_gpu(variant):
    """Fake tensors have a shape and no values: reading one back is an error."""
    with FakeTensorMode():

        def on_gpu(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="cuda")

        given_N = on_gpu(N, dtype=torch.long)
        values = {"epochs": EPOCHS, "warmup": W} | VARIANTS[variant]
        method = build(Settings(**values), given_N, C, False)
        state = method.start(given_N, C)
        views = Views(on_gpu(3), on_gpu(3), (8, 8), 1, True)
        for phase in method.phases():
            (step,) = phase.steps
            batch = make_batch(on_gpu(B, dtype=torch.long), given_N)._replace(
                images_BCHW=on_gpu(B, 3, 8, 8, dtype=torch.uint8),
                mixes=tuple(Mix(on_gpu(B, dtype=torch.long), on_gpu()) for _ in MIXES),
                draws_BK=on_gpu(B, step.draws),
            )
            shown = step.show(views, batch)
            outputs = {
                role: Outputs(*([(on_gpu(B, C), on_gpu(B, D)) for _ in part] for part in found))
                for role, found in shown.items()
            }
            assert step.loss(outputs, batch, state).shape == ()
        roles = {role: on_gpu(N, C) for role in method.networks}
        scorer = FakeScorer(given_N, on_gpu(N, C), roles=roles)
        for epoch in (W - 1, W):
            assert method.scoring(epoch).fixed_shapes
            method.scoring(epoch).run(scorer, state)


# -------------------------------------------------------------------------- scoring and verdicts


@variants
def test_wrong_labels_are_flagged_after_scoring(variant):
    method = method_of(variant)
    state, scorer = method.start(GIVEN, C), scorer_of(method)
    scoring = method.scoring(EPOCHS - 1)
    assert scoring.weak_views == 0
    scoring.run(scorer, state)
    verdict = method.verdict(state, EPOCHS - 1)
    assert verdict.noisy_N[WRONG].float().mean() > 0.8
    assert verdict.noisy_N[~WRONG].float().mean() < 0.1
    wanted = F.cross_entropy(scorer.plain_NC, GIVEN, reduction="none")
    torch.testing.assert_close(verdict.loss_N, wanted)
    assert torch.equal(verdict.predicted_N.long(), scorer.plain_NC.argmax(1))


@variants
def test_metrics_are_compared_where_the_truth_is_known(variant):
    method = method_of(variant)
    state, scorer = method.start(GIVEN, C), scorer_of(method)
    method.scoring(EPOCHS - 1).run(scorer, state)
    found = method.compare(scorer, state, TRUE, EPOCHS - 1)["metrics"]
    assert list(found["noise"]) == ["loss", "agreement", "disagreement", "js", "kl"]
    assert found["noise"]["loss"] > 0.9
    assert (found["pseudo_labels"] is not None) == variant.startswith("pls")


@variants
def test_a_healthy_run_has_no_notice(variant):
    method = method_of(variant)
    state, scorer = method.start(GIVEN, C), scorer_of(method)
    state.predicted_N.copy_(TRUE)
    if hasattr(state, "share_NK"):
        noise = torch.rand(N, C, generator=torch.Generator().manual_seed(0))
        state.store(torch.arange(N), (F.one_hot(TRUE, C) + noise).softmax(1))
    method.scoring(EPOCHS - 1).run(scorer, state)
    found = method.notices(state, EPOCHS - 1, [0.3, 0.3], [str(c) for c in range(C)])
    assert set({**method.notices_at_start(), **found}.values()) <= {None}


# ------------------------------------------------------------------- who may know a method's name

SOURCE = Path(pseudoloss.__file__).parent
GENERIC = [
    path
    for folder in ("engine", "inference", "labels")
    for path in sorted((SOURCE / folder).rglob("*.py"))
] + [SOURCE / "runs.py"]
MODULES = {
    *("ce", "co_teaching", "elr", "mixup"),
    *("pls", "pls_metrics", "pls_notices", "pseudo_labels"),
}


@pytest.mark.parametrize("path", GENERIC, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_the_engine_knows_no_method_by_name(path):
    text = path.read_text()
    tree = ast.parse(text)
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not strings & METHOD_SETTINGS.keys()
    names = [name for name in METHOD_SETTINGS if len(name) > 2]  # "ce" may be part of a sentence
    words = re.compile(rf"\b({'|'.join(names)})\b", re.IGNORECASE)
    assert words.findall(text) == []
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    assert not imported & {f"pseudoloss.methods.{name}" for name in MODULES}
    classes = {own.__name__ for own in METHOD_SETTINGS.values()}
    assert not classes & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_the_list_of_method_modules_is_complete():
    shared = {"__init__", "base", "building", "detection", "label_scores", "latent", "metrics"}
    shared |= {"latent_noise", "beta_mixture", "mixmatch", "mixture"}
    assert {path.stem for path in (SOURCE / "methods").glob("*.py")} == MODULES | shared


def test_methods_name_no_device_no_file_and_no_engine():
    """A method works on tensors."""
    for path in (SOURCE / "methods").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("pseudoloss."):
                layer = module.split(".")[1]
                assert layer in ("config", "errors", "methods", "nn", "scores"), (path, module)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", path
