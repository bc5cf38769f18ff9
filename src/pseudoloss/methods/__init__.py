"""One file a method. A method says what the network is to see, and makes a loss of what it answers:
once for the steps of the warm-up, once for the others."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pseudoloss.config import Settings
from pseudoloss.methods import pls
from pseudoloss.methods.batch import Batch, Outputs, ViewBatch
from pseudoloss.methods.ce import CrossEntropy
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixup import Mixup
from pseudoloss.nn.views import Views

__all__ = ["Batch", "Method", "Outputs", "Part", "ViewBatch", "build"]


class Part(Protocol):
    """What the steps of a phase do. Both functions are of fixed-shape tensors: they read nothing
    back to the host and draw no random numbers of their own."""

    @property
    def guess_in_eval(self) -> bool:
        """Whether the views for guesses are seen in evaluation mode."""

    def show(self, views: Views, batch: Batch) -> ViewBatch:
        """The views of a step."""

    def loss(self, seen: Outputs, batch: Batch, memory: Memory) -> Tensor:
        """A scalar. May write into the memory."""


class Method(Part, Protocol):
    """What the training loop asks of a method, which is its own main phase."""

    @property
    def draws(self) -> int:
        """Random numbers an image needs in a step."""

    @property
    def guess(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What a step guesses from the logits of two weak views, and leaves in the memory for stage
        2 to judge; None where it guesses nothing."""

    @property
    def warm_up(self) -> Part: ...


def build(settings: Settings, given_N: Tensor, classes: int) -> Method:
    """The method that the settings ask for."""
    if settings.method == "ce":
        return CrossEntropy()
    if settings.method == "mixup":
        return Mixup()
    normalise = {"sum": pls.by_sum, "max": pls.by_max}[settings.guess_norm]
    guess = partial(pls.guess_labels, gamma=settings.gamma, normalise=normalise)
    return pls.PLS(
        guess=guess if settings.correct else None,
        mu=settings.mu,
        balance=settings.balance,
        prior_C=_prior(settings, given_N, classes),
        classification={
            "apart": pls.classification_apart,
            "together": pls.classification_together,
            "own": pls.classification_own,
        }[settings.weighting],
        contrastive_class={"mixed": pls.class_of_mixed, "own": pls.class_of_own}[
            settings.contrast_class
        ],
        guess_in_eval=settings.guess_mode == "eval",
        contrast=settings.contrast,
        trust_in_classification=settings.trust_in_classification,
        trust_in_contrast=settings.trust_in_contrast,
    )


def _prior(settings: Settings, given_N: Tensor, classes: int) -> Tensor:
    """The class shares that the balance term aims at."""
    if settings.balance_prior == "uniform":
        return torch.full((classes,), 1 / classes, device=given_N.device)
    return torch.bincount(given_N, minlength=classes).float() / len(given_N)
