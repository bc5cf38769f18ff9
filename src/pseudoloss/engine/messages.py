"""The sentences of a run."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pseudoloss import __version__
from pseudoloss.config import Settings, as_flag

if TYPE_CHECKING:
    from pseudoloss.engine.trainer import Trainer
    from pseudoloss.inference.evaluation import Evaluation
    from pseudoloss.inference.export import Exported

# How much work a step of each phase is, for the time that is left: forward passes, a backward pass
# counted as two. PLS: two for the guess, and two that are learnt from.
WORK = {"warm-up": 3, "ce": 3, "mixup": 3, "pls": 8}

SHOWN = 5  # classes and confusions of an evaluation

# What a metric is called where a notice speaks of its values.
VALUES = {
    "loss": "losses",
    "capped-loss": "losses",
    "agreement": "agreements of neighbours",
    "disagreement": "disagreements of neighbours",
    "js": "divergences of labels",
    "kl": "divergences of views",
    "pseudo-loss": "pseudo-losses",
    "confidence": "confidences of guesses",
    "entropy": "entropies of guesses",
    "threshold": "confidences of guesses",
}


def introduction(trainer: "Trainer", epochs_done: int) -> str:
    settings, train = trainer.settings, trainer.data.train
    height, width = train.size
    colours = "grey" if train.channels == 1 else "RGB"
    noise = "" if train.noise["in"] is None else f", {train.noise['in']:.1%} of the labels wrong"
    if train.noise["out"]:
        noise += f", {train.noise['out']:.1%} of the images of no class"
    parameters = sum(parameter.numel() for parameter in trainer.network.parameters())
    precision = str(trainer.network.precision).removeprefix("torch.")
    lines = [
        f"pseudoloss {__version__}: {settings.method} on {trainer.data.name}, seed {settings.seed}",
        f"  {len(train):,} images of {height}×{width} {colours}, "
        f"{len(train.classes)} classes{noise}",
        f"  {settings.network} ({parameters / 1e6:.2g} M parameters) "
        f"on {device_name(trainer.device)}, {precision}",
        f"  {settings.epochs} epoch{'s' if settings.epochs > 1 else ''}, {settings.warmup_epochs} "
        f"of them warm-up; each is "
        f"{trainer.steps} steps of {settings.batch_size} images; learning rate {settings.lr:g}",
    ]
    test = trainer.data.test
    if test is not None:
        noisy = ", on noisy labels" if trainer.data.noisy_test else ""
        lines.append(f"  accuracy is on {trainer.data.test_name} ({len(test):,}){noisy}")
    if epochs_done:
        lines.append(f"  resumed after epoch {epochs_done}")
    return "\n".join(lines)


def chosen(preset: str, fitting: dict[str, Any]) -> str:
    """What was decided for the user, who may decide otherwise."""
    flags = " ".join(as_flag(name, value) for name, value in fitting.items())
    return f"Settings: --preset {preset}{' and, to fit the images, ' if flags else ''}{flags}"


def epoch_title(settings: Settings, epoch: int, last: dict[str, Any]) -> str:
    left = f", {duration(seconds_left(settings, last))} left" if last else ""
    return f"epoch {epoch + 1}/{settings.epochs}{left}"


def epoch_line(settings: Settings, line: dict[str, Any], best: float | None) -> str:
    width = len(str(settings.epochs))
    parts = [
        f"epoch {line['epoch']:{width}}/{settings.epochs}",
        f"{line['phase']:7}",
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
    if line["epoch"] < settings.epochs:
        parts.append(f"{duration(seconds_left(settings, line))} left")
    return "  ".join(parts)


def seconds_left(settings: Settings, line: dict[str, Any]) -> float:
    """From the last epoch's time and how much work the others are."""
    done, warm_up = line["epoch"], settings.warmup_epochs
    warm_up_left = max(0, warm_up - done)
    main_left = settings.epochs - max(done, warm_up)
    work_left = warm_up_left * WORK["warm-up"] + main_left * WORK[settings.method]
    training = work_left * line["seconds"]["train"] / WORK[line["phase"]]
    judging = line["seconds"]["track"] * main_left + line["seconds"]["validate"] * (
        warm_up_left + main_left
    )
    return float(training + judging)


def stopped_early(minutes: float, epochs: int, path: Path | None) -> str:
    text = f"{float(f'{minutes:.3g}'):g} minutes are over: stopped after epoch {epochs}."
    return text if path is None else f"{text} Go on with:\n  {resume_command(path)}"


def resume_command(path: Path) -> str:
    return f"pseudoloss train --out {shlex.quote(str(path))} --resume"


def conclusion(summary: dict[str, Any], path: Path | None) -> str:
    lines = ["", f"Done in {duration(summary['seconds'])}."]
    accuracy, detection, guesses = (summary[key] for key in ("accuracy", "detection", "guesses"))
    if accuracy["last"] is not None:
        lines.append(
            f"  accuracy   {accuracy['last']:.2f}% on {accuracy['on']} after the last epoch "
            f"(best {accuracy['best']:.2f}% in epoch {accuracy['best_epoch']})"
        )
        if accuracy["noisy_labels"]:
            lines.append("             on noisy labels: theirs may be wrong as well")
    if detection["auc"] is not None:
        lines.append(
            f"  detection  precision {_two(detection['precision'])}, "
            f"recall {_two(detection['recall'])}, AUC of the loss {_two(detection['auc'])}"
        )
    if guesses["accuracy"] is not None:
        lines.append(
            f"  guesses    {guesses['accuracy']:.1f}% right on noisy images, "
            f"AUC of trust {_two(guesses['auc'])}"
        )
    noise = summary["estimated_noise"]
    worst = max(noise["by_class"], key=noise["by_class"].__getitem__)
    lines.append(
        f"  noise      {noise['rate']:.1%} of the labels seem to be wrong"
        + (f"; most in class {worst} ({noise['by_class'][worst]:.1%})" if noise["rate"] else "")
    )
    keep, relabel, look = (summary["actions"][name] for name in ("keep", "relabel", "look"))
    too = f" ({summary['held_out']:,} held-out images too)" if summary["held_out"] else ""
    lines.append(f"  labels     {keep:,} to keep, {relabel:,} to relabel, {look:,} to look at{too}")
    if path is not None:
        lines.append(f"  written    {path}/: labels.csv, model.safetensors, summary.json, …")
    return "\n".join(lines)


def what_next(path: Path) -> str:
    return (
        f"Next: open {path}/labels.csv (a row an image; sort it by label_score), or in Python:\n"
        f'  import pseudoloss as pl; pl.load("{path}").model.predict(images)\n'
        f"Classify files: pseudoloss predict {shlex.quote(str(path))} photo.jpg folder/"
    )


def evaluated(found: "Evaluation") -> str:
    """An evaluation in short: overall, the worst classes, what is confused, how sure it may be."""
    images, error = len(found.predictions), found.calibration["error"]
    confidence = float(found.predictions["probability"].mean())
    tendency = "over" if 100 * confidence > found.accuracy else "under"
    tested = found.classes[found.classes["support"] > 0]
    of = (
        f"{len(tested)} of {len(found.classes)}"
        if len(tested) < len(found.classes)
        else len(tested)
    )
    what = f"{found.source}, all of it" if found.part == "all" else f"{found.source}, {found.part}"
    lines = [
        f"{what}: {images:,} images of {of} classes",
        f"  accuracy     {found.accuracy:.2f}% (mean of the classes "
        f"{found.balanced_accuracy:.2f}%)",
        f"  calibration  error {error:.3f} over {len(found.calibration['bins'])} bins: "
        f"{confidence:.1%} sure on average, so {tendency}confident",
        f"  negative log-likelihood  {found.negative_log_likelihood:.4f}",
    ]
    if found.skipped:
        first, files = found.skipped[0], "file" if len(found.skipped) == 1 else "files"
        lines.append(
            f"  left out     {len(found.skipped):,} {files} that cannot be read (the first: "
            f"{first.path}, {first.reason})"
        )
    worst = tested.sort_values("accuracy", kind="stable").head(SHOWN)
    width = max(len("worst classes"), *(len(str(name)) for name in worst["class"]))
    lines += ["", f"  {'worst classes':{width}}  accuracy  precision  recall  images"]
    lines += [
        f"  {row['class']:{width}}  {row['accuracy']:7.2f}%  {_two(row['precision']):>9}  "
        f"{_two(row['recall']):>6}  {row['support']:6,}"
        for row in worst.astype(object).to_dict("records")
    ]
    confusions = found.confusions.head(SHOWN)
    if len(confusions):
        lines += ["", "  most frequent confusions"]
        lines += [
            f"  {row['images']:6,} × {row['label']} taken for {row['predicted_label']}"
            for row in confusions.to_dict("records")
        ]
    lines += ["", "  probability    images  mean    accuracy"]
    lines += [
        f"  {part['low']:.2f} to {part['high']:.2f}  {part['images']:7,}  "
        f"{part['confidence']:.3f}  {part['accuracy']:7.2f}%"
        for part in found.calibration["bins"]
        if part["images"]
    ]
    return "\n".join(lines)


def exported(found: "Exported") -> str:
    lines = [f"written: {found.path}/: {', '.join(found.files)}"]
    if found.difference is None:
        lines.append("not compared with the model: onnxruntime is not installed")
    else:
        lines.append(
            "compared with the model on random images: probabilities differ by "
            f"{found.difference:.1g} at most"
        )
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU ({threads} thread{'s' if threads > 1 else ''})"
    return device.type


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _two(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.3f}"
