"""Training, to be read from the top: `train`, then `fit`, then `run_epoch`; the steps themselves
are in trainer.py, and what they minimise in methods/."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from pseudoloss.audit.labels import estimated_noise, label_table, write_labels
from pseudoloss.config import HUMAN, Request, Settings, request
from pseudoloss.data import (
    Data,
    ReadOptions,
    ScannedSource,
    Skipped,
    Source,
    absolute,
    corrupt,
    find_source,
)
from pseudoloss.data.images import check_trainable
from pseudoloss.data.label_files import OWNERS
from pseudoloss.engine import checkpoint, evaluate, health
from pseudoloss.engine import messages as messages
from pseudoloss.engine.capture import load_compilers, using
from pseudoloss.engine.choices import choose_device, choose_reader
from pseudoloss.engine.fitting import choose_settings, epochs_in, measure_pace, scaled_warmup
from pseudoloss.engine.tracking import NOISE_METRICS, Stages
from pseudoloss.engine.trainer import Trainer, learning_rate
from pseudoloss.engine.writer import Writer
from pseudoloss.errors import BusyError, InputError, TrainingError
from pseudoloss.files import write_json
from pseudoloss.nn.networks import check_weights
from pseudoloss.paths import as_path, at_home
from pseudoloss.progress import Reporter, SilentReporter, TerminalReporter
from pseudoloss.runs import Recorded, Run, RunFolder, load

MARGIN = 0.9  # of the time is planned for: an estimate can be wrong
MOST_LOST = 0.01  # share of the images whose files may vanish while a run goes on
OPTIONS = tuple(option.name for option in fields(ReadOptions))


def train(
    source: Source | None = None,
    out: str | Path | None = None,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    minutes: float | None = None,
    time_budget: float | None = None,
    checkpoint_every: int = 1,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train a classifier on images whose labels cannot be trusted.

    Args:
        source: see `find_source`. May be left out when a run is resumed.
        out: the run folder, which must be new (or hold the run to resume). None: keep everything
            in memory.
        preset: settings to start from; see `pseudoloss.config.PRESETS`.
        config: a TOML file with settings, or the config.json of another run.
        resume: go on with the run in `out`; where there is none yet, begin it.
        minutes: stop after an epoch when so much time is over; `resume` goes on later.
        time_budget: choose as many epochs as fit into so many minutes.
        checkpoint_every: epochs between two checkpoints (the last epoch always has one).
        quiet: print nothing.
        settings: any field of `Settings`, on top of the preset; and any of `ReadOptions`, which say
            how image files are read.

    Returns:
        The run: its label table, metrics, summary and model.

    Example:
        >>> run = train("photos/", out="run")
        >>> run.labels[run.labels.is_label_issue]
    """
    started = time.monotonic()
    reading = {name: settings.pop(name) for name in OPTIONS if name in settings}
    asked = request(preset, None if config is None else as_path(config, "--config"), settings)
    for flag, value in (("--minutes", minutes), ("--time", time_budget)):
        if value is not None and not (isinstance(value, Real) and value > 0):
            raise InputError(f"{flag} must be a number above 0, not {value!r}")
    if not isinstance(checkpoint_every, int) or checkpoint_every < 1:
        raise InputError(f"--checkpoint-every must be 1 or more, not {checkpoint_every}")
    if time_budget is not None and "epochs" in asked.values:
        where = "--epochs" if "epochs" in settings else f"epochs in --config {config}"
        raise InputError(f"--time chooses the epochs, and {where} contradicts it")
    folder = None if out is None else RunFolder(as_path(out, "--out"))
    recorded = folder.recorded() if folder and resume else None
    if folder and recorded is None:
        folder.refuse_if_taken()
    if source is None:
        if recorded is None:
            raise InputError("SOURCE is missing: say what to train on, such as a folder of images")
        if recorded.from_python:
            raise InputError(
                f"SOURCE is missing: the run in {out} began with data in Python, which its folder "
                "does not hold; go on with pl.train(data, out=..., resume=True)"
            )
        source = recorded.source
    if recorded is None:
        _refuse_clean(asked, source)
        if folder:
            _refuse_inside(folder.path, source)
            _refuse_inside(folder.path, reading.get("test"))

    wait_for_compilers = load_compilers()
    reporter: Reporter = SilentReporter() if quiet else TerminalReporter()
    with reporter:
        prepared = prepare(source, asked, recorded, reading, reporter, time_budget is not None)
        data, chosen, notices = prepared.data, prepared.settings, prepared.notices
        notices["skipped"] = health.left_out(prepared.skipped, folder.skipped if folder else None)
        if recorded and recorded.fingerprint != data.fingerprint():
            raise InputError(
                f"--resume: the images or labels of {data.name} are not those the run began with"
            )
        wait_for_compilers()
        device = choose_device(chosen.device)
        resumed = folder is not None and folder.checkpoint.exists()
        with using(device), private_chance(), memory_errors(chosen):
            if time_budget is not None and recorded is None:
                chosen, notices["time"] = in_time(data, chosen, reporter, time_budget, started)
            with Trainer(data, chosen, reporter, resumed) as trainer:
                if folder is None:
                    return fit(trainer, None, notices, started, minutes, checkpoint_every)
                with folder.lock():
                    if folder.recorded() != recorded:
                        raise BusyError(
                            f"--out {folder.path}: another process has begun a run here"
                        )
                    if folder.finished:
                        reporter.say(f"{folder.path} is finished already.")
                        return load(folder.path)
                    with folder.writing():
                        folder.list_skipped(prepared.skipped)
                        if recorded is None:
                            named = isinstance(source, str | Path)
                            words = absolute(str(source)) if named else data.name
                            folder.create(words, not named, trainer, prepared.options)
                    return fit(trainer, folder, notices, started, minutes, checkpoint_every)


def _refuse_inside(out: Path, source: Source | None) -> None:
    """A run in a folder of images would be one of its classes from then on."""
    if isinstance(source, str | Path) and source:
        root = at_home(str(source))
        is_folder = os.path.isdir(root)  # noqa: PTH112, of any name
        if is_folder and out.resolve().is_relative_to(root.resolve()):
            raise InputError(
                f"--out {out}: lies in {source}, whose folders are classes; "
                "choose a folder outside of it"
            )


def _refuse_clean(asked: Request, source: Source) -> None:
    """CIFAR itself has none of the labels that presets of CIFAR-N are for."""
    is_cifar = isinstance(source, str) and source.partition(":")[0] in ("cifar10", "cifar100")
    if is_cifar and asked.preset in HUMAN and "corrupt" not in asked.values:
        raise InputError(
            f"--preset {asked.preset}: add --corrupt human:FILE, the labels that people gave (or "
            f"--corrupt none, to train on those of the source); {OWNERS}"
        )


class Prepared(NamedTuple):
    """What a run is about to train on, and how."""

    data: Data
    settings: Settings
    options: ReadOptions
    skipped: tuple[Skipped, ...]
    notices: dict[str, str | None]


def prepare(
    source: Source,
    asked: Request,
    recorded: Recorded | None,
    reading: dict[str, Any],
    reporter: Reporter,
    timed: bool = False,
) -> Prepared:
    """Find the images, choose the settings, read and corrupt the images. With `timed` the epochs
    are not chosen yet."""
    options = ReadOptions(**reading)
    if options.test is not None:
        if not options.test:
            raise InputError("--test is empty")
        options = replace(options, test=absolute(options.test))
        reading = reading | {"test": options.test}
    if recorded:
        options = replace(recorded.options, **reading)
        if options != recorded.options:
            name = next(name for name in reading if reading[name] != vars(recorded.options)[name])
            raise InputError(
                f"--{name.replace('_', '-')} is not what the run began with; leave it out to resume"
            )
    seed = Settings(seed=asked.values.get("seed", Settings.seed)).seed  # checked, as it is used now
    seed = recorded.settings.seed if recorded else seed
    found = find_source(source, options, seed, reporter.progress)
    skipped: tuple[Skipped, ...] = ()
    fitting: dict[str, Any] = {}
    if recorded:
        settings = asked.resume(recorded.settings)
    else:
        settings, fitting = choose_settings(found, asked)
        if fitting or isinstance(found, ScannedSource):
            decided = {key: fitting[key] for key in fitting if not (timed and key == "epochs")}
            reporter.say(messages.chosen(asked.preset or found.preset, decided))
    if isinstance(found, ScannedSource):
        reader, seen = choose_reader(found, settings, options.fit)
        if not recorded:
            check_weights(settings.network, settings.weights, reader.channels, seen)
        data, skipped = found.read(reader, seen, settings.images, options.strict, reporter.progress)
        check_trainable(data.train, data.name)
    else:
        data = found
    notices: dict[str, str | None] = {}
    if settings.corrupt is not None or settings.pool is not None:
        noisy = corrupt(
            data.train,
            settings.corrupt,
            settings.seed,
            settings.pool,
            held_out=data.test if data.noisy_test else None,
            tell=partial(notices.__setitem__, "pool"),
        )
        data = replace(data, train=noisy)
    return Prepared(data, settings, options, skipped, notices)


def in_time(
    data: Data, settings: Settings, reporter: Reporter, minutes: float, started: float
) -> tuple[Settings, str | None]:
    """The settings with as many epochs as fit into what is left of the time; and what there is to
    say of it."""
    reporter.progress("timing a few steps", 0, 1)
    begun = time.monotonic()
    with Trainer(data, settings, reporter) as trainer:
        built = time.monotonic() - begun
        pace = measure_pace(trainer)
    left = 60 * minutes - (time.monotonic() - started) - built - pace.ready
    epochs = epochs_in(pace, settings, MARGIN * left)
    warmup = None if settings.warmup is None else scaled_warmup(settings, epochs)
    chosen = replace(settings, epochs=epochs, warmup=warmup)
    needed = pace.of(chosen, epochs)
    if needed <= left:
        return chosen, None
    return chosen, (
        f"--time {minutes:g}m is too short: {epochs} epochs, the least, take about "
        f"{messages.duration(needed)}. --minutes stops a run in time, and --resume goes on"
    )


@dataclass
class Record:
    """What has happened so far. It goes into every checkpoint."""

    epochs: int = 0  # done
    seconds: float = 0.0
    startup_seconds: float = 0.0  # until the first step was done; of all processes together
    best: float | None = None  # test accuracy
    best_epoch: int | None = None
    last: dict[str, Any] = field(default_factory=dict)  # the metrics of the last epoch
    notices: list[dict[str, Any]] = field(default_factory=list)


def fit(
    trainer: Trainer,
    folder: RunFolder | None,
    notices: dict[str, str | None],
    started: float,
    minutes: float | None,
    checkpoint_every: int,
) -> Run:
    """Train the epochs that are not done yet, then write what was found out. `notices` are what
    was noticed before the first of them."""
    settings, reporter = trainer.settings, trainer.reporter
    record, lines = restore(trainer, folder)
    before = len(lines)
    earlier, path = record.seconds, folder.path if folder else None
    record.notices = [  # without what is no longer so: other files may be left out now
        said for said in record.notices if notices.get(said["kind"], said["text"]) == said["text"]
    ]
    notice(trainer, record, notices)
    reporter.say(messages.introduction(trainer, record.epochs))
    if settings.method == "pls" and settings.warmup_epochs == settings.epochs:
        notice(trainer, record, {"warm-up only": health.WARM_UP_ONLY})
    time_is_up = False
    with Writer() as writer:
        while record.epochs < settings.epochs and not time_is_up:
            line = run_epoch(trainer, record, lines)
            if len(lines) == before and trainer.begun is not None:  # the first of this process
                record.startup_seconds += trainer.begun - started
            spent = time.monotonic() - started
            record.seconds = earlier + spent
            lines.append(line)
            # Stop where another epoch like this one would not fit any more.
            next_end = spent + sum(line["seconds"].values())
            time_is_up = minutes is not None and next_end > 60 * minutes
            if folder:
                is_last = time_is_up or record.epochs == settings.epochs
                is_due = is_last or record.epochs % checkpoint_every == 0
                save(trainer, folder, record, is_due, writer)
            reporter.say(messages.epoch_line(settings, line, record.best))
    if minutes is not None and record.epochs < settings.epochs:
        reporter.say(messages.stopped_early(minutes, record.epochs, path))
    return finish(trainer, folder, record, lines)


def run_epoch(trainer: Trainer, record: Record, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """One epoch: steps, tracking, validation. Its metrics, and `record` brought up to date.
    `earlier` are the metrics of the epochs before."""
    epoch, settings = record.epochs, trainer.settings
    trainer.reporter.begin_epoch(messages.epoch_title(settings, epoch, record.last), trainer.steps)
    clock = [time.perf_counter()]
    loss = trainer.train_epoch(epoch)
    clock.append(time.perf_counter())
    if not math.isfinite(loss):
        kept = f"The checkpoint of epoch {epoch} is kept. " if epoch else ""
        raise TrainingError(
            f"the loss became {loss} in epoch {epoch + 1}. {kept}Begin a new run with a lower --lr "
            f"(now {settings.lr:g}) or, on a GPU, with --precision float32."
        )
    stages = trainer.track(epoch) if trainer.tracks(epoch) else None
    found = figures(trainer, epoch, stages)
    clock.append(time.perf_counter())
    accuracy = trainer.validate()
    if settings.compare_metrics:
        found["knn_accuracy"] = trainer.knn_accuracy()
    clock.append(time.perf_counter())

    if accuracy is not None and (record.best is None or accuracy > record.best):
        record.best, record.best_epoch = accuracy, epoch + 1
    if stages is not None:
        noisy = [line["noisy"] for line in [*earlier, found] if line["noisy"] is not None]
        notice(trainer, record, symptoms(trainer, epoch, stages, noisy))
    lost = trainer.lost_files()
    if len(lost) > MOST_LOST * len(trainer.data.train):
        raise TrainingError(f"{health.lost_files(lost)}. --resume goes on when they are back")
    notice(trainer, record, {"files": health.lost_files(lost)})
    parts = ("train", "track", "validate")
    record.last = {
        "epoch": epoch + 1,
        "phase": "warm-up" if trainer.in_warm_up(epoch) else settings.method,
        "lr": learning_rate(settings, epoch),
        "loss": loss,
        "accuracy": accuracy,
        **found,
        "seconds": {
            part: after - before
            for part, before, after in zip(parts, clock[:-1], clock[1:], strict=True)
        },
    }
    record.epochs = epoch + 1
    return record.last


def figures(trainer: Trainer, epoch: int, stages: Stages | None) -> dict[str, Any]:
    """How many labels are taken for noisy, how far guesses are trusted and, where the truth is
    known, how right that is."""
    asked = (
        dict.fromkeys(("metrics", "bias", "pseudo_loss"))
        if trainer.settings.compare_metrics
        else {}
    )
    memory, true_N = trainer.memory, trainer.data.train.true_N
    if stages is None:
        found: dict[str, Any] = {
            "noisy": None,
            "trust": None,
            "detection": None,
            "guesses": None,
            **asked,
        }
        if asked and true_N is not None:
            trainer.look(epoch)
            found |= comparisons(trainer, true_N.to(trainer.device), judged=False)
        return found
    judged = trainer.judges_guesses(epoch)
    noisy = int(memory.noisy_N.sum())
    found = {
        "noisy": noisy / len(memory.noisy_N),
        "trust": memory.trust_N[memory.noisy_N].mean().item() if judged and noisy else None,
        "detection": None,
        "guesses": None,
        **asked,
    }
    if true_N is not None:
        true_N = true_N.to(trainer.device)
        found["detection"] = evaluate.detection(memory, trainer.given_N, true_N)
        found["guesses"] = evaluate.guesses(memory, true_N) if judged else None
        if trainer.settings.compare_metrics:
            found |= comparisons(trainer, true_N, judged)
    return found


def comparisons(trainer: Trainer, true_N: Tensor, judged: bool) -> dict[str, Any]:
    """What the paper's figures show of an epoch: the metrics of both stages, the confirmation bias,
    and how the pseudo-loss lies."""
    memory = trainer.memory
    noise = evaluate.noise_aucs(trainer.noise_metrics(*NOISE_METRICS), trainer.given_N, true_N)
    found: dict[str, Any] = {"metrics": {"noise": noise, "guesses": None}}
    if judged:
        found["metrics"]["guesses"] = evaluate.guess_aucs(trainer.guess_metrics(), memory, true_N)
        selected = trainer.settings.trust_in_classification
        weight_N = memory.trust_N if selected else torch.ones_like(memory.trust_N)
        found["bias"] = evaluate.bias(memory, true_N, weight_N)
        found["pseudo_loss"] = evaluate.pseudo_losses(memory, true_N)
    return found


def symptoms(
    trainer: Trainer, epoch: int, stages: Stages, noisy: Sequence[float]
) -> dict[str, str | None]:
    """What may be wrong after an epoch, by kind. `noisy`: what stage 1 took for wrong so far."""
    memory, settings = trainer.memory, trainer.settings
    ends_warm_up, is_last = epoch + 1 == settings.warmup_epochs, epoch + 1 == settings.epochs
    chance = {
        "warm-up": health.warm_up_at_chance(memory, trainer.given_N) if ends_warm_up else None,
        "end": health.ended_at_chance(memory, trainer.given_N)
        if is_last and not ends_warm_up
        else None,
    }
    if settings.method != "pls":  # what stage 1 says of the labels is not trained on
        return chance
    classes = trainer.data.train.classes
    first = messages.VALUES[settings.noise_metric]
    second = messages.VALUES[settings.trust_metric]
    return chance | {
        "stage 1": health.stage1_collapsed(stages, memory, first),
        "swings": health.stage1_swings(noisy, settings.noise_metric),
        "stage 2": health.stage2_collapsed(stages, memory, second),
        "classes": health.classes_lost(trainer.lost_C(stages), classes) if is_last else None,
    }


def notice(trainer: Trainer, record: Record, seen: dict[str, str | None]) -> None:
    """Say what went wrong, each kind once a run."""
    said = {entry["kind"] for entry in record.notices}
    for kind, text in seen.items():
        if text is not None and kind not in said:
            record.notices.append({"epoch": record.epochs + 1, "kind": kind, "text": text})
            trainer.reporter.notice(text)


def restore(trainer: Trainer, folder: RunFolder | None) -> tuple[Record, list[dict[str, Any]]]:
    """Where the run stands: at its last checkpoint, or at the beginning."""
    if folder is None:
        return Record(), []
    record = Record()
    if folder.checkpoint.exists():
        network, optimiser, memory = trainer.network, trainer.optimiser, trainer.memory
        saved = checkpoint.restore(folder.checkpoint, network, optimiser, memory)
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


def save(trainer: Trainer, folder: RunFolder, record: Record, is_due: bool, writer: Writer) -> None:
    """Take a snapshot of an epoch, and have it written while the next one trains."""
    model, epochs = trainer.model, record.epochs
    is_best = record.best_epoch == epochs
    tensors: dict[str, Tensor] = {}
    if is_best or is_due:
        tensors = checkpoint.tensors_of(trainer.network, trainer.optimiser, trainer.memory)
        tensors = writer.snapshot(tensors)
    recorded = asdict(record)

    def write() -> None:
        """The order matters: whatever a kill leaves behind, the checkpoint finds all that it
        speaks of, and what is newer than the checkpoint is written again."""
        with folder.writing():
            folder.add_metrics(recorded["last"])
            if is_best:
                model.save(folder.best(epochs), checkpoint.weights(tensors))
            if is_due:
                checkpoint.save(folder.checkpoint, tensors, recorded)
                folder.forget_other_bests(recorded["best_epoch"])

    writer.start(write)


def finish(
    trainer: Trainer, folder: RunFolder | None, record: Record, lines: list[dict[str, Any]]
) -> Run:
    """The run as the user gets it; in the folder too, once all epochs are done."""
    settings, epoch = trainer.settings, record.epochs - 1
    if not trainer.tracks(epoch):  # stopped in the warm-up: there is something to say all the same
        trainer.track(epoch)
    held_out = trainer.judge_held_out(epoch)
    notice(trainer, record, {"files": health.lost_files(trainer.lost_files())})
    judged = trainer.judges_guesses(epoch)
    labels = label_table(trainer.data.train, trainer.memory, judged, held_out)
    run = Run(
        settings=settings,
        labels=labels,
        metrics=pd.DataFrame(lines),
        summary=summarise(trainer, record, labels),
        model=trainer.model,
        path=folder.path if folder else None,
    )
    if run.finished and folder:
        with folder.writing():
            trainer.model.save(folder.path / "model.safetensors")
            if record.best_epoch is not None:
                folder.publish_best(record.best_epoch)
            write_labels(labels, folder.path)
            write_json(folder.summary, run.summary)
    if run.finished:
        trainer.reporter.say(messages.conclusion(run.summary, run.path))
    return run


def summarise(trainer: Trainer, record: Record, labels: pd.DataFrame) -> dict[str, Any]:
    """summary.json; docs/run-folder.md describes it."""
    nothing = dict.fromkeys(evaluate.Detection.__annotations__)
    actions = labels["action"].value_counts()
    return {
        "method": trainer.settings.method,
        "source": trainer.data.name,
        "seed": trainer.settings.seed,
        "accuracy": {
            "last": record.last["accuracy"],
            "best": record.best,
            "best_epoch": record.best_epoch,
            "on": trainer.data.test_name if trainer.data.test else None,
            "noisy_labels": trainer.data.noisy_test if trainer.data.test else None,
        },
        "estimated_noise": estimated_noise(labels),
        "detection": record.last["detection"] or nothing,
        "guesses": record.last["guesses"] or {"accuracy": None, "auc": None},
        "knn_accuracy": record.last.get("knn_accuracy"),
        "noise_rate": trainer.data.train.noise_rate,
        "noise": trainer.data.train.noise,
        "actions": {name: int(actions.get(name, 0)) for name in ("keep", "relabel", "look")},
        "seconds": record.seconds,
        "startup_seconds": record.startup_seconds,
        "epochs": record.epochs,
        "images": len(trainer.data.train),
        "held_out": len(labels) - len(trainer.data.train),
        "classes": len(trainer.data.train.classes),
        "notices": record.notices,
        "device": messages.device_name(trainer.device),
        "torch": torch.__version__,
    }


@contextmanager
def memory_errors(settings: Settings) -> Iterator[None]:
    """Say in one line that the device is too small."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the GPU ran out of memory. Begin a new run with a lower --batch-size (now "
            f"{settings.batch_size}), with --accumulate 2 or more, or with a smaller --network, or "
            "go on where there is more."
        ) from None


@contextmanager
def private_chance() -> Iterator[None]:
    """Leave torch's global random state and settings as they were."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    benchmark, tf32 = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark = True  # shapes are fixed, so searching for algorithms pays
    cudnn.allow_tf32 = False  # float32 means float32
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
        torch.set_num_threads(threads)
