"""Features with wrong labels, for the tests of audits."""

import numpy as np


def blobs(n=160, classes=4, dimensions=100, wrong=0.15, seed=0):
    """Features of clusters, given labels and true labels."""
    random = np.random.default_rng(seed)
    true = np.arange(n) % classes
    centres = 2 * random.standard_normal((classes, dimensions))
    features = (centres[true] + random.standard_normal((n, dimensions))).astype(np.float32)
    swapped = random.permutation(n)[: round(wrong * n)]
    given = true.copy()
    given[swapped] = (true[swapped] + random.integers(1, classes, len(swapped))) % classes
    return features, given, true
