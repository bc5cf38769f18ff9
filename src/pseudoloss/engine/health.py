"""Runs that go wrong, noticed and said in plain words, with what to try."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from pseudoloss.data import Skipped
from pseudoloss.engine.tracking import Stages
from pseudoloss.methods.memory import Memory

WARM_UP_ONLY = (
    "all epochs are warm-up, so PLS itself never begins and no label is corrected. Give it more "
    "--epochs, or a shorter --warmup."
)
CHANCE_SIGMAS = 3.0  # predictions this close to guessing show nothing learnt
ALMOST_ALL = 0.98  # with 80% noise, stage 1 rightly flags up to 95% after the warm-up
ALMOST_NONE = 0.01
# What stage 1 takes for wrong, epoch after epoch: in healthy runs it has moved by 0.05 at most.
SWING = 0.3
SWINGS, WATCHED = 3, 10  # so many swings in so many epochs


def warm_up_at_chance(memory: Memory, given_N: Tensor) -> str | None:
    """Whether the warm-up has learnt nothing. Seen at 80% noise."""
    chance = at_chance(memory, given_N)
    return chance and (
        f"the warm-up ended at chance: {chance}. The rest of the run will hardly recover. Try "
        "another --seed, a lower --lr or --weight-decay, a longer --warmup, or --network "
        "preactresnet18 if it is another."
    )


def ended_at_chance(memory: Memory, given_N: Tensor) -> str | None:
    """Whether nothing is left of what was learnt, if anything was."""
    chance = at_chance(memory, given_N)
    return chance and (
        f"the run ended at chance: {chance}. The model has likely learnt nothing, or lost "
        "it. Try a lower --lr, another --seed or a longer --warmup."
    )


def at_chance(memory: Memory, given_N: Tensor) -> str | None:
    """Whether predictions agree with the given labels no more often than they would if they had
    nothing to do with them; None too where nothing could tell, as nearly all are of one class."""
    images, classes = len(given_N), int(max(given_N.max(), memory.predicted_N.max())) + 1
    share_C, predicted_C = (
        torch.bincount(labels_N, minlength=classes).double() / images
        for labels_N in (given_N, memory.predicted_N)
    )
    agreement = int((memory.predicted_N == given_N).sum()) / images
    chance = float(share_C @ predicted_C)
    limit = chance + CHANCE_SIGMAS * math.sqrt(chance * (1 - chance) / images)
    if agreement > limit or limit >= 1:
        return None
    return (
        f"its predictions agree with {agreement:.1%} of the given labels, and would with "
        f"{chance:.1%} by chance"
    )


def stage1_collapsed(stages: Stages, memory: Memory, values: str = "losses") -> str | None:
    """Whether the mixture of the losses, or of other values, says nothing about the labels."""
    share = int(memory.noisy_N.sum()) / len(memory.noisy_N)
    if not bool(stages.loss.fitted):
        return (
            f"stage 1 found no two modes in the {values} (all are equal, or not finite) and takes "
            f"{share:.0%} of the labels for wrong. Try a longer --warmup or a lower --lr."
        )
    if share == 0:
        return (
            "stage 1 takes every given label for right, so nothing is corrected. If you know of "
            "wrong labels, try a lower --threshold or a longer --warmup."
        )
    if share > ALMOST_ALL:
        return (
            f"stage 1 takes {share:.0%} of the given labels for wrong: its mixture has collapsed. "
            "Try a longer --warmup, a higher --threshold or a lower --lr."
        )
    return None


def stage1_swings(shares: Sequence[float], noise_metric: str = "loss") -> str | None:
    """Whether what stage 1 takes for wrong leaps up and down. `shares` are those of the labels,
    after one epoch after another, the last ones of which are looked at. Seen at 80% noise."""
    shares = shares[-WATCHED - 1 :]
    leaps = [(a, b) for a, b in pairwise(shares) if abs(a - b) > SWING]
    if len(leaps) < SWINGS:
        return None
    before, after = leaps[-1]
    capped = "" if noise_metric == "capped-loss" else "--noise-metric capped-loss, "
    return (
        f"stage 1 swings: it took {before:.0%} of the given labels for wrong after one epoch, "
        f"{after:.0%} after the next, and leapt like that {len(leaps)} times in {len(shares) - 1} "
        "epochs. Its mixture finds no clear modes yet; the run may take long to recover. Try "
        f"{capped}a longer --warmup, or a lower --lr or --weight-decay."
    )


def stage2_collapsed(stages: Stages, memory: Memory, values: str = "pseudo-losses") -> str | None:
    """Whether the mixture of the pseudo-losses, or of other values, says nothing about the
    guesses."""
    noisy = int(memory.noisy_N.sum())
    if stages.pseudo_loss is None or noisy <= 2:
        return None
    trust = float(memory.trust_N[memory.noisy_N].mean())
    if not bool(stages.pseudo_loss.fitted):
        return (
            f"stage 2 found no two modes in the {values} (all are equal, or not finite); the "
            f"mean trust is {trust:.2f}. Try a longer --warmup or a lower --lr."
        )
    if trust < ALMOST_NONE:
        return (
            "stage 2 trusts no guess: its mixture has collapsed, and the noisy images teach "
            "nothing. Try a longer --warmup or a lower --gamma."
        )
    return None


def classes_lost(lost_C: Tensor, classes: Sequence[str]) -> str | None:
    """Classes of which no label would be believed, while most of the others' are."""
    lost = [classes[c] for c in lost_C.nonzero().flatten().tolist()]
    if not lost:
        return None
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"stage 1 takes every label of the class {lost[0]}{more} for wrong, and those with the "
        "lower losses were kept all the same. The network may not have learnt a rare class when "
        "its labels were judged. If they are right, try a longer --warmup or a higher --threshold, "
        "or find more images of it."
    )


def left_out(skipped: Sequence[Skipped], table: Path | None) -> str | None:
    """Files that are not trained on; `table` lists all of them, if there is one."""
    if not skipped:
        return None
    first = skipped[0]
    files = "1 file is" if len(skipped) == 1 else f"{len(skipped):,} files are"
    listed = "" if table is None else f"; {table} lists all"
    return f"{files} left out (the first: {first.path}, {first.reason}){listed}"


def lost_files(names: Sequence[str]) -> str | None:
    """Files that were there when the run began."""
    if not names:
        return None
    files = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return (
        f"{files} cannot be read any more (the first: {names[0]}), and black images take the place "
        "of what is lost"
    )
