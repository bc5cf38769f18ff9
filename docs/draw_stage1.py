"""Draw docs/id80-stage1.svg from benchmarks/results: python docs/draw_stage1.py [FILE]"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pseudoloss.config import Settings
from pseudoloss.experiments.drawing import (
    BLUE,
    GREY,
    STYLE,
    VERMILION,
    WIDTH,
    EndLabel,
    draw_seeds,
    label_ends,
    label_epochs,
    mark_warmup,
    save,
)

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
EPOCHS = 200
WARMUP = Settings(epochs=EPOCHS).warmup_epochs

# Noise metric of stage 1: colour, and the names of the result files, one per seed.
RUNS = {
    "loss": (VERMILION, ["again", "seed-2"]),
    "capped loss": (BLUE, ["capped", "capped-seed-2", "capped-seed-3"]),
}


def read_runs(names: list[str]) -> list[dict[str, Any]]:
    files = [RESULTS / f"cifar100-id80-{name}-h200.json" for name in names]
    return [json.loads(file.read_text())["runs"][0] for file in files]


def draw() -> Figure:
    """Above, the share of flagged labels; below, the test accuracy, mean ± standard deviation over
    seeds."""
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    grid = figure.add_gridspec(2, 3)
    accuracies = figure.add_subplot(grid[1, :])
    epochs = range(1, EPOCHS + 1)
    panels, labels = [], []
    for metric, (colour, names) in RUNS.items():
        runs = read_runs(names)
        # One panel per seed where the share swings; the other lines are smooth.
        groups = [[run] for run in runs] if metric == "loss" else [runs]
        panels += [(metric, colour, group) for group in groups]
        by_epoch = list(zip(*(run["accuracy_by_epoch"] for run in runs), strict=True))
        means = draw_seeds(accuracies, epochs, by_epoch, colour)
        labels.append(EndLabel(EPOCHS, means[-1], f"{metric} ({len(runs)} seeds)", colour))
    for column, (metric, colour, runs) in enumerate(panels):
        axis = figure.add_subplot(grid[0, column])
        for run in runs:
            axis.plot(epochs, run["noisy_by_epoch"], color=colour, linewidth=0.7)
        axis.axhline(runs[0]["noise_rate"], color=GREY, linewidth=0.8, linestyle=":")
        seeds = ", ".join(str(run["seed"]) for run in runs)
        axis.set(title=f"{metric}, seed{'s' if len(runs) > 1 else ''} {seeds}", ylim=(0, 1))
        if column == 0:
            axis.set_ylabel("share of flagged labels")
    label_noise_rate(axis, runs[0]["noise_rate"])
    accuracies.set(ylabel="test accuracy (%)", ylim=(0, 70))
    for axis in figure.axes:
        label_epochs(axis, EPOCHS)
        mark_warmup(axis, WARMUP)
    label_ends(figure, [(accuracies, labels)])
    return figure


def label_noise_rate(axis: Axes, rate: float) -> None:
    axis.annotate(
        "labels that are wrong",
        (EPOCHS, rate),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=GREY,
        fontsize=7.5,
    )


if __name__ == "__main__":
    with matplotlib.rc_context(STYLE):
        save(draw(), Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "id80-stage1.svg")
