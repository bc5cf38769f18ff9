"""Everything of a run that is on the device, and what happens to it in an epoch.

Shapes: N images, M held out, S steps, B images in a batch, C classes, K random numbers per image.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pseudoloss import distributed, methods
from pseudoloss.config import OWN, Settings
from pseudoloss.data import Data, ImageFiles, ImageSet
from pseudoloss.data.storage import DeviceImages, choose_place, place
from pseudoloss.engine.building import (
    build_model,
    build_networks,
    build_views,
    reset_head,
)
from pseudoloss.engine.capture import Call, Result, capture, compiled
from pseudoloss.engine.feed import Feed, Place
from pseudoloss.engine.first_audit import FirstAudit
from pseudoloss.engine.history import History
from pseudoloss.engine.optimisers import build_optimiser, reset
from pseudoloss.engine.randomness import (
    generator,
    layer_states,
    set_layer_states,
    stream_seed,
)
from pseudoloss.engine.schedules import learning_rate
from pseudoloss.engine.scoring import ImageScorer
from pseudoloss.engine.steps import Tally, make_step
from pseudoloss.errors import InputError
from pseudoloss.inference.passes import predict, project, with_rows
from pseudoloss.methods.base import Phase, Scoring, Step, Verdict, check_declarations
from pseudoloss.methods.metrics import knn_predict
from pseudoloss.nn.devices import can_fuse, choose_device, reset_peak_memory
from pseudoloss.nn.sync_norm import separate_norms, synchronise_norms
from pseudoloss.nn.views import WEAK_DRAWS
from pseudoloss.progress import Reporter

# Pixels in a batch. Up to this many, one thread on the CPU: where the cores are shared, several
# threads wait for each other longer than they work (docs/design.md).
TINY = 2**13


class Prepared(NamedTuple):
    """A step, its batches, and the call that runs it."""

    step: Step
    feed: Feed
    call: Call[None]


class Inside(NamedTuple):
    """The middle of an epoch: what a checkpoint there holds beside that of a whole epoch."""

    entry: int  # which of the steps of the phase
    done: int  # steps of the epoch, of all entries
    place: Place  # in the epoch of the present entry
    tally: Tally
    layers: dict[str, Tensor]  # random numbers inside networks


class Trainer:
    """Images, networks, optimisers and the state of a method, and the steps that change them."""

    def __init__(
        self, data: Data, settings: Settings, reporter: Reporter, resumed: bool = False
    ) -> None:
        """`resumed`: a checkpoint will replace the initial weights."""
        if len(data.train) < settings.batch_size:
            raise InputError(
                f"--batch-size {settings.batch_size} is larger than the dataset "
                f"({len(data.train)} images in {data.name})"
            )
        self.data, self.settings, self.reporter = data, settings, reporter
        self.device = choose_device(settings.device)
        reset_peak_memory(self.device)
        height, width = data.train.size
        if self.device.type == "cpu" and settings.batch_size * height * width <= TINY:
            torch.set_num_threads(1)
        self.accelerate = settings.accelerate if self.device.type == "cuda" else "off"
        self.classes = len(data.train.classes)
        self.given_N = data.train.given_N.to(self.device)

        self.views = build_views(data, settings, self.device)
        self.weak_is_plain = self.views.weak_is_plain(data.train.size)
        self.method = methods.build(settings, self.given_N, self.classes, self.weak_is_plain)
        self.networks = build_networks(self.method, data, settings, self.device, resumed)
        self.model = build_model(self.method, self.networks, self.views, data, settings)
        self._accelerate_networks()
        self.synced = distributed.size() > 1 and settings.sync_norm
        for network in self.networks.values() if self.synced else ():
            network.synced = True
            synchronise_norms(network)
        self.images = self._place(data.train, "images")
        self.test_images = None if data.test is None else self._place(data.test, "test images")
        self.history = self._history(self.images)
        held_out = self.test_images if data.noisy_test else None
        self.held_out_history = None if held_out is None else self._history(held_out)
        self.first_audit = (
            FirstAudit.empty(len(self.images), self.device) if settings.head_start else None
        )
        self.state = self.method.start(self.given_N, self.classes)
        self.lr = torch.tensor(settings.lr, device=self.device)
        self.optimisers = {
            role: build_optimiser(self.networks[role], settings, self.lr)
            for role in self.method.networks
        }
        self.tally = Tally.on(self.device)
        self.after_step: Callable[[], None] = lambda: None
        self.inside: Inside | None = None  # where an interrupted epoch is resumed
        self.accuracy: float | None = None  # on the test images, if it was measured since a step
        self.done = 0  # steps of the epoch
        self.epoch_began = 0.0  # time.monotonic()
        self.first_step_at: float | None = None  # when the first step, with compilation, was done

        self.phases = self.method.phases()
        check_declarations(self.method, settings.epochs)
        self.feeds: dict[Any, Feed] = {}
        self._prepared: dict[Any, Prepared] = {}
        self.steps = [
            [self._prepare(step, phase) for step in phase.steps if phase.epochs]
            for phase in self.phases
        ]
        self._scorings: dict[Scoring, Call[None]] = {}
        self._storing: set[Scoring] = set()  # scorings that store predictions in the history
        self._weak_draws = {0: torch.zeros(len(self.images), 0, device=self.device)}  # by views
        self._weak_draws_NK = self._weak_draws[0]
        self._validation = self._make_validation(self.model.network, self.held_out_history)
        self._other_validations = {
            role: self._make_validation(self.networks[role]) for role in self.method.validated
        }

    # ------------------------------------------------------------------------------- training

    def phase_of(self, epoch: int) -> tuple[int, int]:
        """Which phase an epoch (counted from 0) belongs to, and its number there."""
        for number, phase in enumerate(self.phases):
            if epoch < phase.epochs:
                return number, epoch
            epoch -= phase.epochs
        raise IndexError("no such epoch")

    def phase(self, epoch: int) -> Phase:
        return self.phases[self.phase_of(epoch)[0]]

    def learning_rate(self, epoch: int, step: Step | None = None) -> float:
        """Of a step, which may have its own; or of the first step of the epoch."""
        number, inside = self.phase_of(epoch)
        own = (step or self.phases[number].steps[0]).lr
        return learning_rate(self.settings, epoch) if own is None else own(inside)

    def steps_in(self, epoch: int) -> int:
        return sum(feed.steps(self.state) for _, feed, _ in self.steps[self.phase_of(epoch)[0]])

    def train_epoch(self, epoch: int) -> float:
        """All steps of an epoch, or those that are left of it; the mean loss, NaN where a weight is
        not finite or no step could be used."""
        random = generator(self.device, self.settings.seed, "epoch", epoch)
        # For dropout and the like in timm's networks.
        own = "layers" if distributed.is_main() else f"layers {distributed.rank()}"
        torch.manual_seed(stream_seed(self.settings.seed, own, epoch))
        number, epoch_in_phase = self.phase_of(epoch)
        first, place, self.done, self.accuracy = 0, None, 0, None
        self.epoch_began = time.monotonic()
        if self.inside is None:
            if epoch_in_phase == 0:
                self._begin_phase(self.phases[number], epoch)
            self.method.begin_epoch(self.state, epoch)
            self.tally.loss_sum.zero_()
            self.tally.skipped.zero_()
            self.tally.idle.zero_()
        else:
            first, place, self.done = self._go_inside(self.inside)
        self.inside = None
        for entry, prepared in enumerate(self.steps[number][first:], first):
            self.lr.fill_(self.learning_rate(epoch, prepared[0]))
            for _ in self.run_steps(prepared, random, place=place):
                self.done += 1
                self.first_step_at = self.first_step_at or time.monotonic()
                self.reporter.step()
                self._now = (entry, prepared[1], random)
                self.after_step()
            place = None
        if not self.synced:  # every process has running statistics of its own
            networks = self.networks.values()
            buffers = [buffer for network in networks for buffer in network.buffers()]
            distributed.average([buffer for buffer in buffers if buffer.is_floating_point()])
        # The effect of the last step on the weights shows in no loss.
        weights = [p.detach() for role in self.optimisers for p in self.networks[role].parameters()]
        finite = torch.nn.utils.get_total_norm(weights).isfinite()
        used = self.done - self.skipped_steps() - int(self.tally.idle)
        return torch.where(finite, self.tally.loss_sum / used, math.nan).item()

    def skipped_steps(self) -> int:
        """How many steps of the epoch were skipped so far. Waits for the device."""
        return int(self.tally.skipped)

    def where_inside(self) -> "Inside":
        """Where the epoch is, after a step."""
        entry, feed, random = self._now
        return Inside(entry, self.done, feed.place(random), self.tally, layer_states(self.device))

    def _go_inside(self, inside: "Inside") -> tuple[int, Place, int]:
        for tensor, value in zip(self.tally, inside.tally, strict=True):
            tensor.copy_(value)
        set_layer_states(self.device, inside.layers)
        return inside.entry, inside.place, inside.done

    def run_steps(
        self,
        prepared: Prepared,
        random: torch.Generator,
        limit: int | None = None,
        place: Place | None = None,
    ) -> Iterator[None]:
        """The steps of an epoch, or the first `limit`, or those after `place`, one by one."""
        for network in self.networks.values():
            network.train()
        step, feed, call = prepared
        for _ in feed.batches(step, self.state, random, limit, place):
            call()
            yield

    def _begin_phase(self, phase: Phase, epoch: int) -> None:
        for number, (role, optimiser) in enumerate(self.optimisers.items()):
            if phase.reset_optimiser:
                reset(optimiser)
            if phase.reset_head:
                seed = stream_seed(self.settings.seed, f"head {number}", epoch)
                reset_head(self.networks[role], seed)

    def _prepare(self, step: Step, phase: Phase) -> Prepared:
        """A step with its batches and the call that runs it; phases share what is the same. Steps
        that differ in their learning rate alone are captured once."""
        key = (replace(step, lr=None), phase.batch_size)
        if key not in self._prepared:
            self._prepared[key] = self._make_prepared(step, phase)
        return self._prepared[key]._replace(step=step)

    def _make_prepared(self, step: Step, phase: Phase) -> Prepared:
        feed = self._feed(step, phase)
        call = make_step(
            step,
            feed,
            self.networks,
            self.optimisers,
            self.method.ema,
            self.views,
            self.state,
            self.tally,
            self.accelerate,
            self.reporter.notice,
            self._plain_networks,
        )
        return Prepared(step, feed, call)

    def _feed(self, step: Step, phase: Phase) -> Feed:
        """One for all steps with the same batches; it draws as many random numbers as any needs."""
        batch_size = phase.batch_size or self.settings.batch_size
        key = (step.streams, batch_size)
        if key not in self.feeds:
            every = [step for phase in self.phases for step in phase.steps]
            self.feeds[key] = Feed(
                self.images,
                self.given_N,
                step.streams,
                batch_size,
                self.settings.accumulate,
                max(other.draws for other in every),
                max(len(other.lambdas) for other in every),
            )
        return self.feeds[key]

    # -------------------------------------------------------------------- scoring all images

    def score(self, epoch: int) -> None:
        """Score all images after an epoch, as the method does."""
        scoring = self.method.scoring(epoch)
        self._draw_weak_views(scoring, epoch)
        if scoring not in self._scorings:
            self._scorings[scoring] = self._make_scoring(scoring)
        if self.history:
            self.history.stored = False
        self._scorings[scoring]()
        if self.history and self.history.stored:  # once captured, it is stored without Python
            self._storing.add(scoring)

    def store_predictions(self, epoch: int) -> None:
        """Store the predictions after an epoch, if its scoring has not done so."""
        scored = self.method.scores_after(epoch) and self.method.scoring(epoch) in self._storing
        if self.history and not scored:
            network = self.model.network
            for rows, logits_BC in with_rows(predict(network, self.views, self.images)):
                self.history.store(rows, logits_BC)

    def add_predictions(self, accuracy: float | None) -> None:
        """Add the stored predictions to those of the epochs before."""
        for history in (self.history, self.held_out_history):
            if history:
                history.add(accuracy)

    def restore_predictions(self) -> None:
        """Store the predictions of the restored networks. A checkpoint has only their sum."""
        for history, images in (
            (self.history, self.images),
            (self.held_out_history, self.test_images),
        ):
            if history and images is not None:
                for rows, logits_BC in with_rows(predict(self.model.network, self.views, images)):
                    history.store(rows, logits_BC)

    def compare(self, epoch: int, true_N: Tensor) -> dict[str, Any]:
        """More metrics of an epoch; see `Method.compare`."""
        scoring = self.method.scoring(epoch)
        if not self.method.scores_after(epoch):
            self._draw_weak_views(scoring, epoch)
            self.method.score(self.scorer(), self.state)
        return self.method.compare(self.scorer(), self.state, true_N, epoch)

    def scorer(self) -> ImageScorer:
        """Asks about the training images."""
        return ImageScorer(
            self.model.network,
            self.networks,
            self.views,
            self.images,
            self.given_N,
            self.classes,
            self.weak_is_plain,
            lambda K: self._weak_draws_NK[:, :K],
            self.history,
        )

    def verdict(self, epoch: int) -> Verdict:
        return self.method.verdict(self.state, epoch)

    def validate(self) -> float | None:
        """Accuracy on the test images, where there are any."""
        test = self.data.test
        self.accuracy = None if test is None else 100 * int(self._validation()) / len(test)
        return self.accuracy

    def other_accuracies(self) -> dict[str, float]:
        """Accuracy of the other networks that the method wants to be validated, by role."""
        test = self.data.test
        if test is None:
            return {}
        return {
            role: 100 * int(validation()) / len(test)
            for role, validation in self._other_validations.items()
        }

    def knn_accuracy(self) -> float | None:
        """Accuracy of a k-nearest-neighbour vote on the test images, if there are any (row 24)."""
        if self.test_images is None or self.data.test is None:
            return None
        network = self.model.network
        features_ND = project(network, self.views, self.images)
        asked_MD = project(network, self.views, self.test_images)
        predicted_M = knn_predict(asked_MD, features_ND, self.given_N, self.classes)
        right = (predicted_M == self.data.test.given_N.to(self.device)).sum()
        return 100 * int(right) / len(predicted_M)

    def lost_files(self) -> list[str]:
        """Files that can no longer be read; black images are used instead."""
        sets = ((self.images, self.data.train), (self.test_images, self.data.test))
        return [
            dataset.paths[i]
            for images, dataset in sets
            if images is not None and dataset is not None and dataset.paths is not None
            for i in _of_all_processes(images.lost)
        ]

    def _draw_weak_views(self, scoring: Scoring, epoch: int) -> None:
        """Random numbers for the weak views of all images. A tensor for each number of views, so
        that the numbers do not depend on how many views were asked for in earlier epochs."""
        views = max(scoring.weak_views, int(self.settings.compare_metrics))
        if views not in self._weak_draws:
            shape = (len(self.images), views * WEAK_DRAWS)
            self._weak_draws[views] = torch.zeros(shape, device=self.device)
        self._weak_draws_NK = self._weak_draws[views]
        random = generator(self.device, self.settings.seed, "tracking", epoch)
        self._weak_draws_NK.uniform_(generator=random)

    def _make_scoring(self, scoring: Scoring) -> Call[None]:
        @torch.no_grad()
        def run() -> None:
            scoring.run(self.scorer(), self.state)

        plain = self.images.streamed or not scoring.fixed_shapes
        return run if plain else self._captured(run, "scoring of all images")

    def _make_validation(self, network: Any, history: History | None = None) -> Call[Tensor]:
        """Counts the test images that a network classifies as labelled."""
        test, images = self.data.test, self.test_images
        if test is None or images is None:
            return lambda: torch.tensor(0)
        given_M = test.given_N.to(self.device)

        def validation() -> Tensor:
            predicted = []
            for rows, logits_BC in with_rows(predict(network, self.views, images)):
                predicted.append(logits_BC.argmax(1))
                if history:
                    history.store(rows, logits_BC)
            return (torch.cat(predicted) == given_M).sum()

        return validation if images.streamed else self._captured(validation, "validation")

    # ------------------------------------------------------------------------------ the device

    def _captured(self, call: Call[Result], what: str) -> Call[Result]:
        if self.accelerate == "off":
            return call
        notice = self.reporter.notice
        return capture(
            call,
            lambda reason: notice(f"the {what} could not be captured and runs slower ({reason})"),
        )

    def _accelerate_networks(self) -> None:
        """Our own networks compute with fused kernels; others can be compiled."""
        if self.accelerate not in ("auto", "full"):
            return
        torch.compiler.reset()  # torch compiles a function only so often in one process
        own = self.settings.network in OWN
        for network in self.networks.values():
            network.fused = own and can_fuse(self.device)
            if self.accelerate == "full" and not own:
                backbone = network.backbone
                backbone.forward = compiled(backbone.forward, whole=False)

    def _plain_networks(self) -> None:
        for network in self.networks.values():
            network.fused = False
            vars(network.backbone).pop("forward", None)

    def _history(self, images: DeviceImages) -> History | None:
        fits = History.fits(len(images), self.classes)
        return History(len(images), self.classes, self.device) if fits else None

    def _place(self, dataset: ImageSet, what: str) -> DeviceImages:
        """Put the images where the settings want them, and say where if that was not asked for."""
        where = self.settings.images
        if distributed.active() and not isinstance(dataset.images_NCHW, ImageFiles):
            where = choose_place(dataset.images_NCHW.nbytes, self.device, where)
            where = distributed.from_main(where)  # the same in all processes
        images = place(dataset.images_NCHW, self.device, where)
        images.shared = distributed.active()
        size = dataset.images_NCHW.nbytes / 2**30
        if self.settings.images != "auto":
            return images
        if isinstance(dataset.images_NCHW, ImageFiles):
            self.reporter.say(
                f"The {what} ({size:.1f} GiB) do not fit into memory: files are decoded again in "
                "every epoch."
            )
        elif images.streamed:
            self.reporter.say(
                f"The {what} ({size:.1f} GiB) stay in host memory and are copied batch by batch: "
                "on the device they would leave too little room for training."
            )
        return images

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the device: all but the networks, which stay as they were built."""
        self._plain_networks()
        for trained in self.networks.values():
            trained.synced = False
            separate_norms(trained)
        for network in (*self.networks.values(), self.model.network):  # the last may be an ensemble
            network.eval()
        for optimiser in self.optimisers.values():
            optimiser.zero_grad(set_to_none=True)
        vars(self).clear()


def _of_all_processes(lost: frozenset[int]) -> list[int]:
    """Images are decoded by different processes."""
    return sorted({i for found in distributed.all_values(sorted(lost)) for i in found})
