"""What a run says on the terminal."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pseudoloss import distributed
from pseudoloss.config import as_flag
from pseudoloss.engine.trainer import Trainer
from pseudoloss.labels.truth import truth_lines
from pseudoloss.nn.devices import device_name
from pseudoloss.runs import resume_command
from pseudoloss.version import __version__

SMOOTHED = 5  # epochs whose times are used for the time left


def introduction(trainer: Trainer, epochs_done: int) -> str:
    settings, train = trainer.settings, trainer.data.train
    height, width = train.size
    colours = "grey" if train.channels == 1 else "RGB"
    noise = "" if train.noise["in"] is None else f", {train.noise['in']:.1%} of the labels wrong"
    if train.noise["out"]:
        noise += f", {train.noise['out']:.1%} of the images out-of-distribution"
    roles = trainer.method.networks
    network = trainer.networks[roles[0]]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    precision = str(network.precision).removeprefix("torch.")
    times = f"{len(roles)} × " if len(roles) > 1 else ""
    lines = [
        f"pseudoloss {__version__}: {settings.method} on {trainer.data.name}, seed {settings.seed}",
        f"  {len(train):,} images of {height}×{width} {colours}, "
        f"{len(train.classes)} classes{noise}",
        f"  {times}{settings.network} ({parameters / 1e6:.2g} M parameters) "
        f"on {device_name(trainer.device)}, {precision}",
        f"  {settings.epochs} epoch{'s' if settings.epochs > 1 else ''}, {settings.warmup_epochs} "
        f"of them warm-up; {steps_of(trainer, epochs_done % settings.epochs)} per epoch; learning "
        f"rate {settings.lr:g}, {settings.schedule}",
    ]
    if distributed.size() > 1:
        lines.append(processes_line(trainer))
    test = trainer.data.test
    if test is not None:
        noisy = ", whose labels may be wrong too" if trainer.data.noisy_test else ""
        lines.append(f"  accuracy is measured on {trainer.data.test_name} ({len(test):,}){noisy}")
    if epochs_done:
        lines.append(f"  resumed after epoch {epochs_done}")
    return "\n".join(lines)


def steps_of(trainer: Trainer, epoch: int) -> str:
    """How many steps an epoch has, and of how many images: a phase may have its own batch size."""
    entries = trainer.steps[trainer.phase_of(epoch)[0]]
    sizes = sorted({sum(feed.sizes) for _, feed, _ in entries})
    return f"{trainer.steps_in(epoch)} steps of {' or '.join(map(str, sizes))} images"


def processes_line(trainer: Trainer) -> str:
    """How the work is divided."""
    processes, settings = distributed.size(), trainer.settings
    norm = "batch norm synchronised" if trainer.synced else "batch norm not synchronised"
    return (
        f"  {processes} processes with {settings.batch_size // processes} of the "
        f"{settings.batch_size} images of a step each; {norm}; the learning rate is that of the "
        "whole step and is not scaled"
    )


def chosen(preset: str, fitting: dict[str, Any]) -> str:
    """The settings that were chosen for the user."""
    flags = " ".join(as_flag(name, value) for name, value in fitting.items())
    return f"Settings: --preset {preset}{' and, to fit the images, ' if flags else ''}{flags}"


def epoch_title(trainer: Trainer, epoch: int, lines: Sequence[dict[str, Any]]) -> str:
    left = f", {duration(seconds_left(trainer, lines))} left" if lines else ""
    return f"epoch {epoch + 1}/{trainer.settings.epochs}{left}"


def epoch_line(trainer: Trainer, lines: Sequence[dict[str, Any]], best: float | None) -> str:
    """The last epoch of `lines`."""
    epochs, line = trainer.settings.epochs, lines[-1]
    parts = [
        f"epoch {line['epoch']:{len(str(epochs))}}/{epochs}",
        f"{line['phase']:{max(len(phase.name) for phase in trainer.phases)}}",
        f"loss {line['loss']:7.4f}",
    ]
    if line["accuracy"] is not None:
        parts.append(f"accuracy {line['accuracy']:6.2f} (best {best:.2f})")
    if line["noisy"] is not None:
        parts.append(f"noisy {line['noisy']:6.1%}")
    if line["trust"] is not None:
        parts.append(f"trust {line['trust']:.2f}")
    seconds = sum(line["seconds"].values())
    parts.append(f"{seconds:.1f} s")
    if line["epoch"] < epochs:
        parts.append(f"{duration(seconds_left(trainer, lines))} left")
    return "  ".join(parts)


def seconds_left(trainer: Trainer, lines: Sequence[dict[str, Any]]) -> float:
    """Estimated from the times of the last epochs and the cost of the phases that are left."""
    last = lines[-1]["epoch"] - 1
    left = range(last + 1, trainer.settings.epochs)
    costs = [sum(step.cost for step in trainer.phase(epoch).steps) for epoch in (last, *left)]
    scored = sum(trainer.method.scores_after(epoch) for epoch in left)
    seconds = usual_seconds(trainer, lines)
    training = seconds["train"] * sum(costs[1:]) / costs[0]
    return float(training + seconds["score"] * scored + seconds["validate"] * len(left))


def usual_seconds(trainer: Trainer, lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median times of the last epochs, of those in the phase of the last one."""
    number = trainer.phase_of(lines[-1]["epoch"] - 1)[0]
    recent = [
        line["seconds"]
        for line in lines[-SMOOTHED:]
        if trainer.phase_of(line["epoch"] - 1)[0] == number
    ]
    return {name: median(seconds[name] for seconds in recent) for name in recent[-1]}


def stopped_early(
    minutes: float, spent: float, needed: float, epochs: int, path: Path | None
) -> str:
    """Why a run with --minutes stops. `spent`: seconds so far; `needed`: of another epoch."""
    left = 60 * minutes - spent
    limit = f"--minutes {float(f'{minutes:.3g}'):g}"
    why = f"another epoch takes about {duration(needed)}, and {duration(left)} are left"
    if left <= 0:
        why = "the time is over"
    text = f"Stopped after epoch {epochs} because of {limit}: {why}."
    return text if path is None else f"{text} Resume with:\n  {resume_command(path)}"


def conclusion(summary: dict[str, Any], path: Path | None) -> str:
    lines = ["", f"Done in {duration(summary['seconds'])}."]
    accuracy, detection, pseudo_labels = (
        summary[key] for key in ("accuracy", "detection", "pseudo_labels")
    )
    if accuracy["last"] is not None:
        lines.append(
            f"  accuracy   {accuracy['last']:.2f}% on {accuracy['on']} after the last epoch "
            f"(best {accuracy['best']:.2f}% in epoch {accuracy['best_epoch']})"
        )
        if accuracy["noisy_labels"]:
            lines.append("             their labels may be wrong too: the true accuracy can differ")
    if detection["auc"] is not None:
        lines.append(
            f"  training   labels flagged in the last epoch: precision "
            f"{_two(detection['precision'])}, recall {_two(detection['recall'])}; "
            f"AUC of the loss {_two(detection['auc'])}"
        )
    if pseudo_labels["accuracy"] is not None:
        lines.append(
            f"             their pseudo-labels: {pseudo_labels['accuracy']:.1f}% right; "
            f"AUC of trust {_two(pseudo_labels['auc'])}"
        )
    lines += [f"  noise      {line}" for line in noise_lines(summary["estimated_noise"])]
    keep, relabel, review = (summary["actions"][name] for name in ("keep", "relabel", "review"))
    too = f" ({summary['held_out']:,} held-out images too)" if summary["held_out"] else ""
    lines.append(
        f"  labels     {keep:,} to keep, {relabel:,} to relabel, {review:,} to review{too}"
    )
    for name, line in zip(("truth", ""), truth_lines(summary["truth"]), strict=False):
        lines.append(f"  {name:10} {line}")
    if path is not None:
        lines.append(f"  written    {path}/: labels.csv, model.safetensors, summary.json, …")
    return "\n".join(lines)


def noise_lines(noise: dict[str, Any]) -> list[str]:
    """The estimated noise rate, as text."""
    rates = {name: found["rate"] for name, found in noise["by_class"].items()}
    worst = max(rates, key=rates.__getitem__)
    between = f"{noise['low']:.0%} to {noise['high']:.0%}"
    said = f"about {noise['rate']:.1%} of the labels are probably wrong"
    if not noise["known"]:
        said = f"not known; at a guess {noise['rate']:.1%} of the labels are wrong"
        if noise["high"] - noise["low"] >= 1:  # then the rate is not even a guess
            said = "not known"
        return [f"{said}: {'; '.join(noise['reasons'])}"]
    return [f"{said} ({between}); most in class {worst} ({rates[worst]:.1%})"]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _two(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3f}"
