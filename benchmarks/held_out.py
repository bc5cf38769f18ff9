"""What the label table says of images that were held out, beside those that were trained on.

    python benchmarks/held_out.py [--seeds 1 2 3] [--quick] [--out FILE.json]

Trains on digits with wrong labels, a tenth of them held out, and compares the table with the truth.
Stage 1 judges held-out images by a mixture that is fitted to all losses together. Beside it are the
two other ways: a mixture of the losses of the images that were trained on, and one of their own; of
all held-out images, and of few. Counts are summed over seeds and draws.
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
from pseudoloss.engine.evaluate import auc
from pseudoloss.methods.mixture import fit_two_modes

CASES = (("pls", 0.4), ("pls", 0.05), ("ce", 0.4))
SHARE = 0.1
FEW, DRAWS = 10, 50  # images that are judged without the other held-out ones, and how often


def by_those_trained_on(trained_N: Tensor, held_M: Tensor) -> Tensor:
    mixture = fit_two_modes(trained_N)
    means, variances, weights = mixture.means, mixture.variances, mixture.weights
    distance = (held_M.double()[:, None] - means) ** 2
    return (weights.log() - 0.5 * (variances.log() + distance / variances)).softmax(1)[:, 1]


def by_their_own(trained_N: Tensor, held_M: Tensor) -> Tensor:
    return 1 - fit_two_modes(held_M).low_N


def by_all_together(trained_N: Tensor, held_M: Tensor) -> Tensor:
    return 1 - fit_two_modes(torch.cat([trained_N, held_M])).low_N[len(trained_N) :]


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "those trained on": by_those_trained_on,
    "their own": by_their_own,
    "all together": by_all_together,
}


def counts(found: Tensor, wrong: Tensor) -> np.ndarray:
    """Rightly found, found, and wrong labels."""
    return np.array([int((found & wrong).sum()), int(found.sum()), int(wrong.sum())])


def rates(found: np.ndarray) -> dict[str, float]:
    right, flagged, wrong = found.tolist()
    return {
        "precision": round(right / max(flagged, 1), 4),
        "recall": round(right / max(wrong, 1), 4),
    }


def measure(method: str, noise: float, seeds: list[int], epochs: int | None) -> dict[str, Any]:
    rows = {part: np.zeros(3, dtype=int) for part in ("train", "held-out")}
    aucs: dict[str, list[float]] = {part: [] for part in rows}
    ways = {size: {way: np.zeros(3, dtype=int) for way in WAYS} for size in ("all", "few")}
    relabelled = np.zeros(2, dtype=int)
    for seed in seeds:
        digits = open_source("digits")
        noisy = corrupt(digits.train, f"symmetric-exact:{noise}", seed)
        data = with_held_out(replace(digits, train=noisy, test=None), SHARE, seed)
        words = {} if epochs is None else {"epochs": epochs}
        run = pl.train(data, preset="digits", method=method, seed=seed, quiet=True, **words)
        assert data.test is not None
        loss, wrong = {}, {}
        tables = {part: run.labels[run.labels["part"] == part] for part in rows}
        for (part, table), images in zip(tables.items(), (data.train, data.test), strict=True):
            assert images.true_N is not None
            wrong[part] = images.given_N != images.true_N
            loss[part] = -torch.tensor(table["label_score"].to_numpy()).log()
            rows[part] += counts(torch.tensor(table["is_label_issue"].to_numpy()), wrong[part])
            aucs[part].append(auc(loss[part], wrong[part]))
        assert data.test.true_N is not None
        held = tables["held-out"]
        moved = (held["action"] == "relabel").to_numpy()
        right = np.array(data.test.classes, dtype=object)[data.test.true_N.numpy()]
        relabelled += (held["suggested_label"].to_numpy() == right)[moved].sum(), moved.sum()
        random = torch.Generator().manual_seed(seed)
        M = len(wrong["held-out"])
        chosen = [torch.randperm(M, generator=random)[:FEW] for _ in range(DRAWS)]
        for size, places in (("all", [torch.arange(M)]), ("few", chosen)):
            for way, p_noisy in WAYS.items():
                for some in places:
                    p_some = p_noisy(loss["train"], loss["held-out"][some])
                    found = p_some > run.settings.threshold
                    ways[size][way] += counts(found, wrong["held-out"][some])
    return {
        "method": method,
        "noise": noise,
        "rows": {
            part: rates(found) | {"auc": round(float(np.mean(aucs[part])), 4)}
            for part, found in rows.items()
        },
        "held_out_suggestions_right": (  # of none, where none was made
            round(relabelled[0] / relabelled[1], 4) if relabelled[1] else None
        ),
        "stage_1_by_mixture_of": {
            size: {way: rates(found) for way, found in each.items()} for size, each in ways.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--quick", action="store_true", help="two epochs of one seed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seeds, epochs = (args.seeds[:1], 2) if args.quick else (args.seeds, None)
    cases = []
    for method, noise in CASES:
        found = measure(method, noise, seeds, epochs)
        cases.append(found)
        print(f"{method}, {noise:.0%} of the labels wrong")
        for part, row in found["rows"].items():
            print(f"  {part:30} " + "  ".join(f"{name} {row[name]:.3f}" for name in row))
        for size, each in found["stage_1_by_mixture_of"].items():
            for way, row in each.items():
                name = f"{size} by {way}"
                print(f"  {name:30} " + "  ".join(f"{key} {row[key]:.3f}" for key in row))
    machine.write(args.out, {"seeds": seeds, "few": FEW, "draws": DRAWS, "cases": cases})


if __name__ == "__main__":
    main()
