"""NumPy archives."""

import numpy as np
import pytest

from conftest import make_images
from pseudoloss.data import open_source
from pseudoloss.errors import InputError


def test_npz(npz):
    test_images, test_labels = make_images(20, seed=2)
    path = npz(
        test_images=test_images,
        test_labels=test_labels,
        classes=np.array(["a", "b", "c", "d"]),
        true_labels=np.roll(np.arange(64) % 4, 1),
    )
    data = open_source(path)
    assert data.train.classes == ("a", "b", "c", "d")
    assert len(data.test) == 20
    assert data.train.noise_rate == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "the array labels is missing"),
        ({"images": None}, "the array images is missing"),
        ({"lables": np.zeros(3)}, "unknown array lables; did you mean labels"),
        ({"labels": np.array([object()] * 64)}, "not a NumPy archive of plain arrays"),
        ({"labels": np.arange(63)}, "set.npz: labels: 63 labels for 64 images"),
        ({"classes": np.array("abcd")}, "classes must be a list of names"),
        ({"classes": np.array(4)}, "classes must be a list of names"),
    ],
)
def test_invalid_archives_are_refused(npz, changes, message):
    with pytest.raises(InputError, match=message):
        open_source(str(npz(**changes)))


def test_broken_and_missing_archives_are_refused(tmp_path):
    path = tmp_path / "broken.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"broken.npz: not a NumPy archive"):
        open_source(path)
    with path.open("wb") as file:
        np.save(file, np.zeros((4, 8, 8), np.uint8))  # one array, no archive
    with pytest.raises(InputError, match=r"broken.npz: not a NumPy archive"):
        open_source(path)
    with pytest.raises(InputError, match=r"nowhere.npz: no such file"):
        open_source(tmp_path / "nowhere.npz")
