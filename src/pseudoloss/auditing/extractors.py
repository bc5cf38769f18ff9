"""Networks that turn images into features.

Shapes: B images in a batch, C channels, H×W pixels, D features.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pseudoloss.config import EMBEDDED, EMBEDDED_NETWORK
from pseudoloss.data import Reader
from pseudoloss.errors import InputError, did_you_mean, first_line
from pseudoloss.inference.ensemble import networks_of
from pseudoloss.nn.devices import choose_device, using
from pseudoloss.nn.networks import create_timm
from pseudoloss.nn.views import make_views
from pseudoloss.nn.weights import embedded_file, load_weights
from pseudoloss.runs import open_model

DEFAULT = "efficientnet-lite0"  # the name of the embedded network
SMALL = 100  # pixels: images with a shorter side below this are small
SMALL_INPUT = 128  # pixels that the embedded network sees of small images
CROP = 0.875  # share of the shorter side that the embedded network sees of photographs
LARGEST = 65504.0  # of float16
VERSION = 1  # to be raised when the same network and image give other features

RUN = "run:"


@dataclass(frozen=True)
class Extractor:
    """A network and its preprocessing.

    Attributes:
        name: for messages and tables.
        key: hash of the weights, the network and the preprocessing.
        reader: decodes an image to the size that `compute` takes.
        width: number of features.
        batch: images that `compute` takes; fewer are padded.
        compute: features, float16 (B,D), of decoded images, uint8 (B,C,H,W).
        workers: number of batches to compute at the same time.
    """

    name: str
    key: str
    reader: Reader
    width: int
    batch: int
    compute: Callable[[np.ndarray], np.ndarray]
    workers: int = 1

    @contextmanager
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        """Threads to call `compute` in, each of which computes alone."""
        threads = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield threads
        finally:
            threads.shutdown(cancel_futures=True)
            torch.set_num_threads(torch.get_num_threads())  # what new threads get was changed too


def open_extractor(spec: str | None, side: int, device: str = "auto") -> Extractor:
    """The extractor that --features names.

    Args:
        spec: None or "efficientnet-lite0": the embedded network. "run:RUN": a network that was
            trained here. Any other: a timm model with its pretrained weights. "NAME@SIZE" sets the
            size in pixels of what a network sees.
        side: the shorter side of a typical image, in pixels. The embedded network sees small images
            at 128 pixels, which is three times faster, and photographs at 224.
        device: as --device.
    """
    place = choose_device(device)
    if spec == "":
        raise InputError("--features is empty")
    if spec is not None and spec.startswith(RUN):
        return _of_run(spec, place)
    name, size = _split(spec or DEFAULT)
    if name in (DEFAULT, EMBEDDED):
        return _embedded(size, side, place)
    return _of_timm(name, size, place)


def _split(spec: str) -> tuple[str, int | None]:
    """The name and the size in NAME@SIZE."""
    name, at, size = spec.partition("@")
    if not at:
        return name, None
    if not re.fullmatch("[0-9]{2,4}", size) or int(size) < 32:
        raise InputError(f"--features {spec}: the size behind @ must be 32 pixels or more")
    return name, int(size)


def _embedded(size: int | None, side: int, device: torch.device) -> Extractor:
    small = side < SMALL
    seen = size or (SMALL_INPUT if small else 224)
    stored = seen if small else round(seen / CROP)
    backbone = create_timm(EMBEDDED_NETWORK, 3, (seen, seen))
    load_weights(backbone, embedded_file(), EMBEDDED_NETWORK)
    fold_norms(backbone)
    half = (0.5, 0.5, 0.5)
    return _extractor(
        f"{DEFAULT}@{seen}", backbone, (stored, stored), (seen, seen), half, half, device
    )


@torch.no_grad()
def fold_norms(backbone: nn.Module) -> None:
    """Fold each batch norm of an EfficientNet into the convolution before it: half as fast again on
    a CPU. Its modules are in the order in which they are called."""
    conv: nn.Conv2d | None = None
    for name, module in list(backbone.named_modules()):
        if isinstance(module, nn.Conv2d):
            conv = module
        elif isinstance(module, nn.BatchNorm2d) and conv is not None:
            assert module.running_mean is not None
            assert module.running_var is not None
            scale_C = module.weight / torch.sqrt(module.running_var + module.eps)
            conv.weight.mul_(scale_C[:, None, None, None])
            conv.bias = nn.Parameter(module.bias - module.running_mean * scale_C)
            parent, _, child = name.rpartition(".")
            setattr(backbone.get_submodule(parent), child, module.act)


def _of_timm(name: str, size: int | None, device: torch.device) -> Extractor:
    import timm

    if not timm.is_model(name.partition(".")[0]):
        # Comparing a very long name with all names takes long.
        hint = did_you_mean(name, timm.list_models()) if len(name) < 60 else ""
        hint = hint or f"; known: {DEFAULT}, the name of a timm model, {RUN}RUN, FILE.npy"
        raise InputError(f"--features {name}: no such network{hint}")
    wanted = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if wanted is None or not wanted.has_weights:
        raise InputError(f"--features {name}: timm has no pretrained weights for it")
    seen = size or wanted.input_size[-1]
    stored = round(seen / (wanted.crop_pct or 1))
    try:
        backbone = create_timm(name, 3, (seen, seen), pretrained=True)
    except Exception as error:  # timm and the hub can raise anything
        raise InputError(
            f"--features {name}: its weights cannot be loaded ({first_line(error)}). Omit "
            "--features to use the embedded network, or compute features elsewhere and give "
            "--features FILE.npy"
        ) from None
    sizes = (stored, stored), (seen, seen)
    label = name if size is None else f"{name}@{size}"
    try:
        return _extractor(label, backbone, *sizes, wanted.mean, wanted.std, device)
    except RuntimeError as error:
        raise InputError(
            f"--features {name}: does not take images of {seen}×{seen} ({first_line(error)})"
        ) from None


def _of_run(spec: str, device: torch.device) -> Extractor:
    try:
        model = open_model(spec.removeprefix(RUN), device=str(device))
    except InputError as error:
        raise InputError(f"--features {spec}: {error}") from None
    found = model.description
    backbone = _Concatenated([network.backbone for network in networks_of(model.network)])
    return _extractor(
        spec, backbone, found.stored, found.size, found.mean, found.std, device, model.reader
    )


class _Concatenated(nn.Module):
    """The features of several networks, side by side."""

    def __init__(self, backbones: Sequence[nn.Module]) -> None:
        super().__init__()
        self.backbones = nn.ModuleList(backbones)

    def forward(self, x_BChw: Tensor) -> Tensor:
        return torch.cat([backbone(x_BChw) for backbone in self.backbones], 1)


def _extractor(
    name: str,
    backbone: nn.Module,
    stored: tuple[int, int],
    seen: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    reader: Reader | None = None,
) -> Extractor:
    """An extractor that decodes images to `stored` pixels, of which the network sees the centre."""
    reader = reader or Reader(3, stored, "crop")
    backbone = backbone.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    views = make_views(mean, std, seen, device=device)
    batch = 256 if device.type == "cuda" else 32 if max(seen) <= 128 else 16  # measured
    facts = (VERSION, type(backbone).__name__, name, reader, seen, tuple(mean), tuple(std))

    @torch.inference_mode()
    def compute(pixels_BCHW: np.ndarray) -> np.ndarray:
        # Always as many images: kernels for other numbers round differently, and the features of an
        # image must not depend on the images around it.
        padded = np.zeros((batch, *pixels_BCHW.shape[1:]), np.uint8)
        padded[: len(pixels_BCHW)] = pixels_BCHW
        with using(device):
            images_BCHW = torch.from_numpy(padded).to(device)
            features_BD = backbone(views.plain(images_BCHW))[: len(pixels_BCHW)].float()
            found = features_BD.clamp(-LARGEST, LARGEST).half().cpu().numpy()
        if not np.isfinite(found).all():
            raise InputError(f"--features {name}: the network gives NaN")
        return np.asarray(found)

    width = compute(np.zeros((1, reader.channels, *reader.size), np.uint8)).shape[1]
    # On a CPU several batches at once, each in one thread: threads need not wait for each other,
    # and their number changes no result.
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    key = _key(facts, backbone.state_dict())
    return Extractor(name, key, reader, width, batch, compute, workers)


def _key(facts: object, weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(facts).encode())
    for name, tensor in weights.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
