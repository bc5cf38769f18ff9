"""The example runs, learns and finds noisy labels; its equations are those of the package."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pseudoloss.methods import mixture, pls
from pseudoloss.methods.base import Mix

PATH = Path(__file__).resolve().parents[2] / "examples" / "pls_plain.py"
B, C, D = 24, 10, 64


@pytest.fixture(scope="module")
def plain():
    return SimpleNamespace(**runpy.run_path(str(PATH)))


@pytest.fixture
def batch():
    """Random tensors of a step: corrected targets, some of them soft, and their trust."""
    torch.manual_seed(0)
    noisy_B = torch.rand(B) < 0.5
    hard_BC = F.one_hot(torch.randint(C, (B,)), C).float()
    soft_BC = torch.randn(B, C).softmax(1)
    return SimpleNamespace(
        logits_BC=3 * torch.randn(B, C),
        target_BC=torch.where(noisy_B[:, None], soft_BC, hard_BC),
        w_B=torch.where(noisy_B, torch.rand(B), torch.ones(B)),
        weak_BD=F.normalize(torch.randn(B, D)),
        strong_BD=F.normalize(torch.randn(B, D)),
        mix=Mix(torch.randperm(B), torch.tensor(0.7)),
    )


def test_it_imports_nothing_of_the_package():
    assert "import pseudoloss" not in PATH.read_text()
    assert "from pseudoloss" not in PATH.read_text()


def test_it_learns_and_finds_noisy_labels(plain):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002 - the mixtures of scikit-learn start from it
    data = plain.load_noisy_digits(noise=0.4, seed=1)
    wrong_N = data.given_N != data.true_N
    assert wrong_N.float().mean().item() == pytest.approx(0.4, abs=0.001)
    result = plain.train_pls(data, epochs=5)
    assert result.accuracy[-1] > 93
    assert len(result.accuracy) == 5
    assert wrong_N[result.noisy_N].float().mean() > 0.9
    assert result.noisy_N[wrong_N].float().mean() > 0.9
    right_N = result.pseudo_NC.argmax(1) == data.true_N
    trusted_N = result.noisy_N & (result.trust_N >= 0.5)
    assert right_N[trusted_N].float().mean() > 0.95
    assert bool((result.trust_N[~result.noisy_N] == 1).all())


def test_the_command_prints_both_accuracies(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(PATH), "--epochs", "2"])
    runpy.run_path(str(PATH), run_name="__main__")
    summary = capsys.readouterr().out.partition("\n\n")[2]
    assert "40% wrong labels" in summary
    assert "cross-entropy" in summary
    assert "PLS" in summary


def test_pseudo_labels_are_those_of_the_package(plain):
    torch.manual_seed(0)
    first_BC, second_BC = torch.randn(2, B, C)
    outputs = iter([(first_BC, None), (second_BC, None)])
    ours = plain.make_pseudo_labels(lambda _: next(outputs), None, None)
    theirs = pls.make_pseudo_labels(first_BC, second_BC, gamma=plain.GAMMA)
    torch.testing.assert_close(ours, theirs)


def test_classification_loss_is_that_of_the_package(plain, batch):
    given = (batch.logits_BC, batch.target_BC, batch.w_B)
    ours = plain.classification_loss(*given, batch.mix)
    torch.testing.assert_close(ours, pls.classification_separate(*given, batch.mix))


def test_contrastive_loss_is_that_of_the_package(plain, batch):
    ours = plain.contrastive_loss(
        batch.weak_BD, batch.strong_BD, batch.target_BC, batch.w_B, batch.mix
    )
    label_BX = pls.contrastive_label(pls.class_of_mixed(batch.target_BC, batch.mix), batch.w_B)
    theirs = pls.contrastive_loss(
        pls.feature_similarity(batch.weak_BD, batch.strong_BD, plain.MU),
        pls.similarity_of_rows(label_BX, batch.mix),
    )
    torch.testing.assert_close(ours, theirs)


def test_class_balance_is_that_of_the_package(plain, batch):
    ours = plain.class_balance(batch.logits_BC)
    theirs = pls.class_balance(batch.logits_BC, torch.full((C,), 1 / C))
    torch.testing.assert_close(ours, theirs)


def test_the_mixture_is_that_of_the_package(plain):
    """scikit-learn starts from random centres, so modes that are well apart."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    value_N = torch.cat([torch.randn(600).abs() * 0.3, 4 + torch.randn(400)])
    theirs = mixture.fit_two_modes(value_N).low_N
    torch.testing.assert_close(plain.low_mode(value_N), theirs, atol=0.02, rtol=0)
