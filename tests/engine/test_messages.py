"""What a run prints."""

import pytest

from conftest import make_trainer
from pseudoloss.engine import messages


def test_durations():
    assert [messages.duration(s) for s in (0.4, 61, 3600, 3 * 3600 + 59)] == [
        *("0:00", "1:01", "1:00:00", "3:00:59")
    ]


def test_the_introduction_counts_networks_and_warm_up():
    text = messages.introduction(make_trainer(method="co-teaching", schedule="constant"), 0)
    assert "co-teaching on arrays, seed 1" in text
    assert "  2 × small-cnn (0.26 M parameters) on CPU" in text
    assert "3 epochs, 1 of them warm-up; 4 steps of 16 images per epoch" in text
    assert "learning rate 0.05, constant" in text
    assert "resumed" not in text
    assert "resumed after epoch 2" in messages.introduction(make_trainer(), 2)
    assert "resumed after epoch 3" in messages.introduction(make_trainer(), 3)  # only to be written


@pytest.mark.parametrize(
    ("settings", "done", "wanted"),
    [
        ({"method": "divide-mix", "batch_size": 8}, 0, "8 steps of 16 images"),  # warm-up: 2·8
        ({"method": "divide-mix", "batch_size": 8}, 1, "16 steps of 16 images"),  # 8 of both kinds
        ({"method": "dsos", "batch_size": 16}, 0, "4 steps of 16 images"),
        ({"method": "dsos", "batch_size": 16}, 1, "16 steps of 8 images"),  # half, and the pass
        ({"method": "dsos", "main_batch_size": 32}, 1, "4 steps of 32 images"),
    ],
)
def test_the_introduction_says_how_many_images_a_step_has(settings, done, wanted):
    """Where a run begins or resumes."""
    trainer = make_trainer(epochs=3, warmup=1, **settings)
    assert f"; {wanted} per epoch" in messages.introduction(trainer, done)


@pytest.mark.parametrize(
    ("settings", "cost"),
    [
        ({}, 8 / 3),  # two views without gradients, two with
        ({"contrast": False}, 5 / 3),
        ({"correct": False}, 6 / 3),
        ({"contrast_mix": "separate"}, 11 / 3),
        ({"method": "ce"}, 1),
        ({"method": "co-teaching"}, 1),
    ],
    ids=str,
)
def test_the_time_left_knows_that_phases_cost_different_time(settings, cost):
    trainer = make_trainer(epochs=5, warmup=2, **settings)
    line = {"epoch": 2, "seconds": {"train": 30.0, "score": 2.0, "validate": 1.0}}
    left = messages.seconds_left(trainer, [line])
    assert left == pytest.approx(3 * (30 * cost + 2 + 1))
    line["epoch"] = 1  # one more epoch of warm-up, which is scored because it is the last one
    assert messages.seconds_left(trainer, [line]) == pytest.approx(left + 30 + 2 + 1)
    line["epoch"] = 5
    assert messages.seconds_left(trainer, [line]) == 0


def test_the_time_left_is_smoothed_over_the_epochs_of_a_phase():
    trainer = make_trainer(epochs=20, warmup=4, method="ce")
    times = [900.0, 900.0, 900.0, 900.0, 10.0, 11.0, 90.0, 9.0]  # a slow warm-up, a hiccup
    lines = [
        {"epoch": i, "seconds": {"train": seconds, "score": 1.0, "validate": 1.0}}
        for i, seconds in enumerate(times, 1)
    ]
    assert messages.seconds_left(trainer, lines) == pytest.approx(12 * (10.5 + 1 + 1))


def test_why_a_run_stops_early():
    text = messages.stopped_early(10, spent=555, needed=80, epochs=7, path=None)
    assert text == (
        "Stopped after epoch 7 because of --minutes 10: another epoch takes about 1:20, and 0:45 "
        "are left."
    )
    over = messages.stopped_early(1 / 3, spent=30, needed=30, epochs=1, path=None)
    assert over == "Stopped after epoch 1 because of --minutes 0.333: the time is over."


def test_the_line_of_an_epoch():
    trainer = make_trainer(epochs=12)
    line = {"epoch": 3, "phase": "pls", "loss": 1.5, "accuracy": 90.0, "noisy": 0.25, "trust": 0.5}
    line |= {"seconds": {"train": 1.0, "score": 0.2, "validate": 0.1}}
    text = messages.epoch_line(trainer, [line], best=91.0)
    assert text.startswith("epoch  3/12  pls      loss  1.5000  accuracy  90.00 (best 91.00)")
    assert "noisy  25.0%  trust 0.50  1.3 s  0:12 left" in text
    line |= {"epoch": 12, "accuracy": None, "noisy": None, "trust": None}
    text = messages.epoch_line(trainer, [line], best=None)
    assert text == "epoch 12/12  pls      loss  1.5000  1.3 s"


@pytest.mark.parametrize("method", ["ce", "pls", "divide-mix", "dynamic-bootstrapping"])
def test_the_columns_of_all_phases_are_aligned(method):
    trainer = make_trainer(epochs=2, method=method)
    seconds = {"train": 1.0, "score": 0.2, "validate": 0.1}
    rest = {"loss": 1.5, "accuracy": None, "noisy": None, "trust": None, "seconds": seconds}
    columns = set()
    for epoch, phase in enumerate((trainer.phase(0), trainer.phase(1)), 1):
        line = {"epoch": epoch, "phase": phase.name, **rest}
        columns.add(messages.epoch_line(trainer, [line], best=None).index("loss "))
    assert len(columns) == 1


def test_a_noise_rate_that_is_not_known_is_called_a_guess():
    noise = {"rate": 0.436, "low": 0.2, "high": 0.6, "by_class": {"a": {"rate": 0.4}}}
    noise |= {"known": False, "reasons": ["it is at chance"]}
    said = "not known; at a guess 43.6% of the labels are wrong: it is at chance"
    assert messages.noise_lines(noise) == [said]
    said = "not known: it is at chance"
    assert messages.noise_lines(noise | {"low": 0.0, "high": 1.0}) == [said]


def test_settings_that_were_chosen_are_printed_as_flags():
    text = messages.chosen("scratch", {"batch_size": 4, "flip": False})
    assert text == "Settings: --preset scratch and, to fit the images, --batch-size 4 --no-flip"
    assert messages.chosen("finetune", {}) == "Settings: --preset finetune"
