"""How long training will take on this machine."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pseudoloss.auditing.timing import heads_seconds
from pseudoloss.config import Settings
from pseudoloss.data import Data, ImageSet, ScannedSource
from pseudoloss.data.decoding import Reader, UnreadableError
from pseudoloss.data.loops import for_each, no_progress
from pseudoloss.engine.choices import choose_reader
from pseudoloss.engine.fitting import UNTIMED, measure_pace
from pseudoloss.engine.randomness import isolated_torch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.training import memory_errors
from pseudoloss.errors import InputError
from pseudoloss.nn.devices import choose_device, using
from pseudoloss.progress import SilentReporter
from pseudoloss.reading import ReadOptions

TIMED = 2  # steps of each kind, if they are not slow
LIMIT = 2.5  # seconds for each kind of step
PASSES = 2  # over the training images in an epoch: training and scoring


def training_seconds(
    found: Data | ScannedSource, settings: Settings, options: ReadOptions, from_files: bool = False
) -> float:
    """About how many seconds a run takes. A few steps on some of the images are timed, with random
    weights.

    Args:
        found: the source.
        settings: of the run.
        options: how the source is read.
        from_files: whether images are decoded again in every epoch.

    Raises:
        InputError: too few images can be read, or the settings do not suit them.
        TrainingError: the device is too small.
    """
    images, test = len(found.train), 0 if found.test is None else len(found.test)
    wanted = min((UNTIMED + TIMED) * settings.batch_size, images)
    chosen = np.linspace(0, images - 1, wanted).round().astype(int).tolist()
    reading = 0.0
    if isinstance(found, ScannedSource):
        reader, seen = choose_reader(found, settings, options.fit)
        start = time.monotonic()
        data = Data(found.name, _read(found, chosen, reader), image_size=seen)
        image = (time.monotonic() - start) / wanted
        reading = image * (images + test)
        if from_files:
            reading += image * settings.epochs * (PASSES * images + test)
    else:
        data = replace(found, train=_select(found.train, chosen), test=None, noisy_test=False)
    head = settings.head_start
    # Without weights: as quick, and nothing is downloaded.
    settings = replace(settings, weights=None, head_start=False)
    with using(choose_device(settings.device)), isolated_torch(), memory_errors(settings):
        start = time.monotonic()
        with Trainer(data, settings, SilentReporter()) as trainer:
            built = time.monotonic() - start
            pace = measure_pace(trainer, TIMED, LIMIT)
            training = pace.of(trainer.method, settings.epochs)
            startup = pace.startup
            if head:
                startup += heads_seconds(images, trainer.classes, trainer.device)
    tests = (settings.epochs * test + head * images) * pace.predict
    return reading + built + startup + (training * images + tests) / len(data.train)


def _read(source: ScannedSource, chosen: Sequence[int], reader: Reader) -> ImageSet:
    """Some of the training images, as far as they can be decoded."""
    entries = [source.train.paths[i] for i in chosen]
    found = for_each(entries, reader.read, "reading images", no_progress)
    kept = [i for i, pixels in enumerate(found) if not isinstance(pixels, UnreadableError)]
    if not kept:
        raise InputError("none of the images that were tried can be read")
    index = {label: i for i, label in enumerate(source.classes)}
    given_N = torch.tensor([index[source.train.labels[chosen[i]]] for i in kept])
    images_NCHW = torch.from_numpy(np.stack([found[i] for i in kept]))
    return ImageSet(images_NCHW, given_N, source.classes)


def _select(images: ImageSet, chosen: Sequence[int]) -> ImageSet:
    if not isinstance(images.images_NCHW, Tensor):
        raise InputError("the images are not in memory")
    return ImageSet(
        images.images_NCHW[chosen],
        images.given_N[chosen],
        images.classes,
        superclasses=images.superclasses,
    )
