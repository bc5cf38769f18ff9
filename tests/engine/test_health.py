"""Notices that do not depend on the method."""

import math
from pathlib import Path

import pytest
import torch

from pseudoloss.data import Skipped
from pseudoloss.engine import health

N, C = 5000, 100


@pytest.fixture
def given():
    return torch.arange(N) % C


def test_one_class_for_all_images_is_chance(given):
    text = health.warm_up_at_chance(torch.full_like(given, 3), given)
    assert text.startswith("the warm-up ended at chance: its predictions agree with 1.0%")
    spread = 100 * 3 * math.sqrt(0.01 * 0.99 / len(given))
    assert f"by chance it would be 1.0% ± {spread:.1f}%" in text
    assert "--seed" in text
    assert "--weight-decay" in text


def test_a_run_that_ends_at_chance(given):
    text = health.ended_at_chance(torch.full_like(given, 3), given)
    assert text.startswith("the run ended at chance: its predictions agree with 1.0%")
    assert health.ended_at_chance(given.clone(), given) is None


def test_random_predictions_are_chance(given):
    predicted = torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(0))
    assert health.warm_up_at_chance(predicted.int(), given) is not None


def test_a_little_learning_is_not_chance(given):
    """At 80% noise a healthy warm-up agrees with about 4% of the given labels."""
    predicted = (given + 1) % C
    predicted[: N * 4 // 100] = given[: N * 4 // 100]
    assert health.warm_up_at_chance(predicted, given) is None


def test_chance_is_the_most_frequent_class():
    given = (torch.arange(1000) % 10 == 0).long()  # nine of ten are in one class
    assert "90.0%" in health.warm_up_at_chance(torch.zeros_like(given), given)


def test_right_predictions_are_not_chance_where_classes_are_imbalanced():
    """They agree less often than predicting the most frequent class would, but tell classes
    apart."""
    true = (torch.arange(4000) % 10 == 0).long()
    given = torch.where(torch.arange(4000) // 10 % 5 < 2, 1 - true, true)  # two of five are wrong
    assert health.ended_at_chance(true, given) is None


def test_where_nearly_all_images_are_in_one_class_nothing_is_said():
    given = (torch.arange(100) < 3).long()
    for predicted in (given, torch.zeros_like(given)):
        assert health.ended_at_chance(predicted, given) is None


def test_a_class_that_is_only_predicted_or_only_given():
    given = torch.arange(100) % 3
    assert health.at_chance(torch.full_like(given, 7), given) is not None
    assert health.at_chance(torch.zeros_like(given), given + 4) is not None


def test_skipped_files():
    assert health.skipped_files((), None) is None
    one = (Skipped("a.txt", "not an image"),)
    assert health.skipped_files(one, None) == "1 file is skipped (the first: a.txt, not an image)"
    many = one * 1234
    text = health.skipped_files(many, Path("run/skipped.csv"))
    assert text.startswith("1,234 files are skipped (the first: a.txt, ")
    assert text.endswith("; run/skipped.csv lists all")


def test_lost_files():
    assert health.lost_files([]) is None
    assert health.lost_files(["a.png"]).startswith("1 file can no longer be read (the first: a.png")
    assert health.lost_files(["a.png", "b.png"]).startswith("2 files can no longer be read")


@pytest.mark.parametrize(
    ("typical", "seen", "said"),
    [(300, 32, True), (65, 64, True), (300, 224, False), (64, 32, False), (32, 32, False)],
)
def test_shrunk_photographs(typical, seen, said):
    text = health.shrunk_photographs(typical, seen, "small-cnn")
    assert (text is not None) == said
    if text is not None:
        assert f"{typical} pixels) are shrunk to {seen}×{seen}" in text
        assert f"--image-size {min(128, typical)} " in text
