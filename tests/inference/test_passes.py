"""Passes over images without gradients."""

import pytest
import torch
import torch.nn.functional as F

from pseudoloss.data.storage import DeviceImages
from pseudoloss.inference import passes
from pseudoloss.nn.networks import build
from pseudoloss.nn.views import Views

N = 50


@pytest.fixture
def setting():
    torch.manual_seed(0)
    network = build("small-cnn", channels=1, size=(8, 8), classes=4, projection=3)
    views = Views(torch.tensor([0.5]), torch.tensor([0.3]), (8, 8), 0, False)
    images = torch.randint(0, 256, (N, 1, 8, 8), dtype=torch.uint8)
    return network, views, DeviceImages(images, torch.device("cpu"))


def outputs(network, views, pixels):
    network.eval()
    with torch.no_grad():
        return network(views.plain(pixels.images_NCHW))


@pytest.mark.parametrize("size", [1, 7, N - 1, N])
def test_chunks_do_not_change_the_result(setting, monkeypatch, size):
    network, views, pixels = setting
    monkeypatch.setattr(passes, "PIXELS_AT_ONCE", 64 * size)
    chunks = list(passes.predict(network.train(), views, pixels))
    assert [len(chunk) for chunk in chunks] == [size] * (N // size) + [N % size] * (N % size > 0)
    wanted, projected = outputs(*setting)
    torch.testing.assert_close(torch.cat(chunks), wanted)
    found = passes.project(network, views, pixels)
    torch.testing.assert_close(found, F.normalize(projected))
    assert not torch.cat(chunks).requires_grad


def test_chunks_come_with_their_rows():
    chunks = torch.arange(10).split(4)
    found = list(passes.with_rows(chunks))
    assert [rows for rows, _ in found] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert all(torch.equal(torch.arange(10)[rows], chunk) for rows, chunk in found)


def test_chunks_are_smaller_for_larger_images():
    def chunk(size):
        return passes.images_at_once(Views(torch.zeros(3), torch.ones(3), (size, size), 0, False))

    assert [chunk(size) for size in (8, 32, 224, 2048)] == [2048, 2048, 41, 1]
