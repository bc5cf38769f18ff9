"""scikit-learn's digits."""

import torch

from pseudoloss.data import open_source


def test_digits():
    data = open_source("digits")
    assert len(data.train) + len(data.test) == 1797
    assert data.train.images_NCHW.shape[1:] == (1, 8, 8)
    assert data.train.classes == tuple("0123456789")
    assert data.train.images_NCHW.max() == 255
    assert data.train.noise_rate == 0
    counts = torch.bincount(data.test.given_N)
    assert counts.min() > 20
    both = torch.cat([data.train.images_NCHW, data.test.images_NCHW]).flatten(1)
    assert len(both.unique(dim=0)) == len(both)  # no image is in both parts
    assert data.fingerprint() == open_source("digits").fingerprint()
