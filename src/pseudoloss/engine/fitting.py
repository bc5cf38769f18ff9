"""Settings that suit the data, and a number of epochs that suits the time."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pseudoloss import distributed
from pseudoloss.auditing.timing import heads_seconds
from pseudoloss.config import EMBEDDED, Settings, scaled_schedule, scaled_warmup, setting_types
from pseudoloss.data import Data, ScannedSource
from pseudoloss.engine.trainer import Trainer
from pseudoloss.inference.passes import predict
from pseudoloss.methods import Method
from pseudoloss.nn.devices import choose_device
from pseudoloss.presets import Request, fit_to_data

CPU_EPOCHS = 30  # default without a GPU
# Defaults for photographs without a GPU. Full size pays more than epochs with a head start.
CPU_HEAD_START = {"epochs": 3}
CPU_FINETUNE = {"image_size": 128, "epochs": 10}  # without a head start
CPU_FINETUNE_BATCH = 16  # largest batch there: few epochs need many steps
UNTIMED = 5  # steps on a GPU before others are timed: they include compilation
TIMED = 5
SCORED = 3.0  # seconds of a pass over all images that are timed
MOST = 10_000  # epochs


class Chosen(NamedTuple):
    """The settings of a run, and those of them that were chosen to suit the images."""

    settings: Settings
    fitting: dict[str, Any]


def choose_settings(found: Data | ScannedSource, asked: Request) -> Chosen:
    """The settings of a new run on this data. A source with a preset of its own keeps it."""
    usual = asked.settings(found.preset)
    fitting: dict[str, Any] = {}
    if isinstance(found, ScannedSource) and found.recipe is None:
        fitting = fit_to_data(found.counts, usual)
        on_cpu = choose_device(usual.device).type == "cpu"
        if on_cpu and usual.network == Settings.network:
            fitting |= {"network": "small-cnn", "epochs": CPU_EPOCHS}
        elif on_cpu and usual.weights == EMBEDDED:
            batch_size = fitting.get("batch_size", usual.batch_size)
            fitting |= CPU_HEAD_START if usual.head_start else CPU_FINETUNE
            fitting |= {"batch_size": min(batch_size, CPU_FINETUNE_BATCH)}
        if "network" in asked.values:
            fitting.pop("epochs", None)
    elif isinstance(found, Data) and found.preset == Data.preset and asked.preset is None:
        counts = torch.bincount(found.train.given_N).tolist()
        fitting = fit_to_data(dict(zip(found.train.classes, counts, strict=False)), usual)
    fitting = {
        name: value
        for name, value in fitting.items()
        if name not in asked.values and name in setting_types(usual.method)
    }
    return Chosen(asked.settings(found.preset, fitting), fitting)


class Pace(NamedTuple):
    """Seconds of what an epoch does, copying images to the device included."""

    train: dict[str, float]  # by phase
    score: float
    validate: float
    startup: float  # once per run: how much longer the first steps take than others
    predict: float = 0.0  # one pass over all images

    def of(self, method: Method, epochs: int) -> float:
        """Seconds of a run with this method, whose phases have so many epochs together."""
        training = sum(phase.epochs * self.train[phase.name] for phase in method.phases())
        scored = sum(method.scores_after(epoch) for epoch in range(epochs))
        predicted = (epochs - scored) * self.predict  # for the label table
        return training + scored * self.score + predicted + epochs * self.validate


def with_epochs(settings: Settings, epochs: int) -> Settings:
    """The settings with another number of epochs; an explicit warm-up and the steps of the learning
    rate are scaled with it."""
    warmup = settings.warmup
    if warmup is not None:
        warmup = scaled_warmup(warmup, settings.epochs, epochs)
    schedule = scaled_schedule(settings.schedule, settings.epochs, epochs)
    return replace(settings, epochs=epochs, warmup=warmup, schedule=schedule)


def measure_pace(trainer: Trainer, timed: int = TIMED, limit: float = math.inf) -> Pace:
    """Time a few steps of each phase and part of a pass over all images, and show the progress. The
    trainer cannot be used afterwards.

    Args:
        trainer: of the run.
        timed: number of steps to time, after some that are slower.
        limit: seconds of a kind of step after which no more are timed.
    """
    what, show = "timing a few steps", trainer.reporter.progress
    parts, done = sum(map(len, trainer.steps)) + 1, 0
    show(what, 0, parts * timed)
    random = torch.Generator(trainer.device).manual_seed(0)
    untimed = UNTIMED if trainer.device.type == "cuda" else 1
    train, startup = {}, 0.0
    for phase, steps in zip(trainer.phases, trainer.steps, strict=True):
        train[phase.name] = 0.0  # also of a phase without epochs
        for prepared in steps:
            count = min(prepared.feed.steps(trainer.state), untimed + timed)
            begun, ends = time.monotonic(), []
            for i, _ in enumerate(trainer.run_steps(prepared, random, count)):
                trainer.tally.loss_sum.item()  # waits for the device
                ends.append(time.monotonic())
                show(what, done * timed + timed * (i + 1) // count, parts * timed)
                if distributed.agree(ends[-1] - begun > limit):
                    break
            before = min(untimed, len(ends) - 1)
            start = ends[before - 1] if before else begun
            seconds = (ends[-1] - start) / (len(ends) - before)
            train[phase.name] += seconds * prepared.feed.steps(trainer.state)
            startup += max(start - begun - before * seconds, 0)
            done += 1
    show("timing a pass over the images", done * timed, parts * timed)
    seen, start = 0, time.monotonic()
    for logits_BC in predict(trainer.model.network, trainer.views, trainer.images):
        logits_BC[0, 0].item()
        seen += len(logits_BC)
        if distributed.agree(time.monotonic() - start > min(SCORED, limit)):
            break
    image = (time.monotonic() - start) / seen
    test = len(trainer.data.test) if trainer.data.test else 0
    passes = trainer.method.scoring(trainer.settings.epochs - 1).passes
    show("timing a pass over the images", parts * timed, parts * timed)
    one = image * len(trainer.images)
    if trainer.settings.head_start:
        startup += one + heads_seconds(len(trainer.images), trainer.classes, trainer.device)
    return Pace(train, passes * one, image * test, startup, one)


def epochs_in(
    pace: Pace, settings: Settings, method_for: Callable[[Settings], Method], seconds: float
) -> int:
    """The most epochs that take no more than so many seconds; at least two."""

    def fits(epochs: int) -> bool:
        return pace.of(method_for(with_epochs(settings, epochs)), epochs) <= seconds

    few, many = 2, 3
    while fits(many) and many < MOST:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if fits(middle) else (few, middle)
    return few
