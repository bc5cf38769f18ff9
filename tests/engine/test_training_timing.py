"""Estimates of the time of training. No measured time is asserted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from conftest import TINY, make_source
from pseudoloss.config import Settings
from pseudoloss.data import find_source
from pseudoloss.engine import timing
from pseudoloss.engine.fitting import Pace, measure_pace
from pseudoloss.engine.timing import training_seconds
from pseudoloss.errors import InputError
from pseudoloss.reading import ReadOptions

SETTINGS = Settings(**(TINY | {"batch_size": 4, "device": "cpu", "method": "ce"}))


@pytest.fixture
def constant(monkeypatch):
    """A training pass takes one second per image, a prediction a quarter, anything else nothing;
    the sizes of the samples."""
    samples = []

    def pace(trainer, *_):
        n = len(trainer.images)
        samples.append(n)
        return Pace({phase.name: n for phase in trainer.phases}, n / 4, 0, 0, n / 4)

    monkeypatch.setattr(timing, "measure_pace", pace)
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: 0.0))
    return samples


def test_it_grows_with_images_epochs_and_test_images(constant):
    data = make_source(64)  # and 32 test images
    epochs = SETTINGS.epochs
    assert training_seconds(data, SETTINGS, ReadOptions()) == epochs * (64 + 16 + 8)
    data = replace(data, test=None)
    assert training_seconds(data, SETTINGS, ReadOptions()) == epochs * (64 + 16)
    assert constant == [28, 28]  # seven batches
    few = replace(make_source(8), test=None)
    assert training_seconds(few, SETTINGS, ReadOptions()) == epochs * (8 + 2)


def test_weights_are_not_loaded(constant, photo_folder):
    settings = replace(SETTINGS, weights="nowhere.safetensors")
    assert training_seconds(find_source(str(photo_folder)), settings, ReadOptions()) > 0


def test_files_that_cannot_be_read_are_left_out(constant, photos):
    folder = photos(*(f"{k}/{i}.png" for k in "ab" for i in range(12)))
    found = find_source(str(folder), ReadOptions(hold_out=0))
    for path in sorted(folder.rglob("*.png"))[:12]:
        path.write_text("no image")
    assert training_seconds(found, SETTINGS, ReadOptions()) == SETTINGS.epochs * (24 + 6)
    for path in folder.rglob("*.png"):
        path.write_text("no image")
    with pytest.raises(InputError, match="none of the images"):
        training_seconds(found, SETTINGS, ReadOptions())


def test_slow_steps_end_the_measurement(monkeypatch):
    limits = []

    def slow(trainer, timed, limit):
        limits.append(limit)
        pace = measure_pace(trainer, timed, 0.0)  # every step is too slow
        assert pace.startup == 0  # only one step of each kind
        return pace

    monkeypatch.setattr(timing, "measure_pace", slow)
    assert training_seconds(make_source(), SETTINGS, ReadOptions()) > 0
    assert limits == [timing.LIMIT]
