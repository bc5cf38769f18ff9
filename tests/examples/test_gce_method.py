"""The example of docs/add-a-method.md: complete, short, and it runs."""

import importlib.util
from pathlib import Path

import pytest
import torch

import pseudoloss as pl
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.methods import BUILDERS

EXAMPLE = Path(__file__).parents[2] / "examples" / "gce_method.py"


@pytest.fixture
def gce():
    """The module; its method is registered while a test runs."""
    spec = importlib.util.spec_from_file_location("gce_method", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del METHOD_SETTINGS["gce"], BUILDERS["gce"]


def test_the_example_is_below_80_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 80


def test_the_loss_lies_between_cross_entropy_and_mean_absolute_error(gce):
    logits_BC, given_B = torch.randn(8, 5), torch.randint(0, 5, (8,))
    p_B = logits_BC.softmax(1)[torch.arange(8), given_B]
    almost_0 = gce.generalised_cross_entropy(logits_BC, given_B, 1e-4)
    at_1 = gce.generalised_cross_entropy(logits_BC, given_B, 1.0)
    assert almost_0.item() == pytest.approx(-p_B.log().mean().item(), abs=1e-2)
    assert at_1.item() == pytest.approx((1 - p_B).mean().item(), abs=1e-6)


def test_it_trains_and_resumes_to_the_same_bits(gce, tmp_path):
    options = {"preset": "digits-id40", "method": "gce", "epochs": 3, "q": 0.5, "quiet": True}
    whole = pl.train("digits", tmp_path / "whole", **options)
    assert whole.summary["accuracy"]["last"] > 50
    assert whole.settings.method_settings.q == 0.5
    run = pl.train("digits", tmp_path / "parts", minutes=1e-9, **options)
    while not run.finished:
        run = pl.train("digits", tmp_path / "parts", minutes=1e-9, resume=True, **options)
    for name in ("labels.csv", "model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_its_settings_are_checked_like_any_other(gce):
    with pytest.raises(pl.InputError, match="q: a setting of --method gce, not of pls"):
        pl.train("digits", q=0.5)
    with pytest.raises(pl.InputError, match="--q must be a number"):
        pl.train("digits", method="gce", q="much")
