import itertools
import math

import pytest

import pseudoloss as pl
from pseudoloss.config import Settings
from pseudoloss.engine.schedules import learning_rate
from pseudoloss.errors import InputError


def rates(**settings):
    settings = Settings(**settings)
    return [learning_rate(settings, epoch) for epoch in range(settings.epochs)]


def test_cosine_is_constant_in_the_warm_up_and_then_as_released():
    found = rates(epochs=200, warmup=30, lr=0.1)
    assert found[:30] == [0.1] * 30
    for t in (30, 31, 100, 199):
        wanted = 0.5 * 0.1 * (1 + math.cos((t - 30 + 1) * math.pi / (200 - 30 + 1)))
        assert found[t] == pytest.approx(wanted)
    assert all(a > b for a, b in itertools.pairwise(found[29:]))
    assert 0 < found[-1] < 1e-4


def test_cosine_without_warm_up_falls_from_the_first_epoch_on():
    found = rates(method="ce", epochs=10, warmup=0, lr=0.1)
    assert all(a > b for a, b in itertools.pairwise([0.1, *found]))


def test_constant():
    assert rates(epochs=20, warmup=3, lr=0.2, schedule="constant") == [0.2] * 20


def test_linear_falls_by_the_same_amount_in_every_epoch_after_the_warm_up():
    found = rates(epochs=20, warmup=3, lr=0.2, schedule="linear")
    assert found[:3] == [0.2] * 3
    differences = [a - b for a, b in itertools.pairwise([*found[2:], 0.0])]
    assert differences == pytest.approx([0.2 / 18] * 18)


def test_steps_multiply_the_rate_at_the_start_of_the_next_epoch():
    found = rates(epochs=150, lr=0.02, schedule="steps:80,120:0.01")
    assert found[:80] == [0.02] * 80
    assert found[80:120] == pytest.approx([2e-4] * 40)
    assert found[120:] == pytest.approx([2e-6] * 30)
    assert rates(epochs=3, lr=1, schedule="steps:1:0.5") == [1, 0.5, 0.5]
    assert rates(epochs=3, lr=1, schedule="steps:7:0.5") == [1, 1, 1]


@pytest.mark.parametrize(
    "text",
    [
        *("", "linearly", "linear:2", "cosine:3", "cosine:", "constant:"),
        *("step:80:0.1", "steps", "steps:", "steps:80"),
        *("steps:80:", "steps:a:0.1", "steps:80:b", "steps:80.5:0.1", "steps:80:0.1:1"),
        *("steps:0:0.1", "steps:-1:0.1", "steps:120,80:0.1", "steps:80,:0.1"),
        *("steps:80:0", "steps:80:1", "steps:80:-0.1", "steps:80:nan", "steps:80:inf"),
    ],
)
def test_other_schedules_are_refused(text):
    with pytest.raises(
        InputError, match=r"--schedule .*must be cosine, linear, constant or"
    ) as error:
        Settings(schedule=text)
    assert "\n" not in str(error.value)


def test_a_schedule_is_text():
    with pytest.raises(InputError, match="--schedule must be text, not 5"):
        Settings(schedule=5)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [("constant", [0.1, 0.1, 0.1]), ("steps:1,2:0.1", [0.1, 0.01, 0.001])],
)
def test_a_run_trains_with_its_schedule(tiny_source, tiny_settings, schedule, wanted):
    settings = tiny_settings | {"method": "ce", "lr": 0.1, "schedule": schedule}
    run = pl.train(tiny_source, quiet=True, **settings)
    assert run.metrics["lr"].tolist() == pytest.approx(wanted)
