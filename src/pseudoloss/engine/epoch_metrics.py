"""The metrics of an epoch, and summary.json."""

from typing import Any, TypedDict

import torch
from torch import Tensor

from pseudoloss.data import OUT
from pseudoloss.engine.trainer import Trainer
from pseudoloss.methods.base import Verdict
from pseudoloss.nn.devices import device_name, peak_memory
from pseudoloss.scores import auc, share


class Detection(TypedDict):
    """Does `noisy` find the wrong labels?"""

    precision: float | None
    recall: float | None
    recall_in: float | None  # of wrong labels whose image belongs to another class
    recall_out: float | None  # of out-of-distribution images
    auc: float | None  # of the loss, over all images


class PseudoLabels(TypedDict):
    """Over the flagged images: are the suggestions right, and does trust know it?"""

    accuracy: float | None
    auc: float | None  # of trust


def detection(verdict: Verdict, given_N: Tensor, true_N: Tensor) -> Detection:
    wrong_N, out_N = given_N != true_N, true_N == OUT
    return Detection(
        precision=share(verdict.noisy_N, wrong_N),
        recall=share(wrong_N, verdict.noisy_N),
        recall_in=share(wrong_N & ~out_N, verdict.noisy_N),
        recall_out=share(out_N, verdict.noisy_N),
        auc=auc(verdict.loss_N, wrong_N),
    )


def pseudo_labels(verdict: Verdict, true_N: Tensor) -> PseudoLabels | None:
    """No suggestion is right for an out-of-distribution image: its true class equals none."""
    noisy_N, suggested_N, trust_N = verdict.noisy_N, verdict.suggested_N, verdict.trust_N
    if suggested_N is None or trust_N is None:
        return None
    if not bool(noisy_N.any()):
        return PseudoLabels(accuracy=None, auc=None)
    right_N = suggested_N[noisy_N] == true_N[noisy_N]
    return PseudoLabels(
        accuracy=100 * int(right_N.sum()) / len(right_N),
        auc=auc(trust_N[noisy_N], right_N),
    )


def epoch_metrics(trainer: Trainer, epoch: int) -> dict[str, Any]:
    """How many labels are flagged, how far suggestions are trusted and, where the true labels are
    known, how right that is."""
    compare = trainer.settings.compare_metrics
    true_N = trainer.data.train.true_N
    true_N = None if true_N is None else true_N.to(trainer.device)
    keys = ["noisy", "trust", "detection", "pseudo_labels"]
    keys += trainer.method.compared if compare else []
    found: dict[str, Any] = dict.fromkeys(keys)
    if trainer.method.scores_after(epoch):
        verdict = trainer.verdict(epoch)
        noisy = int(verdict.noisy_N.sum())
        found["noisy"] = noisy / len(verdict.noisy_N)
        if verdict.trust_N is not None and noisy:
            found["trust"] = verdict.trust_N[verdict.noisy_N].mean().item()
        if true_N is not None:
            found["detection"] = detection(verdict, trainer.given_N, true_N)
            found["pseudo_labels"] = pseudo_labels(verdict, true_N)
        own = trainer.method.own_metrics(trainer.state, trainer.given_N, true_N)
        found |= {"method": own} if own else {}
    if compare and true_N is not None:
        found |= trainer.compare(epoch, true_N)
    return found


def summarise(
    trainer: Trainer,
    record: Any,
    noise: dict[str, Any],
    actions: dict[str, int],
    truth: dict[str, Any] | None,
) -> dict[str, Any]:
    """summary.json; docs/run-folder.md describes it."""
    data, last = trainer.data, record.last
    return {
        "method": trainer.settings.method,
        "source": data.name,
        "seed": trainer.settings.seed,
        "accuracy": {
            "last": last["accuracy"],
            "best": record.best,
            "best_epoch": record.best_epoch,
            "on": data.test_name if data.test else None,
            "noisy_labels": data.noisy_test if data.test else None,
        },
        "estimated_noise": noise,
        "detection": last["detection"] or dict.fromkeys(Detection.__annotations__),
        "pseudo_labels": last["pseudo_labels"] or {"accuracy": None, "auc": None},
        "knn_accuracy": last.get("knn_accuracy"),
        "noise_rate": data.train.noise_rate,
        "noise": data.train.noise,
        "actions": actions,
        "truth": truth,
        "seconds": record.seconds,
        "startup_seconds": record.startup_seconds,
        "epochs": record.epochs,
        "images": len(data.train),
        "held_out": len(data.test) if data.test and data.noisy_test else 0,
        "classes": trainer.classes,
        "notices": record.notices,
        "device": device_name(trainer.device),
        "peak_memory": peak_memory(trainer.device),
        "torch": torch.__version__,
    }
