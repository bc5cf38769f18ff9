"""Settings that fit the data, and epochs that fit the time."""

import time
from typing import Any

import torch

from pseudoloss.config import Request, Settings
from pseudoloss.data import Data, Listing
from pseudoloss.session import Session
from pseudoloss.wording import WORK

STEPS = 8  # an epoch should have at least so many
UNEVEN = 2  # a class with so many times the images of another makes a set imbalanced
MARGIN = 0.9  # of the time is planned for: an estimate can be wrong
TIMED = 5  # steps that are timed, after as many that are not


def choose_settings(found: Data | Listing, asked: Request) -> Settings:
    """The settings of a new run on what was found."""
    if isinstance(found, Data):
        return asked.settings(found.preset)
    usual = asked.settings(found.preset)
    return asked.settings(found.preset, fit_to_data(found, usual))


def fit_to_data(listing: Listing, usual: Settings) -> dict[str, Any]:
    """Settings that fit a set of images better than a preset does."""
    found: dict[str, Any] = {}
    counts = listing.counts.values()
    batch_size = usual.batch_size
    while batch_size > 2 and sum(counts) < STEPS * batch_size:
        batch_size //= 2
    if batch_size != usual.batch_size:
        found["batch_size"] = batch_size
    if max(counts) >= UNEVEN * min(counts):
        found["balance_prior"] = "given"
    return found


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
