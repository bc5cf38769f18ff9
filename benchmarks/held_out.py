"""Quality of the label table for held-out images, compared with training images.

    python benchmarks/held_out.py [--seeds 1 2 3] [--quick] [--out FILE.json]

Trains on digits with wrong labels, with a tenth of the images held out, and compares the table with
the true labels. Stage 1 fits its mixture to the losses of all images together. Two alternatives are
measured too: a mixture of the losses of the training images, and one of the held-out images; each
for all held-out images and for a few of them. Counts are summed over seeds and random subsets.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import machine
import pseudoloss as pl
from pseudoloss.data import corrupt, open_source
from pseudoloss.data.images import with_held_out
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.scores import auc

CASES = (("pls", 0.4), ("pls", 0.05), ("ce", 0.4))
SHARE = 0.1
FEW, SUBSETS = 10, 50  # size and number of the random subsets of held-out images


def fit_to_training_images(trained_N: Tensor, held_M: Tensor) -> Tensor:
    mixture = fit_two_modes(trained_N)
    means, variances, weights = mixture.means, mixture.variances, mixture.weights
    distance = (held_M.double()[:, None] - means) ** 2
    return (weights.log() - 0.5 * (variances.log() + distance / variances)).softmax(1)[:, 1]


def fit_to_held_out_images(trained_N: Tensor, held_M: Tensor) -> Tensor:
    return 1 - fit_two_modes(held_M).low_N


def fit_to_all_images(trained_N: Tensor, held_M: Tensor) -> Tensor:
    return 1 - fit_two_modes(torch.cat([trained_N, held_M])).low_N[len(trained_N) :]


FITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "training images": fit_to_training_images,
    "held-out images": fit_to_held_out_images,
    "all images": fit_to_all_images,
}
"""P(noisy) of the held-out images, by the images that the mixture is fitted to."""


def count(flagged: Tensor, wrong: Tensor) -> np.ndarray:
    """Number of correctly flagged, flagged, and wrong labels."""
    return np.array([int((flagged & wrong).sum()), int(flagged.sum()), int(wrong.sum())])


def precision_and_recall(counts: np.ndarray) -> dict[str, float]:
    correct, flagged, wrong = counts.tolist()
    return {
        "precision": round(correct / max(flagged, 1), 4),
        "recall": round(correct / max(wrong, 1), 4),
    }


def measure(method: str, noise: float, seeds: list[int], epochs: int | None) -> dict[str, Any]:
    rows = {part: np.zeros(3, dtype=int) for part in ("train", "held-out")}
    aucs: dict[str, list[float]] = {part: [] for part in rows}
    fits = {size: {fit: np.zeros(3, dtype=int) for fit in FITS} for size in ("all", "few")}
    relabelled = np.zeros(2, dtype=int)
    for seed in seeds:
        digits = open_source("digits")
        noisy = corrupt(digits.train, f"symmetric-exact:{noise}", seed)
        data = with_held_out(replace(digits, train=noisy, test=None), SHARE, seed)
        changes = {} if epochs is None else {"epochs": epochs}
        run = pl.train(data, preset="digits", method=method, seed=seed, quiet=True, **changes)
        assert data.test is not None
        threshold = run.settings.method_settings.threshold
        loss, wrong = {}, {}
        tables = {part: run.labels[run.labels["part"] == part] for part in rows}
        for (part, table), images in zip(tables.items(), (data.train, data.test), strict=True):
            assert images.true_N is not None
            wrong[part] = images.given_N != images.true_N
            loss[part] = -torch.tensor(table["label_score"].to_numpy()).log()
            rows[part] += count(torch.tensor(table["is_label_issue"].to_numpy()), wrong[part])
            aucs[part].append(auc(loss[part], wrong[part]))
        assert data.test.true_N is not None
        held = tables["held-out"]
        moved = (held["action"] == "relabel").to_numpy()
        right = np.array(data.test.classes, dtype=object)[data.test.true_N.numpy()]
        relabelled += (held["suggested_label"].to_numpy() == right)[moved].sum(), moved.sum()
        random = torch.Generator().manual_seed(seed)
        M = len(wrong["held-out"])
        chosen = [torch.randperm(M, generator=random)[:FEW] for _ in range(SUBSETS)]
        for size, subsets in (("all", [torch.arange(M)]), ("few", chosen)):
            for fit, p_noisy in FITS.items():
                for some in subsets:
                    p_some = p_noisy(loss["train"], loss["held-out"][some])
                    flagged = p_some > threshold
                    fits[size][fit] += count(flagged, wrong["held-out"][some])
    return {
        "method": method,
        "noise": noise,
        "rows": {
            part: precision_and_recall(counts) | {"auc": round(float(np.mean(aucs[part])), 4)}
            for part, counts in rows.items()
        },
        "held_out_suggestions_right": (  # None without suggestions
            round(relabelled[0] / relabelled[1], 4) if relabelled[1] else None
        ),
        "stage_1_by_mixture_of": {
            size: {fit: precision_and_recall(counts) for fit, counts in each.items()}
            for size, each in fits.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--quick", action="store_true", help="two epochs, one seed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seeds, epochs = (args.seeds[:1], 2) if args.quick else (args.seeds, None)
    cases = []
    for method, noise in CASES:
        found = measure(method, noise, seeds, epochs)
        cases.append(found)
        print(f"{method}, {noise:.0%} wrong labels")
        for part, row in found["rows"].items():
            print(f"  {part:34} " + "  ".join(f"{name} {row[name]:.3f}" for name in row))
        for size, each in found["stage_1_by_mixture_of"].items():
            for fit, row in each.items():
                name = f"{size}, mixture of {fit}"
                print(f"  {name:34} " + "  ".join(f"{key} {row[key]:.3f}" for key in row))
    machine.write(args.out, {"seeds": seeds, "few": FEW, "subsets": SUBSETS, "cases": cases})


if __name__ == "__main__":
    main()
