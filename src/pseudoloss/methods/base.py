"""The contract between a method and the engine.

A method declares its networks, its state, the phases of a run and what one step computes; the
engine builds, trains, captures, checkpoints and resumes all of that without knowing the method. See
docs/add-a-method.md for a complete example.

A method works on tensors. It does not choose a device, open a file or draw random numbers: the
engine passes uniform random numbers in, so a step is repeatable and can be compiled and captured.

Shapes: N images in the dataset, B in a batch, C classes, D dimensions of the projection, K random
numbers per image.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy import special
from torch import Tensor

from pseudoloss.nn.views import Views

NET = "net"  # the role of the network of a method that has only one

# ------------------------------------------------------------------------------- what a step sees


class Mix(NamedTuple):
    """How mixup pairs a batch."""

    partner_B: Tensor  # a permutation of the batch
    lam: Tensor  # λ, a scalar tensor

    def of(self, x: Tensor) -> Tensor:
        """λ·x + (1-λ)·x of the partner."""
        return self.lam * x + (1 - self.lam) * x[self.partner_B]


def mix_within(mix: Mix, mask_B: Tensor) -> Mix:
    """The same random pairing, but images are only mixed with images of the same value of the mask.

    Both groups are listed in the order of the batch and in the order of the partners; an image gets
    the partner at the same place of the other list. So each group is permuted at random.
    """
    key_B = mask_B.to(torch.uint8)
    place_B = key_B.argsort(stable=True)
    partner_at_B = mix.partner_B[key_B[mix.partner_B].argsort(stable=True)]
    return mix._replace(partner_B=torch.empty_like(place_B).scatter_(0, place_B, partner_at_B))


class Batch(NamedTuple):
    """The images of a step and its random numbers. All shapes are the same in every step."""

    index_B: Tensor  # positions in the dataset
    images_BCHW: Tensor  # uint8
    given_B: Tensor  # given labels
    mixes: tuple[Mix, ...]  # one for each rule in `Step.lambdas`
    draws_BK: Tensor  # uniform random numbers, for the views

    def mixed_within(self, mask_N: Tensor) -> "Batch":
        """Only images with the same value of the mask are mixed."""
        mask_B = mask_N[self.index_B]
        return self._replace(mixes=tuple(mix_within(mix, mask_B) for mix in self.mixes))


class ViewBatch(NamedTuple):
    """The views that one network sees in a step. The first two kinds are seen in training mode, in
    this order; the last one before them, without gradients, in evaluation mode: with the running
    statistics of the norms, which stay as they are, and without dropout."""

    no_grad: Sequence[Tensor]
    with_grad: Sequence[Tensor]
    in_eval: Sequence[Tensor] = ()


class Outputs(NamedTuple):
    """What the network made of them: logits (B,C) and projection (B,D) of each view. If the method
    has a `decoder`, views seen in training mode also have a reconstruction error (B,1)."""

    no_grad: Sequence[tuple[Tensor, ...]]
    with_grad: Sequence[tuple[Tensor, ...]]
    in_eval: Sequence[tuple[Tensor, ...]] = ()


def joined(first: Mapping[str, Outputs], more: Mapping[str, Outputs]) -> dict[str, Outputs]:
    """The outputs of two rounds of views, by role."""
    none = Outputs([], [])
    return {
        role: Outputs(
            *([*a, *b] for a, b in zip(first.get(role, none), more.get(role, none), strict=True))
        )
        for role in {**first, **more}
    }


# ------------------------------------------------------------------------- what a method declares


def fold(u: Tensor) -> Tensor:
    """λ = max(u, 1 - u): the first image of a pair always dominates."""
    return torch.maximum(u, 1 - u)


def uniform(u: Tensor) -> Tensor:
    """λ = u."""
    return u


def no_mixing(u: Tensor) -> Tensor:
    """λ = 1."""
    return torch.ones_like(u)


QUANTILES = 4096  # of a beta distribution


def beta(alpha: float, folded: bool = False) -> Callable[[Tensor], Tensor]:
    """λ ~ Beta(α, α), by its quantiles; folded: max(λ, 1 - λ)."""
    levels = np.linspace(0, 1, QUANTILES + 1)
    table = torch.from_numpy(special.betaincinv(alpha, alpha, levels)).float()

    def rule(u: Tensor) -> Tensor:
        quantiles = table.to(u.device)
        place = u * QUANTILES
        below = place.floor().long().clamp(0, QUANTILES - 1)
        lam = torch.lerp(quantiles[below], quantiles[below + 1], place - below)
        return fold(lam) if folded else lam

    return rule


@dataclass(frozen=True)
class Stream:
    """Images that a step draws from: all, or those where `mask` of the state is true. If it is true
    nowhere, all images are used. `size` is how many of them are in a batch; None: the batch size of
    the phase. A stream with fewer images than a batch repeats some of them."""

    mask: Callable[[Any], Tensor] | None = None
    size: int | None = None


@dataclass(frozen=True)
class Step:
    """One update: which views each network sees, and the loss of what it makes of them.

    With several processes each calls `show` with a part of the batch, so a view of an image may
    depend on the image, its random numbers and its partners in `mixes` only; `loss` always gets the
    whole batch. (A step with several streams shows the whole batch everywhere.)

    `show` and `loss` work on tensors of fixed shapes, read nothing back to the host and use no
    random numbers but those of the batch, so that the step can be compiled and captured. `loss` may
    write to the state, in place. A batch holds the images of all streams, one stream after the
    other; the first stream decides how many steps an epoch has, the others repeat as needed.

    If views depend on what the networks make of others, `show_next` returns them: it is called with
    the outputs of the views of `show`, which then must all be without gradients, and `loss` gets
    the outputs of both.

    The running statistics of norms follow the views that a network sees in training mode if the
    step trains that network or names it in `moves_norms`; those of all other networks stay.

    A step may train nothing (`trains=()`): a pass in random batches that only writes to the state,
    or moves norms. Its loss is not used.

    With `mixes_within`, images are only mixed with images of the same value of that mask.
    """

    show: Callable[[Views, Batch], dict[str, ViewBatch]]  # by role of the network
    loss: Callable[[dict[str, Outputs], Batch, Any], Tensor]
    draws: int  # uniform random numbers per image
    lambdas: tuple[Callable[[Tensor], Tensor], ...] = (fold,)  # λ of each `Mix`, from uniform
    trains: tuple[str, ...] = (NET,)  # roles of the networks that are updated
    streams: tuple[Stream, ...] = (Stream(),)
    moves_norms: tuple[str, ...] = ()  # networks that it does not train, but whose norms follow
    mixes_within: Callable[[Any], Tensor] | None = None  # a mask of the state
    lr: Callable[[int], float] | None = None  # by epoch of the phase; None: the run's schedule
    cost: int = 3  # forward passes, a backward pass counted as two; for the time that is left
    show_next: Callable[[Views, Batch, dict[str, Outputs], Any], dict[str, ViewBatch]] | None = None


@dataclass(frozen=True)
class Phase:
    """Some epochs in a row. Every epoch runs the steps of each entry of `steps`, one entry after
    the other (networks that are trained in turn have an entry each)."""

    name: str
    epochs: int
    steps: tuple[Step, ...]
    batch_size: int | None = None  # None: that of the settings
    reset_optimiser: bool = False  # start the phase without momentum
    reset_head: bool = False  # ... with new classifiers; networks that follow others keep theirs


@dataclass(frozen=True)
class Ema:
    """A network that follows another one as an exponential moving average of its parameters."""

    of: str  # role of the network it follows
    decay: float | Callable[[Any], Tensor]  # or a scalar tensor, computed from the state
    copy_buffers: bool = True  # take over its batch-norm statistics too


class Scorer(Protocol):
    """What a method can ask about all images after an epoch, in evaluation mode."""

    given_N: Tensor
    classes: int
    weak_is_plain: bool  # the settings leave nothing random in weak views

    def logits(
        self, *, plain: bool = True, weak: int = 0, role: str | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Logits of the plain view and of `weak` weak views, for one chunk of images after another;
        of the network that predicts, or of the one with this role."""

    def members(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Logits of the plain view, of each network that predicts, for one chunk of images after
        another: one pass where `logits` needs another one for their mean."""

    def projections(self, *, role: str | None = None) -> Tensor:
        """All images in the contrastive space, L2-normalised: (N,D)."""


@dataclass(frozen=True)
class Scoring:
    """What happens after an epoch: a function of all images that updates the state."""

    run: Callable[[Scorer, Any], None]
    weak_views: int = 0  # how many weak views of an image it asks for
    fixed_shapes: bool = True  # it can be captured, like a step
    passes: int = 1  # over all images; for the time that a run takes


# ---------------------------------------------------------------------------------------- state


@dataclass(frozen=True)
class LabelState:
    """What every method knows about every label. A method with more state extends it.

    The tensors are created once and then filled in place, so a captured step keeps seeing them. The
    engine checkpoints all of them. A name says the shape: `loss_N` holds one value per image.
    """

    loss_N: Tensor  # cross-entropy of the plain view and the given label
    predicted_N: Tensor  # int32: predicted class of the plain view
    p_noisy_N: Tensor  # probability that the given label is wrong
    noisy_N: Tensor  # bool: the label is flagged
    fitted: Tensor  # bool, scalar: the values that flag labels have two modes
    protected_C: Tensor  # bool: classes of which every label would have been flagged

    @staticmethod
    def start(given_N: Tensor, classes: int) -> dict[str, Tensor]:
        """Values before training: no label is flagged."""
        zero_N = torch.zeros(len(given_N), device=given_N.device)
        return {
            "loss_N": zero_N,
            "predicted_N": given_N.int(),
            "p_noisy_N": zero_N.clone(),
            "noisy_N": torch.zeros_like(given_N, dtype=torch.bool),
            "fitted": torch.zeros((), dtype=torch.bool, device=given_N.device),
            "protected_C": torch.zeros(classes, dtype=torch.bool, device=given_N.device),
        }


def tensors_of(state: LabelState) -> dict[str, Tensor]:
    """Every tensor of a state, by name."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class Verdict(NamedTuple):
    """What a method says about every label. `trust_N` and `suggested_N` are None as long as it has
    no opinion on what the right label is."""

    noisy_N: Tensor  # bool: flagged
    p_noisy_N: Tensor
    loss_N: Tensor  # the label score is exp(-loss)
    predicted_N: Tensor
    suggested_N: Tensor | None = None  # class
    trust_N: Tensor | None = None  # how far the suggestion can be trusted, 0 to 1


class Detector(Protocol):
    """Flags labels (detection.py)."""

    @property
    def metric(self) -> str:
        """Name of what its mixture is fitted to."""

    @property
    def weak_views(self) -> int: ...

    @property
    def fixed_shapes(self) -> bool: ...

    def score(self, scorer: Scorer, state: Any) -> None:
        """Fill in losses and predictions."""

    def values(self, scorer: Scorer, state: Any) -> Tensor:
        """The losses, or another metric, after this epoch."""

    def flag(self, scorer: Scorer, state: Any) -> None:
        """Fill in which labels are noisy."""

    def flag_by(self, low_N: Tensor, scorer: Scorer, state: Any) -> None:
        """... from the probabilities of the low mode, by a mixture of the method's own."""

    def compare(self, scorer: Scorer, state: Any, wrong_N: Tensor) -> dict[str, float | None]:
        """How well each metric finds the labels that are truly wrong: its AUC."""


# --------------------------------------------------------------------------------------- method


class Method:
    """What the engine asks of a method. A subclass must define `phases`; the other members have
    defaults that suit a method with one network that flags labels by their loss.

    What changes during training belongs in the state: attributes of the method itself are fixed
    when a step is captured, and are not checkpointed."""

    networks: tuple[str, ...] = (NET,)
    """Roles of the networks that are trained."""
    ema: Mapping[str, Ema] = {}
    """Networks that follow others, by role."""
    predicts: tuple[str, ...] = (NET,)
    """Which networks predict: one, or the mean of the logits of several."""
    validated: tuple[str, ...] = ()
    """Other networks whose accuracy is measured after every epoch, too."""
    decoder: bool = False
    """Networks have a linear decoder from the projection to the features; see `Outputs`."""
    compared: tuple[str, ...] = ("metrics",)
    """Keys of what `compare` may return."""
    corrects: str | None = None
    """What notices call the method, if it corrects labels and does so after the warm-up only."""

    def __init__(self, detector: Detector, warmup: int) -> None:
        self.detector = detector
        self.warmup = warmup  # epochs

    def phases(self) -> tuple[Phase, ...]:
        """The phases of a run, in order; their lengths add up to the epochs of the run."""
        raise NotImplementedError

    def in_warm_up(self, epoch: int) -> bool:
        return epoch < self.warmup

    def start(self, given_N: Tensor, classes: int) -> Any:
        """The state before training."""
        return LabelState(**LabelState.start(given_N, classes))

    def begin_epoch(self, state: Any, epoch: int) -> None:
        """Set tensors of the state that depend on the epoch, in place."""

    def scores_after(self, epoch: int) -> bool:
        """Whether all images are scored after this epoch: from the end of the warm-up on."""
        return epoch >= self.warmup - 1

    def scoring(self, epoch: int) -> Scoring:
        """How images are scored after this epoch."""
        return self._flagging

    def score(self, scorer: Scorer, state: Any) -> None:
        """Fill in what is known about every image: at least losses and predictions."""
        self.detector.score(scorer, state)

    def score_and_flag(self, scorer: Scorer, state: Any) -> None:
        self.score(scorer, state)
        self.detector.flag(scorer, state)

    @property
    def _flagging(self) -> Scoring:
        return Scoring(self.score_and_flag, self.detector.weak_views, self.detector.fixed_shapes)

    def verdict(self, state: Any, epoch: int) -> Verdict:
        """What is known about every label after this epoch."""
        return Verdict(state.noisy_N, state.p_noisy_N, state.loss_N, state.predicted_N)

    def own_metrics(self, state: Any, given_N: Tensor, true_N: Tensor | None) -> dict[str, Any]:
        """Metrics of the method itself after an epoch that was scored; `true_N` if it is known."""
        return {}

    def compare(self, scorer: Scorer, state: Any, true_N: Tensor, epoch: int) -> dict[str, Any]:
        """More metrics of an epoch, for `compare_metrics`; the true labels are known."""
        wrong_N = scorer.given_N != true_N
        found = {"noise": self.detector.compare(scorer, state, wrong_N), "pseudo_labels": None}
        return {"metrics": found}

    def notices_at_start(self) -> dict[str, str | None]:
        """What is wrong with the settings, by kind, before the first epoch."""
        if self.corrects is None:
            return {}
        only = self.warmup == sum(phase.epochs for phase in self.phases())
        text = (
            f"all epochs are warm-up, so {self.corrects} never corrects a label. Use more --epochs "
            "or a shorter --warmup."
        )
        return {"warm-up only": text if only else None}

    def notices(
        self, state: Any, epoch: int, noisy: Sequence[float], classes: Sequence[str]
    ) -> dict[str, str | None]:
        """What may have gone wrong, by kind, after an epoch. `noisy`: the share of labels that was
        flagged after each epoch so far."""
        return {}


def check_declarations(method: Method, epochs: int) -> None:
    """Raise a ValueError where a method contradicts itself, before anything is trained."""
    phases, known = method.phases(), {*method.networks, *method.ema}
    length = sum(phase.epochs for phase in phases)
    if length != epochs:
        raise ValueError(f"the phases have {length} epochs together, the run has {epochs}")
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ValueError(f"two phases have the same name: {names}")
    steps = [step for phase in phases for step in phase.steps]
    trained = {role for step in steps for role in step.trains}
    moved = {role for step in steps for role in step.moves_norms}
    for what, roles, allowed in (
        ("a step trains", trained, set(method.networks)),
        ("a step moves the norms of", moved, known),
        ("an EMA follows", {ema.of for ema in method.ema.values()}, set(method.networks)),
        ("the model predicts with", set(method.predicts), known),
    ):
        if not roles <= allowed:
            raise ValueError(f"{what} {sorted(roles - allowed)[0]!r}, which is no network of it")
