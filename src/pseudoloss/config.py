"""Every setting with its default: those that all methods share, then those of each method.

No default lives anywhere else; presets.py holds named sets of them. Importing this file costs
nothing: the command line reads it before torch is loaded. "Row n" is a row of the table in
docs/paper-and-code.md.
"""

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from pseudoloss.errors import InputError, name_hint

# Networks of ours.
OWN = ("preactresnet18", "preactresnet18-stemnorm", "preactresnet18-released", "small-cnn")
EMBEDDED = "embedded"  # the value of --weights for weights that are installed with pseudoloss
EMBEDDED_NETWORK = "tf_efficientnet_lite0"  # the timm model that they are for
WARMUP_SHARE = 30 / 200  # the paper's: 30 of 200 epochs

# ------------------------------------------------------------------------- settings of a method


@dataclass(frozen=True, kw_only=True)
class DetectionSettings:
    """How a two-mode mixture flags labels as noisy: PLS trains on the result, others report it."""

    # Detecting noisy labels
    threshold: float = 0.95
    """Probability above which a label is flagged. The paper uses 0.5 at 80% noise."""
    threshold_on: Literal["noisy", "clean"] = "noisy"
    """noisy: flagged if P(high mode) > threshold; clean: kept only if P(low mode) > threshold."""
    noise_metric: Literal["loss", "capped-loss", "agreement", "disagreement", "js", "kl"] = "loss"
    """What the mixture is fitted to: the loss; the loss, at most that of a uniform prediction; the
    agreement or disagreement of neighbours in the contrastive space; the Jensen-Shannon divergence
    of prediction and label; or the KL divergence of two views (which hardly sees the label)."""
    protect_rare_classes: bool = True
    """Keep the labels with the lower losses of a class when all of them would be flagged while most
    labels of the other classes are kept. Not in the paper."""


@dataclass(frozen=True, kw_only=True)
class PLSSettings(DetectionSettings):
    """Pseudo-Loss Selection. The defaults follow the released program."""

    # Pseudo-labels and trust
    gamma: float = 2.0
    """Exponent that sharpens a pseudo-label; 1 leaves the mean of the two predictions."""
    pseudo_label_norm: Literal["sum", "max"] = "sum"
    """What a pseudo-label is divided by: its sum or its maximum (the paper)."""
    pseudo_label_mode: Literal["train", "eval"] = "train"
    """Mode of the network that makes pseudo-labels: batch statistics or running statistics."""
    weighting: Literal["separate", "interpolated", "first"] = "separate"
    """Trust under mixup: two terms with a normaliser each, one interpolated trust (the paper), or
    the trust of the first image for both."""
    trust_metric: Literal["pseudo-loss", "confidence", "entropy", "threshold"] = "pseudo-loss"
    """What trust comes from: a mixture of the pseudo-loss, of the confidence of the pseudo-label or
    of its entropy; threshold: 1 where the confidence exceeds trust_threshold, else 0."""
    trust_threshold: float = 0.95
    """Confidence above which a pseudo-label is trusted, with trust_metric threshold."""
    initial_trust: bool = False
    """Compute trust before the first epoch after the warm-up (the paper's Algorithm 1), instead of
    after it."""

    # Terms of the loss
    mu: float = 0.2
    """Temperature of the contrastive loss."""
    contrast_class: Literal["mixed", "own"] = "mixed"
    """Class of an image in the contrastive loss: of its mixed target, or of its own target (the
    paper)."""
    contrast_labels: Literal["rows", "mixed"] = "rows"
    """Label similarity of mixed images: the rows of Y Yᵀ mixed, or Y_mix Y_mixᵀ (the paper)."""
    contrast_mix: Literal["shared", "separate"] = "shared"
    """Mixing in the contrastive loss: as in the classification loss, or with a λ, partners and a
    forward pass of its own (the paper; slower)."""
    balance: float = 1.0
    """Weight of the class-balance term; 0 turns it off."""
    balance_prior: Literal["uniform", "given"] = "uniform"
    """Class shares it aims at: uniform, or those of the given labels (imbalanced datasets)."""
    mixup_lambda: Literal["folded", "uniform"] = "folded"
    """λ of mixup: uniform and then max(λ, 1 - λ), or just uniform (the paper)."""

    # Parts that can be switched off
    correct: bool = True
    """Replace the labels of noisy images by pseudo-labels."""
    contrast: bool = True
    """Train the contrastive loss too."""
    trust_in_classification: bool = True
    """Weight the classification loss by trust."""
    trust_in_contrast: bool = True
    """Let trust decide between class and image in the contrastive loss."""
    mixup: bool = True
    """Mix images, during the warm-up and afterwards."""


@dataclass(frozen=True, kw_only=True)
class CESettings(DetectionSettings):
    """Cross-entropy on the given labels."""


@dataclass(frozen=True, kw_only=True)
class MixupSettings(DetectionSettings):
    """mixup on the given labels."""


@dataclass(frozen=True, kw_only=True)
class ELRSettings(DetectionSettings):
    """Early-Learning Regularisation."""

    # Early-learning regularisation
    elr_lambda: float = 7.0
    """Weight of the regularisation term. 7 is the authors' value for CIFAR-100, 3 for CIFAR-10."""
    elr_beta: float = 0.9
    """How much of the old target stays when a prediction is added to it. The authors use 0.9 for
    CIFAR-100, 0.7 for CIFAR-10."""


@dataclass(frozen=True, kw_only=True)
class CoTeachingSettings(DetectionSettings):
    """Co-teaching."""

    # Co-teaching
    forget_rate: float = 0.2
    """Share of every batch that is dropped in the end: the noise rate, if it is known."""
    forget_epochs: int = 10
    """Epochs over which the dropped share grows from 0 to forget_rate."""
    ensemble: bool = False
    """Predict with the mean of both networks, instead of the first one (the paper)."""


METHOD_SETTINGS: dict[str, type[DetectionSettings]] = {
    "pls": PLSSettings,
    "ce": CESettings,
    "mixup": MixupSettings,
    "elr": ELRSettings,
    "co-teaching": CoTeachingSettings,
}
"""The settings of each method, by its name; docs/add-a-method.md says how to add one."""

# ------------------------------------------------------------------- settings of every method


@dataclass(frozen=True, kw_only=True, init=False)
class Settings:
    """Everything that decides how a run trains. The defaults are the paper's CIFAR-100 setting.

    Settings of the chosen method are given beside the others, `Settings(method="elr",
    elr_lambda=3)`, and are kept in `method_settings`.
    """

    # What is trained
    method: str = "pls"
    """pls; a baseline: ce (cross-entropy), mixup; or a rival: elr, co-teaching."""
    network: str = "preactresnet18"
    """preactresnet18, its variants preactresnet18-stemnorm and preactresnet18-released, small-cnn,
    or the name of any timm model."""
    weights: str | None = None
    """Initial weights of a timm network: embedded (of tf_efficientnet_lite0, installed with
    pseudoloss), pretrained (downloaded by timm) or a file (.safetensors, .pth). None: train from
    scratch."""
    head_start: bool = False
    """With weights: audit the labels by the network's frozen features, and start from a linear head
    that is fitted to the corrected labels. Batch norms then keep their statistics."""
    projection: int = 128
    """Dimensions of the linear projection into the contrastive space."""

    # Length and learning rate
    epochs: int = 200
    """Number of passes over the images."""
    warmup: int | None = None
    """Warm-up epochs, before labels are corrected. None: 15% of the epochs (at least 1)."""
    batch_size: int = 256
    """Images per step. A value other than the preset's scales its learning rate."""
    accumulate: int = 1
    """Split each batch into this many parts and accumulate gradients, to save device memory."""
    lr: float = 0.1
    """Learning rate at the start."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine, constant, or steps:80,120:0.1 (multiplied by 0.1 at
    the start of epochs 81 and 121)."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay of SGD."""

    # Views
    image_size: int | None = None
    """Pixels per side that the network sees: larger images are cropped. None: the whole image; for
    image files, the size the network was made for."""
    pad: int | None = None
    """Zero padding in pixels before the random crop. None: an eighth of the size (4 at 32)."""
    flip: bool = True
    """Flip images horizontally at random. Turn off where left and right matter (digits, text)."""

    # More metrics
    compare_metrics: bool = False
    """Record in every epoch how well each metric separates noisy labels, and the k-NN accuracy.
    Slower."""

    # Data, seed and device
    corrupt: str | None = None
    """Noise added for an experiment: symmetric:RATE, symmetric-exact:RATE, asymmetric:RATE (next
    class of the superclass), asymmetric-blocks:RATE (of its block of five), pair:RATE (of all
    classes), each optionally followed by +out:RATE; out:RATE; human:FILE (CIFAR-N);
    labels:FILE.csv."""
    pool: str | None = None
    """Images for +out: a folder, a .npy file, or a folder of ImageNet32 batch files."""
    seed: int = 1
    """Seed of everything random: corruption, network, order, views, mixing."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    sync_norm: bool = True
    """With several processes (torchrun): batch norm uses the images of all of them. Off, each has
    its own statistics, which is faster on GPUs."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Arithmetic of the network. auto: bf16 on CUDA, float32 elsewhere."""
    images: Literal["auto", "device", "host", "files"] = "auto"
    """Where images are kept. device: all on the GPU; host: in memory, copied batch by batch; files:
    decoded again in every epoch; auto: the first that fits."""
    accelerate: Literal["auto", "full", "capture", "off"] = "auto"
    """On CUDA. auto: fused kernels, compiled views and losses, the step captured as one graph;
    full: timm networks compiled too; capture: the graph alone; off: plain calls."""

    # The settings of the method, in its own dataclass.
    method_settings: DetectionSettings = None  # type: ignore[assignment]

    def __init__(self, **values: Any) -> None:
        shared = _shared()
        method = _of_declared_type("method", values.get("method", Settings.method), shared)
        own_class = METHOD_SETTINGS[method]
        given = values.pop("method_settings", None)
        # `dataclasses.replace` passes these on; if the method changes, keep what both share.
        own = {} if given is None else dataclasses.asdict(given)
        own = {name: value for name, value in own.items() if name in _hints(own_class)}
        own |= {name: values.pop(name) for name in list(values) if name in _hints(own_class)}
        for name in values:
            if name not in shared:
                raise InputError(f"{flag(name)}: {unknown_setting(name, method)}")
        for name in shared:
            value = _of_declared_type(name, values.get(name, getattr(Settings, name)), shared)
            object.__setattr__(self, name, value)
        own = {n: _of_declared_type(n, value, _hints(own_class)) for n, value in own.items()}
        object.__setattr__(self, "method_settings", own_class(**own))
        self._check()

    def _check(self) -> None:
        for name, value in as_json(self).items():
            test, expected = _LIMITS.get(name, (None, ""))
            if test is not None and value is not None and not test(value):
                raise InputError(f"{flag(name)} must be {expected}, not {shorten(value)}")
        if self.warmup is not None and self.warmup > self.epochs:
            raise InputError(f"--warmup {self.warmup} must not exceed --epochs {self.epochs}")
        if self.method == "pls" and self.warmup == 0:
            raise InputError("--warmup must be at least 1 for --method pls: stage 1 needs a loss")
        if self.head_start and self.weights is None:
            raise InputError(
                f"--head-start needs --weights, such as {EMBEDDED}: features of a network that is "
                "not trained say nothing"
            )
        if self.batch_size % self.accumulate or self.batch_size // self.accumulate < 2:
            raise InputError(
                f"--accumulate {self.accumulate} must divide --batch-size {self.batch_size} into "
                "equal parts of at least 2 images"
            )
        parse_schedule(self.schedule)

    @property
    def warmup_epochs(self) -> int:
        """The warm-up that is used: `warmup`, or its share of the epochs."""
        if self.warmup is not None:
            return self.warmup
        return max(1, round(WARMUP_SHARE * self.epochs))


def parse_schedule(text: str) -> tuple[tuple[int, ...], float] | None:
    """Epochs and factor of a schedule of steps; None for the others."""
    if text in ("cosine", "constant"):
        return None
    kind, _, rest = text.partition(":")
    try:
        epochs_text, factor_text = rest.split(":")
        epochs = tuple(int(word) for word in epochs_text.split(","))
        factor = float(factor_text)
        rising = epochs[0] > 0 and list(epochs) == sorted(set(epochs))
        if kind == "steps" and 0 < factor < 1 and rising:
            return epochs, factor
    except ValueError:
        pass
    raise InputError(
        f"--schedule {shorten(text)}: must be cosine, constant or such as steps:80,120:0.1"
    )


def scaled_schedule(text: str, epochs: int, new_epochs: Any) -> str:
    """A schedule of steps for another number of epochs; others stay as they are."""
    steps = parse_schedule(text)
    if steps is None or not isinstance(new_epochs, Integral) or new_epochs == epochs:
        return text
    starts = dict.fromkeys(max(1, round(start * int(new_epochs) / epochs)) for start in steps[0])
    return f"steps:{','.join(map(str, starts))}:{steps[1]:g}"


# What each setting may be: a test, and how an error says it.
_LIMITS: dict[str, tuple[Any, str]] = {
    "network": (lambda v: v.strip() != "", "the name of a network"),
    "projection": (lambda v: 1 <= v <= 65_536, "1 to 65536"),
    "epochs": (lambda v: 1 <= v <= 1_000_000, "1 to 1000000"),
    "warmup": (lambda v: v >= 0, "0 or more"),
    "batch_size": (lambda v: 2 <= v <= 1_048_576, "2 to 1048576"),
    "accumulate": (lambda v: v >= 1, "1 or more"),
    "lr": (lambda v: 0 < v <= 100, "above 0 and at most 100"),
    "momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "weight_decay": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "threshold": (lambda v: 0 < v < 1, "between 0 and 1"),
    "trust_threshold": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "gamma": (lambda v: 0 < v <= 100, "above 0 and at most 100"),
    "mu": (lambda v: 0.001 <= v <= 1000, "0.001 to 1000"),
    "balance": (lambda v: 0 <= v <= 1000, "0 to 1000"),
    "image_size": (lambda v: 8 <= v <= 4096, "8 to 4096"),
    "pad": (lambda v: 0 <= v <= 512, "0 to 512"),
    "elr_lambda": (lambda v: 0 <= v <= 1000, "0 to 1000"),
    "elr_beta": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "forget_rate": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "forget_epochs": (lambda v: 1 <= v <= 1_000_000, "1 to 1000000"),
    "seed": (lambda v: 0 <= v < 2**63, "0 to 2^63 - 1"),
}


# ------------------------------------------------------------------- about the settings themselves


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(settings: type) -> dict[str, Any]:
    """Names and types of the fields of a dataclass."""
    if settings not in _HINTS:
        _HINTS[settings] = get_type_hints(settings)
    return _HINTS[settings]


def _shared() -> dict[str, Any]:
    """Types of the settings that all methods share."""
    hints = _hints(Settings) | {"method": Literal[tuple(METHOD_SETTINGS)]}
    del hints["method_settings"]
    return hints


def setting_types(method: Any) -> dict[str, Any]:
    """The type of every setting of a run with this method."""
    shared = _shared()
    return shared | _hints(METHOD_SETTINGS[_of_declared_type("method", method, shared)])


def all_setting_types() -> dict[str, Any]:
    """The type of every setting of any method."""
    found = _shared()
    for own in METHOD_SETTINGS.values():
        found |= _hints(own)
    return found


def unknown_setting(name: str, method: str) -> str:
    """What is wrong with a setting that a method does not have."""
    owners = [other for other, own in METHOD_SETTINGS.items() if name in _hints(own)]
    if owners:
        return f"a setting of --method {' and '.join(owners)}, not of {method}"
    names = setting_types(method)
    return f"no such setting{name_hint(name, names)}"


def describe_settings(method: str) -> dict[str, tuple[str, str]]:
    """Group and help text of every setting of a method: the comment above its group, the text below
    its line. The shared settings come first.

    They are read from the source, so that each stands beside what it describes.
    """
    described: dict[str, tuple[str, str]] = {}
    own = METHOD_SETTINGS[method]
    for settings in (Settings, *reversed(own.__mro__[:-1])):
        described |= dict(_descriptions(settings))
    return described


def _descriptions(settings: type) -> Iterator[tuple[str, tuple[str, str]]]:
    source = inspect.getsource(settings)
    lines = source.splitlines()
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    group = ""
    for node, following in itertools.pairwise([*body, None]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above = lines[node.lineno - 2].strip()
        group = above.removeprefix("# ") if above.startswith("# ") else group
        if isinstance(following, ast.Expr):
            yield node.target.id, (group, " ".join(following.value.value.split()))  # type: ignore[attr-defined]


def as_json(settings: Settings) -> dict[str, Any]:
    """The settings as they are written to config.json: one flat dictionary."""
    shared = {name: getattr(settings, name) for name in _shared()}
    return shared | dataclasses.asdict(settings.method_settings)


# Settings of version 0.1 that have other names or values by now.
_RENAMED = {"guess_norm": "pseudo_label_norm", "guess_mode": "pseudo_label_mode"}
_RENAMED_VALUES = {
    "weighting": {"apart": "separate", "together": "interpolated", "own": "first"},
}


def upgrade_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run of an earlier version, under the names and values of this one. Settings
    of other methods are dropped; names that are no settings stay, to be refused."""
    own = setting_types(values.get("method", Settings.method))
    others = all_setting_types().keys() - own.keys()
    found = {}
    for old_name, value in values.items():
        name = _RENAMED.get(old_name, old_name)
        if name not in others:
            renamed = _RENAMED_VALUES.get(name, {})
            found[name] = renamed.get(value, value) if isinstance(value, str) else value
    return found


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: Any) -> str:
    """A setting as one would type it."""
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {value}"


def as_text(value: Any) -> str:
    """A value as help and documentation show it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "–" if value is None else str(value)


def shorten(value: Any) -> str:
    """A value in an error."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _of_declared_type(name: str, value: Any, hints: Mapping[str, Any]) -> Any:
    """`value` checked against the annotation of its field; whole floats become ints and back."""
    hint = hints[name]
    choices = get_args(hint) or (hint,)
    if isinstance(choices[0], str):  # a Literal
        if not isinstance(value, str) or value not in choices:
            raise InputError(f"{flag(name)} {shorten(value)}: must be one of {', '.join(choices)}")
        return value
    if value is None and type(None) in choices:
        return None
    kind = choices[0]
    if kind is bool and type(value).__name__ in ("bool", "bool_"):  # NumPy's too
        return bool(value)
    if kind is str and isinstance(value, str):
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        number: Any = value
        if kind is float and abs(number) < 1e300:
            return float(number)
        if kind is int and (isinstance(value, Integral) or float(number).is_integer()):
            return int(number)
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    raise InputError(f"{flag(name)} must be {expected}, not {shorten(repr(value))}")
