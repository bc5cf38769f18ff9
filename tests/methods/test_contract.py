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
from torch.utils._python_dispatch import TorchDispatchMode

import pseudoloss
from pseudoloss.config import METHOD_SETTINGS, Settings
from pseudoloss.methods import BUILDERS, build
from pseudoloss.methods.base import Mix, Outputs, joined, tensors_of
from pseudoloss.nn.views import Views

N, B, C, D = 60, 6, 4, 5
EPOCHS, W = 9, 3
GIVEN = torch.arange(N) % C
WRONG = torch.arange(N) % 3 == 0
TRUE = torch.where(WRONG, (GIVEN + 1) % C, GIVEN)
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
OTHERS = torch.tensor([1, 2, 0, 4, 5, 3])
MIXES = ((SWAP, 0.7), (OTHERS, 0.4))
DRAWS = 48  # enough for every step
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
# PLS-plus with every switch; the two ways to select have a variant each.
PLUS = {
    "method": "pls-plus",
    "strong_loss": 1.0,
    "strong_loss_ramp": 4,
    "strong_view": "trivial",
    "strong_cutout": 0.5,
    "mixup_alpha": 4.0,
    "cutmix": 0.5,
    "first_epoch_trust": False,
    "debias": 1.0,
    "ema_decay": 0.9,
    "ema_pseudo_labels": True,
    "ema_scoring": True,
    "loss_momentum": 0.8,
    "warmup_trend": True,
    "mode_gate": 0.5,
}
VOTE = {
    "method": "pls-plus",
    "strong_loss": 1.0,
    "strong_view": "rand",
    "ema_decay": 0.9,
    "ema_prediction": True,
    "selection": "neighbours",
    "neighbours": 10,
    "neighbour_share": 0.7,
    "relabel": 0.8,
    "pseudo_label_views": 1,
}
VARIANTS = {name: {"method": name} for name in METHOD_SETTINGS} | {"pls-paper": PAPER}
VARIANTS["jo-src"] |= {"label_smoothing": 0.1}  # for few classes
VARIANTS |= {"pls-plus, all": PLUS, "pls-plus, vote": VOTE}
VARIANTS["soft-to-hard"] = {"method": "dynamic-bootstrapping", "bootstrapping": "soft-to-hard"}
variants = pytest.mark.parametrize("variant", VARIANTS)


def method_of(variant, **changes):
    values = {"epochs": EPOCHS, "warmup": W, "projection": D} | VARIANTS[variant] | changes
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


def widths(method):
    """Columns of what a network says about a view in training mode."""
    return (C, D, 1) if method.decoder else (C, D)


def outputs_for(method, shown, seed=0):
    """Random outputs for the views that are shown; those with gradients are leaves."""
    random = torch.Generator().manual_seed(seed)

    def some(views, grad):
        return [
            tuple(
                (2 * torch.randn(len(view), k, generator=random)).requires_grad_(grad)
                for k in widths(method)
            )
            for view in views
        ]

    return {
        role: Outputs(
            some(views.no_grad, False), some(views.with_grad, True), some(views.in_eval, False)
        )
        for role, views in shown.items()
    }


def steps_of(method):
    """Every step of a run, once."""
    return list(dict.fromkeys(step for phase in method.phases() for step in phase.steps))


def outputs_of_step(method, step, batch, state, seed=0, views=VIEWS):
    """Random outputs for all views of a step, also for those that depend on outputs."""
    outputs = outputs_for(method, step.show(views, batch), seed)
    if step.show_next is None:
        return outputs
    shown = step.show_next(views, batch, outputs, state)
    return joined(outputs, outputs_for(method, shown, seed + 1))


def scorer_of(method, seed=0, n=N):
    """Networks that predict the true labels, mostly."""
    random = torch.Generator().manual_seed(seed)

    def logits():
        return 8 * F.one_hot(TRUE[:n], C) + torch.randn(n, C, generator=random)

    plain = logits()
    weak = [logits(), logits()]
    roles = dict.fromkeys(method.ema, plain)
    roles |= {role: plain if i == 0 else logits() for i, role in enumerate(method.networks)}
    if len(method.predicts) > 1:
        plain = torch.stack([roles[role] for role in method.predicts]).mean(0)
    z_ND = F.normalize(F.pad(plain, (0, D - C)))
    return FakeScorer(GIVEN[:n], plain, weak, roles, z_ND, predicts=method.predicts)


# ----------------------------------------------------------------------------------- declarations


def test_every_method_has_settings_and_a_builder():
    assert BUILDERS.keys() == METHOD_SETTINGS.keys()


@variants
@pytest.mark.parametrize("warmup", [1, W, EPOCHS])
def test_the_phases_add_up_to_the_epochs(variant, warmup):
    phases = method_of(variant, warmup=warmup).phases()
    assert sum(phase.epochs for phase in phases) == EPOCHS
    assert phases[0].name == "warm-up"
    of_warmup = [phase.epochs for phase in phases if phase.name.startswith("warm-up")]
    assert sum(of_warmup) == warmup
    assert len({phase.name for phase in phases}) == len(phases)


@pytest.mark.parametrize(
    "name", [name for name, own in METHOD_SETTINGS.items() if not own.needs_warmup]
)
def test_other_methods_can_do_without_a_warm_up(name):
    method = method_of(name, warmup=0)
    assert [phase.epochs for phase in method.phases()] == [0, EPOCHS]
    assert method.scores_after(0)


@variants
def test_a_run_of_warm_up_alone_is_noticed_if_the_warm_up_is_another_training(variant):
    method, only = method_of(variant), method_of(variant, warmup=EPOCHS)
    first, *_, last = method.phases()
    assert method.corrects or first.steps == last.steps
    assert method.notices_at_start().get("warm-up only") is None
    text = only.notices_at_start().get("warm-up only")
    if method.corrects:
        assert text.startswith(f"all epochs are warm-up, so {method.corrects} never corrects a ")
    else:
        assert text is None


@variants
def test_roles_are_those_of_networks_that_exist(variant):
    method = method_of(variant)
    every = {*method.networks, *method.ema}
    assert set(method.predicts) <= every
    assert len(set(method.networks)) == len(method.networks)
    for phase in method.phases():
        for step in phase.steps:
            assert set(step.trains) <= set(method.networks)
            shown = step.show(VIEWS, make_batch(INDEX, GIVEN, images(), MIXES, DRAWS))
            assert set(step.trains) <= shown.keys() <= every


# ----------------------------------------------------------------------------------------- steps


@variants
def test_the_loss_is_a_finite_number_with_gradients_for_every_trained_network(variant):
    method = method_of(variant)
    for phase in method.phases():
        for step in phase.steps:
            batch = make_batch(INDEX, GIVEN, images(), MIXES, DRAWS)
            state = state_of(method)
            outputs = outputs_of_step(method, step, batch, state)
            loss = step.loss(outputs, batch, state)
            assert loss.shape == ()
            assert loss.isfinite()
            if step.trains:
                loss.backward()
            for role in step.trains:
                logits, *_ = outputs[role].with_grad[0]
                assert logits.grad.abs().sum() > 0


@variants
@settings(max_examples=10, deadline=None)
@given(order=st.permutations(list(range(B))).map(torch.tensor), seed=st.integers(0, 100))
def test_permuting_the_batch_keeps_the_loss_and_the_state(variant, order, seed):
    """With several streams, the place of an image says which it is from."""
    method = method_of(variant)
    for step in steps_of(method):
        if len(step.streams) == 1:
            check_permutation(method, step, order, seed)


def check_permutation(method, step, order, seed):
    batch = make_batch(INDEX, GIVEN, images(), MIXES, DRAWS)
    outputs = outputs_of_step(method, step, batch, state_of(method), seed)
    place = order.argsort()
    moved_batch = batch._replace(
        index_B=batch.index_B[order],
        given_B=batch.given_B[order],
        mixes=tuple(Mix(place[mix.partner_B[order]], mix.lam) for mix in batch.mixes),
    )
    moved_outputs = {
        role: Outputs(*([tuple(t[order] for t in view) for view in kind] for kind in found))
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
            outputs = outputs_of_step(method, step, batch, state_of(method))
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
    batch = make_batch(INDEX, GIVEN, images(), MIXES, DRAWS)
    scorer = scorer_of(method)
    for epoch in (W - 1, W, EPOCHS - 1):
        method.begin_epoch(state, epoch)
        for step in steps_of(method):
            step.loss(outputs_of_step(method, step, batch, state), batch, state)
        method.scoring(epoch).run(scorer, state)
    for name, value in tensors_of(state).items():
        assert value.data_ptr() == places[name], name
        assert (value.dtype, value.shape) == kinds[name], name


@variants
def test_views_and_losses_can_be_compiled_whole(variant):
    """Without a break in the graph, with the same result and the same state."""
    method = method_of(variant)
    batch = make_batch(INDEX, GIVEN, images(), MIXES, DRAWS)
    for step in dict.fromkeys(method.phases()[-1].steps):
        show, show_next, loss = (
            call and torch.compile(call, dynamic=False, fullgraph=True, backend="aot_eager")
            for call in (step.show, step.show_next, step.loss)
        )
        state, compiled_state = state_of(method), state_of(method)
        shown = [(show(VIEWS, batch), step.show(VIEWS, batch))]
        if step.show_next is not None:
            seen = (VIEWS, batch, outputs_for(method, shown[0][1]), state)
            shown.append((show_next(*seen), step.show_next(*seen)))
        for compiled_views, plain_views in shown:
            for role, views in compiled_views.items():
                torch.testing.assert_close(tuple(views), tuple(plain_views[role]))
        outputs = outputs_of_step(method, step, batch, state)
        wanted = step.loss(outputs, batch, state)
        torch.testing.assert_close(loss(outputs, batch, compiled_state), wanted)
        for name, value in tensors_of(state).items():
            torch.testing.assert_close(tensors_of(compiled_state)[name], value, msg=name)


class NoCopyFromTheHost(TorchDispatchMode):
    """While a graph is captured, nothing can be copied from the host to the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        kind = func.overloadpacket
        if kind in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[0] if kind is torch.ops.aten._to_copy else args[1]
            assert (found.device.type, source.device.type) != ("cuda", "cpu"), source.shape
        return found


@variants
def test_nothing_is_read_back_from_a_gpu_or_copied_to_it(variant):
    """Fake tensors have a shape and no values: reading one back is an error."""
    with FakeTensorMode():

        def on_gpu(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="cuda")

        def on_gpu_outputs(shown):
            return {
                role: Outputs(
                    *(
                        [tuple(on_gpu(len(view), k) for k in widths(method)) for view in kind]
                        for kind in found
                    )
                )
                for role, found in shown.items()
            }

        given_N = on_gpu(N, dtype=torch.long)
        values = {"epochs": EPOCHS, "warmup": W, "projection": D} | VARIANTS[variant]
        method = build(Settings(**values), given_N, C, False)
        state = method.start(given_N, C)
        views = Views(on_gpu(3), on_gpu(3), (8, 8), 1, True)
        for step in steps_of(method):
            batch = make_batch(on_gpu(B, dtype=torch.long), given_N)._replace(
                images_BCHW=on_gpu(B, 3, 8, 8, dtype=torch.uint8),
                mixes=tuple(Mix(on_gpu(B, dtype=torch.long), on_gpu()) for _ in MIXES),
                draws_BK=on_gpu(B, step.draws),
            )
            with NoCopyFromTheHost():
                outputs = on_gpu_outputs(step.show(views, batch))
                if step.show_next is not None:
                    shown = step.show_next(views, batch, outputs, state)
                    outputs = joined(outputs, on_gpu_outputs(shown))
                assert step.loss(outputs, batch, state).shape == ()
        roles = {role: on_gpu(N, C) for role in (*method.networks, *method.ema)}
        scorer = FakeScorer(
            given_N,
            on_gpu(N, C),
            weak=[on_gpu(N, C)],
            roles=roles,
            projections_ND=on_gpu(N, D),
            predicts=method.predicts,
        )
        for epoch in (W - 1, W):
            assert method.scoring(epoch).fixed_shapes
            with NoCopyFromTheHost():
                method.scoring(epoch).run(scorer, state)


# -------------------------------------------------------------------------- scoring and verdicts


def see_all(method, scorer, state):
    """The steps of an epoch, in which all networks say what the scorer says."""
    for step in method.phases()[1].steps:
        if len(step.streams) > 1 or step.show_next is not None:
            continue
        for index_B in torch.arange(N).split(B):
            batch = make_batch(index_B, GIVEN, images(), MIXES, DRAWS)
            logits_BC = scorer.plain_NC[index_B].clone().requires_grad_()
            seen = (logits_BC, *(torch.ones(B, k) for k in widths(method)[1:]))
            outputs = {
                role: Outputs(*([seen] * len(views) for views in shown))
                for role, shown in step.show(VIEWS, batch).items()
            }
            step.loss(outputs, batch, state)


@variants
def test_wrong_labels_are_flagged_after_scoring(variant):
    method = method_of(variant)
    state, scorer = method.start(GIVEN, C), scorer_of(method)
    see_all(method, scorer, state)
    scoring = method.scoring(EPOCHS - 1)
    assert scoring.weak_views <= len(scorer.weak)
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
    see_all(method, scorer, state)
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
    *("ce", "co_teaching", "divide_mix", "dsos", "dynamic_bootstrapping", "elr", "elr_plus"),
    *("evidential_mix", "jo_src"),
    *("mixup", "pls", "pls_metrics", "pls_notices", "pls_plus", "pseudo_labels", "rrl"),
    "split_notices",
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
    shared = {"__init__", "base", "building", "detection", "label_scores", "latent", "losses"}
    shared |= {"latent_noise", "beta_mixture", "gaussian_mixture", "metrics", "mixmatch", "mixture"}
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
