"""ImageNet32, on a small folder with its layout."""

import pickle

import numpy as np
import pytest
from published import assert_refused

from pseudoloss.data import open_source


@pytest.fixture(params=["pickle", "npz"])
def imagenet32(request, tmp_path):
    random = np.random.default_rng(0)
    root, content = tmp_path / "in32", {}
    root.mkdir()
    for name in [f"train_data_batch_{i}" for i in range(1, 11)] + ["val_data"]:
        data = random.integers(0, 256, (6, 3072), dtype=np.uint8)
        content[name] = {"data": data, "labels": [1, 2, 3, 3, 2, 1], "mean": data.mean(0)}
        if request.param == "pickle":
            (root / name).write_bytes(pickle.dumps(content[name]))
        else:
            np.savez(root / f"{name}.npz", **content[name])
    return root, content


def test_imagenet32(imagenet32):
    root, content = imagenet32
    data = open_source(f"imagenet32:{root}")
    assert (len(data.train), len(data.test)) == (60, 6)
    np.testing.assert_array_equal(
        data.train.images_NCHW[54:], content["train_data_batch_10"]["data"].reshape(6, 3, 32, 32)
    )
    assert data.train.classes == ("1", "2", "3")
    assert data.train.given_N.tolist() == [0, 1, 2, 2, 1, 0] * 10
    assert data.train.noise_rate == 0


def test_incomplete_imagenet32_is_refused(imagenet32, tmp_path):
    root, content = imagenet32
    owners = "https://image-net.org/download-images"
    assert_refused(
        f"imagenet32:{tmp_path}/nowhere", rf"no such folder; .*train_data_batch_1 .*{owners}"
    )
    path = next(root.glob("train_data_batch_4*"))
    path.rename(root / "kept")
    assert_refused(f"imagenet32:{root}", rf"train_data_batch_4 missing in .*{owners}")
    whole = (root / "kept").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert_refused(f"imagenet32:{root}", rf"train_data_batch_4.* is damaged .*{owners}")
    wrong = content["train_data_batch_4"]
    for change in ({"data": wrong["data"][:, :9]}, {"labels": [1]}, {"data": wrong["mean"]}):
        path.write_bytes(pickle.dumps(wrong | change))
        assert_refused(f"imagenet32:{root}", rf"train_data_batch_4.* must hold data .*{owners}")
    path.write_bytes(whole)
    next(root.glob("val_data*")).write_bytes(
        pickle.dumps({"data": wrong["data"], "labels": [1, 2, 3, 4, 5, 6]})
    )
    assert_refused(f"imagenet32:{root}", "val_data: no training image has the class 4")
