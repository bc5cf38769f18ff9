"""The paper's plots, drawn from the run folders of `selection`. Needs matplotlib.

A line is the mean over seeds, and the band around it goes from the lowest to the highest value.
Unfinished runs are drawn up to their last epoch.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudoloss.config import did_you_mean
from pseudoloss.errors import InputError
from pseudoloss.experiments.catalogue import PLOTS, SELECTION, WITH, WITHOUT, Cell
from pseudoloss.experiments.cells import find_run_folders, source_kind
from pseudoloss.experiments.matching import setting_differences
from pseudoloss.experiments.old_files import upgrade_metrics
from pseudoloss.files import write_atomically
from pseudoloss.runs import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")

# What is drawn: place in a line of metrics.jsonl, name, colour (told apart by the colour-blind).
NOISE = (
    ("metrics.noise.loss", "small loss", "#0072b2"),
    ("metrics.noise.agreement", "neighbour agreement", "#009e73"),
    ("metrics.noise.disagreement", "neighbour disagreement", "#e69f00"),
    ("metrics.noise.js", "JS divergence of the label", "#d55e00"),
    ("metrics.noise.kl", "KL divergence of views", "#cc79a7"),
)
GUESSES = (
    ("metrics.pseudo_labels.pseudo-loss", "pseudo-loss", "#0072b2"),
    ("metrics.pseudo_labels.confidence", "confidence", "#e69f00"),
    ("metrics.pseudo_labels.entropy", "entropy", "#009e73"),
)
ACCURACY = (("accuracy", "accuracy", ""),)
BIAS = (
    ("bias.fitted", "wrong guess, and the network agrees", "#d55e00"),
    ("bias.learnt", "wrong guess, and it is learnt from", "#0072b2"),
)
RIGHT, WRONG = "#56b4e9", "#d55e00"
STYLES = {WITH: "-", WITHOUT: "--"}
COLOURS = {WITH: "#0072b2", WITHOUT: "#d55e00"}  # where one thing is drawn

Lines = list[dict[str, Any]]  # of a metrics.jsonl


@dataclass(frozen=True)
class Runs:
    """The runs of a cell: lines of metrics by seed."""

    cell: Cell
    lines: dict[int, Lines]


def draw(
    name: str,
    out: Path,
    file: Path,
    only: Sequence[str] | None = None,
    epochs: Sequence[int] | None = None,
) -> list[str]:
    """Draw a figure into a file, whose ending says the format. What was left out, and why."""
    if name not in PLOTS:
        raise InputError(f"{name}: no such plot{did_you_mean(name, PLOTS)}")
    if file.suffix not in ENDINGS:
        raise InputError(f"--file {file}: must end in {' or '.join(ENDINGS)}")
    if epochs is not None and name != "pseudo-labels":
        raise InputError(f"--epochs is for pseudo-labels, not for {name}")
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            "plots need matplotlib: pip install matplotlib, or pseudoloss[figures]"
        ) from None
    runs, notes = find_runs(out, only)
    with matplotlib.rc_context(STYLE):
        figure = DRAWINGS[name](runs, epochs)
        metadata = {"Date": None} if file.suffix == ".svg" else {}  # equal runs, equal files
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(
                file,
                lambda draft: figure.savefig(draft, format=file.suffix[1:], metadata=metadata),
            )
        except OSError as error:
            raise InputError(f"--file {file}: cannot be written ({error.strerror})") from None
    return notes


STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pseudoloss",
    "savefig.dpi": 160,
}


def find_runs(out: Path, only: Sequence[str] | None) -> tuple[list[Runs], list[str]]:
    """The runs of `selection` that have begun; and what is to be said of them.

    Of a cell only runs that were trained alike: as the cell wants it, or else all in one other way.
    """
    found, notes = [], []
    for cell in SELECTION.choose(only) if only else SELECTION.cells:
        alike: dict[str, dict[int, Lines]] = {}
        for seed, folder in find_run_folders(out, cell).items():
            try:
                rows, differs = read(folder, cell, seed)
            except (InputError, OSError, ValueError, KeyError, TypeError) as error:
                notes.append(f"{cell.name}: seed {seed} is left out: {error}")
                continue
            if rows:
                alike.setdefault(differs, {})[seed] = rows
            if rows and not folder.finished:
                notes.append(f"{cell.name}: seed {seed} is not finished, epoch {len(rows)} so far")
        if not alike:
            continue
        chosen = "" if "" in alike else max(alike, key=lambda differs: len(alike[differs]))
        found.append(Runs(cell, alike[chosen]))
        for differs, lines in alike.items():
            seeds = " ".join(map(str, lines))
            left_out = " and left out" if differs != chosen else ""
            if differs:
                notes.append(f"{cell.name}: seed {seeds}: trained with {differs}{left_out}")
    if not found:
        said = "".join(f"; {note}" for note in notes)
        raise InputError(
            f"--out {out}: has no runs to draw{said}; train them: "
            "pseudoloss experiments run selection"
        )
    return found, notes


def read(folder: RunFolder, cell: Cell, seed: int) -> tuple[Lines, str]:
    """The epochs of a run, and in what its settings differ from those of the cell."""
    rows, recorded = [upgrade_metrics(row) for row in folder.metrics()], folder.recorded()
    if recorded is None:
        if not rows:
            return [], ""
        raise ValueError("config.json is missing")
    if folder.finished:
        epochs = json.loads(folder.summary.read_bytes())["epochs"]
        if epochs != len(rows):
            raise ValueError(f"metrics.jsonl has {len(rows)} of {epochs} epochs")
    if source_kind(recorded.source) != source_kind(cell.source):
        raise ValueError(f"it was trained on {recorded.source}, not on {cell.source}")
    if recorded.settings.seed != seed:
        raise ValueError(f"it was trained with --seed {recorded.settings.seed}")
    return rows, ", ".join(setting_differences(cell, recorded.settings))


def value_of(line: dict[str, Any], place: str) -> Any:
    """What a line has at `metrics.noise.loss`, say; None where it has nothing."""
    value: Any = line
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def series(runs: Runs, place: str) -> tuple[list[int], list[list[float]]]:
    """Epochs, and the values of all seeds at each."""
    by_epoch: dict[int, list[float]] = {}
    for rows in runs.lines.values():
        for row in rows:
            value = value_of(row, place)
            if value is not None:
                by_epoch.setdefault(row["epoch"], []).append(float(value))
    epochs = sorted(by_epoch)
    return epochs, [by_epoch[epoch] for epoch in epochs]


# ------------------------------------------------------------------------------------ the figures


def noise_detection(runs: list[Runs], epochs: Sequence[int] | None) -> "Figure":
    return panels(runs, NOISE, "AUC of noisy labels")


def accuracy(runs: list[Runs], epochs: Sequence[int] | None) -> "Figure":
    return panels(runs, ACCURACY, "test accuracy (%)")


def bias(runs: list[Runs], epochs: Sequence[int] | None) -> "Figure":
    return panels(runs, BIAS, "share of the images found noisy")


def panels(runs: list[Runs], what: Sequence[tuple[str, str, str]], unit: str) -> "Figure":
    """A panel a data set; full lines with selection, dashed ones without; a colour for each of
    several things."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    several = len(what) > 1
    having = [one for one in runs if any(series(one, place)[0] for place, *_ in what)]
    if not having:
        raise InputError(
            f"no run under way or done has {what[0][0]} in its metrics.jsonl; "
            "was it trained with --compare-metrics?"
        )
    what = [part for part in what if any(series(one, part[0])[0] for one in having)]
    rows = list(dict.fromkeys(one.cell.row for one in having))
    figure = Figure(figsize=(1.2 + 3.9 * len(rows), 3.4), layout="constrained")
    axes = figure.subplots(1, len(rows), squeeze=False)[0]
    for axis, row in zip(axes, rows, strict=True):
        for one in having:
            if one.cell.row == row:
                column = one.cell.column
                for place, _, colour in what:
                    colour = colour if several else COLOURS[column]
                    curve(axis, one, place, colour, STYLES[column])
        axis.set_title(row)
        over_epochs(axis)
    axes[0].set_ylabel(unit)
    columns = [column for column in STYLES if any(one.cell.column == column for one in having)]
    handles = [Line2D([], [], color=colour, label=name) for _, name, colour in what if several]
    handles += [
        Line2D([], [], color="#444444" if several else COLOURS[name], ls=STYLES[name], label=name)
        for name in columns
    ]
    # As many side by side as there is room for.
    room = 2 * len(rows) if len(handles) > 2 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), room))
    return figure


def over_epochs(axis: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def curve(axis: "Axes", runs: Runs, place: str, colour: str, style: str, label: str = "") -> None:
    epochs, values = series(runs, place)
    if not epochs:
        return
    means = [sum(some) / len(some) for some in values]
    # A line of one point would not be seen.
    mark = "o" if len(epochs) == 1 else ""
    axis.plot(epochs, means, color=colour, ls=style, marker=mark, label=label)
    if max(map(len, values)) > 1:
        low, high = [min(some) for some in values], [max(some) for some in values]
        axis.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)


def pseudo_labels(runs: list[Runs], epochs: Sequence[int] | None) -> "Figure":
    """As in the paper, of runs without selection where there are any; of one data set."""
    from matplotlib.figure import Figure

    having = [one for one in runs if series(one, GUESSES[0][0])[0]]
    having.sort(key=lambda one: one.cell.column != WITHOUT)
    if not having:
        raise InputError(
            "no run under way or done has metrics.pseudo_labels in its metrics.jsonl; "
            "was it trained with --compare-metrics?"
        )
    chosen = having[0]
    seed, rows = next(iter(chosen.lines.items()))
    drawn = {row["epoch"]: row["pseudo_loss"] for row in rows if value_of(row, "pseudo_loss")}
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 2)
    top = figure.add_subplot(grid[0, :])
    for place, name, colour in GUESSES:
        curve(top, chosen, place, colour, "-", name)
    top.set_title(f"{chosen.cell.row}, {chosen.cell.column}")
    over_epochs(top)
    top.set_ylabel("AUC of right guesses")
    top.legend()
    for index, epoch in enumerate(two_epochs(list(drawn), epochs)):
        axis = figure.add_subplot(grid[1, index])
        histogram(axis, drawn[epoch])
        axis.set_title(f"epoch {epoch}, seed {seed}")
        axis.set_xlabel("pseudo-loss")
        if index == 0:
            axis.set_ylabel("images found noisy")
            axis.legend()
    return figure


def two_epochs(known: list[int], asked: Sequence[int] | None) -> list[int]:
    """The epochs of the histograms: those asked for, or a third of the way and the last."""
    if not known:
        raise InputError("no epoch has a histogram of the pseudo-loss yet")
    for epoch in asked or ():
        if epoch not in known:
            raise InputError(
                f"--epochs {epoch}: has no histogram; epochs {known[0]} to {known[-1]} may have one"
            )
    return list(asked or dict.fromkeys((known[(len(known) - 1) // 3], known[-1])))


def histogram(axis: "Axes", pseudo_loss: dict[str, Any]) -> None:
    """Right and wrong guesses on top of each other, and the two modes fitted to both."""
    counts, modes = pseudo_loss["histogram"], pseudo_loss.get("modes")
    edges, right, wrong = counts["edges"], counts["right"], counts["wrong"]
    both = [a + b for a, b in zip(right, wrong, strict=True)]
    axis.stairs(right, edges, fill=True, color=RIGHT, label="right guess")
    axis.stairs(both, edges, baseline=right, fill=True, color=WRONG, label="wrong guess")
    top = max(both)
    if modes:
        area = sum(both) * (edges[1] - edges[0])
        xs = [edges[0] + (edges[-1] - edges[0]) * step / 400 for step in range(401)]
        names = ("low mode", "high mode")
        for name, style, *mode in zip(
            names,
            ("-", ":"),
            *(modes[key] for key in ("means", "variances", "weights")),
            strict=True,
        ):
            ys = [area * normal(x, *mode) for x in xs]
            axis.plot(xs, ys, color="#333333", ls=style, lw=1.1, label=name)
            top = max(top, min(max(ys), 1.5 * max(both)))
    axis.set_ylim(0, 1.05 * top)


def normal(x: float, mean: float, variance: float, weight: float) -> float:
    """A mode's density at x."""
    variance = max(variance, 1e-12)
    bell = math.exp(-((x - mean) ** 2) / (2 * variance))
    return weight * bell / math.sqrt(2 * math.pi * variance)


DRAWINGS: dict[str, Callable[[list[Runs], Sequence[int] | None], "Figure"]] = {
    "noise-detection": noise_detection,
    "pseudo-labels": pseudo_labels,
    "accuracy": accuracy,
    "bias": bias,
}
