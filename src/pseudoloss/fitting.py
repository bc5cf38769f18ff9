"""Settings that fit the data, and epochs that fit the time."""

import time
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from pseudoloss.choices import choose_device
from pseudoloss.config import Request, Settings
from pseudoloss.data import Data, Listing
from pseudoloss.session import Session
from pseudoloss.wording import WORK

STEPS = 8  # an epoch should have at least so many
UNEVEN = 2  # a class with so many times the images of another makes a set imbalanced
CPU_EPOCHS = 30  # where there is no GPU, and nobody has asked for more
MARGIN = 0.9  # of the time is planned for: an estimate can be wrong
TIMED = 5  # steps that are timed, after as many that are not


class Chosen(NamedTuple):
    """The settings of a run, and those of them that were made to fit the images."""

    settings: Settings
    fitting: dict[str, Any]


def choose_settings(found: Data | Listing, asked: Request) -> Chosen:
    """The settings of a new run on what was found."""
    usual = asked.settings(found.preset)
    if isinstance(found, Data):
        return Chosen(usual, {})
    fitting = fit_to_data(found, usual, choose_device(usual.device), asked.values)
    return Chosen(asked.settings(found.preset, fitting), fitting)


def fit_to_data(
    listing: Listing, usual: Settings, device: torch.device, asked: Collection[str] = ()
) -> dict[str, Any]:
    """Settings that fit a set of images, and the device, better than a preset does; none of those
    that were asked for."""
    found: dict[str, Any] = {}
    if device.type == "cpu" and usual.network == Settings.network and "network" not in asked:
        found |= {"network": "small-cnn", "epochs": CPU_EPOCHS}
    counts = listing.counts.values()
    batch_size = usual.batch_size
    while batch_size > 2 and sum(counts) < STEPS * batch_size:
        batch_size //= 2
    if batch_size != usual.batch_size:
        found["batch_size"] = batch_size
    if max(counts) >= UNEVEN * min(counts):
        found["balance_prior"] = "given"
    return {name: value for name, value in found.items() if name not in asked}


def epochs_in(session: Session, seconds: float) -> int:
    """How many epochs fit into so many seconds. The session is of no use afterwards."""
    settings = session.settings
    chance = torch.Generator(session.device).manual_seed(0)
    N, B = len(session.pixels), settings.batch_size
    session.order_SB.copy_(torch.arange(session.steps * B, device=session.device).view(-1, B) % N)
    session.network.train()
    step_seconds = []
    began = time.monotonic()
    for step in (session.warm_up_step, session.main_step):
        times = []
        batches = session.pixels.batches(session.order_SB[: 2 * TIMED])
        session._draw(chance)
        session.step.zero_()
        for _ in batches:
            start = time.monotonic()
            step()
            session.loss_sum.item()  # waits for the device
            times.append(time.monotonic() - start)
        step_seconds.append(min(times[len(times) // 2 :]))
    warm_up, main = (seconds * session.steps for seconds in step_seconds)
    # A pass without gradients over all images costs about a third of a warm-up epoch.
    track = warm_up / WORK["warm-up"]
    validate = track * (len(session.data.test) / N if session.data.test else 0)
    share = settings.warmup_epochs / settings.epochs
    epoch = share * warm_up + (1 - share) * (main + track) + validate
    left = MARGIN * seconds - 2 * (time.monotonic() - began)
    return max(2, int(left / epoch))
