"""Train the cells of an experiment: OUT/EXPERIMENT/CELL/seedN, each an ordinary run folder.

A worker has the claim of the run folder that it trains (see `claims`). So several processes, also
on several machines that share OUT, can work on one experiment: each skips the cells that another
one is training, and takes over those whose worker has died.
"""

import gc
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from pseudoloss import claims
from pseudoloss.config import (
    Settings,
    all_setting_types,
    as_flag,
    as_json,
    as_text,
    setting_types,
    shorten,
)
from pseudoloss.data import corruption, pools, sources
from pseudoloss.engine.loggers import read_names
from pseudoloss.engine.training import train
from pseudoloss.errors import BusyError, InputError, TrainingError, name_hint
from pseudoloss.experiments.catalogue import EXPERIMENTS
from pseudoloss.experiments.definitions import Cell, Experiment
from pseudoloss.experiments.matching import pool_difference, training_cell
from pseudoloss.files import read_checked
from pseudoloss.nn.devices import choose_device
from pseudoloss.nn.networks import check_known
from pseudoloss.presets import request, same_for_a_run
from pseudoloss.runs import Recorded, RunFolder

MIN_MINUTES = 0.5  # with less time left, no further cell is started
POOL = "POOL"  # placeholder for a pool that --data does not name

Print = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Job:
    """A cell with a seed."""

    name: str
    folder: RunFolder
    cell: Cell
    seed: int
    source: str
    changes: dict[str, Any]  # settings that differ from the preset

    @property
    def command(self) -> str:
        """The command that trains it."""
        arguments = ["pseudoloss", "train", self.source, "--out", str(self.folder.path)]
        arguments += ["--preset", self.cell.preset, "--seed", str(self.seed), "--resume"]
        for name, value in self.changes.items():
            arguments += as_flag(name, value).split(" ", 1)
        return shlex.join(arguments)

    @property
    def state(self) -> str:
        """damaged, done, busy (another process is training it), started or new."""
        if self.damage:
            return "damaged"
        if self.folder.finished:
            return "done"
        if self.folder.busy:
            return "busy"
        return "started" if self.folder.config.exists() else "new"

    @property
    def damage(self) -> str:
        """What is wrong with the files of its folder; empty if nothing is."""
        try:
            if self.folder.finished:
                read_finished(self.folder)
            else:
                self.folder.recorded()
        except InputError as error:
            return str(error)
        return ""

    def settings(self) -> Settings:
        """The settings of its run."""
        changes = {**self.changes, "seed": self.seed}
        return request(self.cell.preset, None, changes).settings("default")

    def differences(self) -> list[tuple[str, str]]:
        """Where its folder was started with other settings: pairs of recorded and wanted flags."""
        recorded = None if self.damage else self.folder.recorded()
        if recorded is None:
            return []
        before = as_json(recorded.settings)
        found = [
            (as_flag(name, before[name]), as_flag(name, value))
            for name, value in as_json(self.settings()).items()
            if name in before and not same_for_a_run(name, before[name], value)
        ]
        if self.folder.finished and self._has_other_pool(recorded.settings.pool):
            found.insert(0, (as_flag("pool", recorded.settings.pool), f"--pool {self._pool}"))
        if source_kind(recorded.source) != source_kind(self.source):
            found.insert(0, (recorded.source, self.source))
        return found

    @property
    def _pool(self) -> str | None:
        is_named = self.changes.get("pool") not in (None, POOL)
        return self.settings().pool if is_named else None

    def _has_other_pool(self, recorded: str | None) -> bool:
        """Whether a finished run used a pool of another name; its folder may differ between
        machines. (Unfinished runs compare the images themselves.)"""
        if recorded is None or self._pool is None:
            return False
        return pool_difference(self.cell, recorded) != pool_difference(self.cell, self._pool)

    def check_settings(self) -> None:
        """Raise an InputError if its folder was started with other settings."""
        for before, wanted in self.differences()[:1]:
            raise InputError(
                f"{self.folder.path}: was started with {before}, not {wanted}; choose another --out"
            )

    def check_data(self, places: Mapping[str, str]) -> None:
        """Raise an InputError if its data are not in the folders of --data."""
        kind, colon, _ = self.source.partition(":")
        if colon:
            _look_for(
                sources.check_exists, self.source, f"--data {kind}={places[kind]}", self.source
            )
        if self.cell.pool:
            place = self.changes["pool"]
            is_named = place == places[self.cell.pool]
            flag = f"--data {self.cell.pool}={place}" if is_named else f"--set pool={place}"
            _look_for(pools.check_exists, place, flag, f"--pool {place}")

    def make_parent_folder(self) -> None:
        """Create the folder that its run folder goes into."""
        try:
            self.folder.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = error.filename or self.folder.path.parent
            raise InputError(f"--out: cannot create {place} ({error.strerror})") from None


def check_values(jobs: Sequence[Job]) -> None:
    """Raise an InputError if a job has a setting with an invalid value."""
    for job in jobs:
        settings = job.settings()
        check_known(settings.network)
        if job.cell.pool and settings.pool is None:
            raise InputError(
                f"--set pool=none: {job.cell.name} needs a pool of out-of-distribution images"
            )
        corruption.check_noise(settings.corrupt, settings.pool)


def source_kind(source: str) -> tuple[str, float | None]:
    """A source without its folder: its kind and, if the source contains it, the noise rate."""
    kind, _, place = source.partition(":")
    try:
        return kind, float(place.rpartition(":")[2]) if kind in sources.WITH_NOISE_RATIO else None
    except ValueError:
        return kind, None


@dataclass(frozen=True)
class FinishedRun:
    """Settings and accuracies of a finished run, the notices that it gave, and its details."""

    recorded: Recorded
    last: float
    best: float
    notices: tuple[str, ...]
    details: Mapping[str, float]


def read_finished(folder: RunFolder) -> FinishedRun:
    """Read a finished run; an InputError names a file that is missing or damaged."""
    recorded = folder.recorded()
    if recorded is None:
        raise InputError(f"{folder.config}: is missing")
    try:
        summary = read_checked(folder.summary)
        last, best = read_accuracies(summary)
        notices, details = read_notices(summary), read_details(summary)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder.summary}: not the summary.json of a run ({error})") from None
    return FinishedRun(recorded, last, best, notices, details)


def read_accuracies(summary: Mapping[str, Any]) -> tuple[float, float]:
    """Accuracy after the last and in the best epoch; a ValueError if one is not a percentage."""
    last, best = summary["accuracy"]["last"], summary["accuracy"]["best"]
    for value in (last, best):
        if type(value) not in (int, float) or not 0 <= value <= 100:  # also excludes NaN
            raise ValueError(f"an accuracy is {shorten(repr(value))}, not a number from 0 to 100")
    return float(last), float(best)


def read_notices(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The first sentence of every notice of a run."""
    return tuple(str(notice["text"]).partition(". ")[0] for notice in summary.get("notices", ()))


def read_details(summary: Mapping[str, Any]) -> dict[str, float]:
    """What else a summary says of a run: the time and memory that it took, and how well it finds
    wrong labels. What it does not say is left out."""
    detection = summary.get("detection") or {}
    precision, recall = detection.get("precision"), detection.get("recall")
    f1 = None
    if precision is not None and recall is not None:
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    memory = summary.get("peak_memory")
    found = {
        "seconds": summary.get("seconds"),
        "memory": None if memory is None else memory / 2**30,
        "auc": detection.get("auc"),
        "f1": f1,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _look_for(look_for: Callable[[str], None], place: str, flag: str, prefix: str) -> None:
    """Look for data; an error starts with the flag that names them."""
    try:
        look_for(place)
    except InputError as error:
        raise InputError(f"{flag}: {str(error).removeprefix(f'{prefix}: ')}") from None


def plan(
    experiment: Experiment,
    out: Path,
    places: Mapping[str, str],
    *,
    seeds: Sequence[int],
    only: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Job]:
    """The jobs of an experiment: all cells with the first seed, then all with the next.

    Folders that `places` does not name stay DIR or POOL. A cell that shares its runs with another
    one gets the settings of the cell that is trained.
    """
    for seed in seeds:
        Settings(seed=seed)  # raises an InputError for an invalid seed
    jobs = {}
    for seed in dict.fromkeys(seeds):
        for cell in experiment.choose(only, methods):
            path = run_path(out, cell, seed)
            kind = cell.source.partition(":")[0]
            pool = {"pool": places.get(cell.pool, POOL)} if cell.pool else {}
            jobs[path] = Job(
                f"{cell.name} seed {seed}",
                RunFolder(path),
                cell,
                seed,
                cell.source.replace("DIR", places.get(kind, "DIR"), 1),
                {**training_cell(cell)[1].changes, **pool, **_for_cell(cell, changes or {})},
            )
    return list(jobs.values())


def _for_cell(cell: Cell, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that the method of a cell has a setting for."""
    types = setting_types(changes.get("method", training_cell(cell)[1].method))
    return {name: value for name, value in changes.items() if name in types}


def run_path(out: Path, cell: Cell, seed: int) -> Path:
    """The run folder of a cell with a seed."""
    experiment, trained = training_cell(cell)
    return out / experiment.name / trained.name / f"seed{seed}"


def find_run_folders(out: Path, cell: Cell) -> dict[int, RunFolder]:
    """The existing run folders of a cell, by seed."""
    folders = {
        path.name.removeprefix("seed"): RunFolder(path)
        for path in run_path(out, cell, 0).parent.glob("seed*")
    }
    return {int(seed): folders[seed] for seed in sorted(filter(str.isdecimal, folders), key=int)}


# ---------------------------------------------------------------------------------- run the jobs


def run(
    jobs: Sequence[Job],
    places: Mapping[str, str],
    *,
    minutes: float | None = None,
    quiet: bool = False,
    log: str = "",
    say: Print = print,
) -> dict[Job, str]:
    """Train the jobs that are not done, and return the state of every job.

    Invalid settings and missing data raise an InputError before anything is trained. A job that
    fails does not stop the others; a TrainingError at the end names all that failed.
    """
    read_names(log)  # raises an InputError for a logger that is not there
    check_before_training(jobs, places, minutes)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    titles = {job: f"[{number}/{len(jobs)}] {job.name}" for number, job in enumerate(jobs, 1)}
    queue, has_trained = list(jobs), False
    postponed: set[Job] = set()
    awaited: set[Job] = set()
    failed: dict[str, list[str]] = {}  # reason: names of jobs
    while queue:
        job = queue.pop(0)
        title, state = titles[job], job.state
        left = None if deadline is None else (deadline - time.monotonic()) / 60
        try:
            job.check_settings()  # again: another process may have started it since
        except InputError as error:
            failed.setdefault(str(error), []).append(job.name)
            say(f"{title}: has other settings")
            continue
        if state == "done":
            say(f"{title}: already done")
            continue
        if state == "damaged":
            why = f"{job.damage}; the folder is damaged: remove or rename {job.folder.path}"
            failed.setdefault(why, []).append(job.name)
            say(f"{title}: its folder is damaged")
            continue
        if state != "busy":
            if left is not None and (left < MIN_MINUTES if has_trained else left <= 0):
                say(f"{title}: no time left; run the same command to resume")
                break
            has_trained = True
            say(f"{title}: {'resumes' if state == 'started' else 'starts'} in {job.folder.path}")
            try:
                is_finished = _train(job, left, quiet, log)
            except (InputError, TrainingError) as error:
                # Another process may have started it a moment earlier.
                is_taken = isinstance(error, BusyError) or (
                    isinstance(error, InputError) and state == "new" and job.state != "new"
                )
                if not is_taken:
                    failed.setdefault(str(error), []).append(job.name)
                    say(f"{title}: failed")
                    continue
            else:
                if not is_finished:
                    say(f"{title}: time is up; run the same command to resume")
                    break
                found = read_finished(job.folder)
                say(f"{title}: done, accuracy {found.last:.2f} (best {found.best:.2f})")
                for notice in found.notices:
                    say(f"{title}: notice: {notice}")
                continue
        other = claims.holder(job.folder.path)
        if job not in postponed:  # try once more at the end: the other process may be gone by then
            say(f"{title}: another process is training it{f' ({other})' if other else ''}")
            postponed.add(job)
            queue.append(job)
        elif other is None:  # it has ended, or its claim has, a moment ago
            queue.append(job)
        elif other.is_late and (left is None or left > 0):
            if job not in awaited:
                say(f"{title}: waiting for {other}")
                awaited.add(job)
            time.sleep(claims.RENEW_SECONDS)
            queue.append(job)
    if failed:
        reasons = [f"{', '.join(names)}: {why}" for why, names in failed.items()]
        raise TrainingError("; ".join(reasons))
    return {job: job.state for job in jobs}


def check_before_training(
    jobs: Sequence[Job], places: Mapping[str, str], minutes: float | None
) -> None:
    """Raise an InputError for invalid settings, folders of other settings, or missing data."""
    check_values(jobs)
    for job in jobs:
        for kind in job.cell.data_kinds:
            if kind not in places:
                raise InputError(f"--data {kind}=DIR is missing: {job.cell.name} needs it")
        job.check_settings()
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes must be above 0, not {minutes:g}")
    to_train = [job for job in jobs if job.state not in ("done", "damaged")]
    for job in {(job.source, job.cell.pool): job for job in to_train}.values():
        job.check_data(places)
    for job in to_train:
        choose_device(job.settings().device)
        job.make_parent_folder()


def _train(job: Job, minutes: float | None, quiet: bool, log: str) -> bool:
    """Train a job; return whether it is finished."""
    more: dict[str, Any] = {"log": log} if log else {}
    run = train(
        job.source,
        job.folder.path,
        preset=job.cell.preset,
        resume=True,
        minutes=minutes,
        quiet=quiet,
        seed=job.seed,
        **more,
        **job.changes,
    )
    is_finished = run.finished
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return is_finished


# ------------------------------------------------------------------------- values of the options


def read_places(arguments: Sequence[str]) -> dict[str, str]:
    """`--data KIND=DIR`: the folder of each kind of data."""
    kinds = {
        kind
        for experiment in EXPERIMENTS.values()
        for cell in experiment.cells
        for kind in cell.data_kinds
    }
    places: dict[str, str] = {}
    for argument in arguments:
        kind, equals, place = argument.partition("=")
        if not equals or not place:
            raise InputError(f"--data {argument}: must be KIND=DIR, such as cifar100=data")
        if kind not in kinds:
            raise InputError(f"--data {argument}: no such kind of data{name_hint(kind, kinds)}")
        if places.setdefault(kind, place) != place:
            raise InputError(f"--data {argument}: {kind} is already in {places[kind]}")
    return places


def read_changes(arguments: Sequence[str]) -> dict[str, Any]:
    """`--set NAME=VALUE`: values as in a TOML file; text needs no quotes."""
    changes: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise InputError(f"--set {argument}: must be NAME=VALUE, such as epochs=2")
        if name == "seed":
            raise InputError(f"--set {argument}: seeds are chosen with --seeds")
        if name not in all_setting_types():
            hint = name_hint(name, all_setting_types())
            raise InputError(f"--set {argument}: no such setting{hint}")
        value = parse_value(name, text)
        if changes.setdefault(name, value) != value:
            raise InputError(f"--set {argument}: {name} is already {as_text(changes[name])}")
    return changes


def parse_value(name: str, text: str) -> Any:
    """The value of a setting: None if it may be none, a TOML value, or else the text itself."""
    if text.lower() == "none" and type(None) in get_args(all_setting_types().get(name)):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
