"""Runs that go wrong, whatever the method: what is noticed, and what to try."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pseudoloss.data import Skipped
from pseudoloss.data.scanning import LARGE

EXPLODED = 10.0  # times the loss of random predictions
CHANCE_SIGMAS = 3.0  # predictions this close to chance show that nothing was learned


def warm_up_at_chance(predicted_N: Tensor, given_N: Tensor) -> str | None:
    """The warm-up has learned nothing."""
    chance = at_chance(predicted_N, given_N)
    return chance and (
        f"the warm-up ended at chance: {chance}. The run is unlikely to recover. Try another "
        "--seed, a lower --lr or --weight-decay, a longer --warmup, or another --network, such "
        "as preactresnet18."
    )


def ended_at_chance(predicted_N: Tensor, given_N: Tensor) -> str | None:
    """The final predictions are at chance."""
    chance = at_chance(predicted_N, given_N)
    return chance and (
        f"the run ended at chance: {chance}. The model has probably learned nothing. Try a lower "
        "--lr, another --seed or a longer --warmup."
    )


def at_chance(predicted_N: Tensor, given_N: Tensor) -> str | None:
    """Predictions agree with the given labels no more often than if they were unrelated. Also
    None if nearly all labels are of one class, so that this cannot be told."""
    images, classes = len(given_N), int(max(given_N.max(), predicted_N.max())) + 1
    share_C, predicted_C = (
        torch.bincount(labels_N, minlength=classes).double() / images
        for labels_N in (given_N, predicted_N)
    )
    agreement = int((predicted_N == given_N).sum()) / images
    chance = float(share_C @ predicted_C)
    limit = chance + CHANCE_SIGMAS * math.sqrt(chance * (1 - chance) / images)
    if agreement > limit or limit >= 1:
        return None
    return (
        f"its predictions agree with {agreement:.1%} of the given labels; by chance it would be "
        f"{chance:.1%} ± {limit - chance:.1%}"
    )


def exploded_loss(loss: float, classes: int, batch_size: int) -> str | None:
    """The mean loss of an epoch is finite, but far above that of random predictions: log C for
    the classes and, in a contrastive loss, log B for the images of a batch."""
    chance = math.log(classes) + math.log(batch_size)
    if loss <= EXPLODED * chance:
        return None
    return (
        f"the loss is {loss:.3g}; random predictions would have about {chance:.1f}. The run "
        "diverges and is unlikely to recover. Try a lower --lr"
    )


def skipped_steps(skipped: int, steps: int, lr: float) -> str | None:
    """Steps in which the loss or a gradient was NaN or infinite."""
    if not skipped:
        return None
    were = "step was" if skipped == 1 else "steps were"
    return (
        f"{skipped} {were} skipped (of {steps} in this epoch), because the loss or a gradient was "
        f"not finite. If it happens again, try a lower --lr (now {lr:g}) or, on a GPU, --precision "
        "float32"
    )


def skipped_files(skipped: Sequence[Skipped], table: Path | None) -> str | None:
    """Files that are not used; `table` lists all of them, if there is one."""
    if not skipped:
        return None
    first = skipped[0]
    files = "1 file is" if len(skipped) == 1 else f"{len(skipped):,} files are"
    listed = "" if table is None else f"; {table} lists all"
    return f"{files} skipped (the first: {first.path}, {first.reason}){listed}"


def shrunk_photographs(typical: int, seen: int, network: str) -> str | None:
    """Photographs, with shorter sides of `typical` pixels, of which the network sees very little
    although no size was asked for."""
    if not seen <= LARGE < typical:
        return None
    return (
        f"photographs (shorter side typically {typical:,} pixels) are shrunk to {seen}×{seen}, the "
        f"default for {network}. --image-size {min(2 * LARGE, typical)} keeps more detail; "
        "--preset finetune starts from trained weights at a larger size"
    )


def lost_files(names: Sequence[str]) -> str | None:
    """Files that could be read when the run began."""
    if not names:
        return None
    files = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return f"{files} can no longer be read (the first: {names[0]}); black images are used instead"
