"""Estimates of the time of an audit. No measured time is asserted."""

from types import SimpleNamespace

import pytest
import torch

from conftest import make_images
from pseudoloss.auditing import timing
from pseudoloss.auditing.timing import audit_seconds
from pseudoloss.errors import InputError


@pytest.fixture
def constant(monkeypatch):
    """Decoding and computing take one second per image and nothing else takes any."""
    monkeypatch.setattr(timing, "os", SimpleNamespace(cpu_count=lambda: 1))
    monkeypatch.setattr(timing, "_compute_time", lambda *_: 0.25)
    monkeypatch.setattr(timing, "heads_seconds", lambda *_: 5.0)
    decoded = timing._decode_some
    monkeypatch.setattr(timing, "_decode_some", lambda *args: decoded(*args)._replace(seconds=0.75))
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: 0.0))


def images(n=20):
    return torch.from_numpy(make_images(n)[0]).permute(0, 3, 1, 2)


def test_it_grows_with_the_images(constant):
    assert audit_seconds(images(), 1000, 4, "cpu") == 1000 + 5
    assert audit_seconds(images(2), 10, 4, "cpu") == 10 + 5


def test_files_that_cannot_be_read_are_left_out(photos, constant):
    folder = photos("0.png", "1.png", "2.png", "3.png")
    paths = sorted(folder.iterdir())
    for path in paths[:3]:
        path.write_text("no image")
    assert audit_seconds(paths, 10, 2, "cpu") == 15
    paths[3].write_text("no image")
    with pytest.raises(InputError, match="none of the images"):
        audit_seconds(paths, 10, 2, "cpu")


def test_heads_take_longer_with_more_images_and_classes(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    cpu = torch.device("cpu")
    few, more, classes = (
        timing.heads_seconds(*sizes, cpu) for sizes in ((100, 10), (200, 10), (100, 20))
    )
    assert more == pytest.approx(2 * few)
    assert few < classes < 2 * few


def test_it_measures_something():
    assert audit_seconds(images(), 20, 4, "cpu") > 0
