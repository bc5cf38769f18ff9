"""Export of a model to ONNX, TorchScript or safetensors, with everything that is needed to use it.

Shapes: N images, C channels or classes, h×w input of the network.
"""

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pseudoloss.errors import ExportError, InputError, first_line
from pseudoloss.files import as_path, new_folder, write_bytes, write_json
from pseudoloss.inference.ensemble import networks_of
from pseudoloss.inference.export_files import (
    PROGRAMS,
    Format,
    Training,
    centre_crop,
    image_reader,
    model_card,
    preprocessing,
)
from pseudoloss.inference.model import Model, load_model

FILES = {"onnx": "model.onnx", "torchscript": "model.pt", "safetensors": "model.safetensors"}
NEEDS = {"onnx": ("onnx", "onnxscript"), "torchscript": (), "safetensors": ()}

TOLERANCE = 1e-4  # largest difference of a probability after the export
LOG_TOLERANCE = 1e-2  # ... of its logarithm, which differs even where all are close to 0 or 1
LEAST = 1e-20  # smaller probabilities count as this one

Predict = Callable[[np.ndarray], np.ndarray]  # float32 N,C,h,w to probabilities


class Exported(NamedTuple):
    """What `export_model` has written."""

    path: Path
    files: list[str]
    difference: float | None  # largest difference of a probability; None: not compared


class Deployed(nn.Module):
    """From pixels between 0 and 1 to probabilities, normalisation and softmax included."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        networks = networks_of(model.network)
        self.backbones = nn.ModuleList(network.backbone for network in networks)
        self.classifiers = nn.ModuleList(network.classifier for network in networks)
        mean, std = (torch.tensor(v) for v in (model.description.mean, model.description.std))
        self.register_buffer("mean", mean[:, None, None])
        self.register_buffer("std", std[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        pixels = (images - self.mean) / self.std
        logits = [
            classifier(backbone(pixels))
            for backbone, classifier in zip(self.backbones, self.classifiers, strict=True)
        ]
        mean = logits[0] if len(logits) == 1 else torch.stack(logits).mean(0)
        return mean.softmax(1)


def export_model(
    model: Model, out: str | Path, form: Format = "onnx", training: Training | None = None
) -> Exported:
    """Write a folder with a model, its class names, its preprocessing and a model card.

    The exported model is compared with the original on a few images before the folder is kept.

    Args:
        model: the model, on the CPU.
        out: the folder to write; must not exist.
        form: "onnx" or "torchscript" (from pixels to probabilities), or "safetensors" (the weights,
            for pseudoloss itself).
        training: facts about the training, for the model card.
    """
    if form not in FILES:
        raise InputError(f"--format {form}: must be one of {', '.join(FILES)}")
    for name in NEEDS[form]:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--format {form} needs {name}: pip install 'pseudoloss[export]'")
    folder = as_path(out, "--out")
    write = {"onnx": _write_onnx, "torchscript": _write_torchscript, "safetensors": _write_own}
    with new_folder(folder) as draft:
        try:
            with silence():
                write[form](model, draft / FILES[form])
        except OSError:
            raise
        except Exception as error:  # the exporters raise many kinds of errors
            others = " or ".join(name for name in FILES if name != form)
            raise ExportError(
                f"--format {form}: {model.description.network} cannot be exported "
                f"({first_line(error)}); try --format {others}"
            ) from None
        difference = compare(draft / FILES[form], form, model)
        write_json(draft / "classes.json", list(model.classes))
        write_json(draft / "preprocessing.json", preprocessing(model.description, form))
        if form in PROGRAMS:
            write_bytes(draft / "image_files.py", image_reader().encode())
            write_bytes(draft / "predict.py", PROGRAMS[form].encode())
        write_bytes(draft / "README.md", model_card(model.description, form, training).encode())
        files = sorted(path.name for path in draft.iterdir())
    return Exported(folder, files, difference)


# ------------------------------------------------------------------------------------- formats


def _write_onnx(model: Model, path: Path) -> None:
    torch.onnx.export(
        Deployed(model).eval(),
        (_example(model),),
        path,
        input_names=["images"],
        output_names=["probabilities"],
        dynamic_shapes={"images": {0: torch.export.Dim("N")}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    import onnx

    # The exporter stores the source line of every node, with paths of this machine.
    graph = onnx.load(path)
    for node in graph.graph.node:
        del node.metadata_props[:]
    onnx.save(graph, path)


def _write_torchscript(model: Model, path: Path) -> None:
    with torch.no_grad():
        torch.jit.trace(Deployed(model).eval(), _example(model)).save(path)


def _write_own(model: Model, path: Path) -> None:
    model.save(path)


def _example(model: Model) -> Tensor:
    """Two images: with one, the exporter would fix the number of images."""
    return torch.rand(2, model.description.channels, *model.description.size)


# ---------------------------------------------------------------------------------- comparison


def compare(path: Path, form: Format, model: Model) -> float | None:
    """Largest difference between the probabilities of the exported model and of the original, on a
    few random images. Raises ExportError if it is too large; None if the format cannot be read
    here."""
    random = np.random.default_rng(0)
    shape = (5, model.description.channels, *model.description.stored)
    brightness = np.linspace(0.2, 1, 5)[:, None, None, None]
    images = (random.integers(0, 256, shape) * brightness).astype(np.uint8)
    wanted = model.predict_proba(images)
    top, left, height, width = centre_crop(model.description)
    pixels = images[:, :, top : top + height, left : left + width].astype(np.float32) / 255
    if form == "safetensors":
        found = load_model(path).predict_proba(images)
    else:
        if form == "onnx" and importlib.util.find_spec("onnxruntime") is None:
            return None
        with silence():
            predict = _read_onnx(path) if form == "onnx" else _read_torchscript(path)
            # One image, then several: any number of images must work.
            found = np.concatenate([predict(pixels[:1]), predict(pixels[1:])])
    difference = float(np.abs(found - wanted).max())
    logs = np.abs(np.log(np.maximum(found, LEAST)) - np.log(np.maximum(wanted, LEAST))).max()
    if not (difference <= TOLERANCE and logs <= LOG_TOLERANCE):  # also if it is NaN
        raise ExportError(
            f"--format {form}: the exported model differs from the original by {difference:.2g} in "
            f"a probability; nothing was written, try another --format"
        )
    return difference


def _read_onnx(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: np.asarray(session.run(None, {"images": images})[0])


def _read_torchscript(path: Path) -> Predict:
    script = torch.jit.load(path, map_location="cpu")
    return lambda images: np.asarray(script(torch.from_numpy(images)).detach())


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress the output and the warnings of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
