"""One file a method. A method is a loss for the steps of the warm-up and one for the others."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pseudoloss.config import Settings
from pseudoloss.memory import Memory
from pseudoloss.methods import pls
from pseudoloss.methods.batch import Batch
from pseudoloss.methods.ce import CrossEntropy
from pseudoloss.methods.mixup import Mixup
from pseudoloss.networks import Network
from pseudoloss.views import Views

__all__ = ["Batch", "Loss", "Method", "build"]

Loss = Callable[[Network, Views, Batch, Memory], Tensor]


class Method(Protocol):
    """What the training loop asks of a method.

    A loss is a scalar of fixed-shape tensors: it reads nothing back to the host and draws no
    random numbers of its own.
    """

    @property
    def draws(self) -> int:
        """Random numbers an image needs in a step."""

    @property
    def guesses(self) -> bool:
        """Whether a step leaves guesses in the memory, for stage 2 to judge."""

    def warm_up_loss(
        self, network: Network, views: Views, batch: Batch, memory: Memory
    ) -> Tensor: ...

    def loss(self, network: Network, views: Views, batch: Batch, memory: Memory) -> Tensor: ...


def build(settings: Settings, given_N: Tensor, classes: int) -> Method:
    """The method that the settings ask for."""
    if settings.method == "ce":
        return CrossEntropy()
    if settings.method == "mixup":
        return Mixup()
    return pls.PLS(
        gamma=settings.gamma,
        mu=settings.mu,
        balance=settings.balance,
        prior_C=_prior(settings, given_N, classes),
        normalise={"sum": pls.by_sum, "max": pls.by_max}[settings.guess_norm],
        classification={
            "apart": pls.classification_apart,
            "together": pls.classification_together,
        }[settings.weighting],
        contrastive_class={"mixed": pls.class_of_mixed, "own": pls.class_of_own}[
            settings.contrast_class
        ],
        guess_in_eval=settings.guess_mode == "eval",
        correct=settings.correct,
        contrast=settings.contrast,
        trust_in_classification=settings.trust_in_classification,
        trust_in_contrast=settings.trust_in_contrast,
    )


def _prior(settings: Settings, given_N: Tensor, classes: int) -> Tensor:
    """The class shares that the balance term aims at."""
    if settings.balance_prior == "uniform":
        return torch.full((classes,), 1 / classes, device=given_N.device)
    return torch.bincount(given_N, minlength=classes).float() / len(given_N)
