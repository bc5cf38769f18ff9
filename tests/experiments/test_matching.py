"""Which runs belong to which cells."""

import pytest
from experiment_files import find_cell

from pseudoloss.experiments.catalogue import EXPERIMENTS
from pseudoloss.experiments.matching import pool_difference, training_cell


@pytest.mark.parametrize(
    ("experiment", "name", "trained"),
    [
        ("mu", "mu-0.2", ("selection", "id40-with")),
        ("gamma", "gamma-2", ("selection", "id40-with")),
        ("thresholds", "pseudo-loss", ("selection", "id40-with")),
        ("ablation", "inet-40-20-correct-cont-w", ("ood-noise", "inet-40-20-pls")),
        ("ablation", "cnwl-40-none", ("cnwl", "cnwl-40-mixup")),
        ("mu", "mu-0.1", ("mu", "mu-0.1")),
        ("ablation", "id40-correct-cont", ("selection", "id40-without")),
        ("cnwl", "cnwl-40-pls", ("selection", "cnwl-40-with")),
        ("selection", "id40-with", ("selection", "id40-with")),
        ("selection", "digits-with", ("selection", "digits-with")),  # a quick trial
        ("digits", "digits-pls", ("digits", "digits-pls")),
    ],
)
def test_cells_with_equal_settings_are_trained_once(experiment, name, trained):
    [cell] = EXPERIMENTS[experiment].choose([name])
    found_experiment, found_cell = training_cell(cell)
    assert (found_experiment.name, found_cell.name) == trained


@pytest.mark.parametrize(
    ("pool", "is_the_papers"),
    [
        ("/data/imagenet32", True),
        ("Imagenet32_train_npz/", True),
        ("/data/ImageNet-32/train", True),
        ("/data/imagenet32/data/train_256", True),
        ("/x/imagenet32.npy", True),
        ("/x/train_imagenet32", True),
        ("/x/data/train_imagenet32standard", True),
        ("/x/imagenet32-stuff/mypool.npy", False),
        ("/x/imagenet32/mypool", False),
        ("/home/imagenet32/data/places365/train", False),
        ("/imagenet32/train.npy", False),  # the name of a file counts, even a generic one
        ("/train", False),
        ("tinyimagenet32", False),
    ],
)
def test_a_pool_is_recognised_by_its_name(pool, is_the_papers):
    assert (pool_difference(find_cell("inet-40-20-pls"), pool) == "") == is_the_papers
