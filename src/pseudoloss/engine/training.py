"""`train`: from a source and settings to a finished run.

Read from the top: `train` checks what was asked for, `prepare` finds the images and chooses the
settings, `loop.fit` trains. What a step minimises is in methods/.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from pseudoloss import distributed, methods
from pseudoloss.config import Settings, as_json, flag
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
from pseudoloss.data.sources import refuse_inside
from pseudoloss.data.sources.cifar import FILES as CIFAR
from pseudoloss.engine import health, messages
from pseudoloss.engine.capture import load_compilers
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import choose_settings, epochs_in, measure_pace, with_epochs
from pseudoloss.engine.loggers import Loggers, Start, read_names
from pseudoloss.engine.loop import fit
from pseudoloss.engine.randomness import isolated_torch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.watch import Limits
from pseudoloss.errors import BusyError, InputError, TrainingError
from pseudoloss.files import as_path
from pseudoloss.nn.devices import choose_device, using
from pseudoloss.nn.networks import check_weights
from pseudoloss.presets import HUMAN, Request, request
from pseudoloss.progress import Reporter, SilentReporter, TerminalReporter
from pseudoloss.reading import READ_OPTIONS
from pseudoloss.runs import Recorded, Run, RunFolder, load
from pseudoloss.version import __version__

MARGIN = 0.9  # share of --time that is planned for: an estimate can be wrong


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
    log: str | Sequence[str] = (),
    **settings: Any,
) -> Run:
    """Train a classifier on images with noisy labels.

    Args:
        source: what to train on: a folder with one folder per class, a table, arrays or a dataset;
            see `pseudoloss.data.find_source`. May be omitted to resume a run.
        out: the run folder, which must be new (or hold the run to resume). None: keep everything
            in memory.
        preset: settings to start from; see `pseudoloss.presets.PRESETS`.
        config: a TOML file with settings, or the config.json of another run.
        resume: resume the run in `out`; start it if there is none yet.
        minutes: stop before an epoch that would not end within this time; `resume` continues.
        time_budget: choose as many epochs as fit into this number of minutes.
        checkpoint_every: number of epochs between checkpoints (the last epoch always has one).
        quiet: print nothing.
        log: where metrics go beside metrics.jsonl: any of "tensorboard", "wandb" and "mlflow".
        settings: any field of `Settings` or of the settings of the method, on top of the preset;
            and any field of `ReadOptions`, which say how image files are read.

    Returns:
        The run: its label table, metrics, summary and model.

    Example:
        >>> run = train("photos/", out="run")
        >>> run.labels[run.labels.is_label_issue]
    """
    started = time.monotonic()
    reading = {name: settings.pop(name) for name in READ_OPTIONS if name in settings}
    asked = request(preset, None if config is None else as_path(config, "--config"), settings)
    _check_limits(minutes, time_budget, checkpoint_every)
    loggers = read_names(log)
    if loggers and out is None:
        raise InputError(f"--log {','.join(loggers)}: needs --out, the run folder")
    if time_budget is not None and "epochs" in asked.values:
        where = "--epochs" if "epochs" in settings else f"epochs in --config {config}"
        raise InputError(f"--time chooses the epochs, and {where} contradicts it")
    folder = None if out is None else RunFolder(as_path(out, "--out"))
    limits = Limits(started, minutes, checkpoint_every)
    with distributed.session(asked.values.get("device", "auto")):
        again = folder is not None and distributed.restarted(folder.path)
        resume = distributed.agree(resume or again)
        return _begin(source, folder, asked, reading, resume, limits, time_budget, quiet, loggers)


def _begin(
    source: Source | None,
    folder: RunFolder | None,
    asked: Request,
    reading: dict[str, Any],
    resume: bool,
    limits: Limits,
    time_budget: float | None,
    quiet: bool,
    loggers: Sequence[str],
) -> Run:
    """Find out whether this is a new run, make it ready and train."""
    out = folder.path if folder else None
    recorded = folder.recorded() if folder and resume else None
    silent = quiet or not distributed.is_main()
    reporter: Reporter = SilentReporter() if silent else TerminalReporter()
    if folder and recorded is None:
        folder.refuse_if_taken()
    if folder and recorded and folder.finished:
        asked.resume(recorded.settings)  # refuses other settings
        _read_options(reading, recorded)  # and options for reading
        return _already_finished(folder, reporter, other_source(source, recorded))
    if source is None:
        source = _recorded_source(recorded, out, resume)
    if recorded is None:
        _refuse_clean_labels(asked, source)
        if folder:
            refuse_inside(folder.path, source)
            refuse_inside(folder.path, reading.get("test"))

    wait_for_compilers = load_compilers()
    with reporter:
        job = prepare(source, asked, recorded, reading, reporter, time_budget is not None)
        job.notices["skipped"] = health.skipped_files(
            job.skipped, folder.skipped if folder else None
        )
        if recorded and recorded.fingerprint != job.data.fingerprint():
            other = other_source(source, recorded)
            raise InputError(
                f"--resume: the images or labels of {job.data.name} are not those the run began "
                f"with{other and f' ({other})'}"
            )
        if distributed.active():
            facts = {"fingerprint of the data": job.data.fingerprint()}
            distributed.check_same(facts | as_json(job.settings), job.data.name)
        wait_for_compilers()
        with (
            using(choose_device(job.settings.device)),
            isolated_torch(),
            memory_errors(job.settings),
        ):
            if time_budget is not None and recorded is None:
                job.settings, job.notices["time"] = fit_time(
                    job, reporter, time_budget, limits.started
                )
            return _train_in(folder, recorded, job, reporter, limits, loggers)


def _train_in(
    folder: RunFolder | None,
    recorded: Recorded | None,
    job: "Job",
    reporter: Reporter,
    limits: Limits,
    loggers: Sequence[str],
) -> Run:
    """Train, and keep other processes out of the run folder meanwhile."""
    resumed = folder is not None and folder.has_checkpoint
    with Trainer(job.data, job.settings, reporter, resumed) as trainer:
        if folder is None:
            return fit(trainer, None, job.notices, limits)
        if not distributed.is_main():
            distributed.wait_for_all()  # for the first process, which writes
            return fit(trainer, folder, job.notices, limits)
        with folder.lock():
            if folder.recorded() != recorded:
                raise BusyError(f"--out {folder.path}: another process has started a run here")
            if folder.finished:  # by another process, since this one started
                return _already_finished(folder, reporter)
            with folder.writing():
                folder.list_skipped(job.skipped)
                if recorded is None:
                    named = isinstance(job.source, str | Path)
                    text = absolute(str(job.source)) if named else job.data.name
                    folder.create(text, not named, job.data, job.settings, job.options)
            distributed.claim(folder.path)
            distributed.wait_for_all()
            facts = {"source": job.data.name, "pseudoloss": __version__} | as_json(job.settings)
            start = Start(folder.path / "loggers", facts)
            with Loggers(loggers, start, reporter.notice) as log:
                return fit(trainer, folder, job.notices, limits, log)


def _already_finished(folder: RunFolder, reporter: Reporter, other: str = "") -> Run:
    reporter.say(f"{folder.path} is already finished.")
    if other:
        reporter.notice(f"{other}. For a new run, choose another --out")
    return load(folder.path)


def other_source(source: Source | None, recorded: Recorded) -> str:
    """That a run was started on another source than SOURCE names; empty if not. It may be the same
    one, moved."""
    if source is None or recorded.from_python or not isinstance(source, str | Path):
        return ""
    if absolute(str(source)) == recorded.source:
        return ""
    return f"the run is of {recorded.source}, not of {source}"


# ----------------------------------------------------------------------- what cannot be trained


def _check_limits(minutes: Any, time_budget: Any, checkpoint_every: Any) -> None:
    for name, value in (("--minutes", minutes), ("--time", time_budget)):
        if value is not None and not (isinstance(value, Real) and float(value) > 0):
            raise InputError(f"{name} must be a number above 0, not {value!r}")
    if not isinstance(checkpoint_every, int) or checkpoint_every < 1:
        raise InputError(f"--checkpoint-every must be 1 or more, not {checkpoint_every}")


def _recorded_source(recorded: Recorded | None, out: str | Path | None, resume: bool) -> str:
    if recorded is None and resume and out is not None:
        raise InputError(f"--resume: there is no run in {out}; name SOURCE to start one")
    if recorded is None:
        raise InputError("SOURCE is missing: name what to train on, such as a folder of images")
    if recorded.from_python:
        raise InputError(
            f"SOURCE is missing: the run in {out} was started with data in Python, which its "
            "folder does not hold; resume it with pl.train(data, out=..., resume=True)"
        )
    return recorded.source


def _refuse_clean_labels(asked: Request, source: Source) -> None:
    """CIFAR itself has none of the labels that the presets of CIFAR-N are for."""
    is_cifar = isinstance(source, str) and source.partition(":")[0] in CIFAR
    if is_cifar and asked.preset in HUMAN and "corrupt" not in asked.values:
        raise InputError(
            f"--preset {asked.preset}: add --corrupt human:FILE, the labels given by people (or "
            f"--corrupt none, to train on those of the source); {OWNERS}"
        )


# ------------------------------------------------------------------------ what will be trained


@dataclass
class Job:
    """What a run trains on, and how."""

    source: Source
    data: Data
    settings: Settings
    options: ReadOptions
    skipped: tuple[Skipped, ...] = ()
    notices: dict[str, str | None] = field(default_factory=dict)


def prepare(
    source: Source,
    asked: Request,
    recorded: Recorded | None,
    reading: dict[str, Any],
    reporter: Reporter,
    timed: bool = False,
) -> Job:
    """Find the images, choose the settings, read and corrupt the images. With `timed` the epochs
    are not chosen yet."""
    options = _read_options(reading, recorded)
    # Checked here because it is used before the other settings are known.
    seed = Settings(seed=asked.values.get("seed", Settings.seed)).seed
    seed = recorded.settings.seed if recorded else seed
    found = find_source(source, options, seed, reporter.progress)
    if recorded:
        settings = asked.resume(recorded.settings)
    else:
        settings, fitting = choose_settings(found, asked)
        if fitting or isinstance(found, ScannedSource):
            decided = {key: fitting[key] for key in fitting if not (timed and key == "epochs")}
            reporter.say(messages.chosen(asked.preset or found.preset, decided))
    skipped: tuple[Skipped, ...] = ()
    shrunk = None
    if isinstance(found, ScannedSource):
        reader, seen = choose_reader(found, settings, options.fit)
        if not recorded:
            check_weights(settings.network, settings.weights, reader.channels, seen)
        if settings.image_size is None and found.recipe is None:
            shrunk = health.shrunk_photographs(found.typical_side, seen, settings.network)
        found, skipped = found.read(
            reader, seen, settings.images, options.strict, reporter.progress
        )
        check_trainable(found.train, found.name)
    job = Job(source, found, settings, options, skipped, {"shrunk": shrunk})
    if settings.corrupt is not None or settings.pool is not None:
        noisy = corrupt(
            found.train,
            settings.corrupt,
            settings.seed,
            settings.pool,
            held_out=found.test if found.noisy_test else None,
            tell=partial(job.notices.__setitem__, "pool"),
        )
        job.data = replace(found, train=noisy)
    return job


def _read_options(reading: dict[str, Any], recorded: Recorded | None) -> ReadOptions:
    """How the source is read; a resumed run reads it as before."""
    options = ReadOptions(**reading)
    if options.test is not None:
        if not options.test:
            raise InputError("--test is empty")
        options = replace(options, test=absolute(options.test))
        reading = reading | {"test": options.test}
    if recorded is None:
        return options
    options = replace(recorded.options, **reading)
    for name in reading:
        if reading[name] != vars(recorded.options)[name]:
            raise InputError(f"{flag(name)} is not what the run began with; omit it to resume")
    return options


def fit_time(
    job: Job, reporter: Reporter, minutes: float, started: float
) -> tuple[Settings, str | None]:
    """The settings with as many epochs as fit into what is left of the time; and a notice if even
    the fewest do not."""
    begun = time.monotonic()
    with Trainer(job.data, job.settings, reporter) as trainer:
        built = time.monotonic() - begun
        pace = measure_pace(trainer)
        known = (trainer.given_N, trainer.classes, trainer.weak_is_plain)

    def method_for(settings: Settings) -> methods.Method:
        return methods.build(settings, *known)

    left = 60 * minutes - (time.monotonic() - started) - built - pace.startup
    epochs = distributed.from_main(epochs_in(pace, job.settings, method_for, MARGIN * left))
    chosen = with_epochs(job.settings, epochs)
    needed = pace.of(method_for(chosen), epochs)
    if needed <= left:
        return chosen, None
    return chosen, (
        f"--time {minutes:g}m is too short: {epochs} epochs, the fewest, take about "
        f"{messages.duration(needed)}. --minutes stops a run in time, and --resume continues it"
    )


@contextmanager
def memory_errors(settings: Settings) -> Iterator[None]:
    """One line for the user when the device is too small."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the GPU ran out of memory. Start a new run with a lower --batch-size (now "
            f"{settings.batch_size}), with --accumulate 2 or more, or with a smaller --network, or "
            "resume on a larger GPU."
        ) from None
