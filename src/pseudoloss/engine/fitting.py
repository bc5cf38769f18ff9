"""Settings that fit the data, and epochs that fit the time."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pseudoloss.config import Request, Settings
from pseudoloss.data import Data, ScannedSource
from pseudoloss.engine.choices import choose_device
from pseudoloss.engine.tracking import predict
from pseudoloss.engine.trainer import Trainer

STEPS = 8  # an epoch should have at least so many
UNEVEN = 2  # a class with so many times the images of another makes a set imbalanced
CPU_EPOCHS = 30  # where there is no GPU, and nobody has asked for more
UNTIMED = 5  # steps on a GPU before others are timed: compilers work in them
TIMED = 5
TRACKED = 3.0  # seconds of a tracking pass that are timed
MOST = 10_000  # epochs


class Chosen(NamedTuple):
    """The settings of a run, and those of them that were made to fit the images."""

    settings: Settings
    fitting: dict[str, Any]


def choose_settings(found: Data | ScannedSource, asked: Request) -> Chosen:
    """The settings of a new run on what was found. A source with a preset of its own keeps it."""
    usual = asked.settings(found.preset)
    fitting: dict[str, Any] = {}
    if isinstance(found, ScannedSource) and found.recipe is None:
        fitting = fit_to_data(found.counts, usual)
        if choose_device(usual.device).type == "cpu" and usual.network == Settings.network:
            fitting |= {"network": "small-cnn", "epochs": CPU_EPOCHS}
        if "network" in asked.values:
            fitting.pop("epochs", None)
    elif isinstance(found, Data) and found.preset == Data.preset and asked.preset is None:
        counts = torch.bincount(found.train.given_N).tolist()
        fitting = fit_to_data(dict(zip(found.train.classes, counts, strict=False)), usual)
    fitting = {name: value for name, value in fitting.items() if name not in asked.values}
    return Chosen(asked.settings(found.preset, fitting), fitting)


def fit_to_data(counts: Mapping[str, int], usual: Settings) -> dict[str, Any]:
    """Settings that fit so many images of each class better than a preset does."""
    found: dict[str, Any] = {}
    images, parts, batch_size = sum(counts.values()), usual.accumulate, usual.batch_size
    # Halves that still make whole parts, of two images at least.
    while images < STEPS * batch_size and batch_size % (2 * parts) == 0 and batch_size >= 4 * parts:
        batch_size //= 2
    if batch_size != usual.batch_size:
        found["batch_size"] = batch_size
    if max(counts.values()) >= UNEVEN * max(min(counts.values()), 1):
        found["balance_prior"] = "given"
    return found


class Pace(NamedTuple):
    """Seconds of the parts of an epoch, images on their way to the device included."""

    warm_up: float
    main: float
    track: float
    validate: float
    ready: float  # once a run: what the first steps take longer than others

    def of(self, settings: Settings, epochs: int) -> float:
        """Seconds of so many epochs."""
        warm_up = replace(settings, epochs=epochs, warmup=None).warmup_epochs
        if settings.warmup is not None:
            warm_up = scaled_warmup(settings, epochs)
        judged = epochs - warm_up
        return warm_up * self.warm_up + judged * (self.main + self.track) + epochs * self.validate


def scaled_warmup(settings: Settings, epochs: int) -> int:
    """A warm-up that was named, in another number of epochs."""
    named = settings.warmup_epochs
    return min(max(1, round(named * epochs / settings.epochs)), max(epochs - 1, 1))


def measure_pace(trainer: Trainer) -> Pace:
    """Time a few steps of each kind and a part of a tracking pass. The trainer is of no use
    afterwards."""
    chance = torch.Generator(trainer.device).manual_seed(0)
    trainer.order_SB.copy_(
        torch.randperm(len(trainer.pixels), generator=chance, device=trainer.device)[
            : trainer.order_SB.numel()
        ].view_as(trainer.order_SB)
    )
    untimed = UNTIMED if trainer.device.type == "cuda" else 1
    step_seconds, ready = [], 0.0
    for step in (trainer.warm_up_step, trainer.main_step):
        trainer.network.train()
        trainer._draw(chance)
        trainer.step.zero_()
        order_SB = trainer.order_SB[: untimed + TIMED]
        before = min(untimed, len(order_SB) - 1)
        begun = start = time.monotonic()
        for i, _ in enumerate(trainer.pixels.batches(order_SB)):
            step()
            trainer.loss_sum.item()  # waits for the device
            if i + 1 == before:
                start = time.monotonic()
        seconds = (time.monotonic() - start) / (len(order_SB) - before)
        step_seconds.append(seconds)
        ready += max(start - begun - before * seconds, 0)
    seen, start = 0, time.monotonic()
    for logits_BC in predict(trainer.network, trainer.views, trainer.pixels):
        logits_BC[0, 0].item()
        seen += len(logits_BC)
        if time.monotonic() - start > TRACKED:
            break
    image = (time.monotonic() - start) / seen
    test = len(trainer.data.test) if trainer.data.test else 0
    warm_up, main = (seconds * trainer.steps for seconds in step_seconds)
    return Pace(warm_up, main, image * len(trainer.pixels), image * test, ready)


def epochs_in(pace: Pace, settings: Settings, seconds: float) -> int:
    """The most epochs that take no more than so many seconds; two at least."""
    few, many = 2, 3
    while pace.of(settings, many) <= seconds and many < MOST:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if pace.of(settings, middle) <= seconds else (few, middle)
    return few
