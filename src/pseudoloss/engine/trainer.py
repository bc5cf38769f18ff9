"""A training trainer: everything on the device, and what happens in one epoch.

Shapes: N images, M held out, B in a batch (of P parts, b in each), S steps, C classes, K random
numbers an image.
"""

import math
import time
import zlib
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pseudoloss import methods
from pseudoloss.config import OWN, Settings
from pseudoloss.data import Data, ImageFiles, ImageSet
from pseudoloss.data.storage import ConcatImages, DeviceImages, ImageParts, place
from pseudoloss.engine.capture import Call, Failed, Result, capture, compiled, first_try
from pseudoloss.engine.choices import (
    can_fuse,
    choose_device,
    choose_normalisation,
    choose_padding,
    choose_precision,
    choose_size,
)
from pseudoloss.engine.tracking import (
    NEEDS_NO_PASS,
    Stages,
    guess,
    judge,
    look,
    noise_metrics,
    of_guesses,
    predict,
    project,
    trust_by_pseudo_loss,
)
from pseudoloss.errors import InputError
from pseudoloss.inference.model import Description, Model
from pseudoloss.methods import Batch, Outputs, Part, ViewBatch, metrics, pls
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import Mixture
from pseudoloss.nn import networks
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import WEAK_DRAWS, Views
from pseudoloss.progress import Reporter

BLOCK = 64  # steps whose random numbers are drawn at once

# Pixels in a batch. Up to here one thread on the CPU: where the cores are shared, several wait for
# each other longer than they work (docs/design.md).
TINY = 2**13


class Trainer:
    """Images, network, optimiser and memory of a run, and the steps that move them."""

    def __init__(
        self, data: Data, settings: Settings, reporter: Reporter, resumed: bool = False
    ) -> None:
        """`resumed`: a checkpoint will take the place of the weights that a network starts from."""
        B, C = settings.batch_size, len(data.train.classes)
        parts = settings.accumulate
        if len(data.train) < B:
            raise InputError(
                f"--batch-size {B} is larger than the set ({len(data.train)} images of {data.name})"
            )
        self.data, self.settings, self.reporter = data, settings, reporter
        self.device = choose_device(settings.device)
        height, width = data.train.size
        if self.device.type == "cpu" and B * height * width <= TINY:
            torch.set_num_threads(1)
        self.accelerate = settings.accelerate if self.device.type == "cuda" else "off"
        self.model = build_model(data, settings, self.device, resumed)
        self.network, self.views = self.model.network, self.model.views
        self._accelerate_network()
        self.pixels = self._place(data.train, "images")
        self.given_N = data.train.given_N.to(self.device)
        self.memory = Memory.of(self.given_N, C)
        self.method = methods.build(settings, self.given_N, C)
        self.lr = torch.tensor(settings.lr, device=self.device)
        self.optimiser = torch.optim.SGD(
            self.network.parameters(),
            lr=self.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            fused=self.device.type != "mps",
        )
        # From the start, also for a head whose first gradient comes after the warm-up: zeros make
        # the same first step as none, and a captured step and a checkpoint find the tensors there.
        for parameter in self.network.parameters():
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        # What changes from step to step lies in tensors that are filled in place, so that a step
        # can be captured: the order of the images, the number of the step, and random numbers for
        # as many steps as BLOCK.
        self.order_SB = torch.zeros(self.steps, B, dtype=torch.long, device=self.device)
        self.step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.draws_SBK = torch.zeros(BLOCK, B, self.method.draws, device=self.device)
        self.partner_SPb = torch.zeros(
            BLOCK, parts, B // parts, dtype=torch.long, device=self.device
        )
        self.lam_SP = torch.ones(BLOCK, parts, device=self.device)
        self.loss_sum = torch.zeros((), device=self.device)
        self.begun: float | None = None  # when the first step was done: compiling is part of it
        self.warm_up_step = self._step(self.method.warm_up)
        self.main_step = self._step(self.method)
        self.weak_draws_NK = self._room_for_weak_draws()
        self.tracking = {judge: self._tracking(judge) for judge in (False, True)}
        self.test_pixels = None if data.test is None else self._place(data.test, "test images")
        self.validation = self._validation()

    @property
    def steps(self) -> int:
        """Steps in an epoch. The images of the last, incomplete batch wait for another epoch; the
        order is drawn anew each time."""
        return len(self.pixels) // self.settings.batch_size

    def in_warm_up(self, epoch: int) -> bool:
        return epoch < self.settings.warmup_epochs

    def judges_guesses(self, epoch: int) -> bool:
        """Whether stage 2 runs after an epoch: from the first one that left guesses (row 11)."""
        return self.method.guess is not None and not self.in_warm_up(epoch)

    def train_epoch(self, epoch: int) -> float:
        """All steps of an epoch (counted from 0); its mean loss, NaN where the weights are."""
        seed = self.settings.seed
        chance = torch.Generator(self.device).manual_seed(stream_seed(seed, "epoch", epoch))
        torch.manual_seed(stream_seed(seed, "layers", epoch))  # dropout and its like, in timm
        self.lr.fill_(learning_rate(self.settings, epoch))
        self.loss_sum.zero_()
        self.step.zero_()
        self.network.train()
        step = self.warm_up_step if self.in_warm_up(epoch) else self.main_step
        order_N = torch.randperm(len(self.pixels), generator=chance, device=self.device)
        self.order_SB.copy_(order_N[: self.order_SB.numel()].view_as(self.order_SB))
        for i, _ in enumerate(self.pixels.batches(self.order_SB)):
            if i % BLOCK == 0:
                self._draw(chance)
            step()
            self.begun = self.begun or time.monotonic()
            self.reporter.step()
        # What the last step did to the weights shows in no loss.
        weights = [parameter.detach() for parameter in self.network.parameters()]
        sound = torch.nn.utils.get_total_norm(weights).isfinite()
        return torch.where(sound, self.loss_sum / self.steps, math.nan).item()

    def tracks(self, epoch: int) -> bool:
        """Whether an epoch ends with a tracking pass: from the last of the warm-up on (row 11)."""
        return epoch >= self.settings.warmup_epochs - 1

    def track(self, epoch: int) -> Stages:
        """The tracking pass after an epoch."""
        self._draw_weak_views(epoch)
        return self.tracking[self.judges_guesses(epoch)]()

    def look(self, epoch: int) -> None:
        """The tracking pass without its verdicts, for metrics of an epoch that needs none."""
        self._draw_weak_views(epoch)
        look(self.network, self.views, self.pixels, self.given_N, self.memory)

    def _draw_weak_views(self, epoch: int) -> None:
        if len(self.weak_draws_NK):
            seed = stream_seed(self.settings.seed, "tracking", epoch)
            chance = torch.Generator(self.device).manual_seed(seed)
            self.weak_draws_NK.uniform_(generator=chance)

    def judge_held_out(self, epoch: int) -> tuple[ImageSet, Memory] | None:
        """The images that were held out and whose labels may be wrong, if there are any, and what
        there is to remember of them after an epoch.

        They are judged together with the images that were trained on: alone they may be few, and
        their losses are not those of labels that the network has seen.
        """
        test, pixels = self.data.test, self.test_pixels
        if test is None or pixels is None or not self.data.noisy_test:
            return None
        N, M = len(self.pixels), len(pixels)
        given_M = test.given_N.to(self.device)
        memory = Memory.of(given_M, self.memory.classes)
        chance = torch.Generator(self.device)
        chance.manual_seed(stream_seed(self.settings.seed, "held out", epoch))
        guess_of = self.method.guess if self.judges_guesses(epoch) else None
        if guess_of is not None:
            draws_MK = torch.rand(M, 2 * WEAK_DRAWS, generator=chance, device=self.device)
            guess(self.network, self.views, pixels, memory, draws_MK, guess_of)
        look(self.network, self.views, pixels, given_M, memory)

        both = self.memory.followed_by(memory)
        images = ConcatImages(self.pixels, pixels)
        given = torch.cat([self.given_N, given_M])
        draws = torch.rand(N + M, WEAK_DRAWS, generator=chance, device=self.device)
        self._judge(both, images, given, draws, guess_of is not None)
        return test, both.part(slice(N, None))

    def noise_metrics(self, *names: str) -> dict[str, Tensor]:
        """What each of these metrics says of every given label, after a tracking pass."""
        network, views, pixels = self.network, self.views, self.pixels
        return noise_metrics(
            names, network, views, pixels, self.given_N, self.memory, self.weak_draws_NK
        )

    def guess_metrics(self) -> dict[str, Tensor]:
        """What each metric says of every guess, after a tracking pass."""
        return {
            "pseudo-loss": self.memory.pseudo_loss_N,
            "confidence": of_guesses(metrics.confidence, self.memory),
            "entropy": of_guesses(metrics.entropy, self.memory),
        }

    def knn_accuracy(self) -> float | None:
        """Accuracy on the test images, where there are any, of asking neighbours (row 24)."""
        if self.test_pixels is None or self.data.test is None:
            return None
        features_ND = project(self.network, self.views, self.pixels)
        asked_MD = project(self.network, self.views, self.test_pixels)
        predicted_M = metrics.knn_predict(asked_MD, features_ND, self.given_N, self.memory.classes)
        right = (predicted_M == self.data.test.given_N.to(self.device)).sum()
        return 100 * int(right) / len(predicted_M)

    def lost_files(self) -> list[str]:
        """Files that could not be read any more; black images took their places."""
        sets = ((self.pixels, self.data.train), (self.test_pixels, self.data.test))
        return [
            images.paths[i]
            for pixels, images in sets
            if pixels is not None and images is not None and images.paths is not None
            for i in sorted(pixels.lost)
        ]

    def validate(self) -> float | None:
        """Accuracy on the test images, where there are any."""
        test = self.data.test
        return None if test is None else 100 * int(self.validation()) / len(test)

    def _draw(self, chance: torch.Generator) -> None:
        """Random numbers for the next BLOCK steps."""
        self.draws_SBK.uniform_(generator=chance)
        keys_SPb = torch.rand(self.partner_SPb.shape, generator=chance, device=self.device)
        self.partner_SPb.copy_(keys_SPb.argsort(2))
        self.lam_SP.uniform_(generator=chance)
        torch.maximum(self.lam_SP, 1 - self.lam_SP, out=self.lam_SP)  # row 5
        if not self.settings.mixup:
            self.lam_SP.fill_(1)

    def _batch(self, part: int) -> Batch:
        """What is new in a step: in one of the parts in which it is computed."""
        index_B = self.order_SB.index_select(0, self.step).squeeze(0)
        now = self.step % BLOCK
        size = len(index_B) // self.settings.accumulate
        rows = slice(part * size, (part + 1) * size)
        return Batch(
            index_B=index_B[rows],
            images_BCHW=self.pixels.batch(index_B, rows),
            given_B=self.given_N[index_B[rows]],
            partner_B=self.partner_SPb.index_select(0, now)[0, part],
            lam=self.lam_SP.index_select(0, now)[0, part],
            draws_BK=self.draws_SBK.index_select(0, now)[0, rows],
        )

    def _step(self, part: Part) -> Call[None]:
        """One update of the network, of fixed shapes and without a read-back to the host."""

        def step(show: Any, loss_of: Any) -> None:
            self.optimiser.zero_grad(set_to_none=True)
            for i in range(self.settings.accumulate):
                batch = self._batch(i)
                seen = see(self.network, show(self.views, batch), part.guess_in_eval)
                loss = loss_of(seen, batch, self.memory) / self.settings.accumulate
                loss.backward()
                self.loss_sum += loss.detach()
            self.optimiser.step()
            self.step += 1

        def be_plain(reason: str) -> None:
            self._plain_network()
            self._failed("step could not be compiled")(reason)

        plain = partial(step, part.show, part.loss)
        call: Call[None] = plain
        if self.accelerate in ("auto", "full"):
            fast = partial(step, compiled(part.show), compiled(part.loss))
            call = first_try(fast, plain, be_plain)
        return self._captured(call, "step")

    def _room_for_weak_draws(self) -> Tensor:
        """Random numbers for the weak views of a tracking pass, where it looks at any."""
        asked = self.settings.noise_metric == "kl"
        if asked and self.views.weak_is_plain(self.data.train.size):
            raise InputError(
                "--noise-metric kl compares the plain view of an image with a weak one; without "
                "padding, crop and flip they are the same. Give --pad 1 or more, or --flip"
            )
        images = len(self.pixels) if asked or self.settings.compare_metrics else 0
        return torch.zeros(images, WEAK_DRAWS, device=self.device)

    def _trust(self, memory: Memory) -> tuple[Tensor, Mixture | None]:
        """Stage 2 by another metric than the pseudo-loss."""
        chosen = self.settings.trust_metric
        metric = metrics.entropy if chosen == "entropy" else metrics.confidence
        value_N = of_guesses(metric, memory)
        if chosen != "threshold":
            return pls.trust_guesses(value_N, memory.noisy_N)
        threshold = self.settings.trust_threshold
        return pls.trust_confident(value_N, memory.noisy_N, threshold), None

    def lost_C(self, stages: Stages) -> Tensor:
        """Classes of which stage 1 believes no label (see `protect_rare_classes`)."""
        return self._believed(stages.loss, self.memory, self.given_N)[1]

    def _believed(self, stage1: Mixture, memory: Memory, given_N: Tensor) -> tuple[Tensor, Tensor]:
        """Which given labels are taken for wrong, by the rule that the settings ask for; and
        classes that only `protect_rare_classes` has saved."""
        rule = {"noisy": pls.high_loss, "clean": pls.not_low_loss}[self.settings.threshold_on]
        noisy_N = rule(stage1, self.settings.threshold)
        return pls.protect_rare_classes(noisy_N, memory.loss_N, given_N, memory.classes)

    def _judge(
        self,
        memory: Memory,
        pixels: ImageParts,
        given_N: Tensor,
        draws_NK: Tensor,
        judge_guesses: bool,
    ) -> Stages:
        """Both stages, of these images. `draws_NK` are for weak views, if the metric takes any."""
        name = self.settings.noise_metric

        def noise_metric(memory: Memory) -> Tensor:
            network, views = self.network, self.views
            found = noise_metrics((name,), network, views, pixels, given_N, memory, draws_NK)
            return found[name]

        by_pseudo_loss = self.settings.trust_metric == "pseudo-loss"
        return judge(
            memory,
            is_noisy=lambda stage1: self._believed(stage1, memory, given_N)[0],
            judge_guesses=judge_guesses,
            noise_metric=noise_metric,
            trust=trust_by_pseudo_loss if by_pseudo_loss else self._trust,
        )

    def _tracking(self, judge_guesses: bool) -> Call[Stages]:
        memory, pixels, given_N = self.memory, self.pixels, self.given_N

        def tracking() -> Stages:
            look(self.network, self.views, pixels, given_N, memory)
            return self._judge(memory, pixels, given_N, self.weak_draws_NK, judge_guesses)

        # Metrics of stage 1 that make further passes are not made for being captured.
        plain = pixels.streamed or self.settings.noise_metric not in NEEDS_NO_PASS
        return tracking if plain else self._captured(tracking, "tracking pass")

    def _validation(self) -> Call[Tensor]:
        """Counts the test images that are classified as they are labelled."""
        test, pixels = self.data.test, self.test_pixels
        if test is None or pixels is None:
            return lambda: torch.tensor(0)
        given_N = test.given_N.to(self.device)

        def validation() -> Tensor:
            logits = predict(self.network, self.views, pixels)
            predicted_N = torch.cat([logits_BC.argmax(1) for logits_BC in logits])
            return (predicted_N == given_N).sum()

        return validation if pixels.streamed else self._captured(validation, "validation")

    def _captured(self, call: Call[Result], what: str) -> Call[Result]:
        if self.accelerate == "off":
            return call
        return capture(call, self._failed(f"{what} could not be captured"))

    def _failed(self, what: str) -> Failed:
        return lambda reason: self.reporter.notice(f"the {what} and runs slower ({reason})")

    def _accelerate_network(self) -> None:
        """Our own networks compute by fused kernels; others can be compiled, each by itself."""
        if self.accelerate not in ("auto", "full"):
            return
        torch.compiler.reset()  # torch compiles a function only so often in one process
        own = self.settings.network in OWN
        self.network.fused = own and can_fuse(self.device)
        if self.accelerate == "full" and not own:
            backbone = self.network.backbone
            backbone.forward = compiled(backbone.forward, whole=False)

    def _plain_network(self) -> None:
        self.network.fused = False
        vars(self.network.backbone).pop("forward", None)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all but the network, which is as it was built, and of what a captured call
        holds on the device."""
        self._plain_network()
        self.network.eval()
        self.optimiser.zero_grad(set_to_none=True)
        vars(self).clear()

    def _place(self, images: ImageSet, what: str) -> DeviceImages:
        pixels = place(images.images_NCHW, self.device, self.settings.images)
        size = images.images_NCHW.nbytes / 2**30
        if isinstance(images.images_NCHW, ImageFiles):
            if self.settings.images == "auto":
                self.reporter.say(
                    f"The {what} ({size:.1f} GiB) do not fit into memory: their files are decoded "
                    "in every epoch."
                )
        elif pixels.streamed and self.settings.images == "auto":
            self.reporter.say(
                f"The {what} ({size:.1f} GiB) stay in the host's memory and are copied as they are "
                "needed: on the device they would leave too little room for training."
            )
        return pixels


def see(network: Network, shown: ViewBatch, guess_in_eval: bool = False) -> Outputs:
    """What the network makes of all views, those for guesses first."""
    count = len(shown.no_grad)
    if not guess_in_eval:
        outputs = network.forward_views(*shown.no_grad, *shown.with_grad, free=count)
        return Outputs(outputs[:count], outputs[count:])
    network.eval()
    guessed = network.forward_views(*shown.no_grad, free=count)
    network.train()
    return Outputs(guessed, network.forward_views(*shown.with_grad))


def build_model(
    data: Data, settings: Settings, device: torch.device, resumed: bool = False
) -> Model:
    """A fresh network with its views."""
    images = data.train
    size = choose_size(images.size, settings, data.image_size)
    mean, std = choose_normalisation(data, settings)
    # Built on the CPU, so that a seed gives the same network on every device.
    torch.manual_seed(stream_seed(settings.seed, "network"))
    network = networks.build(
        settings.network,
        channels=images.channels,
        size=size,
        classes=len(images.classes),
        projection=settings.projection,
        weights=None if resumed else settings.weights,
        precision=choose_precision(settings.precision, device),
    ).to(device)
    views = Views(
        mean_C=torch.tensor(mean, device=device),
        std_C=torch.tensor(std, device=device),
        size=size,
        pad=choose_padding(size, settings),
        flip=settings.flip,
    )
    description = Description(
        network=settings.network,
        classes=images.classes,
        channels=images.channels,
        stored=images.size,
        size=size,
        mean=mean,
        std=std,
        projection=settings.projection,
        fit=data.fit,
    )
    return Model(description, network, views)


def learning_rate(settings: Settings, epoch: int) -> float:
    """Constant in the warm-up, then a cosine, a value an epoch (row 15)."""
    W, E = settings.warmup_epochs, settings.epochs
    if epoch < W:
        return settings.lr
    return 0.5 * settings.lr * (1 + math.cos((epoch - W + 1) * math.pi / (E - W + 1)))


def stream_seed(seed: int, stream: str, epoch: int = 0) -> int:
    """The seed of one stream of random numbers: a function of the run's seed and the epoch."""
    words = np.random.SeedSequence([seed, zlib.crc32(stream.encode()), epoch])
    return int(words.generate_state(1, np.uint64)[0] >> 1)
