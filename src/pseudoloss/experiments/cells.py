"""Training the cells of an experiment: OUT/EXPERIMENT/CELL/seedN, each an ordinary run folder.

A cell is claimed by the lock of its run folder. So several processes, on several machines that
share OUT, can work on one experiment; a cell that another one works on is passed over.
"""

import gc
import json
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from pseudoloss.config import (
    Settings,
    as_flag,
    as_json,
    as_text,
    did_you_mean,
    request,
    same_for_a_run,
    setting_types,
    shorten,
)
from pseudoloss.data import corruption, pools, sources
from pseudoloss.engine.choices import choose_device
from pseudoloss.engine.training import train
from pseudoloss.errors import BusyError, InputError, TrainingError
from pseudoloss.experiments.catalogue import EXPERIMENTS, Cell, Experiment, home, other_pool
from pseudoloss.nn.networks import check_known
from pseudoloss.runs import Recorded, RunFolder

LEAST_MINUTES = 0.5  # with less than that left no other cell is begun
POOL = "POOL"  # stands for a pool whose place was not named

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Job:
    """A cell with a seed."""

    name: str
    folder: RunFolder
    cell: Cell
    seed: int
    source: str
    changes: dict[str, Any]  # what it changes of the preset

    @property
    def command(self) -> str:
        """What trains it, as one would type it."""
        words = ["pseudoloss", "train", self.source, "--out", str(self.folder.path)]
        words += ["--preset", self.cell.preset, "--seed", str(self.seed), "--resume"]
        for name, value in self.changes.items():
            first, *value_words = as_flag(name, value).split(" ", 1)
            words += [first, *value_words]
        return shlex.join(words)

    @property
    def state(self) -> str:
        """damaged, done, busy (another process works on it), begun or free."""
        if self.damage:
            return "damaged"
        if self.folder.finished:
            return "done"
        if self.folder.busy:
            return "busy"
        return "begun" if self.folder.config.exists() else "free"

    @property
    def damage(self) -> str:
        """What is wrong with its folder, if anything."""
        try:
            if self.folder.finished:
                finished_run(self.folder)
            else:
                self.folder.recorded()
        except InputError as error:
            return str(error)
        return ""

    def settings(self) -> Settings:
        changes = {**self.changes, "seed": self.seed}
        return request(self.cell.preset, None, changes).settings("default")

    def differences(self) -> list[tuple[str, str]]:
        """What its folder began with, and what the job wants instead."""
        recorded = None if self.damage else self.folder.recorded()
        if recorded is None:
            return []
        before = as_json(recorded.settings)
        found = [
            (as_flag(name, before[name]), as_flag(name, value))
            for name, value in as_json(self.settings()).items()
            if not same_for_a_run(name, before[name], value)
        ]
        if self.folder.finished and self._other_pool(recorded.settings.pool):
            found.insert(0, (as_flag("pool", recorded.settings.pool), f"--pool {self._pool}"))
        if kind_of(recorded.source) != kind_of(self.source):
            found.insert(0, (recorded.source, self.source))
        return found

    @property
    def _pool(self) -> str | None:
        named = self.changes.get("pool") not in (None, POOL)
        return self.settings().pool if named else None

    def _other_pool(self, before: str | None) -> bool:
        """Whether a finished run drew from another pool, by its name: on another machine the same
        pool may lie elsewhere. (Runs that are under way compare the images themselves.)"""
        if before is None or self._pool is None:
            return False
        return other_pool(self.cell, before) != other_pool(self.cell, self._pool)

    def check(self) -> None:
        """Refuse a run that began with other settings: before any write."""
        for before, wanted in self.differences()[:1]:
            raise InputError(
                f"{self.folder.path}: began with {before}, not with {wanted}; choose another --out"
            )

    def look_for_data(self, places: Mapping[str, str]) -> None:
        """Refuse data that are not where --data says."""
        kind, colon, _ = self.source.partition(":")
        if colon:
            _look(sources.check_exists, self.source, f"--data {kind}={places[kind]}", self.source)
        if self.cell.pool:
            place = self.changes["pool"]
            named = place == places[self.cell.pool]
            flag = f"--data {self.cell.pool}={place}" if named else f"--set pool={place}"
            _look(pools.check_exists, place, flag, f"--pool {place}")

    def make_room(self) -> None:
        """The folder that its own is to be in, or an error that names --out."""
        try:
            self.folder.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = error.filename or self.folder.path.parent
            raise InputError(f"--out: {place} cannot be made ({error.strerror})") from None


def check_settings(jobs: Sequence[Job]) -> None:
    """Refuse settings that are none."""
    for job in jobs:
        settings = job.settings()
        check_known(settings.network)
        if job.cell.pool and settings.pool is None:
            raise InputError(
                f"--set pool=none: {job.cell.name} needs a pool, the images that belong to no class"
            )
        corruption.check_noise(settings.corrupt, settings.pool)


def kind_of(source: str) -> tuple[str, float | None]:
    """A source without its place: its kind and, where the source says it, the share of noise."""
    kind, _, place = source.partition(":")
    try:
        return kind, float(place.rpartition(":")[2]) if kind in sources.WITH_NOISE_RATIO else None
    except ValueError:
        return kind, None


@dataclass(frozen=True)
class Finished:
    """How a finished run began and ended: its accuracy after the last epoch and in the best one,
    and what one should know before one counts it."""

    recorded: Recorded
    last: float
    best: float
    remarks: tuple[str, ...]


def finished_run(folder: RunFolder) -> Finished:
    recorded = folder.recorded()
    if recorded is None:
        raise InputError(f"{folder.config}: is missing")
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
        last, best = accuracies(summary)
        remarks = remarks_on(summary)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder.summary}: not the summary.json of a run ({error})") from None
    return Finished(recorded, last, best, remarks)


def accuracies(summary: Mapping[str, Any]) -> tuple[float, float]:
    """After the last epoch and in the best one; a ValueError where one is no percentage."""
    last, best = summary["accuracy"]["last"], summary["accuracy"]["best"]
    for value in (last, best):
        if type(value) not in (int, float) or not 0 <= value <= 100:  # NaN is neither
            raise ValueError(f"an accuracy is {shorten(repr(value))}, not a number from 0 to 100")
    return float(last), float(best)


def remarks_on(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The first sentence of every notice that a run gave."""
    return tuple(str(notice["text"]).partition(". ")[0] for notice in summary.get("notices", ()))


def _look(look_for: Callable[[str], None], place: str, flag: str, start: str) -> None:
    """Look for data; the error begins with the flag."""
    try:
        look_for(place)
    except InputError as error:
        raise InputError(f"{flag}: {str(error).removeprefix(f'{start}: ')}") from None


def plan(
    experiment: Experiment,
    out: Path,
    places: Mapping[str, str],
    *,
    seeds: Sequence[int],
    only: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Job]:
    """The jobs that are asked for: all cells of a seed, then those of the next. A place that was
    not named stays DIR, or POOL. A cell that others share is trained as its home wants it."""
    for seed in seeds:
        Settings(seed=seed)  # refuses what is no seed
    jobs = {}
    for seed in dict.fromkeys(seeds):
        for cell in experiment.choose(only):
            path = folder_of(out, cell, seed)
            kind = cell.source.partition(":")[0]
            pool = {"pool": places.get(cell.pool, POOL)} if cell.pool else {}
            jobs[path] = Job(
                f"{cell.name} seed {seed}",
                RunFolder(path),
                cell,
                seed,
                cell.source.replace("DIR", places.get(kind, "DIR"), 1),
                {**home(cell)[1].changes, **pool, **(changes or {})},
            )
    return list(jobs.values())


def folder_of(out: Path, cell: Cell, seed: int) -> Path:
    experiment, trained = home(cell)
    return out / experiment.name / trained.name / f"seed{seed}"


def folders_of(out: Path, cell: Cell) -> dict[int, RunFolder]:
    """The run folders of a cell that are there, by seed."""
    named = {
        path.name.removeprefix("seed"): RunFolder(path)
        for path in folder_of(out, cell, 0).parent.glob("seed*")
    }
    return {int(seed): named[seed] for seed in sorted(filter(str.isdecimal, named), key=int)}


def run(
    jobs: Sequence[Job],
    places: Mapping[str, str],
    *,
    minutes: float | None = None,
    quiet: bool = False,
    say: Say = print,
) -> dict[Job, str]:
    """Train what is not done yet. The state of every job afterwards.

    Settings that are none and data that are not there are refused before anything is trained. A
    cell that fails is told of at the end, when all others have been tried.
    """
    check_settings(jobs)
    for job in jobs:
        for kind in job.cell.data:
            if kind not in places:
                raise InputError(f"--data {kind}=DIR is missing: {job.cell.name} needs it")
        job.check()
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes must be above 0, not {minutes:g}")
    to_train = [job for job in jobs if job.state not in ("done", "damaged")]
    for job in {(job.source, job.cell.pool): job for job in to_train}.values():
        job.look_for_data(places)
    for job in to_train:
        choose_device(job.settings().device)
        job.make_room()
    end = None if minutes is None else time.monotonic() + 60 * minutes
    titles = {job: f"[{number}/{len(jobs)}] {job.name}" for number, job in enumerate(jobs, 1)}
    queue, again, trained = list(jobs), set(), False
    failed: dict[str, list[str]] = {}  # why, and which cells
    while queue:
        job = queue.pop(0)
        title, state = titles[job], job.state
        left = None if end is None else (end - time.monotonic()) / 60
        try:
            job.check()  # once more: another process may have begun it since
        except InputError as error:
            failed.setdefault(str(error), []).append(job.name)
            say(f"{title}: has other settings")
            continue
        if state == "done":
            say(f"{title}: done already")
            continue
        if state == "damaged":
            why = f"{job.damage}; the folder is damaged: remove or rename {job.folder.path}"
            failed.setdefault(why, []).append(job.name)
            say(f"{title}: its folder is damaged")
            continue
        if state != "busy":
            if left is not None and (left < LEAST_MINUTES if trained else left <= 0):
                say(f"{title}: no time is left for it; the same command goes on")
                break
            trained = True
            say(f"{title}: {'goes on' if state == 'begun' else 'begins'} in {job.folder.path}")
            try:
                finished = _train(job, left, quiet)
            except (InputError, TrainingError) as error:
                # Another process may have been a moment faster.
                taken = isinstance(error, BusyError) or (
                    isinstance(error, InputError) and state == "free" and job.state != "free"
                )
                if not taken:
                    failed.setdefault(str(error), []).append(job.name)
                    say(f"{title}: failed")
                    continue
            else:
                if not finished:
                    say(f"{title}: time is up; the same command goes on")
                    break
                found = finished_run(job.folder)
                say(f"{title}: done, accuracy {found.last:.2f} (best {found.best:.2f})")
                for remark in found.remarks:
                    say(f"{title}: notice: {remark}")
                continue
        if job not in again:  # at the end its process may have gone, or have only been looking
            say(f"{title}: another process works on it")
            again.add(job)
            queue.append(job)
    if failed:
        raise TrainingError("; ".join(f"{', '.join(who)}: {why}" for why, who in failed.items()))
    return {job: job.state for job in jobs}


def _train(job: Job, minutes: float | None, quiet: bool) -> bool:
    """Train a job; whether it is finished."""
    run = train(
        job.source,
        job.folder.path,
        preset=job.cell.preset,
        resume=True,
        minutes=minutes,
        quiet=quiet,
        seed=job.seed,
        **job.changes,
    )
    finished = run.finished
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return finished


# ------------------------------------------------------------------------- what the flags say


def read_places(words: Sequence[str]) -> dict[str, str]:
    """`--data KIND=PLACE`: where each kind of data lies."""
    kinds = {
        kind
        for experiment in EXPERIMENTS.values()
        for cell in experiment.cells
        for kind in cell.data
    }
    places: dict[str, str] = {}
    for word in words:
        kind, equals, place = word.partition("=")
        if not equals or not place:
            raise InputError(f"--data {word}: must be KIND=DIR, such as cifar100=data")
        if kind not in kinds:
            raise InputError(f"--data {word}: no such kind of data{did_you_mean(kind, kinds)}")
        if places.setdefault(kind, place) != place:
            raise InputError(f"--data {word}: {kind} lies in {places[kind]} already")
    return places


def read_changes(words: Sequence[str]) -> dict[str, Any]:
    """`--set NAME=VALUE`, the value as in a TOML file; text needs no quotes."""
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise InputError(f"--set {word}: must be NAME=VALUE, such as epochs=2")
        if name == "seed":
            raise InputError(f"--set {word}: seeds are chosen with --seeds")
        if name not in setting_types():
            hint = did_you_mean(name, setting_types())
            raise InputError(f"--set {word}: no such setting{hint}")
        value = as_value(name, text)
        if changes.setdefault(name, value) != value:
            raise InputError(f"--set {word}: {name} is {as_text(changes[name])} already")
    return changes


def as_value(name: str, text: str) -> Any:
    """A value of a setting as TOML has it, or the text itself; none where there may be none."""
    if text.lower() == "none" and type(None) in get_args(setting_types().get(name)):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
