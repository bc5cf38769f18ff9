"""The engine does what the contract of methods/base.py says, with the toy method."""

import signal
from contextlib import suppress
from dataclasses import fields, replace

import pytest
import torch
from torch import nn
from toy_method import DECAY, FIRST, Toy

import pseudoloss as pl
from conftest import (
    TINY,
    assert_same_run,
    make_images,
    make_source,
    make_trainer,
    metrics_of,
    train_epoch_by_epoch,
)
from pseudoloss.data import arrays
from pseudoloss.engine.fitting import measure_pace
from pseudoloss.engine.randomness import stream_seed
from pseudoloss.engine.schedules import learning_rate
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors
from pseudoloss.interrupts import Interrupted
from pseudoloss.methods.base import Phase, Step, tensors_of
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS
from pseudoloss.progress import SilentReporter

EPOCHS = 5
SETTINGS = TINY | {"method": "ce", "epochs": EPOCHS, "warmup": 1, "device": "cpu"}
SETTINGS |= {"corrupt": "symmetric-exact:0.25"}


@pytest.fixture
def toys(monkeypatch):
    """Every run trains the toy method; the objects that were built."""
    built = []

    def build(settings, given_N, classes, weak_is_plain):
        built.append(Toy(settings))
        return built[-1]

    monkeypatch.setattr("pseudoloss.methods.build", build)
    return built


@pytest.fixture
def trainer(toys):
    return make_trainer(epochs=EPOCHS, method="ce")


def parameters(trainer, role):
    return [p.detach().clone() for p in trainer.networks[role].parameters()]


def changed(trainer, role, before):
    return any(
        not torch.equal(a, b) for a, b in zip(parameters(trainer, role), before, strict=True)
    )


def around_steps(trainer, before, after):
    """Call `before(step)` before every step, and `after(step, its result)` after it."""

    def wrap(step, feed, call):
        def checked():
            seen = before(step)
            call()
            after(step, seen)

        return step, feed, checked

    trainer.steps = [[wrap(*prepared) for prepared in phase] for phase in trainer.steps]


def run_all(trainer):
    for epoch in range(EPOCHS):
        trainer.train_epoch(epoch)
        trainer.score(epoch)


# ------------------------------------------------------------------------------------ whole runs


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}], ids=str)
def test_it_trains_and_resumes_bit_for_bit(toys, tmp_path, more):
    """Stopped after every epoch, also where a phase ends and where a mask is empty."""
    source = make_source()
    whole = pl.train(source, tmp_path / "whole", quiet=True, **SETTINGS, **more)
    assert whole.finished
    assert train_epoch_by_epoch(source, tmp_path / "stopped", **SETTINGS, **more) == EPOCHS
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    lines = metrics_of(tmp_path / "whole")
    assert [line["phase"] for line in lines] == ["first"] * 2 + ["second"] * 3
    assert [line["lr"] for line in lines[2:]] == pytest.approx([0.01, 0.005, 0.01 / 3])
    assert whole.labels["trust"].between(0, 1).all()


def test_it_resumes_in_the_middle_of_an_epoch(toys, tmp_path, monkeypatch):
    """Also between the two kinds of steps of an epoch, whose streams come from masks."""
    pl.train(make_source(), tmp_path / "whole", quiet=True, **SETTINGS)
    taken = []

    def step(reporter):
        taken.append(1)
        if len(taken) % 2 == 0:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SilentReporter, "step", step)
    starts, finished = 0, False
    while not finished:
        starts += 1
        with suppress(Interrupted):
            pl.train(make_source(), tmp_path / "broken", quiet=True, resume=True, **SETTINGS)
            finished = True
    assert starts > 2 * EPOCHS
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_all_of_its_state_is_in_the_checkpoint(toys, tmp_path):
    out = tmp_path / "run"
    pl.train(make_source(), out, quiet=True, **SETTINGS)
    tensors, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
    start = Toy.start(toys[0], torch.arange(64) % 4, 4)
    for name, tensor in tensors_of(start).items():
        saved = tensors[f"state.{name}"]
        assert (saved.dtype, saved.shape) == (tensor.dtype, tensor.shape), name
        if name not in ("none_X", "fitted", "protected_C", "noisy_N"):
            assert not torch.equal(saved, tensor), name  # it was used
    assert "state.name" not in tensors
    roles = {name.split(".")[1] for name in tensors if name.startswith("networks.")}
    assert roles == {"student", "peer", "teacher", "slow peer"}
    roles = {name.split(".")[1] for name in tensors if name.startswith("momentum.")}
    assert roles == {"student", "peer"}


def test_the_network_that_predicts_is_the_one_it_names(toys, tmp_path):
    out = tmp_path / "run"
    run = pl.train(make_source(), out, quiet=True, **SETTINGS)
    tensors, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
    weights, _ = from_safetensors(out / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(tensor, tensors[f"networks.teacher.{name}"]), name
        assert torch.equal(tensor, run.model.network.state_dict()[name]), name
    test = make_source().test
    right = pl.load(out).model.predict(test.images_NCHW.numpy()) == test.given_N.numpy()
    assert run.summary["accuracy"]["last"] == pytest.approx(100 * right.mean())


def test_held_out_images_have_rows(toys):
    images, labels = make_images(80)
    run = pl.train(arrays(images, labels), quiet=True, hold_out=0.2, **SETTINGS)
    held_out = run.labels[run.labels["part"] == "held-out"]
    assert len(held_out) == 16
    assert held_out["label_score"].nunique() > 8


def test_epochs_can_be_chosen_to_fit_the_time(toys, trainer):
    pace = measure_pace(trainer)
    assert set(pace.train) == {"first", "second"}
    settings = {name: value for name, value in SETTINGS.items() if name not in ("epochs", "warmup")}
    run = pl.train(make_source(), quiet=True, time_budget=0.02, **settings)
    assert run.finished


# ------------------------------------------------------------------- what each declaration does


def test_the_leading_stream_decides_the_number_of_steps(trainer):
    for epoch in range(EPOCHS):
        trainer.method.log.clear()
        easy_images = 64 - int(trainer.state.hard_N.sum())
        hard_images = 64 - easy_images
        assert (hard_images == 0) == (epoch == 0)
        expected = trainer.steps_in(epoch)
        trainer.train_epoch(epoch)
        turns = [turn for turn, *_ in trainer.method.log]
        students, peers = turns.count("student"), turns.count("peer")
        assert turns == ["student"] * students + ["peer"] * peers  # one turn after the other
        if epoch < FIRST:
            assert (students, peers) == (easy_images // 8, 0)
        else:
            assert (students, peers) == (easy_images // 6, hard_images // 10)
        assert expected == students + peers
        trainer.score(epoch)


def test_streams_hold_only_the_images_of_their_masks(trainer):
    run_all(trainer)
    empty = 0
    for step, (turn, batch, hard_N) in enumerate(trainer.method.log):
        index_B = batch.index_B
        if turn == "peer":
            assert len(index_B) == 20
            assert hard_N[index_B[:10]].all()
        elif len(index_B) == 12:  # the first phase: eight easy images, then four hard ones
            assert not hard_N[index_B[:8]].any()
            if hard_N.any():
                assert hard_N[index_B[8:]].all()
            else:  # the mask is empty: all images stand in
                empty += 1
                assert step < 8
        else:
            assert len(index_B) == 6
            assert not hard_N[index_B].any()
    assert empty == 8


def test_images_are_mixed_with_images_of_the_same_value_of_a_mask(trainer):
    run_all(trainer)
    mixed = 0
    for turn, batch, hard_N in trainer.method.log:
        hard_B, partner_B = hard_N[batch.index_B], batch.mixes[0].partner_B
        assert sorted(partner_B.tolist()) == list(range(len(partner_B)))
        if turn == "student":
            assert torch.equal(hard_B, hard_B[partner_B])
            mixed += bool(hard_B.any() and not hard_B.all())
    assert mixed > 3


def test_the_state_that_a_step_wrote_is_kept(trainer):
    run_all(trainer)
    students = [batch for turn, batch, _ in trainer.method.log if turn == "student"]
    visits = torch.cat([batch.index_B for batch in students]).bincount(minlength=64)
    assert torch.equal(trainer.state.visits_N.long(), visits)
    assert int(trainer.state.position) == len(students)
    assert trainer.state.confusion_CC.sum() == visits.sum()


def test_random_numbers_are_as_each_step_declares(trainer):
    run_all(trainer)
    for turn, batch, _ in trainer.method.log:
        lams = [mix.lam.item() for mix in batch.mixes]
        assert batch.draws_BK.shape[1] == WEAK_DRAWS + STRONG_DRAWS  # the most that any step needs
        if turn == "peer":
            assert lams[0] >= 0.5
            assert lams[1] == 1
    lams = [batch.mixes[0].lam.item() for turn, batch, _ in trainer.method.log if turn == "student"]
    assert min(lams) < 0.5


def test_a_turn_trains_its_own_network_only(trainer):
    """Although the student is shown, with gradients, in the turn of its peer."""

    def before(step):
        return {role: parameters(trainer, role) for role in trainer.networks}

    def after(step, seen):
        moved = {role for role in trainer.networks if changed(trainer, role, seen[role])}
        student = step.trains == ("student",)
        assert moved == ({"student", "teacher"} if student else {"peer", "slow peer"})

    around_steps(trainer, before, after)
    run_all(trainer)


def test_moving_averages_are_as_computed_by_hand(trainer):
    averages = {role: parameters(trainer, role) for role in ("teacher", "slow peer")}
    assert not changed(trainer, "student", averages["teacher"])
    assert not changed(trainer, "peer", averages["slow peer"])

    def after(step, seen):
        role, followed = ("teacher", "student")
        decay = DECAY
        if step.trains == ("peer",):
            role, followed, decay = "slow peer", "peer", float(trainer.state.decay)
        averages[role] = [
            decay * average + (1 - decay) * value
            for average, value in zip(averages[role], parameters(trainer, followed), strict=True)
        ]

    around_steps(trainer, lambda step: None, after)
    for epoch in range(EPOCHS):
        trainer.train_epoch(epoch)
        assert float(trainer.state.decay) == pytest.approx(0.5 + 0.1 * epoch)
        trainer.score(epoch)
    for role, average in averages.items():
        torch.testing.assert_close(parameters(trainer, role), average, rtol=1e-4, atol=1e-6)
        assert not any(p.requires_grad for p in trainer.networks[role].parameters())


def test_batch_norm_statistics_follow_only_if_declared(trainer):
    """In the turn of the peer, the student and the teacher see views in training mode too."""
    norms = {role: network.backbone.norms[0] for role, network in trainer.networks.items()}

    def means(step=None):
        return {role: norm.running_mean.clone() for role, norm in norms.items()}

    def after(step, seen):
        moved = {role for role, mean in means().items() if not torch.equal(mean, seen[role])}
        student = step.trains == ("student",)
        assert moved == ({"student", "teacher"} if student else {"peer", "slow peer"})
        assert torch.equal(norms["teacher"].running_mean, norms["student"].running_mean)
        if not student:
            assert not torch.equal(norms["slow peer"].running_mean, norms["peer"].running_mean)

    around_steps(trainer, means, after)
    run_all(trainer)


def test_parts_must_divide_the_batches_of_every_stream(toys):
    with pytest.raises(InputError, match=r"--accumulate 4 .*batches of 6 images") as error:
        make_trainer(method="ce", accumulate=4)
    assert "\n" not in str(error.value)


def test_images_in_host_memory_give_the_same_run(toys):
    """Batches of several sizes are copied to the device."""
    runs = [
        pl.train(make_source(), quiet=True, images=where, **SETTINGS)
        for where in ("device", "host")
    ]
    assert runs[0].labels.equals(runs[1].labels)


def test_a_phase_starts_without_momentum_and_with_a_new_head(trainer):
    ends, starts = [], []

    def snapshot():
        return {
            role: (
                [v["momentum_buffer"].abs().sum().item() for v in optimiser.state.values()],
                trainer.networks[role].classifier.weight.detach().clone(),
                trainer.networks[role].backbone.convs[0].weight.detach().clone(),
            )
            for role, optimiser in trainer.optimisers.items()
        }

    around_steps(
        trainer,
        lambda step: starts.append(snapshot()),
        lambda step, seen: ends.append(snapshot()),
    )
    for epoch in range(FIRST):
        trainer.train_epoch(epoch)
        trainer.score(epoch)
    steps = len(starts)
    trainer.train_epoch(FIRST)
    end, start = ends[steps - 1], starts[steps]
    assert any(end["student"][0])
    for number, role in enumerate(("student", "peer")):
        momentum, head, conv = start[role]
        assert not any(momentum)
        torch.manual_seed(stream_seed(1, f"head {number}", FIRST))
        assert torch.equal(head, nn.Linear(128, 4).weight)
        assert not torch.equal(head, end[role][1])
        assert torch.equal(conv, end[role][2])
    steps = len(starts)
    trainer.train_epoch(FIRST + 1)  # the second epoch of the phase keeps both
    end, start = ends[steps - 1], starts[steps]
    for role in ("student", "peer"):
        assert any(start[role][0])
        assert torch.equal(start[role][1], end[role][1])


def test_a_learning_rate_belongs_to_a_step_and_counts_from_the_first_epoch_of_its_phase(trainer):
    assert trainer.learning_rate(0) == 0.05  # the schedule of the run
    assert [trainer.learning_rate(e) for e in (2, 3)] == pytest.approx([0.01, 0.005])
    own, other = trainer.phase(3).steps
    of_run = trainer.learning_rate(3, other)
    assert trainer.learning_rate(3, own) == pytest.approx(0.005)
    assert of_run == learning_rate(trainer.settings, 3) != pytest.approx(0.005)
    used = []
    around_steps(trainer, lambda step: float(trainer.lr), lambda step, lr: used.append(lr))
    trainer.train_epoch(3)
    assert sorted({round(rate, 6) for rate in used}) == [0.005, round(of_run, 6)]
    assert used == sorted(used)  # the first network's turn, then the other's


def test_a_phase_has_no_learning_rate_of_its_own():
    """Two steps of a phase may have different ones."""
    assert "lr" not in {field.name for field in fields(Phase)}
    assert "lr" in {field.name for field in fields(Step)}


def test_steps_that_differ_in_their_learning_rate_are_prepared_once(toys):
    """A graph is captured for each; the rate is a tensor beside it."""

    class TwoRates(Toy):
        def phases(self):
            first, second = super().phases()
            slow = replace(first.steps[0], lr=lambda epoch: 0.001)
            return replace(first, steps=(first.steps[0], slow)), second

    trainer = make_trainer(epochs=EPOCHS, method="ce")
    trainer.method.__class__ = TwoRates
    trainer.phases = trainer.method.phases()
    (fast, slow) = (trainer._prepare(step, trainer.phases[0]) for step in trainer.phases[0].steps)
    assert fast.call is slow.call
    assert fast.feed is slow.feed
    rates = [trainer.learning_rate(0, prepared.step) for prepared in (fast, slow)]
    assert rates == [0.05, 0.001]


def test_learning_rates_after_resuming_in_the_middle_of_a_turn(toys, tmp_path, monkeypatch):
    """In the warm-up and after it: those of the run that was never interrupted."""
    used, run_steps = [], Trainer.run_steps

    def recorded(self, prepared, *arguments, **options):
        for _ in run_steps(self, prepared, *arguments, **options):
            used.append((prepared.step.trains, round(float(self.lr), 7)))
            yield

    monkeypatch.setattr(Trainer, "run_steps", recorded)
    settings = SETTINGS | {"warmup": 3, "schedule": "steps:1,4:0.1"}
    pl.train(make_source(), tmp_path / "whole", quiet=True, **settings)
    whole = used.copy()
    used.clear()
    monkeypatch.setattr(SilentReporter, "step", lambda _: signal.raise_signal(signal.SIGTERM))
    for _ in whole:
        with suppress(Interrupted):
            pl.train(make_source(), tmp_path / "broken", quiet=True, resume=True, **settings)
    assert used == whole
    assert {rate for _, rate in whole} > {0.05, 0.005, 0.01}


def test_scoring_asks_for_networks_by_role_and_for_weak_views(trainer):
    """The numbers of weak views depend on the epoch alone, not on what was scored before."""
    trainer.train_epoch(0)
    trainer.score(0)
    assert trainer.scorer().draws(2 * WEAK_DRAWS).shape == (64, 2 * WEAK_DRAWS)
    trainer.score(1)
    after_both = trainer.scorer().draws(WEAK_DRAWS).clone()
    other = make_trainer(epochs=EPOCHS, method="ce")
    other.score(1)
    assert torch.equal(other.scorer().draws(WEAK_DRAWS), after_both)
    ((_, (from_peer,)),) = trainer.scorer().logits(role="peer")
    ((_, (from_teacher,)),) = trainer.scorer().logits()
    ((_, (by_name,)),) = trainer.scorer().logits(role="teacher")
    assert torch.equal(from_teacher, by_name)
    assert not torch.equal(from_peer, from_teacher)
