"""Images on the device, in host memory and in files."""

import pytest
import torch

import pseudoloss as pl
from pseudoloss.config import Settings
from pseudoloss.data import storage
from pseudoloss.data.storage import (
    SLOTS,
    DeviceImages,
    HostImages,
    place,
    room_for_images,
)
from pseudoloss.engine.trainer import Trainer
from pseudoloss.progress import SilentReporter

CPU = torch.device("cpu")


def images(n=23):
    return torch.randint(0, 256, (n, 3, 4, 5), dtype=torch.uint8)


@pytest.mark.parametrize("kind", [DeviceImages, HostImages])
@pytest.mark.parametrize("steps", [1, 2, SLOTS, 2 * SLOTS + 1])
def test_batches_follow_the_order(kind, steps):
    all_images = images(64)
    pixels = kind(all_images, CPU)
    for _ in range(2):  # two epochs
        order = torch.randperm(64)[: steps * 4].view(steps, 4)
        seen = [pixels.batch(order[i]).clone() for i, _ in enumerate(pixels.batches(order))]
        assert len(seen) == steps
        for batch, index in zip(seen, order, strict=True):
            assert torch.equal(batch, all_images[index])


@pytest.mark.parametrize("kind", [DeviceImages, HostImages])
@pytest.mark.parametrize("size", [1, 5, 23, 100])
def test_parts_are_all_images_in_order(kind, size):
    all_images = images()
    pixels = kind(all_images, CPU)
    for _ in range(2):
        parts = [part.clone() for part in pixels.parts(size)]
        assert torch.equal(torch.cat(parts), all_images)
        assert all(len(part) == size for part in parts[:-1])


def test_streamed_batches_use_one_tensor():
    """So that a step which reads it can be captured."""
    pixels = HostImages(images(), CPU)
    order = torch.arange(20).view(4, 5)
    addresses = {pixels.batch(order[i]).data_ptr() for i, _ in enumerate(pixels.batches(order))}
    assert len(addresses) == 1


def test_images_are_stored_where_they_fit(monkeypatch):
    assert room_for_images(CPU) == float("inf")
    assert not place(images(), CPU).streamed
    assert place(images(), CPU, "host").streamed
    monkeypatch.setattr(storage, "room_for_images", lambda device: images().nbytes - 1)
    assert place(images(), CPU).streamed
    assert not place(images(), CPU, "device").streamed


def test_images_may_take_a_share_of_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert room_for_images(torch.device("cuda")) == 400


def test_training_does_not_depend_on_where_images_are_stored(tiny_source, tiny_settings):
    """Bit by bit, on the CPU."""
    runs = [
        pl.train(tiny_source, quiet=True, images=where, **tiny_settings)
        for where in ("device", "host")
    ]
    weights = [torch.cat([p.flatten() for p in run.model.network.parameters()]) for run in runs]
    assert torch.equal(*weights)
    assert runs[0].labels.equals(runs[1].labels)


def test_streaming_is_reported_unless_requested(tiny_source, tiny_settings, monkeypatch):
    messages = []

    class Recorder(SilentReporter):
        def say(self, text):
            messages.append(text)

    monkeypatch.setattr(storage, "room_for_images", lambda device: 0)
    trainer = Trainer(tiny_source, Settings(**tiny_settings), Recorder())
    assert trainer.images.streamed
    assert "The images (0.0 GiB) stay in host memory" in messages[0]
    assert "The test images" in messages[1]
    messages.clear()
    Trainer(tiny_source, Settings(images="host", **tiny_settings), Recorder())
    assert messages == []


def test_tiny_batches_use_one_thread(tiny_source, tiny_settings):
    before = torch.get_num_threads()
    try:
        Trainer(tiny_source, Settings(**tiny_settings), SilentReporter())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    pl.train(tiny_source, quiet=True, **(tiny_settings | {"epochs": 1}))
    assert torch.get_num_threads() == before
