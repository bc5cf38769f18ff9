"""Networks: a backbone, a linear classifier, and a linear projection into the contrastive space.

Shapes: B images, C classes, D dimensions of the contrastive space.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pseudoloss.config import OWN
from pseudoloss.errors import InputError, did_you_mean, first_line
from pseudoloss.files import at_home
from pseudoloss.nn.ops import Beside, Folded, Fused, Plain, weights_in

PLAIN = Plain()


class Network(nn.Module):
    """What training and prediction call. Outputs are float32 whatever `precision` it runs in."""

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        classes: int,
        projection: int,
        precision: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(features, classes)
        self.projection = nn.Linear(features, projection)
        self.precision = precision
        self.fused = False  # whether our own backbones compute by `Fused` and `Folded`
        self._folded: Folded | None = None

    def forward(self, x_BChw: Tensor, groups: int = 1, free: int = 0) -> tuple[Tensor, Tensor]:
        """Logits (B,C), and the projection (B,D) before it is normalised.

        Fused only: the batch may be several `groups`, each with batch statistics of its own, of
        which the first ones are `free` of gradients.
        """
        # Without the cache: a cast kept from an earlier pass could not be captured with a step.
        with torch.autocast(
            x_BChw.device.type,
            dtype=self.precision,
            enabled=self.precision != torch.float32,
            cache_enabled=False,
        ):
            ops = self._how(x_BChw.device, groups, free)
            features = self.backbone(x_BChw, *([ops] if self.fused else []))
            heads = (self.classifier, self.projection)
            logits, projected = (ops.linear(head, features).float() for head in heads)
            return logits, projected

    def forward_views(self, *views: Tensor, free: int = 0) -> list[tuple[Tensor, Tensor]]:
        """What `forward` gives for one view after another, the first ones `free` of gradients; in
        one pass where that is faster."""
        if self.fused and self.training:
            outputs = self(torch.cat(views), len(views), free)
            parts = list(zip(*(part.chunk(len(views)) for part in outputs), strict=True))
        else:
            parts = []
            for i, view in enumerate(views):
                with torch.set_grad_enabled(torch.is_grad_enabled() and i >= free):
                    parts.append(self(view))
        return [(a.detach(), b.detach()) for a, b in parts[:free]] + parts[free:]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """For calls in evaluation mode between which no weight changes: what is derived from
        weights is derived once."""
        self.eval()
        try:
            if self.fused:
                self._folded = Folded(_convolutions(self.backbone), self.precision)
            yield
        finally:
            self._folded = None

    def _how(self, device: torch.device, groups: int, free: int) -> Plain:
        """How to compute."""
        if self.fused and self._folded is not None and not torch.is_grad_enabled():
            return self._folded
        if not self.fused or not self.training:
            return PLAIN
        free = free if torch.is_grad_enabled() else groups
        beside = Beside(device)
        weights = [conv.weight for conv in _convolutions(self.backbone)]
        weights += [*self.classifier.parameters(), *self.projection.parameters()]
        return Fused(weights_in(self.precision, weights, beside), groups, free, beside)


def build(
    name: str,
    *,
    channels: int,
    size: tuple[int, int],
    classes: int,
    projection: int,
    weights: str | None = None,
    precision: torch.dtype = torch.float32,
) -> Network:
    """The network called `name`: one of ours (`OWN`) or any model of timm.

    `weights`: what a timm backbone starts from, "pretrained" or a file.
    """
    if weights is not None and name in OWN:
        raise InputError(f"--weights {weights}: {name} is trained from scratch; name a timm model")
    if name == "small-cnn":
        backbone: nn.Module = SmallCNN(channels)
        features = SmallCNN.FEATURES
    elif name in OWN:
        backbone = PreActResNet18(
            channels,
            final_norm=name == "preactresnet18",
            active_shortcuts=name == "preactresnet18-released",
        )
        features = PreActResNet18.FEATURES
    else:
        backbone, features = _timm_backbone(name, channels, size, weights)
    network = Network(backbone, features, classes, projection, precision)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class PreActBlock(nn.Module):
    """Norm, ReLU and convolution, twice, around a shortcut. Where the image is halved, the shortcut
    begins behind the first norm and ReLU; elsewhere before them, or there too (`active`)."""

    def __init__(self, inputs: int, outputs: int, stride: int, active: bool) -> None:
        super().__init__()
        self.active = active
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Any, skip: Any, ops: Plain) -> tuple[Any, Any]:
        """From x + skip to the two that the next norm sums."""
        keep = self.shortcut is None and not self.active
        total, active = ops.sum_norm_relu(self.norm1, x, skip, keep=keep)
        if self.shortcut is None:
            shortcut = active if self.active else total
            active = ops.conv_norm_relu(self.conv1, self.norm2, active)
        else:
            active, shortcut = ops.downsample(self.conv1, self.norm2, self.shortcut, active)
        return ops.conv(self.conv2, active), shortcut


class PreActResNet18(nn.Module):
    """The 32-pixel pre-activation ResNet-18 (row 17).

    With `final_norm` the standard form: norm and ReLU before the pooling. Without, they come after
    the first convolution instead; in the released program `active_shortcuts` too.
    """

    FEATURES = 512

    def __init__(self, channels: int, final_norm: bool, active_shortcuts: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.stem_norm = None if final_norm else nn.BatchNorm2d(64)
        blocks = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [
                PreActBlock(inputs, outputs, stride, active_shortcuts),
                PreActBlock(outputs, outputs, 1, active_shortcuts),
            ]
            inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.BatchNorm2d(self.FEATURES) if final_norm else None
        _start_convolutions(self)

    def forward(self, x_BChw: Tensor, ops: Plain = PLAIN) -> Tensor:
        if self.stem_norm is None:
            x, skip = ops.first(self.stem, x_BChw), None
        else:
            x, skip = ops.first_norm_relu(self.stem, self.stem_norm, x_BChw), None
        for block in self.blocks:
            x, skip = block(x, skip, ops)
        if self.final_norm is not None:
            (_, x), skip = ops.sum_norm_relu(self.final_norm, x, skip, keep=False), None
        return ops.pool(x, skip)


class SmallCNN(nn.Module):
    """Four convolutions, for tiny images and for CPUs."""

    FEATURES = 128

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = (channels, 32, 64, 128, self.FEATURES)
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            for (inputs, outputs), stride in zip(pairwise(widths), (1, 2, 1, 2), strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for outputs in widths[1:])
        _start_convolutions(self)

    def forward(self, x_BChw: Tensor, ops: Plain = PLAIN) -> Tensor:
        (first, *convs), (first_norm, *norms) = self.convs, self.norms
        x = ops.first_norm_relu(cast(Any, first), cast(Any, first_norm), x_BChw)
        for conv, norm in cast(Any, zip(convs, norms, strict=True)):
            x = ops.conv_norm_relu(conv, norm, x)
        return ops.pool(x)


def _convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


def _start_convolutions(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


class Input(NamedTuple):
    """What a network was made for."""

    size: int  # pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]


def wanted_input(name: str) -> Input | None:
    """The images that a timm model was made for; None for ours, which take any."""
    if name in OWN:
        return None
    check_known(name)
    import timm

    found = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if found is None:
        return Input(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return Input(found.input_size[-1], tuple(found.mean), tuple(found.std))


def check_known(name: str) -> None:
    """Refuse the name of no network."""
    if name in OWN:
        return
    import timm

    if not timm.is_model(name.partition(".")[0]):
        # Comparing a very long name with all names takes long.
        hint = did_you_mean(name, [*OWN, *timm.list_models()]) if len(name) < 40 else ""
        hint = hint or f"; known: {', '.join(OWN)}, or the name of a timm model"
        raise InputError(f"--network {name}: no such network{hint}")


def _timm_backbone(
    name: str, channels: int, size: tuple[int, int], weights: str | None
) -> tuple[nn.Module, int]:
    check_known(name)
    import timm

    pretrained = weights == "pretrained"
    options: dict[str, Any] = {"in_chans": channels, "num_classes": 0, "pretrained": pretrained}
    try:
        with _patient_only_where_it_helps() if pretrained else nullcontext():
            try:  # transformers are built for one image size
                backbone = timm.create_model(name, img_size=size, **options)
            except TypeError:
                backbone = timm.create_model(name, **options)
    except Exception as error:  # timm and its hub raise many kinds
        if not pretrained:
            raise InputError(
                f"--network {name}: timm could not build it ({first_line(error)})"
            ) from None
        raise InputError(
            f"--weights pretrained: the weights of {name} could not be had "
            f"({first_line(error)}). Two ways out: --weights FILE with weights that were "
            "downloaded elsewhere, or training from scratch: --preset scratch, or --weights none"
        ) from None
    if weights is not None and not pretrained:
        _load_weights(backbone, at_home(weights), name)
    try:
        backbone.eval()
        with torch.no_grad():
            features = backbone(torch.zeros(1, channels, *size)).shape[-1]
    except Exception as error:
        raise InputError(
            f"--network {name}: does not take images of {size[0]}×{size[1]} ({first_line(error)})"
        ) from None
    return backbone.train(), features


def check_weights(name: str, weights: str | None, channels: int, size: int) -> None:
    """Refuse weights that cannot be had, before anything else takes time. Published ones are then
    in timm's cache."""
    if weights is not None:
        build(name, channels=channels, size=(size, size), classes=2, projection=1, weights=weights)


@contextmanager
def _patient_only_where_it_helps() -> Iterator[None]:
    """Without a connection, ask the cache of the hub alone: it would try again for a minute."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname or ""
    before = constants.HF_HUB_OFFLINE
    try:
        if not getproxies():
            socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _load_weights(backbone: nn.Module, path: Path, name: str) -> None:
    """The weights in a file, those of a classifier left out. Nothing in it is run."""
    where = f"--weights {path}"
    if not path.is_file():
        raise InputError(f"{where}: no such file")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever it likes
        raise InputError(f"{where}: not a file of weights ({first_line(error)})") from None
    for key in ("state_dict_ema", "state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise InputError(f"{where}: not a file of weights (it holds no tensors by name)")
    found = {str(key).removeprefix("module."): tensor for key, tensor in found.items()}
    wanted = backbone.state_dict()
    # What timm knows of a family: positions of a transformer in another number of patches, say.
    fit = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if fit is not None:
        try:
            found = fit(found, backbone)
        except Exception as error:  # made for its own files
            raise InputError(f"{where}: not the weights of {name} ({first_line(error)})") from None
    for key, tensor in wanted.items():
        if key not in found and not key.endswith("num_batches_tracked"):
            raise InputError(f"{where}: not the weights of {name} ({key} is missing)")
        if key in found and found[key].shape != tensor.shape:
            shapes = ["×".join(map(str, t.shape)) for t in (found[key], tensor)]
            raise InputError(
                f"{where}: not the weights of {name} as it is used here ({key} is {shapes[0]}, "
                f"wanted is {shapes[1]})"
            )
    backbone.load_state_dict({key: found.get(key, tensor) for key, tensor in wanted.items()})
