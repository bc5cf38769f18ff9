"""DSOS: its equations against slow forms, their laws, and what it says about labels."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, FakeScorer, make_batch, outputs_of, slow_cross_entropy, softmax
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.errors import InputError
from pseudoloss.methods import build, dsos
from pseudoloss.nn.views import Views

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])
LAM = 0.7  # of the batch


def method_of(given=GIVEN, classes=C, **changes):
    values = {"method": "dsos", "epochs": 9, "warmup": 3} | changes
    return build(Settings(**values), given, classes, False)


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------ slow forms


def slow_entropy(row):
    return -sum(p * math.log(p) for p in softmax(row))


def slow_collision_entropy(row, label):
    mean = [(p + (c == label)) / 2 for c, p in enumerate(softmax(row))]
    return -math.log(sum(m * m for m in mean))


def slow_target(label, u, temperature):
    return softmax([(c == label) * u / temperature for c in range(C)])


def slow_loss(logits, labels, u, weight, dynamic, temperature):
    targets = [slow_target(c, v, temperature) for c, v in zip(labels, u, strict=True)]
    fit = term = 0.0
    for i, (row, other) in enumerate(zip(logits, SWAP.tolist(), strict=True)):
        pairs = zip(targets[i], targets[other], strict=True)
        mixed = [LAM * a + (1 - LAM) * b for a, b in pairs]
        fit += slow_cross_entropy([row], [mixed])[0]
        term += slow_entropy(row) * (LAM * u[i] + (1 - LAM) * u[other] if dynamic else 1)
    return (fit + weight * term) / len(logits)


def test_collision_entropy():
    logits, labels = random_logits(B, C), GIVEN[INDEX]
    ours = dsos.collision_entropy(logits, F.one_hot(labels, C).float())
    pairs = zip(logits.tolist(), labels.tolist(), strict=True)
    np.testing.assert_allclose(ours, [slow_collision_entropy(*pair) for pair in pairs], rtol=1e-5)


def test_collision_entropy_of_sure_and_unsure_predictions():
    """0 for a sure prediction of the label, log 2 for one that contradicts it, more without any."""
    label = F.one_hot(torch.zeros(3, dtype=torch.long), 100).float()
    logits = torch.zeros(3, 100)
    logits[0, 0] = logits[1, 1] = 60.0
    right, wrong, unsure = dsos.collision_entropy(logits, label).tolist()
    assert right == pytest.approx(0, abs=1e-6)
    assert wrong == pytest.approx(math.log(2))
    assert unsure == pytest.approx(math.log(4 / 1.03), rel=1e-5)


def test_entropy():
    logits = random_logits(B, C)
    wanted = [slow_entropy(row) for row in logits.tolist()]
    np.testing.assert_allclose(dsos.entropy(logits), wanted, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_softened_targets(temperature):
    labels, u = GIVEN[INDEX], torch.tensor([0.0, 0.05, 0.2, 0.5, 0.9, 1.0])
    ours = dsos.soften(F.one_hot(labels, C).float(), u, temperature)
    pairs = zip(labels.tolist(), u.tolist(), strict=True)
    wanted = [slow_target(*pair, temperature) for pair in pairs]
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-7)
    assert ours[0].tolist() == [1 / C] * C


@pytest.mark.parametrize("as_released", [False, True])
@pytest.mark.parametrize(("weight", "temperature"), [(0.4, 0.05), (2.0, 1.0), (0.0, 0.05)])
def test_the_loss(weight, temperature, as_released):
    values = {"entropy_weight": weight, "softening_temperature": temperature}
    method = method_of(as_released=as_released, **values)
    state = method.start(GIVEN, C)
    state.u_N.copy_(torch.rand(N, generator=torch.Generator().manual_seed(3)))
    state.label_N[INDEX[:3]] = 2
    logits = random_logits(B, C)
    loss = method.loss(outputs_of(logits), make_batch(INDEX, GIVEN), state)
    labels, u = state.label_N[INDEX].tolist(), state.u_N[INDEX].tolist()
    wanted = slow_loss(logits.tolist(), labels, u, weight, not as_released, temperature)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


# ------------------------------------------------------------------------------------------ laws


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0, 1000), classes=st.integers(2, 30))
def test_collision_entropy_is_within_its_limits(seed, scale, classes):
    logits = random_logits(B, classes, seed=seed, scale=scale)
    label = F.one_hot(torch.arange(B) % classes, classes).float()
    v = dsos.collision_entropy(logits, label)
    assert (v >= -1e-6).all()
    assert (v <= dsos.HIGHEST + 1e-6).all()
    right = logits.argmax(1) == label.argmax(1)
    assert (v[~right] > 0.1).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), as_released=st.booleans())
def test_without_noise_and_entropy_it_is_mixup(seed, as_released):
    method = method_of(entropy_weight=0, as_released=as_released)
    logits, batch = random_logits(B, C, seed=seed), make_batch(INDEX, GIVEN)
    loss = method.loss(outputs_of(logits), batch, method.start(GIVEN, C))
    given_B = batch.given_B
    own, other = (F.cross_entropy(logits, labels) for labels in (given_B, given_B[SWAP]))
    torch.testing.assert_close(loss, LAM * own + (1 - LAM) * other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixed", [True, False])
def test_the_warm_up_mixes_images_or_not(mixed):
    warm_up, main = method_of(warmup_mixup=mixed).phases()
    u = torch.rand(100)
    assert (warm_up.steps[0].lambdas[0](u) == 1).all() != mixed
    assert (main.steps[0].lambdas[0](u) == torch.maximum(u, 1 - u)).all()


def entropies(clean=600, wrong=200, outside=200, seed=0):
    """Three groups of images."""
    random = np.random.default_rng(seed)
    groups = [
        random.beta(2, 20, clean) * 0.5,
        0.6932 + random.beta(2, 30, wrong) * 0.5,
        0.6932 + 0.6 * random.beta(12, 4, outside),
    ]
    return torch.from_numpy(np.concatenate(groups)).float(), np.repeat(
        [0, 1, 2], list(map(len, groups))
    )


def test_three_kinds_of_images_are_told_apart():
    v, kind = entropies()
    found = dsos.sort_images(v, 0.9)
    assert found.fitted
    assert np.array_equal(found.noisy_N.numpy(), kind > 0)
    assert (found.u_N[kind == 0] == 1).all()
    assert found.correct_N[kind == 1].float().mean() > 0.8
    assert not found.correct_N[kind != 1].any()
    assert found.u_N[kind == 1].mean() > 0.9
    assert found.u_N[kind == 2].mean() < 0.1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1.386), max_size=60), st.floats(0.01, 0.99), st.integers(0, 9))
def test_every_input_is_sorted(values, above, equal):
    v = torch.tensor(values + [0.9] * equal, dtype=torch.float32)
    found = dsos.sort_images(v, above)
    assert ((found.u_N >= 0) & (found.u_N <= 1)).all()
    assert (found.u_N[~found.noisy_N] == 1).all()
    assert not (found.correct_N & ~found.noisy_N).any()
    assert torch.equal(found.noisy_N, v >= math.log(2) - 1e-6)


def test_values_without_two_modes_decide_themselves():
    """The density falls from its end on, so the low mode has no peak: the lower half is corrected,
    and u falls evenly."""
    random = np.random.default_rng(0)
    scaled = np.concatenate([[0, 1], random.beta(0.3, 4, 500), random.beta(8, 6, 200)])
    v = torch.from_numpy(0.7 + 0.6 * scaled).float()
    found = dsos.sort_images(v, 0.9)
    assert not found.fitted
    assert np.array_equal(found.correct_N.numpy(), scaled < 0.5)
    two = dsos.sort_images(torch.tensor([0.1, 0.2, 0.7, 1.3]), 0.9)  # too few for modes
    assert not two.fitted
    assert two.correct_N.tolist() == [False, False, True, False]
    torch.testing.assert_close(two.u_N, torch.tensor([1, 1, 0.999, 0.001]))


# ------------------------------------------------------------------------------- what it remembers


def test_the_pass_remembers_what_the_network_says():
    method = method_of()
    look = method.phases()[1].steps[1]
    assert (look.trains, look.moves_norms) == ((), ("net",))
    state, logits = method.start(GIVEN, C), random_logits(B, C)
    look.loss(outputs_of(no_grad=[logits]), make_batch(INDEX, GIVEN), state)
    pairs = zip(logits.tolist(), GIVEN[INDEX].tolist(), strict=True)
    wanted = [slow_collision_entropy(*pair) for pair in pairs]
    np.testing.assert_allclose(state.entropy_N[INDEX], wanted, rtol=1e-5)
    assert torch.equal(state.latest_N[INDEX].long(), logits.argmax(1))
    others = torch.ones(N, dtype=torch.bool)
    others[INDEX] = False
    assert (state.entropy_N[others] == 0).all()


def test_the_pass_shows_plain_images_in_training_mode():
    look = method_of().phases()[1].steps[1]
    views = Views(torch.zeros(1), torch.ones(1), (8, 8), 1, True)
    batch = make_batch(INDEX, GIVEN)
    shown = look.show(views, batch)["net"]
    assert (len(shown.with_grad), len(shown.in_eval)) == (0, 0)
    torch.testing.assert_close(shown.no_grad[0], views.plain(batch.images_BCHW))


def sorted_state(method, v, seed=1):
    given_N = torch.arange(len(v)) % 10
    state = method.start(given_N, 10)
    state.entropy_N.copy_(v)
    state.latest_N.copy_((given_N + 1) % 10)
    plain_NC = random_logits(len(v), 10, seed=seed)
    method.scoring(5).run(FakeScorer(given_N, plain_NC), state)
    return state, given_N


def test_sure_contradictions_are_corrected_and_out_of_distribution_images_are_softened():
    v, kind = entropies()
    method = method_of(torch.arange(len(v)) % 10, 10)
    state, given_N = sorted_state(method, v)
    found = dsos.sort_images(v, 0.9)
    wanted = torch.where(found.correct_N, (given_N + 1) % 10, given_N)
    assert torch.equal(state.label_N.long(), wanted)
    torch.testing.assert_close(state.u_N, found.u_N)
    verdict = method.verdict(state, 5)
    assert torch.equal(verdict.noisy_N, found.noisy_N)
    assert ((verdict.p_noisy_N > 0.499) == found.noisy_N).all()
    assert (verdict.p_noisy_N <= 1).all()
    noisy = found.noisy_N
    assert torch.equal(verdict.suggested_N[noisy].long(), state.latest_N[noisy].long())
    assert torch.equal(verdict.suggested_N[~noisy].long(), given_N[~noisy])
    assert verdict.trust_N[kind == 1].mean() > 0.9
    assert verdict.trust_N[kind == 2].mean() < 0.1


def test_a_label_is_judged_anew_in_every_epoch():
    """What was corrected once is given again if the network no longer contradicts it."""
    v, _ = entropies()
    method = method_of(torch.arange(len(v)) % 10, 10)
    state, given_N = sorted_state(method, v)
    assert not torch.equal(state.label_N.long(), given_N)
    state.entropy_N.zero_()
    method.scoring(6).run(FakeScorer(given_N, random_logits(len(v), 10)), state)
    assert torch.equal(state.label_N.long(), given_N)
    assert (state.u_N == 1).all()


def test_during_the_warm_up_the_loss_flags_labels_and_nothing_is_corrected():
    method = method_of()
    state = method.start(GIVEN, C)
    logits = 5 * F.one_hot(GIVEN, C).float() + random_logits(N, C, scale=0.1)
    logits[:5] = logits[:5].roll(1, 1)
    method.scoring(2).run(FakeScorer(GIVEN, logits), state)
    assert state.noisy_N.tolist() == [True] * 5 + [False] * 15
    assert (state.u_N == 1).all()
    assert torch.equal(state.label_N.long(), GIVEN)
    assert method.verdict(state, 2).suggested_N is None


# --------------------------------------------------------------------------------------- notices


def notices(method, state, share, epoch=8):
    found = method.notices(state, epoch, [0.3, share], [])
    return {kind: text for kind, text in found.items() if text}


def test_it_says_what_may_have_gone_wrong():
    method = method_of()
    state = method.start(GIVEN, C)
    assert notices(method, state, 0.4) == {}
    assert "no noisy label" in notices(method, state, 0.0)["noisy"]
    assert "99%" in notices(method, state, 0.99)["noisy"]
    assert method.notices(state, 2, [], []) == {}
    state.unfitted.fill_(4)
    assert "4 of 6 epochs" in notices(method, state, 0.4)["mixture"]
    assert notices(method, state, 0.4, epoch=7) == {}


def test_with_two_classes_only_certain_contradictions_are_flagged_and_it_says_so():
    """No collision entropy is above log 2 there."""
    given_2C = torch.tensor([[1.0, 0], [1.0, 0]])
    v = dsos.collision_entropy(torch.tensor([[0.0, 6.0], [0.0, 20.0]]), given_2C)
    assert dsos.sort_images(v, 0.9).noisy_N.tolist() == [False, True]
    method = method_of()
    state = method.start(GIVEN, C)
    for classes, said in ((["a", "b"], True), (["a", "b", "c"], False)):
        text = method.notices(state, 8, [0.3, 0.0], classes)["noisy"]
        assert ("two classes" in text) == said


def test_epochs_without_two_modes_are_counted():
    v = torch.zeros(N)
    method = method_of()
    state = method.start(GIVEN, C)
    state.entropy_N.copy_(v)
    for epoch in (3, 4):
        method.scoring(epoch).run(FakeScorer(GIVEN, random_logits(N, C)), state)
    assert int(state.unfitted) == 2


def test_a_run_of_warm_up_alone_says_so():
    assert "warm-up" in method_of(warmup=9).notices_at_start()["warm-up only"]
    assert method_of().notices_at_start()["warm-up only"] is None


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"batch_size": 64}, 32),
        ({"batch_size": 64, "main_batch_size": 64}, 64),
        ({"batch_size": 2}, 2),
        ({"batch_size": 12, "accumulate": 3}, 6),
        ({"batch_size": 6, "accumulate": 3}, 6),
        ({"batch_size": 20, "accumulate": 4}, 8),
    ],
)
def test_batches_after_the_warm_up_are_half_as_large(changes, wanted):
    assert method_of(**changes).phases()[1].batch_size == wanted


def test_a_part_of_a_batch_has_two_images_or_more():
    with pytest.raises(InputError, match=r"^--main-batch-size 4 .*--accumulate 4$"):
        method_of(batch_size=16, accumulate=4, main_batch_size=4)
