"""Resuming a run: from its last checkpoint, or from the one before if that is damaged."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pseudoloss.engine import checkpoint
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.runs import RunFolder


@dataclass
class Record:
    """What has happened so far. It is part of every checkpoint."""

    epochs: int = 0  # done
    seconds: float = 0.0
    startup_seconds: float = 0.0  # until the first step was done; of all processes together
    best: float | None = None  # test accuracy
    best_epoch: int | None = None
    last: dict[str, Any] = field(default_factory=dict)  # the metrics of the last epoch
    notices: list[dict[str, Any]] = field(default_factory=list)
    inside: dict[str, Any] | None = None  # in the middle of the next epoch: how far it is


def restore(trainer: Trainer, folder: RunFolder | None) -> tuple[Record, list[dict[str, Any]]]:
    """The state of the run: that of its last checkpoint, or a new one; and its metrics so far."""
    if folder is None:
        return Record(), []
    record, lines = Record(), None
    if folder.has_checkpoint:
        record, lines = read_checkpoint(trainer, folder)
    elif folder.checkpointed.exists():
        raise InputError(
            f"{folder.checkpoint}: is missing, and the run had one. Restore it from a copy, or "
            "start a new run in another folder"
        )
    elif folder.metrics():
        trainer.reporter.notice("there is no checkpoint yet: the run starts again from epoch 1")
    if lines is None:  # a new run, or a checkpoint of an older version
        lines = folder.metrics()[: record.epochs]
    with folder.writing():
        folder.write_metrics(lines)
    return record, folder.metrics()


def read_checkpoint(
    trainer: Trainer, folder: RunFolder
) -> tuple[Record, list[dict[str, Any]] | None]:
    """The record and the metrics of the last checkpoint, or of the one before if that is damaged or
    missing; the trainer is as it was then."""
    last, previous = folder.checkpoint, folder.previous
    try:
        if not last.exists():
            raise InputError(f"{last}: is missing")
        found = open_checkpoint(trainer, folder, last)
    except InputError as error:
        if not previous.exists():
            raise InputError(
                f"{error}. There is no earlier checkpoint: restore it from a copy, or start a new "
                "run in another folder"
            ) from None
        found = open_checkpoint(trainer, folder, previous)
        with folder.writing(), suppress(FileNotFoundError):
            last.replace(folder.damaged)
        trainer.reporter.notice(f"{error}; the checkpoint before it is used")
    return found


def open_checkpoint(
    trainer: Trainer, folder: RunFolder, path: Path
) -> tuple[Record, list[dict[str, Any]] | None]:
    saved = checkpoint.restore(path, trainer)
    saved.pop("model", None)
    lines = saved.pop("metrics", None)
    try:
        record = Record(**saved)
    except TypeError as error:
        raise InputError(f"{path}: of another version ({error})") from None
    if wrong := wrong_field(record, trainer.settings.epochs):
        raise InputError(f"{path}: not a checkpoint of this run ({wrong} is not as expected)")
    if lines is not None:  # older versions have none
        found = lines if isinstance(lines, list) else []
        epochs = [line.get("epoch") if isinstance(line, dict) else None for line in found]
        if epochs != [*range(1, record.epochs + 1)]:
            raise InputError(f"{path}: not a checkpoint of this run (metrics are not as expected)")
    best = None if record.best_epoch is None else folder.best(record.best_epoch)
    if best is not None and not best.exists():
        raise InputError(f"{best}: is missing, the model of the best epoch so far")
    if lost := folder.lost_best(record.best_epoch):
        trainer.reporter.notice(
            f"{lost}; best.safetensors will be the model of a later, better epoch, or missing"
        )
    return record, lines


def wrong_field(record: Record, epochs: int) -> str | None:
    """The name of a value that no checkpoint can have."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    best, inside = record.best_epoch, record.inside
    checks = {
        "epochs": type(record.epochs) is int and 0 <= record.epochs <= epochs,
        "seconds": is_number(record.seconds) and is_number(record.startup_seconds),
        "best": record.best is None or is_number(record.best),
        "best_epoch": best is None or (type(best) is int and 0 < best <= epochs),
        "last": isinstance(record.last, dict),
        "notices": isinstance(record.notices, list)
        and all(
            isinstance(said, dict) and {"kind", "text"} <= said.keys() for said in record.notices
        ),
        "inside": inside is None or is_number(inside.get("seconds")),
    }
    return next((name for name, right in checks.items() if not right), None)
