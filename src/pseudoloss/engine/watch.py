"""What happens between two steps of an epoch: signals, checkpoints, steps that cannot be used."""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pseudoloss import distributed
from pseudoloss.engine import checkpoint
from pseudoloss.engine.resuming import Record
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.writer import Writer
from pseudoloss.errors import TrainingError
from pseudoloss.interrupts import Stop
from pseudoloss.runs import RunFolder

MOST_SKIPPED = 10  # steps of an epoch, or ...
MOST_SKIPPED_SHARE = 0.01  # ... of its steps that may be skipped because something is not finite
CHECKPOINT_SECONDS = 900.0  # in a long epoch, between checkpoints in its middle
CHECK_SECONDS = 30.0  # between looks at the number of skipped steps, which wait for the device
TOGETHER = 16  # steps after which several processes tell each other of signals


@dataclass(frozen=True)
class Limits:
    """When to stop, and when to write."""

    started: float  # time.monotonic()
    minutes: float | None = None  # stop before an epoch that would not end in time
    checkpoint_every: int = 1


@dataclass
class Watch:
    """What happens between two steps: a signal, a long epoch, or steps that cannot be used."""

    trainer: Trainer
    folder: RunFolder
    record: Record
    lines: list[dict[str, Any]]
    writer: Writer
    stop: Stop
    earlier: float  # seconds of the processes before
    limits: Limits
    checked_at: float = field(default_factory=time.monotonic)
    saved_at: float = field(default_factory=time.monotonic)

    def after_step(self) -> None:
        if distributed.active():
            if self.trainer.done % TOGETHER:
                return
            agree_on(self.stop)
        now = time.monotonic()
        if self.stop:
            self.save(now)
            self.stop.raise_if_asked()
        if now - self.checked_at > CHECK_SECONDS:
            self.checked_at = now
            refuse_many_skipped(self.trainer, self.record.epochs)
        if now - max(self.saved_at, self.trainer.epoch_began) > CHECKPOINT_SECONDS:
            self.save(now)

    def save(self, now: float) -> None:
        """A checkpoint in the middle of the epoch."""
        self.saved_at = now
        if not distributed.is_main():
            return
        seconds = now - self.trainer.epoch_began
        seconds += (self.record.inside or {}).get("seconds", 0.0)
        inside = self.trainer.where_inside()
        record = replace(
            self.record,
            seconds=self.earlier + now - self.limits.started,
            inside=checkpoint.inside_record(inside, seconds),
        )
        tensors = checkpoint.checkpoint_tensors(self.trainer) | checkpoint.inside_tensors(inside)
        taken = self.writer.snapshot(tensors)
        content = asdict(record) | described(self.trainer, self.lines)

        def write() -> None:
            with self.folder.writing():
                checkpoint.save(self.folder.checkpoint, taken, content)
                self.folder.checkpointed.touch()

        self.writer.start(write)


def agree_on(stop: Stop) -> None:
    """A signal to one process stops all of them after the same step."""
    if distributed.active():
        numbers = [number for number in distributed.all_values(stop.number) if number is not None]
        stop.number = numbers[0] if numbers else None


def refuse_many_skipped(trainer: Trainer, epoch: int) -> int:
    """How many steps of an epoch were skipped; a TrainingError if they are too many."""
    skipped = trainer.skipped_steps()
    if skipped > max(MOST_SKIPPED, MOST_SKIPPED_SHARE * trainer.done):
        raise TrainingError(
            f"{skipped} of {trainer.done} steps of epoch {epoch + 1} were skipped because the loss "
            f"or a gradient was not finite. {advice(trainer, epoch)}"
        )
    return skipped


def advice(trainer: Trainer, epoch: int) -> str:
    """What to do when a run diverges in an epoch."""
    kept = f"The checkpoint of epoch {epoch} is kept. " if epoch else ""
    return (
        f"{kept}Start a new run with a lower --lr (now {trainer.settings.lr:g}) or, on a GPU, with "
        "--precision float32."
    )


def described(trainer: Trainer, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint says beside its record: about the model, so that it can be used before the
    run is finished, and the metrics, from which metrics.jsonl is written anew."""
    model = {"roles": list(trainer.method.predicts), "description": vars(trainer.model.description)}
    return {"model": model, "metrics": list(lines)}
