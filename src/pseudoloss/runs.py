"""A run: its folder, and what it hands to the user."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pseudoloss import __version__
from pseudoloss.config import Settings, as_json
from pseudoloss.errors import InputError
from pseudoloss.files import to_json, write_bytes, write_json
from pseudoloss.labels import read_labels
from pseudoloss.model import Model, load_model
from pseudoloss.session import Session


@dataclass(frozen=True)
class Run:
    """What a run found out.

    Attributes:
        settings: what it was trained with.
        labels: one row an image: the label table (see docs/run-folder.md).
        metrics: one row an epoch.
        summary: the figures a script wants, as in summary.json.
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
        """Whether all epochs are done (a run may stop early with `minutes`)."""
        return bool(self.summary["epochs"] == self.settings.epochs)


def load(path: str | Path) -> Run:
    """A finished run from its folder."""
    folder = RunFolder(Path(path))
    recorded = folder.recorded()
    if recorded is None:
        raise InputError(f"{path}: not a run folder (it has no config.json)")
    if not folder.finished:
        raise InputError(f"{path}: the run is not finished; go on with pseudoloss train --resume")
    return Run(
        settings=recorded.settings,
        labels=read_labels(folder.path),
        metrics=pd.DataFrame(folder.metrics()),
        summary=json.loads(folder.summary.read_text(encoding="utf-8")),
        model=load_model(folder.path / "model.safetensors"),
        path=folder.path,
    )


@dataclass(frozen=True)
class Recorded:
    """What config.json says of a run that has begun."""

    source: str
    settings: Settings
    fingerprint: str


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
    def checkpoint(self) -> Path:
        return self.path / "checkpoint" / "last.safetensors"

    @property
    def finished(self) -> bool:
        """The summary is written last of all."""
        return self.summary.exists()

    def best(self, epoch: int) -> Path:
        return self.path / "checkpoint" / f"best-{epoch}.safetensors"

    def recorded(self) -> Recorded | None:
        """The run that has begun here, or None."""
        if not self.config.exists():
            return None
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
            return Recorded(
                source=config["source"],
                settings=Settings(**config["settings"]),
                fingerprint=config["data"]["fingerprint"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.config}: not the config.json of a run ({error})") from None

    def refuse_if_taken(self) -> None:
        """Nothing of the user's is overwritten: a new run wants a new or empty folder."""
        if self.path.is_dir() and any(self.path.iterdir()):
            kind = "holds files that are no run"
            if self.config.exists():
                kind = "holds a run already: add --resume to go on with it"
            raise InputError(f"--out {self.path}: {kind}, or choose another folder")
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path}: is a file, not a folder")

    def create(self, source: str, session: Session) -> None:
        """Begin a run: make the folder and write config.json."""
        data, settings = session.data, session.settings
        height, width = data.train.size
        config = {
            "pseudoloss": __version__,
            "source": source,
            "settings": as_json(settings),
            "data": {
                "images": len(data.train),
                "test_images": len(data.test) if data.test else 0,
                "classes": list(data.train.classes),
                "shape": [data.train.channels, height, width],
                "noise_rate": data.train.noise_rate,
                "fingerprint": data.train.fingerprint,
            },
        }
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.config, config)
        except OSError as error:
            raise InputError(f"--out {self.path}: cannot be written ({error.strerror})") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second process out. The lock goes with the process, however it ends."""
        try:
            import fcntl
        except ImportError:  # not on this system
            yield
            return
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"--out {self.path}: another process is working on this run"
                ) from None
            yield

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that a kill cut short does not count."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines

    def keep_metrics(self, epochs: int) -> None:
        """Forget lines of epochs that will be done again."""
        lines = [to_json(line) + "\n" for line in self.metrics() if line["epoch"] <= epochs]
        write_bytes(self.path / "metrics.jsonl", "".join(lines).encode())

    def add_metrics(self, line: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget_other_bests(self, epoch: int | None) -> None:
        for path in self.checkpoint.parent.glob("best-*.safetensors"):
            if epoch is None or path != self.best(epoch):
                path.unlink()

    def publish_best(self, epoch: int) -> None:
        write_bytes(self.path / "best.safetensors", self.best(epoch).read_bytes())
