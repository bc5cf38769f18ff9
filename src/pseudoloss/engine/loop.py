"""The epochs of a run: train, score, validate, write. Read `fit` first, then `run_epoch`."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from pseudoloss.engine import checkpoint, health, messages
from pseudoloss.engine.epoch_metrics import epoch_metrics, summarise
from pseudoloss.engine.head_start import head_start
from pseudoloss.engine.label_scores import label_scores
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.writer import Writer
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.files import write_json
from pseudoloss.labels.table import ACTIONS
from pseudoloss.runs import Run, RunFolder, model_weights

MOST_LOST = 0.01  # share of the images whose files may vanish during a run
TABLE_SECONDS = 30.0  # between two label tables of an unfinished run, at least
TABLE_SHARE = 0.05  # of the time that label tables may take, at most

Notices = Mapping[str, str | None]  # by kind


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


@dataclass(frozen=True)
class Limits:
    """When to stop, and when to write."""

    started: float  # time.monotonic()
    minutes: float | None = None  # stop before an epoch that would not end in time
    checkpoint_every: int = 1


@dataclass
class TableClock:
    """When the label table of a run that goes on is written again."""

    written_at: float | None = None  # time.monotonic()
    seconds: float = 0.0  # that the last one took

    def is_due(self) -> bool:
        if self.written_at is None:
            return True
        pause = max(TABLE_SECONDS, self.seconds / TABLE_SHARE)
        return time.monotonic() - self.written_at > pause


def fit(trainer: Trainer, folder: RunFolder | None, notices: Notices, limits: Limits) -> Run:
    """Train the epochs that are not done yet, then write the results. `notices` were made before
    training."""
    settings, reporter = trainer.settings, trainer.reporter
    record, lines = restore(trainer, folder)
    resumed_at, earlier = len(lines), record.seconds
    record.notices = [  # drop what is no longer true: other files may be skipped now
        said for said in record.notices if notices.get(said["kind"], said["text"]) == said["text"]
    ]
    notice(trainer, record, notices)
    reporter.say(messages.introduction(trainer, record.epochs))
    notice(trainer, record, trainer.method.notices_at_start())
    if settings.head_start and record.epochs == 0:
        head_start(trainer)
    time_is_up, clock, spent, needed = False, TableClock(), 0.0, 0.0
    with Writer() as writer:
        while record.epochs < settings.epochs and not time_is_up:
            line = run_epoch(trainer, record, lines)
            if len(lines) == resumed_at and trainer.first_step_at is not None:
                record.startup_seconds += trainer.first_step_at - limits.started
            spent = time.monotonic() - limits.started
            record.seconds = earlier + spent
            lines.append(line)
            needed = sum(line["seconds"].values())  # by another epoch like this one
            time_is_up = limits.minutes is not None and spent + needed > 60 * limits.minutes
            if folder:
                is_last = time_is_up or record.epochs == settings.epochs
                is_due = is_last or record.epochs % limits.checkpoint_every == 0
                save(trainer, folder, record, is_due, writer, None if is_last else clock)
            reporter.say(messages.epoch_line(trainer, lines, record.best))
    if limits.minutes is not None and record.epochs < settings.epochs:
        path = folder.path if folder else None
        reporter.say(messages.stopped_early(limits.minutes, spent, needed, record.epochs, path))
    if len(lines) == resumed_at:  # the checkpoint was that of the last epoch
        trainer.restore_predictions()
    return finish(trainer, folder, record, lines)


def run_epoch(trainer: Trainer, record: Record, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """One epoch: steps, scoring, validation. Returns its metrics and updates `record`. `earlier`
    are the metrics of the epochs before."""
    epoch, settings = record.epochs, trainer.settings
    title = messages.epoch_title(trainer, epoch, earlier)
    trainer.reporter.begin_epoch(title, trainer.steps_in(epoch))
    clock = [time.perf_counter()]
    loss = trainer.train_epoch(epoch)
    clock.append(time.perf_counter())
    if not math.isfinite(loss):
        kept = f"The checkpoint of epoch {epoch} is kept. " if epoch else ""
        raise TrainingError(
            f"the loss became {loss} in epoch {epoch + 1}. {kept}Start a new run with a lower --lr "
            f"(now {settings.lr:g}) or, on a GPU, with --precision float32."
        )
    scored = trainer.method.scores_after(epoch)
    if scored:
        trainer.score(epoch)
    trainer.store_predictions(epoch)
    found = epoch_metrics(trainer, epoch)
    clock.append(time.perf_counter())
    accuracy = trainer.validate()
    # Correct test labels must not decide anything: their accuracy has no say in the label table.
    trainer.add_predictions(accuracy if trainer.data.noisy_test else None)
    if settings.compare_metrics:
        found["knn_accuracy"] = trainer.knn_accuracy()
    clock.append(time.perf_counter())

    if accuracy is not None and (record.best is None or accuracy > record.best):
        record.best, record.best_epoch = accuracy, epoch + 1
    if scored:
        noisy = [line["noisy"] for line in [*earlier, found] if line["noisy"] is not None]
        notice(trainer, record, symptoms(trainer, epoch, noisy))
    check_files(trainer, record)
    names = ("train", "score", "validate")
    record.last = {
        "epoch": epoch + 1,
        "phase": trainer.phase(epoch).name,
        "lr": trainer.learning_rate(epoch),
        "loss": loss,
        "accuracy": accuracy,
        **found,
        "seconds": {
            name: after - before
            for name, before, after in zip(names, clock[:-1], clock[1:], strict=True)
        },
    }
    record.epochs = epoch + 1
    return record.last


def symptoms(trainer: Trainer, epoch: int, noisy: list[float]) -> dict[str, str | None]:
    """What may be wrong after an epoch, by kind. `noisy`: the shares of flagged labels so far."""
    settings, given_N = trainer.settings, trainer.given_N
    found: dict[str, str | None] = {}
    predicted_N = trainer.state.predicted_N
    if epoch + 1 == trainer.method.warmup:
        found["warm-up"] = health.warm_up_at_chance(predicted_N, given_N)
    elif epoch + 1 == settings.epochs:
        found["end"] = health.ended_at_chance(predicted_N, given_N)
    classes = trainer.data.train.classes
    return found | trainer.method.notices(trainer.state, epoch, noisy, classes)


def check_files(trainer: Trainer, record: Record) -> None:
    """Notice files that vanished during the run; too many of them end it."""
    lost = trainer.lost_files()
    if len(lost) > MOST_LOST * len(trainer.data.train):
        raise TrainingError(f"{health.lost_files(lost)}. Use --resume when they are back")
    notice(trainer, record, {"files": health.lost_files(lost)})


def notice(trainer: Trainer, record: Record, seen: Notices) -> None:
    """Say what went wrong, each kind once per run."""
    said = {entry["kind"] for entry in record.notices}
    for kind, text in seen.items():
        if text is not None and kind not in said:
            record.notices.append({"epoch": record.epochs + 1, "kind": kind, "text": text})
            trainer.reporter.notice(text)


def restore(trainer: Trainer, folder: RunFolder | None) -> tuple[Record, list[dict[str, Any]]]:
    """The state of the run: that of its last checkpoint, or a new one; and its metrics so far."""
    record = Record()
    if folder is None:
        return record, []
    if folder.checkpoint.exists():
        saved = checkpoint.restore(folder.checkpoint, trainer)
        saved.pop("model", None)
        try:
            record = Record(**saved)
        except TypeError as error:
            raise InputError(f"{folder.checkpoint}: of another version ({error})") from None
        best = None if record.best_epoch is None else folder.best(record.best_epoch)
        if best is not None and not best.exists():
            raise InputError(f"{best}: is missing, the model of the best epoch so far")
    with folder.writing():
        folder.keep_metrics(record.epochs)
    return record, folder.metrics()


def save(
    trainer: Trainer,
    folder: RunFolder,
    record: Record,
    is_due: bool,
    writer: Writer,
    clock: TableClock | None,
) -> None:
    """Take a snapshot of an epoch, and write it while the next one trains; with a `clock`, also the
    label table, if it is time."""
    model, epochs = trainer.model, record.epochs
    is_best = record.best_epoch == epochs
    tensors = writer.snapshot(checkpoint.checkpoint_tensors(trainer)) if is_best or is_due else {}
    roles = trainer.method.predicts
    weights = model_weights(tensors, roles)
    recorded = asdict(record)
    described = {"roles": list(roles), "description": vars(model.description)}
    begun = time.monotonic()
    with_table = is_due and clock is not None and clock.is_due()
    table = label_scores(trainer) if with_table else None

    def write() -> None:
        """The order matters: whatever a kill leaves behind, the checkpoint finds all files that it
        refers to, and what is newer than the checkpoint is written again."""
        with folder.writing():
            folder.add_metrics(recorded["last"])
            if is_best:
                model.save(folder.best(epochs), weights)
            if is_due:
                checkpoint.save(folder.checkpoint, tensors, recorded | {"model": described})
                folder.forget_other_bests(recorded["best_epoch"])
            if table is not None and clock is not None:
                started = time.monotonic()
                folder.write_table(table[0], table_record(epochs, trainer_epochs, *table))
                clock.seconds = computed + time.monotonic() - started
                clock.written_at = time.monotonic()

    trainer_epochs, computed = trainer.settings.epochs, time.monotonic() - begun
    writer.start(write)


def table_record(
    epoch: int, epochs: int, labels: pd.DataFrame, noise: dict[str, Any]
) -> dict[str, Any]:
    """labels.json: what the label table of an unfinished run is of."""
    return {
        "epoch": epoch,
        "epochs": epochs,
        "rows": len(labels),
        "estimated_noise": noise,
        "actions": actions_of(labels),
    }


def actions_of(labels: pd.DataFrame) -> dict[str, int]:
    """Number of rows with each action."""
    counts = labels["action"].value_counts()
    return {name: int(counts.get(name, 0)) for name in ACTIONS}


def finish(
    trainer: Trainer, folder: RunFolder | None, record: Record, lines: list[dict[str, Any]]
) -> Run:
    """The run as the user gets it; written to the folder once all epochs are done."""
    labels, noise = label_scores(trainer)
    notice(trainer, record, {"files": health.lost_files(trainer.lost_files())})
    run = Run(
        settings=trainer.settings,
        labels=labels,
        metrics=pd.DataFrame(lines),
        summary=summarise(trainer, record, noise, actions_of(labels)),
        model=trainer.model,
        path=folder.path if folder else None,
    )
    if folder and not run.finished:
        with folder.writing():
            epochs = trainer.settings.epochs
            folder.write_table(labels, table_record(record.epochs, epochs, labels, noise))
    if folder and run.finished:
        with folder.writing():
            trainer.model.save(folder.path / "model.safetensors")
            if record.best_epoch is not None:
                folder.publish_best(record.best_epoch)
            folder.write_final_table(labels)
            write_json(folder.summary, run.summary)
    if run.finished:
        trainer.reporter.say(messages.conclusion(run.summary, run.path))
    return run
