"""Draws docs/id80-stage1.svg from benchmarks/results: python docs/draw_stage1.py [FILE]"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from pseudoloss.experiments.plots import STYLE

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
RUNS = {
    "the loss, as released (seeds 1, 2)": ("#d55e00", ["again", "seed-2"]),
    "the capped loss (seeds 1, 2, 3)": ("#0072b2", ["capped", "capped-seed-2", "capped-seed-3"]),
}


def draw() -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        shares, accuracies = figure.subplots(1, 2)
        for label, (colour, names) in RUNS.items():
            for name in names:
                file = RESULTS / f"cifar100-id80-{name}-h200.json"
                run = json.loads(file.read_text())["runs"][0]
                epochs = range(1, run["epochs"] + 1)
                line = {"color": colour, "linewidth": 0.9, "label": label}
                shares.plot(epochs, run["noisy_by_epoch"], **(line | {"label": ""}))
                accuracies.plot(epochs, run["accuracy_by_epoch"], **line)
                label = ""
        wrong = run["noise_rate"]
        shares.axhline(wrong, color="#666666", linewidth=1, linestyle=":", label="that are wrong")
        shares.legend(loc="lower right")
        shares.set(title="Labels that stage 1 takes for wrong", xlabel="epoch", ylim=(0, 1))
        accuracies.set(title="Test accuracy, %", xlabel="epoch", ylim=(0, 70))
        accuracies.legend(loc="lower right", title="stage 1 looks at")
    return figure


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "id80-stage1.svg"
    with matplotlib.rc_context(STYLE):
        draw().savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
