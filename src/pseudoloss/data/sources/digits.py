"""scikit-learn's handwritten digits."""

from dataclasses import replace

import numpy as np

from pseudoloss.data.images import Data, arrays


def digits() -> Data:
    """1,797 grey images of 8×8 pixels; a fifth of them is the test split.

    scikit-learn contains them, so nothing is downloaded.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    # The digits of one writer are next to each other. A fixed shuffle puts some of every writer's
    # digits into both splits.
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    data = arrays(
        images[train],
        bunch.target[train],
        test_images=images[test],
        test_labels=bunch.target[test],
        classes=[str(name) for name in bunch.target_names],
        true_labels=bunch.target[train],
        name="digits",
    )
    return replace(data, preset="digits")
