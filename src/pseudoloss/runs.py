"""A run: its folder, and what the user gets."""

import contextlib
import hashlib
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import torch
from torch import Tensor

from pseudoloss import claims
from pseudoloss.claims import lock_folder
from pseudoloss.config import Settings, as_json, upgrade_settings
from pseudoloss.data import Data, ReadOptions, Skipped
from pseudoloss.errors import InputError, TrainingError, first_line, reason
from pseudoloss.files import (
    as_path,
    from_safetensors,
    parse_json,
    read_checked,
    read_header,
    read_json,
    remove_drafts,
    to_json,
    verify,
    write_atomically,
    write_bytes,
    write_checked,
    write_json,
)
from pseudoloss.inference.model import Model, load_model, make_model
from pseudoloss.labels.table import read_labels, write_csv, write_labels
from pseudoloss.nn.devices import choose_device
from pseudoloss.reading import recorded_options
from pseudoloss.version import __version__

METRICS = "metrics_checksum"  # the key in summary.json of the SHA-256 of metrics.jsonl
NETWORKS = "networks."  # the names of the weights in a checkpoint start with this and their role


@dataclass(frozen=True)
class Run:
    """The results of a run.

    Attributes:
        settings: the settings it was trained with.
        labels: the label table, one row per image (see docs/run-folder.md).
        metrics: one row per epoch.
        summary: the content of summary.json.
        model: the classifier after the last epoch; `model.predict(images)`.
        path: its folder, if it has one.
    """

    settings: Settings
    labels: pd.DataFrame
    metrics: pd.DataFrame
    summary: dict[str, Any]
    model: Model
    path: Path | None = None

    @property
    def finished(self) -> bool:
        """Whether all epochs are done; a run with `minutes` may stop early."""
        return bool(self.summary["epochs"] == self.settings.epochs)


def load(path: str | Path, device: str = "cpu") -> Run:
    """Load a finished run from its folder; its model is on `device`, in float32."""
    folder = RunFolder(as_path(path, "run"))
    recorded = folder.recorded()
    if recorded is None:
        raise InputError(f"{path}: not a run folder (it has no config.json)")
    folder.refuse_unfinished()
    try:
        summary = _upgrade(read_checked(folder.summary))
        labels = read_labels(folder.path)
        rows = summary["images"] + summary.get("held_out", 0)
        if len(labels) != rows:
            raise ValueError(f"labels.csv has {len(labels)} rows, not {rows}")
        metrics = folder.metrics()
        if len(metrics) != summary["epochs"]:
            raise ValueError(
                f"metrics.jsonl has {len(metrics)} readable epochs, not {summary['epochs']}"
            )
        if summary.pop(METRICS, None) not in (None, folder.metrics_checksum()):
            raise ValueError("metrics.jsonl was changed since it was written")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: the folder of the run is damaged ({reason(error)})") from None
    return Run(
        settings=recorded.settings,
        labels=labels,
        metrics=pd.DataFrame(metrics),
        summary=summary,
        model=load_model(folder.path / "model.safetensors", choose_device(device)),
        path=folder.path,
    )


def open_model(
    path: str | Path,
    best: bool = False,
    device: str = "cpu",
    notice: Callable[[str], object] = warnings.warn,
) -> Model:
    """The model of a run folder, of an exported folder, or of a file.

    Args:
        path: the run folder, exported folder or file.
        best: the model of the epoch with the best accuracy, which only run folders have.
        device: where the model computes.
        notice: called with one line if the run is not finished; the model is then that of its last
            checkpoint, or of the best epoch so far.
    """
    place = as_path(path, "run")
    if not place.exists():
        raise InputError(f"{path}: no such run")
    folder = RunFolder(place)
    folder.refuse_audit()
    is_run = folder.config.exists()
    if best and not is_run:
        raise InputError(f"--best: {path} is not a run folder, and has only one model")
    if is_run and not folder.finished:
        return _model_so_far(folder, best, choose_device(device), notice)
    file = place if place.is_file() else place / f"{'best' if best else 'model'}.safetensors"
    if is_run:
        if best and not file.exists():
            raise InputError(
                f"--best: {path} has no best.safetensors: it had no test images, or lost it"
            )
    elif not file.exists():
        raise InputError(f"{path}: neither a run folder nor one with a model.safetensors")
    return load_model(file, choose_device(device))


def _model_so_far(
    folder: "RunFolder", best: bool, device: torch.device, notice: Callable[[str], object]
) -> Model:
    """The model in the checkpoint of a run that is not finished."""
    recorded = folder.recorded()
    if recorded is None or not folder.checkpoint.exists():
        raise InputError(f"{folder.path}: the run has no checkpoint yet")
    try:
        tensors, record = from_safetensors(folder.checkpoint, NETWORKS)
        epoch = record["best_epoch"] if best else record["epochs"]
        if "model" not in record:
            raise InputError(
                f"{folder.path}: the run is not finished, and its checkpoint is of an older "
                "version; continue it with pseudoloss train --resume"
            )
        if epoch is None:
            raise InputError(f"--best: {folder.path} has no test images, so it has no best epoch")
        if best:
            model = load_model(folder.best(epoch), device)
        else:
            roles = record["model"]["roles"]
            weights = model_weights(tensors, roles)
            model = make_model(weights, record["model"]["description"], device)
    except (OSError, TypeError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder.checkpoint}: cannot be read ({first_line(error)})") from None
    of = f"epoch {epoch} of {recorded.settings.epochs}"
    if not best and record.get("inside") is not None:
        of = f"the middle of epoch {epoch + 1} of {recorded.settings.epochs}"
    notice(f"{folder.path}: the run is not finished; this is the model of {of}")
    return model


def model_weights(tensors: Mapping[str, Tensor], roles: Sequence[str]) -> dict[str, Tensor]:
    """The weights of the model among the tensors of a checkpoint, under the model's own names.
    `roles`: of the networks that predict."""
    found = {}
    for i, role in enumerate(roles):
        prefix, member = f"{NETWORKS}{role}.", "" if len(roles) == 1 else f"{i}."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                found[member + name.removeprefix(prefix)] = tensor
    return found


@dataclass(frozen=True)
class Recorded:
    """What config.json says about a run."""

    source: str
    settings: Settings
    fingerprint: str
    options: ReadOptions
    from_python: bool = False  # the data were passed in Python; `source` is only a name for them


@dataclass(frozen=True)
class RunFolder:
    """The files of a run; docs/run-folder.md describes them."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def skipped(self) -> Path:
        return self.path / "skipped.csv"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint" / "last.safetensors"

    @property
    def previous(self) -> Path:
        """The checkpoint before the last one."""
        return self.path / "checkpoint" / "previous.safetensors"

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint.exists() or self.previous.exists()

    @property
    def checkpointed(self) -> Path:
        """An empty file, from the first checkpoint on: one that is missing later was lost."""
        return self.path / ".checkpointed"

    @property
    def finished(self) -> bool:
        """The summary is written last of all."""
        return self.summary.exists()

    @property
    def labels_record(self) -> Path:
        """Of an unfinished run: what its label table is of."""
        return self.path / "labels.json"

    @property
    def labels_epoch(self) -> int | None:
        """The epoch of the label table; None if there is no table, or if the run was killed while
        it was written."""
        try:
            if self.finished:
                return int(read_checked(self.summary)["epochs"])
            return int(read_json(self.labels_record)["epoch"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write_table(self, table: pd.DataFrame, record: dict[str, Any]) -> None:
        """The label table of an unfinished run. The old record is removed first and the new one
        written last, so that a kill never leaves a table with the record of another one."""
        self.labels_record.unlink(missing_ok=True)
        write_csv(table, self.path)
        write_json(self.labels_record, record)

    def write_final_table(self, table: pd.DataFrame) -> None:
        self.labels_record.unlink(missing_ok=True)
        write_labels(table, self.path)

    def best(self, epoch: int) -> Path:
        return self.path / "checkpoint" / f"best-{epoch}.safetensors"

    def recorded(self) -> Recorded | None:
        """The run that was started here, or None."""
        if not self.config.exists():
            return None
        self.refuse_audit()
        try:
            config = read_checked(self.config)
            return Recorded(
                source=config["source"],
                settings=Settings(**upgrade_settings(config["settings"])),
                fingerprint=config["data"]["fingerprint"],
                options=recorded_options(config.get("reading", {})),
                from_python=config.get("from_python", False) is True,
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = reason(error)
            raise InputError(f"{self.config}: not the config.json of a run ({why})") from None

    def refuse_audit(self) -> None:
        """An audit has no model."""
        if self._is_audit():
            raise InputError(
                f"{self.path}: is an audit, not a training run: it has no model; train one with "
                "pseudoloss train (in Python, pl.load opens audits)"
            )

    def _is_audit(self) -> bool:
        try:
            return bool(read_json(self.config).get("kind") == "audit")
        except (OSError, ValueError, AttributeError):
            return False  # `recorded` says what is wrong

    def refuse_unfinished(self) -> None:
        if not self.finished:
            raise InputError(
                f"{self.path}: the run is not finished; continue it with pseudoloss train --resume"
            )

    def refuse_if_taken(self) -> None:
        """A new run needs a new or empty folder: nothing is overwritten."""
        found = contents(self.path)
        if self._is_audit():
            raise InputError(f"--out {self.path}: already contains an audit: choose another folder")
        if self.config.exists():
            raise InputError(
                f"--out {self.path}: already contains a run: add --resume to continue it, "
                "or choose another folder"
            )
        # Files that a run may leave behind if it is killed while starting do not matter.
        if found - {"skipped.csv", "checkpoint"} or any((self.path / "checkpoint").glob("*")):
            refuse_other_files(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder if needed, and keep other processes out of it (see `claims`)."""
        with lock_folder(self.path, self.checkpoint.parent):
            for folder in (self.path, self.checkpoint.parent):
                remove_drafts(folder)
            yield

    @property
    def busy(self) -> bool:
        """Whether a process is working on the run. Writes nothing."""
        return claims.holder(self.path) is not None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes: a full or missing disk ends the run with one line, and so does another
        process that has taken over."""
        claims.check(self.path)
        try:
            yield
        except OSError as error:
            file = Path(error.filename or self.path).name
            raise TrainingError(
                f"--out {self.path}: cannot be written ({error.strerror or error}) at {file}; make "
                f"room or repair it, then {resume_command(self.path)} continues from the last "
                "checkpoint"
            ) from error

    def create(
        self,
        source: str,
        from_python: bool,
        data: Data,
        settings: Settings,
        options: ReadOptions,
    ) -> None:
        """Begin a run: write config.json."""
        height, width = data.train.size
        config = {
            "pseudoloss": __version__,
            "source": source,
            "from_python": from_python,
            "reading": asdict(options),
            "settings": as_json(settings),
            "data": {
                "images": len(data.train),
                "test_images": len(data.test) if data.test else 0,
                "classes": list(data.train.classes),
                "shape": [data.train.channels, height, width],
                "noise_rate": data.train.noise_rate,
                "fingerprint": data.fingerprint(),
            },
        }
        write_checked(self.config, config)

    def list_skipped(self, skipped: Sequence[Skipped]) -> None:
        """Write skipped.csv if files were skipped; delete it if none are any more."""
        if skipped:
            table = pd.DataFrame([vars(entry) for entry in skipped])
            write_atomically(self.skipped, lambda draft: table.to_csv(draft, index=False))
        else:
            self.skipped.unlink(missing_ok=True)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, up to one that was cut short by a kill."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines: list[dict[str, Any]] = []
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = _upgrade(parse_json(text))
                if line["epoch"] != len(lines) + 1:
                    break
            except (ValueError, KeyError, TypeError):
                break
            lines.append(line)
        return lines

    def write_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write metrics.jsonl anew: without the lines of epochs that will be repeated."""
        text = "".join(to_json(line) + "\n" for line in lines)
        write_bytes(self.path / "metrics.jsonl", text.encode())

    def metrics_checksum(self) -> str:
        return hashlib.sha256((self.path / "metrics.jsonl").read_bytes()).hexdigest()

    def add_metrics(self, line: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget_other_bests(self, epoch: int | None) -> None:
        """Remove the models of all epochs but this one, and that to which the previous checkpoint
        refers."""
        kept = {epoch}
        with contextlib.suppress(ValueError, AttributeError):
            kept.add(read_header(self.previous).get("best_epoch"))
        for path in self.checkpoint.parent.glob("best-*.safetensors"):
            if path not in {self.best(number) for number in kept if number is not None}:
                path.unlink()

    def lost_best(self, epoch: int | None) -> str | None:
        """Why the model of the best epoch cannot be used."""
        if epoch is not None:
            try:
                verify(self.best(epoch))
            except ValueError as error:
                return f"{self.best(epoch)}: {error}"
        return None

    def publish_best(self, epoch: int) -> None:
        write_bytes(self.path / "best.safetensors", self.best(epoch).read_bytes())

    def tidy(self, best_epoch: int | None) -> None:
        """Of a finished run: remove what only an unfinished one needs."""
        for path in (self.previous, self.damaged, self.checkpointed):
            path.unlink(missing_ok=True)
        self.forget_other_bests(best_epoch)

    @property
    def damaged(self) -> Path:
        """A checkpoint that could not be read, and instead of which the one before was used."""
        return self.path / "checkpoint" / "damaged.safetensors"


def resume_command(path: Path) -> str:
    return f"pseudoloss train --out {shlex.quote(str(path))} --resume"


def contents(path: Path) -> set[str]:
    """Names of what is in the folder --out names, if it exists; without the lock and the drafts
    that a killed process leaves behind."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--out {path}: is a file, not a folder")
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    return {name for name in names if not name.endswith(".draft")} - {".lock"}


def refuse_other_files(path: Path) -> NoReturn:
    raise InputError(f"--out {path}: contains other files; choose another folder")


# Names in the metrics and the summary of a run of version 0.1.
_RENAMED = {"guesses": "pseudo_labels", "learnt": "learned", "look": "review", "track": "score"}


def _upgrade(record: dict[str, Any]) -> dict[str, Any]:
    """Metrics or a summary, under the names of this version."""

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {_RENAMED.get(name, name): value for name, value in values.items()}

    record = renamed(dict(record))
    for name in ("actions", "bias", "metrics", "seconds"):
        if isinstance(record.get(name), dict):
            record[name] = renamed(record[name])
    return record
