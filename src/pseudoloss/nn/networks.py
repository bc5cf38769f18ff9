"""Networks: a backbone, a linear classifier and a linear projection into the contrastive space.

Shapes: B images, C classes, D dimensions of the contrastive space, F features of the backbone.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pseudoloss.config import EMBEDDED, EMBEDDED_NETWORK, OWN
from pseudoloss.errors import InputError, did_you_mean, first_line
from pseudoloss.files import at_home
from pseudoloss.nn.autograd import SideStream, cast_weights
from pseudoloss.nn.ops import EagerOps, FoldedOps, FusedOps
from pseudoloss.nn.weights import embedded_file, load_weights

EAGER = EagerOps()


class Network(nn.Module):
    """The network that training and prediction call. Outputs are float32 in every `precision`."""

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        classes: int,
        projection: int,
        precision: torch.dtype = torch.float32,
        decoder: bool = False,
    ) -> None:
        """`decoder`: for training, with a linear decoder from the projection to the features."""
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(features, classes)
        self.projection = nn.Linear(features, projection)
        self.decoder = nn.Linear(projection, features) if decoder else None
        self.precision = precision
        self.keep_norms = False  # batch norms use, and keep, their statistics in training too
        self.fused = False  # our own backbones only: compute with `FusedOps` and `FoldedOps`
        self.synced = False  # batch norm over all processes: plain layers in training
        self._folded: FoldedOps | None = None

    def forward(self, x_BChw: Tensor, groups: int = 1, no_grad: int = 0) -> tuple[Tensor, ...]:
        """Logits (B,C), and the projection (B,D) before it is normalised. In training mode, a
        network with a decoder adds its reconstruction error (B,1).

        If fused, the batch may consist of several `groups` with batch statistics of their own; the
        first `no_grad` of them need no gradient.
        """
        # No cache: a cast that was kept from an earlier pass would be missing in a captured step.
        with torch.autocast(
            x_BChw.device.type,
            dtype=self.precision,
            enabled=self.precision != torch.float32,
            cache_enabled=False,
        ):
            ops = self._ops(x_BChw.device, groups, no_grad)
            features = self.backbone(x_BChw, *([ops] if self.fused else []))
            logits = ops.linear(self.classifier, features).float()
            projected = ops.linear(self.projection, features)
            if self.decoder is None or not self.training:
                return logits, projected.float()
            decoded = ops.linear(self.decoder, projected)
            return logits, projected.float(), reconstruction_error(decoded, features)

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        if self.keep_norms:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def forward_views(self, *views: Tensor, no_grad: int = 0) -> list[tuple[Tensor, ...]]:
        """What `forward` returns for every view, in one pass for views of one size if that is
        faster. The first `no_grad` views need no gradient."""
        outputs: list[tuple[Tensor, ...]] = []
        if self.fused and self.training and not self.synced:
            for _, same_size in groupby(views, len):
                group = list(same_size)
                free = min(max(no_grad - len(outputs), 0), len(group))
                with torch.set_grad_enabled(torch.is_grad_enabled() and free < len(group)):
                    found = self(torch.cat(group), len(group), free)
                outputs += zip(*(output.chunk(len(group)) for output in found), strict=True)
        else:
            for i, view in enumerate(views):
                with torch.set_grad_enabled(torch.is_grad_enabled() and i >= no_grad):
                    outputs.append(self(view))
        free_outputs = [tuple(t.detach() for t in found) for found in outputs[:no_grad]]
        return free_outputs + outputs[no_grad:]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Evaluation mode for several calls between which no weight changes. What is derived from
        the weights is computed once."""
        self.eval()
        try:
            if self.fused:
                self._folded = FoldedOps(_convolutions(self.backbone), self.precision)
            yield
        finally:
            self._folded = None

    def _ops(self, device: torch.device, groups: int, no_grad: int) -> EagerOps:
        """The implementation of the layers for this call."""
        if self.fused and self._folded is not None and not torch.is_grad_enabled():
            return self._folded
        if not self.fused or not self.training or self.synced:
            return EAGER
        no_grad = no_grad if torch.is_grad_enabled() else groups
        side_stream = SideStream(device)
        weights = [conv.weight for conv in _convolutions(self.backbone)]
        heads = (self.classifier, self.projection, self.decoder)
        weights += [weight for head in heads if head is not None for weight in head.parameters()]
        weights_by_parameter = cast_weights(self.precision, weights, side_stream)
        return FusedOps(weights_by_parameter, groups, no_grad, side_stream)


def reconstruction_error(decoded_BF: Tensor, features_BF: Tensor) -> Tensor:
    """The mean squared difference of ReLU(decoded) and the features of each image: (B,1)."""
    difference_BF = F.relu(decoded_BF).float() - features_BF.float()
    return difference_BF.square().mean(1, keepdim=True)


def build(
    name: str,
    *,
    channels: int,
    size: tuple[int, int],
    classes: int,
    projection: int,
    weights: str | None = None,
    precision: torch.dtype = torch.float32,
    decoder: bool = False,
) -> Network:
    """Build the network called `name`: one of ours (`OWN`) or any timm model.

    `weights` are the initial weights of a timm backbone: "embedded", "pretrained" or a file.
    """
    if weights is not None and name in OWN:
        raise InputError(f"--weights {weights}: {name} is trained from scratch; use a timm model")
    if name == "small-cnn":
        backbone: nn.Module = SmallCNN(channels)
        features = SmallCNN.FEATURES
    elif name in OWN:
        backbone = PreActResNet18(
            channels,
            final_norm=name == "preactresnet18",
            activated_shortcuts=name == "preactresnet18-released",
        )
        features = PreActResNet18.FEATURES
    else:
        backbone, features = _timm_backbone(name, channels, size, weights)
    network = Network(backbone, features, classes, projection, precision, decoder)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class PreActBlock(nn.Module):
    """Norm, ReLU and convolution, twice, and a shortcut. If the block downsamples, the shortcut
    starts after the first norm and ReLU; otherwise before them, or after them as well with
    `activated_shortcut`."""

    def __init__(self, inputs: int, outputs: int, stride: int, activated_shortcut: bool) -> None:
        super().__init__()
        self.activated_shortcut = activated_shortcut
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Any, skip: Any, ops: EagerOps) -> tuple[Any, Any]:
        """The input is x + skip; the output, too, is the sum of the two returned values."""
        keep_sum = self.shortcut is None and not self.activated_shortcut
        total, activated = ops.sum_norm_relu(self.norm1, x, skip, keep_sum)
        if self.shortcut is None:
            shortcut = activated if self.activated_shortcut else total
            activated = ops.conv_norm_relu(self.conv1, self.norm2, activated)
        else:
            activated, shortcut = ops.downsample(self.conv1, self.norm2, self.shortcut, activated)
        return ops.conv(self.conv2, activated), shortcut


class PreActResNet18(nn.Module):
    """The pre-activation ResNet-18 for images of 32 pixels (row 17).

    With `final_norm` it is the standard network, with norm and ReLU before the pooling. Without,
    they come after the first convolution instead. The authors' released code also has
    `activated_shortcuts`.
    """

    FEATURES = 512

    def __init__(self, channels: int, final_norm: bool, activated_shortcuts: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        self.stem_norm = None if final_norm else nn.BatchNorm2d(64)
        blocks = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [
                PreActBlock(inputs, outputs, stride, activated_shortcuts),
                PreActBlock(outputs, outputs, 1, activated_shortcuts),
            ]
            inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.BatchNorm2d(self.FEATURES) if final_norm else None
        _init_convolutions(self)

    def forward(self, x_BChw: Tensor, ops: EagerOps = EAGER) -> Tensor:
        if self.stem_norm is None:
            x, skip = ops.first(self.stem, x_BChw), None
        else:
            x, skip = ops.first_norm_relu(self.stem, self.stem_norm, x_BChw), None
        for block in self.blocks:
            x, skip = block(x, skip, ops)
        if self.final_norm is not None:
            (_, x), skip = ops.sum_norm_relu(self.final_norm, x, skip, keep_sum=False), None
        return ops.pool(x, skip)


class SmallCNN(nn.Module):
    """Four convolutions, for small images and for the CPU."""

    FEATURES = 128

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = (channels, 32, 64, 128, self.FEATURES)
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            for (inputs, outputs), stride in zip(pairwise(widths), (1, 2, 1, 2), strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for outputs in widths[1:])
        _init_convolutions(self)

    def forward(self, x_BChw: Tensor, ops: EagerOps = EAGER) -> Tensor:
        (first, *convs), (first_norm, *norms) = self.convs, self.norms
        x = ops.first_norm_relu(cast(Any, first), cast(Any, first_norm), x_BChw)
        for conv, norm in cast(Any, zip(convs, norms, strict=True)):
            x = ops.conv_norm_relu(conv, norm, x)
        return ops.pool(x)


def _convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]


def _init_convolutions(module: nn.Module) -> None:
    for conv in _convolutions(module):
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")


class Input(NamedTuple):
    """The images that a network was designed for."""

    size: int  # height and width in pixels
    mean: tuple[float, ...]
    std: tuple[float, ...]


def wanted_input(name: str) -> Input | None:
    """The images that a timm model was designed for; None for our own networks, which take any."""
    if name in OWN:
        return None
    check_known(name)
    import timm

    found = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if found is None:
        return Input(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return Input(found.input_size[-1], tuple(found.mean), tuple(found.std))


def check_known(name: str) -> None:
    """Refuse the name of a network that does not exist."""
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
    pretrained = weights == "pretrained"
    try:
        backbone = create_timm(name, channels, size, pretrained)
    except Exception as error:  # timm and the hub can raise anything
        if not pretrained:
            raise InputError(
                f"--network {name}: timm cannot build it ({first_line(error)})"
            ) from None
        raise InputError(
            f"--weights pretrained: the weights of {name} cannot be loaded ({first_line(error)}). "
            f"Download them elsewhere and give --weights FILE, start from --network "
            f"{EMBEDDED_NETWORK} --weights {EMBEDDED}, or train from scratch with --preset scratch "
            "or --weights none"
        ) from None
    if weights is not None and not pretrained:
        load_weights(backbone, _file_of(weights, name), name)
    try:
        backbone.eval()
        with torch.no_grad():
            features = backbone(torch.zeros(1, channels, *size)).shape[-1]
    except Exception as error:
        raise InputError(
            f"--network {name}: does not take images of {size[0]}×{size[1]} ({first_line(error)})"
        ) from None
    return backbone.train(), features


def create_timm(
    name: str, channels: int, size: tuple[int, int], pretrained: bool = False
) -> nn.Module:
    """A timm model without its classifier. timm and the hub can raise anything."""
    import timm

    options: dict[str, Any] = {"in_chans": channels, "num_classes": 0, "pretrained": pretrained}
    with _offline_if_unreachable() if pretrained else nullcontext():
        try:  # a transformer is built for one image size
            return timm.create_model(name, img_size=size, **options)
        except TypeError:
            return timm.create_model(name, **options)


def _file_of(weights: str, name: str) -> Path:
    """The file that --weights names."""
    if weights != EMBEDDED:
        return at_home(weights)
    if name.partition(".")[0] != EMBEDDED_NETWORK:
        raise InputError(
            f"--weights {EMBEDDED}: are those of --network {EMBEDDED_NETWORK}, not of {name}"
        )
    return embedded_file()


def check_weights(name: str, weights: str | None, channels: int, size: int) -> None:
    """Refuse weights that cannot be loaded, before the images are read. Pretrained weights are in
    timm's cache afterwards."""
    if weights is not None:
        build(name, channels=channels, size=(size, size), classes=2, projection=1, weights=weights)


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Use only the local cache of the Hugging Face hub if there is no connection. Otherwise the
    library retries for a minute."""
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
