"""Send the metrics of a run to TensorBoard, Weights & Biases or MLflow, beside metrics.jsonl.

Every logger works in a thread of its own, so one that fails or waits for a network neither stops
training nor slows it down. What a resumed run needs to go on in the same place is in RUN/loggers/.
"""

import json
import logging
import math
import os
import queue
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple

from pseudoloss import distributed
from pseudoloss.errors import InputError, first_line, name_hint
from pseudoloss.files import write_json

END_SECONDS = 60.0  # that a logger gets to send the rest when the run ends
KILL_SECONDS = 5.0  # ... when the run is interrupted
LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
PROJECT = "pseudoloss"  # of wandb and of MLflow, if their variables name no other

Values = dict[str, float]


@dataclass(frozen=True)
class Start:
    """What a logger knows when it opens."""

    folder: Path  # RUN/loggers
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.absolute().parent.name

    def known(self, logger: str) -> dict[str, Any]:
        """What the logger has kept: the id of its run, and the last epoch that it has."""
        try:
            found = json.loads((self.folder / f"{logger}.json").read_text(encoding="utf-8"))
            return {"id": str(found["id"]), "epoch": int(found["epoch"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def keep(self, logger: str, run: str, epoch: int) -> None:
        self.folder.mkdir(exist_ok=True)
        write_json(self.folder / f"{logger}.json", {"id": run, "epoch": epoch})


class Opened(NamedTuple):
    """An open logger."""

    epoch: Callable[[int, Values], object]  # gets every epoch that the logger does not have
    end: Callable[[dict[str, Any] | None], object]  # gets the summary; None: not finished


def read_names(log: str | Sequence[str]) -> tuple[str, ...]:
    """The loggers of --log, each with its library installed."""
    names = log.split(",") if isinstance(log, str) else list(log)
    names = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in names:
        if name not in LIBRARIES:
            raise InputError(f"--log {name}: no such logger{name_hint(name, LIBRARIES)}")
        if find_spec(LIBRARIES[name]) is None:
            raise InputError(f"--log {name}: needs {name}: pip install 'pseudoloss[{name}]'")
    return tuple(names)


class Loggers:
    """All loggers of a run. Leaving its `with` block waits for them, but not for long."""

    def __init__(
        self,
        names: Sequence[str] = (),
        start: Start | None = None,
        notice: Callable[[str], object] = print,
    ) -> None:
        """Only the main process of a distributed run logs."""
        self.notice = notice
        is_main = distributed.is_main()
        self.workers = [_Worker(name, start) for name in names] if start and is_main else []

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of an epoch."""
        for worker in self._working():
            worker.tasks.put((metrics["epoch"], flat(metrics)))

    def finish(self, summary: dict[str, Any]) -> None:
        """Log the summary of a finished run."""
        for worker in self._working():
            worker.summary = summary

    def _working(self) -> "list[_Worker]":
        """The loggers that have not failed. A failure is told once."""
        for worker in self.workers:
            if worker.failure is not None:
                self.notice(
                    f"--log {worker.name}: logging failed ({worker.failure}) and ends here; "
                    "metrics.jsonl has everything"
                )
        self.workers = [worker for worker in self.workers if worker.failure is None]
        return self.workers

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            worker.tasks.put(None)
        for worker in self.workers:
            worker.thread.join(END_SECONDS if kind is None else KILL_SECONDS)
            if worker.thread.is_alive() and kind is None:
                worker.failure = f"it takes longer than {END_SECONDS:g} seconds to send the rest"
        self._working()


class _Worker:
    """A logger and its thread."""

    def __init__(self, name: str, start: Start) -> None:
        self.name, self.start = name, start
        self.tasks: queue.SimpleQueue[tuple[int, Values] | None] = queue.SimpleQueue()
        self.summary: dict[str, Any] | None = None
        self.failure: str | None = None
        self.thread = Thread(target=self._work, name=f"log {name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            opened = OPEN[self.name](self.start)
            while (task := self.tasks.get()) is not None:
                opened.epoch(*task)
            opened.end(self.summary)
        except BaseException as error:  # libraries also raise SystemExit
            self.failure = first_line(error) if isinstance(error, Exception) else repr(error)


def flat(values: Mapping[str, Any], prefix: str = "") -> Values:
    """The finite numbers, those of inner groups under names such as detection/auc."""
    found: Values = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif type(value) in (int, float) and math.isfinite(value):
            found[f"{prefix}{name}"] = value
    return found


def result(summary: Mapping[str, Any]) -> Values:
    """The numbers of a summary, without those of single classes."""
    return flat(
        {
            name: {k: v for k, v in value.items() if k != "by_class"}
            if isinstance(value, Mapping)
            else value
            for name, value in summary.items()
        },
        "final/",
    )


# -------------------------------------------------------------------------------- the loggers


def open_tensorboard(start: Start) -> Opened:
    """Event files in RUN/loggers/tensorboard. Epochs that are repeated replace those before."""
    from torch.utils.tensorboard import SummaryWriter

    folder = start.folder / "tensorboard"
    writers: list[Any] = []

    def log(number: int, values: Values) -> None:
        if not writers:
            is_new = not folder.exists()
            writers.append(SummaryWriter(str(folder), purge_step=number))
            if is_new:
                lines = json.dumps(start.settings, indent=2).splitlines()
                writers[0].add_text("settings", "\n".join(f"    {line}" for line in lines))
        for name, value in values.items():
            writers[0].add_scalar(name, value, number)
        writers[0].flush()

    def end(summary: dict[str, Any] | None) -> None:
        if summary:
            log(summary["epochs"], result(summary))
        for writer in writers:
            writer.close()

    return Opened(log, end)


def open_wandb(start: Start) -> Opened:
    """A run of Weights & Biases; offline unless the user is logged in or sets WANDB_MODE."""
    import wandb

    known = start.known("wandb")
    run_id = known.get("id") or uuid.uuid4().hex[:12]
    start.keep("wandb", run_id, known.get("epoch", 0))
    options: dict[str, Any] = {
        "silent": True,
        "console": "off",
        "init_timeout": 60,
        "finish_timeout": 50,
    }
    fields = getattr(wandb.Settings, "model_fields", options)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", start.name),
        id=run_id,
        resume="allow",
        dir=str(start.folder),
        config=start.settings,
        mode=None if "WANDB_MODE" in os.environ or _logged_in(wandb) else "offline",
        settings=wandb.Settings(**{name: options[name] for name in options if name in fields}),
    )

    def log(number: int, values: Values) -> None:
        run.log(values, step=number)

    def end(summary: dict[str, Any] | None) -> None:
        run.summary.update(result(summary or {}))
        run.finish(exit_code=0 if summary else 1)

    return Opened(partial(_new_epochs, start, "wandb", run_id, known, log), end)


def _logged_in(wandb: Any) -> bool:
    """Whether there is a login; nobody is asked for one."""
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # an older version
        return bool(wandb.api.api_key)


def open_mlflow(start: Start) -> Opened:
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):  # after their import, which sets it
        logging.getLogger(name).setLevel(logging.WARNING)
    client, known = MlflowClient(), start.known("mlflow")
    run_id = known.get("id")
    if run_id is not None:
        client.update_run(run_id, status="RUNNING")
    else:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else client.create_experiment(name)
        run_id = client.create_run(place, run_name=start.name).info.run_id
        start.keep("mlflow", run_id, 0)
        params = [Param(name, str(value)[:500]) for name, value in start.settings.items()]
        client.log_batch(run_id, params=params)

    def log(number: int, values: Values) -> None:
        now = int(1000 * time.time())
        client.log_batch(run_id, [Metric(n, v, now, number) for n, v in values.items()])

    def end(summary: dict[str, Any] | None) -> None:
        if summary:
            log(summary["epochs"], result(summary))
        client.set_terminated(run_id, "FINISHED" if summary else "KILLED")

    return Opened(partial(_new_epochs, start, "mlflow", run_id, known, log), end)


def _new_epochs(
    start: Start,
    logger: str,
    run_id: str,
    known: Mapping[str, Any],
    log: Callable[[int, Values], object],
    number: int,
    values: Values,
) -> None:
    """Log an epoch, unless the logger has it already: a resumed run repeats what came after its
    checkpoint."""
    if number > known.get("epoch", 0):
        log(number, values)
        start.keep(logger, run_id, number)


OPEN: dict[str, Callable[[Start], Opened]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
}
