"""The settings that all methods share, and what is known about settings: types, help, limits."""

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pseudoloss.config.limits import A_NAME, SHARE, Limit, above, at_least, within
from pseudoloss.config.methods import METHOD_SETTINGS, MethodSettings
from pseudoloss.errors import InputError, did_you_mean, name_hint

# Networks of ours.
OWN = ("preactresnet18", "preactresnet18-stemnorm", "preactresnet18-released", "small-cnn")
EMBEDDED = "embedded"  # the value of --weights for weights that are installed with pseudoloss
EMBEDDED_NETWORK = "tf_efficientnet_lite0"  # the timm model that they are for
WARMUP_SHARE = 30 / 200  # the paper's: 30 of 200 epochs

# ------------------------------------------------------------------- settings of every method


@dataclass(frozen=True, kw_only=True, init=False)
class Settings:
    """Everything that decides how a run trains. The defaults are the paper's CIFAR-100 setting.

    Settings of the chosen method are given beside the others, `Settings(method="elr",
    elr_lambda=3)`, and are kept in `method_settings`.
    """

    # What is trained
    method: str = "pls"
    """pls; pls-plus, with additions; a baseline: ce (cross-entropy), mixup; or a rival: elr,
    elr-plus, co-teaching, divide-mix, dynamic-bootstrapping, dsos, rrl, evidential-mix,
    jo-src."""
    network: Annotated[str, A_NAME] = "preactresnet18"
    """preactresnet18, its variants preactresnet18-stemnorm and preactresnet18-released, small-cnn,
    or the name of any timm model."""
    weights: str | None = None
    """Initial weights of a timm network: embedded (of tf_efficientnet_lite0, installed with
    pseudoloss), pretrained (downloaded by timm) or a file (.safetensors, .pth). None: train from
    scratch."""
    head_start: bool = False
    """With weights: audit the labels by the network's frozen features, and start from a linear head
    that is fitted to the corrected labels. Batch norms then keep their statistics."""
    projection: Annotated[int, within(1, 65_536)] = 128
    """Dimensions of the linear projection into the contrastive space."""

    # Length and learning rate
    epochs: Annotated[int, within(1, 1_000_000)] = 200
    """Number of passes over the images. A value other than the preset's scales its warm-up and the
    steps of its schedule."""
    warmup: Annotated[int | None, at_least(0)] = None
    """Warm-up epochs, before labels are corrected. None: 15% of the epochs (at least 1)."""
    batch_size: Annotated[int, within(2, 1_048_576)] = 256
    """Images per step. A value other than the preset's scales its learning rate."""
    accumulate: Annotated[int, at_least(1)] = 1
    """Split each batch into this many parts and accumulate gradients, to save device memory."""
    lr: Annotated[float, above(0, 100)] = 0.1
    """Learning rate at the start."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine or linear, which fall to 0; constant; or
    steps:80,120:0.1 (multiplied by 0.1 at the start of epochs 81 and 121)."""
    optimiser: Literal["sgd", "nesterov", "adam", "muon"] = "sgd"
    """SGD with momentum; with Nesterov's momentum; Adam; or Muon for convolutions and SGD for the
    rest. The learning rate of Adam starts at 0.001 and that of Muon at 0.02 unless --lr says
    otherwise."""
    momentum: Annotated[float, SHARE] = 0.9
    """Momentum of SGD and Muon; the first beta of Adam."""
    weight_decay: Annotated[float, SHARE] = 5e-4
    """Weight decay, added to the gradients; that of Muon shrinks weights by its product with the
    learning rate."""

    # Views
    image_size: Annotated[int | None, within(8, 4096)] = None
    """Pixels per side that the network sees: larger images are cropped. None: the whole image; for
    image files, the size the network was made for."""
    pad: Annotated[int | None, within(0, 512)] = None
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
    seed: Annotated[int, Limit(lambda v: 0 <= v < 2**63, "0 to 2^63 - 1")] = 1
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
    method_settings: MethodSettings = None  # type: ignore[assignment]

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
        limits = _limits(Settings) | _limits(type(self.method_settings))
        for name, value in as_json(self).items():
            limit = limits.get(name)
            if limit is not None and value is not None and not limit.holds(value):
                raise InputError(f"{flag(name)} must be {limit.text}, not {shorten(value)}")
        if self.warmup is not None and self.warmup > self.epochs:
            raise InputError(f"--warmup {self.warmup} must not exceed --epochs {self.epochs}")
        needed = self.method_settings.needs_warmup
        if needed and self.warmup == 0:
            raise InputError(f"--warmup must be at least 1 for --method {self.method}: {needed}")
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
        if self.optimiser == "nesterov" and self.momentum == 0:
            raise InputError("--optimiser nesterov needs a --momentum above 0")
        parse_schedule(self.schedule)

    @property
    def warmup_epochs(self) -> int:
        """The warm-up that is used: `warmup`, or its share of the epochs."""
        if self.warmup is not None:
            return self.warmup
        return max(1, round(WARMUP_SHARE * self.epochs))


def parse_schedule(text: str) -> tuple[tuple[int, ...], float] | None:
    """Epochs and factor of a schedule of steps; None for the others."""
    if text in ("cosine", "linear", "constant"):
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
        f"--schedule {shorten(text)}: must be cosine, linear, constant or such as steps:80,120:0.1"
    )


def scaled_schedule(text: str, epochs: int, new_epochs: Any) -> str:
    """A schedule of steps for another number of epochs; others stay as they are."""
    steps = parse_schedule(text)
    if steps is None or not isinstance(new_epochs, Integral) or new_epochs == epochs:
        return text
    starts = dict.fromkeys(max(1, round(start * int(new_epochs) / epochs)) for start in steps[0])
    return f"steps:{','.join(map(str, starts))}:{steps[1]:g}"


def scaled_warmup(warmup: int, epochs: int, new_epochs: int) -> int:
    """A warm-up for another number of epochs; 0 stays 0."""
    if warmup == 0:
        return 0
    return min(max(1, round(warmup * new_epochs / epochs)), max(new_epochs - 1, 1))


# ------------------------------------------------------------------- about the settings themselves


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(settings: type) -> dict[str, Any]:
    """Names and types of the fields of a dataclass."""
    if settings not in _HINTS:
        hints = get_type_hints(settings)
        _HINTS[settings] = {f.name: hints[f.name] for f in dataclasses.fields(settings)}
    return _HINTS[settings]


_LIMITS: dict[type, dict[str, Limit]] = {}


def _limits(settings: type) -> dict[str, Limit]:
    """What the settings of a dataclass may be, from their annotations."""
    if settings not in _LIMITS:
        _LIMITS[settings] = {
            name: limit
            for name, hint in get_type_hints(settings, include_extras=True).items()
            for limit in getattr(hint, "__metadata__", ())
            if isinstance(limit, Limit)
        }
    return _LIMITS[settings]


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
        listed = " and ".join(filter(None, (", ".join(owners[:-1]), owners[-1])))
        return f"a setting of --method {listed}, not of {method}"
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
            hint = did_you_mean(str(value), choices)
            must = f"must be one of {', '.join(choices)}"
            raise InputError(f"{flag(name)} {shorten(value)}: {must}{hint}")
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
