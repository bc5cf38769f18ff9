"""The epochs of a run: train, score, validate, write. Read `fit` first, then `run_epoch`."""

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from pseudoloss import distributed
from pseudoloss.engine import checkpoint, health, messages
from pseudoloss.engine.epoch_metrics import epoch_metrics, summarise
from pseudoloss.engine.head_start import head_start
from pseudoloss.engine.label_scores import label_scores
from pseudoloss.engine.loggers import Loggers
from pseudoloss.engine.resuming import Record, restore
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.watch import Limits, Watch, advice, agree_on, described, refuse_many_skipped
from pseudoloss.engine.writer import Writer
from pseudoloss.errors import TrainingError
from pseudoloss.files import write_checked
from pseudoloss.interrupts import Stop, deferred
from pseudoloss.labels.table import ACTIONS
from pseudoloss.labels.truth import against_truth
from pseudoloss.progress import SilentReporter
from pseudoloss.runs import METRICS, Run, RunFolder, model_weights

MOST_LOST = 0.01  # share of the images whose files may vanish during a run
TABLE_SECONDS = 30.0  # between two label tables of an unfinished run, at least
TABLE_SHARE = 0.05  # of the time that label tables may take, at most

Notices = Mapping[str, str | None]  # by kind


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


def fit(
    trainer: Trainer,
    folder: RunFolder | None,
    notices: Notices,
    limits: Limits,
    loggers: Loggers | None = None,
) -> Run:
    """Train the epochs that are not done yet, then write the results. `notices` were made before
    training."""
    loggers = loggers or Loggers()
    settings, reporter = trainer.settings, trainer.reporter
    record, lines = restore_all(trainer, folder)
    resumed_at, earlier = len(lines), record.seconds
    record.notices = [  # drop what is no longer true: other files may be skipped now
        said for said in record.notices if notices.get(said["kind"], said["text"]) == said["text"]
    ]
    notice(trainer, record, notices)
    reporter.say(messages.introduction(trainer, record.epochs))
    notice(trainer, record, trainer.method.notices_at_start())
    if settings.head_start and record.epochs == 0 and record.inside is None:
        head_start(trainer)
        distributed.spread(checkpoint.checkpoint_tensors(trainer).values())
    # Without a folder there is nothing to write first, and Ctrl-C stops at once.
    quiet = isinstance(reporter, SilentReporter)
    with nullcontext(Stop()) if folder is None else deferred(quiet) as stop:
        time_is_up, clock, spent, needed = False, TableClock(), 0.0, 0.0
        with Writer() as writer:
            if folder:
                watch = Watch(trainer, folder, record, lines, writer, stop, earlier, limits)
                trainer.after_step = watch.after_step
            while record.epochs < settings.epochs and not time_is_up:
                line = run_epoch(trainer, record, lines)
                if len(lines) == resumed_at and trainer.first_step_at is not None:
                    record.startup_seconds += trainer.first_step_at - limits.started
                spent = time.monotonic() - limits.started
                record.seconds = earlier + spent
                lines.append(line)
                needed = sum(line["seconds"].values())  # by another epoch like this one
                if limits.minutes is not None:
                    time_is_up = distributed.agree(spent + needed > 60 * limits.minutes)
                agree_on(stop)
                if folder:
                    is_last = time_is_up or record.epochs == settings.epochs or bool(stop)
                    is_due = is_last or record.epochs % limits.checkpoint_every == 0
                    due_clock = None if is_last else clock
                    save(trainer, folder, record, lines, is_due, writer, due_clock)
                loggers.epoch(line)
                reporter.say(messages.epoch_line(trainer, lines, record.best))
                if record.epochs < settings.epochs:
                    stop.raise_if_asked()  # after the checkpoint, for which the writer waits
        if limits.minutes is not None and record.epochs < settings.epochs:
            path = folder.path if folder else None
            reporter.say(messages.stopped_early(limits.minutes, spent, needed, record.epochs, path))
        if len(lines) == resumed_at:  # the checkpoint was that of the last epoch
            trainer.restore_predictions()
        run = finish(trainer, folder, record, lines)
        if run.finished:
            loggers.finish(run.summary)
        return run


def run_epoch(trainer: Trainer, record: Record, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """One epoch: steps, scoring, validation. Returns its metrics and updates `record`. `earlier`
    are the metrics of the epochs before."""
    epoch, settings = record.epochs, trainer.settings
    title = messages.epoch_title(trainer, epoch, earlier)
    already = record.inside or {"done": 0, "seconds": 0.0}  # before the run was interrupted
    trainer.reporter.begin_epoch(title, trainer.steps_in(epoch) - already["done"])
    clock = [time.perf_counter() - already["seconds"]]
    loss = trainer.train_epoch(epoch)
    clock.append(time.perf_counter())
    record.inside = None
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss became {loss} in epoch {epoch + 1}. {advice(trainer, epoch)}"
        )
    skipped = refuse_many_skipped(trainer, epoch)
    seen: dict[str, str | None] = {
        "skipped steps": health.skipped_steps(skipped, trainer.done, settings.lr),
        "loss": health.exploded_loss(loss, trainer.classes, settings.batch_size),
    }
    notice(trainer, record, seen)
    scored = trainer.method.scores_after(epoch)
    if scored:
        trainer.score(epoch)
    trainer.store_predictions(epoch)
    # The same bits in all processes, even on different GPUs.
    distributed.spread(checkpoint.checkpoint_tensors(trainer).values())
    found = epoch_metrics(trainer, epoch)
    clock.append(time.perf_counter())
    accuracy = trainer.validate()
    others = trainer.other_accuracies()
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
        **({"other_accuracies": others} if others else {}),
        **({"skipped_steps": skipped} if skipped else {}),
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


def restore_all(trainer: Trainer, folder: RunFolder | None) -> tuple[Record, list[dict[str, Any]]]:
    """`restore` in the first process, which tells the others."""
    if not distributed.active():
        return restore(trainer, folder)
    found = None
    if distributed.is_main():
        record, lines = restore(trainer, folder)
        found = asdict(record), lines
    recorded, lines = distributed.from_main(found)
    distributed.spread(checkpoint.checkpoint_tensors(trainer).values())
    checkpoint.spread_inside(trainer, recorded["inside"])
    return Record(**recorded), lines


def save(
    trainer: Trainer,
    folder: RunFolder,
    record: Record,
    lines: list[dict[str, Any]],
    is_due: bool,
    writer: Writer,
    clock: TableClock | None,
) -> None:
    """Take a snapshot of an epoch, and write it while the next one trains; with a `clock`, also the
    label table, if it is time."""
    model, epochs = trainer.model, record.epochs
    begun = time.monotonic()
    with_table = distributed.agree(is_due and clock is not None and clock.is_due())
    table = label_scores(trainer, thorough=False) if with_table else None
    computed = time.monotonic() - begun
    if not distributed.is_main():
        return
    is_best = record.best_epoch == epochs
    tensors = writer.snapshot(checkpoint.checkpoint_tensors(trainer)) if is_best or is_due else {}
    roles = trainer.method.predicts
    weights = model_weights(tensors, roles)
    recorded = asdict(record)
    more = described(trainer, lines)

    def write() -> None:
        """The order matters: whatever a kill leaves behind, the checkpoint finds all files that it
        refers to, and what is newer than the checkpoint is written again."""
        with folder.writing():
            folder.add_metrics(recorded["last"])
            if is_best:
                model.save(folder.best(epochs), weights)
            if is_due:
                checkpoint.save(folder.checkpoint, tensors, recorded | more)
                folder.checkpointed.touch()
                folder.forget_other_bests(recorded["best_epoch"])
            if table is not None and clock is not None:
                started = time.monotonic()
                folder.write_table(table[0], table_record(epochs, trainer_epochs, *table))
                clock.seconds = computed + time.monotonic() - started
                clock.written_at = time.monotonic()

    trainer_epochs = trainer.settings.epochs
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
    begun = time.monotonic()
    labels, noise = label_scores(trainer)
    record.seconds += time.monotonic() - begun
    notice(trainer, record, {"files": health.lost_files(trainer.lost_files())})
    is_published = folder is not None and record.epochs == trainer.settings.epochs
    lost = folder.lost_best(record.best_epoch) if folder and is_published else None
    notice(trainer, record, {"best": lost and f"there is no best.safetensors: {lost}"})
    run = Run(
        settings=trainer.settings,
        labels=labels,
        metrics=pd.DataFrame(lines),
        summary=summarise(trainer, record, noise, actions_of(labels), against_truth(labels)),
        model=trainer.model,
        path=folder.path if folder else None,
    )
    writes = folder if distributed.is_main() else None
    if writes and not run.finished:
        with writes.writing():
            epochs = trainer.settings.epochs
            writes.write_table(labels, table_record(record.epochs, epochs, labels, noise))
    if writes and run.finished:
        with writes.writing():
            trainer.model.save(writes.path / "model.safetensors")
            if record.best_epoch is not None and lost is None:
                writes.publish_best(record.best_epoch)
            writes.write_final_table(labels)
            write_checked(writes.summary, run.summary | {METRICS: writes.metrics_checksum()})
            writes.tidy(record.best_epoch)
    if run.finished:
        trainer.reporter.say(messages.conclusion(run.summary, run.path))
    return run
