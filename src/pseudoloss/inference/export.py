"""A model for use elsewhere: its weights in a common format, and all that using them takes.

Shapes: N images, C channels or classes, h×w as the network sees them.
"""

import contextlib
import importlib.util
import io
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pseudoloss import __version__
from pseudoloss.audit.labels import estimated_noise
from pseudoloss.data import decoding as image_files
from pseudoloss.errors import ExportError, InputError, first_line
from pseudoloss.files import as_path, new_folder, refuse_existing, write_bytes, write_json
from pseudoloss.inference.model import Description, Model, load_model
from pseudoloss.runs import Run, load, open_model

Format = Literal["onnx", "torchscript", "safetensors"]
FILES = {"onnx": "model.onnx", "torchscript": "model.pt", "safetensors": "model.safetensors"}
NEEDS = {"onnx": ("onnx", "onnxscript"), "torchscript": (), "safetensors": ()}

TOLERANCE = 1e-4  # by which a probability may differ after exporting
LOG_TOLERANCE = 1e-2  # ... and its logarithm, which still differs where all are close to 0 or 1
LEAST = 1e-20  # probabilities below it are not looked at more closely
WORST = 5  # classes that the model card names

Predict = Callable[[np.ndarray], np.ndarray]  # float32 N,C,h,w to probabilities


class Exported(NamedTuple):
    """What `export_run` has written."""

    path: Path
    files: list[str]
    difference: float | None  # of a probability, at most, from the model's; None: not compared


class Deployed(nn.Module):
    """From pixels (0 to 1) to probabilities, with nothing left to do on either side."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.backbone, self.classifier = model.network.backbone, model.network.classifier
        mean, std = (torch.tensor(v) for v in (model.description.mean, model.description.std))
        self.register_buffer("mean", mean[:, None, None])
        self.register_buffer("std", std[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone((images - self.mean) / self.std)
        probabilities: Tensor = self.classifier(features).softmax(1)
        return probabilities


def export_run(
    run: str | Path, out: str | Path, form: Format = "onnx", best: bool = False
) -> Exported:
    """Write a folder with the model of a run, its classes, its preprocessing and a model card.

    What was written is read again, and compared with the model on a few images.

    Args:
        run: the folder of a finished run.
        out: the folder to write; new.
        form: "onnx" or "torchscript" (both from pixels to probabilities), or "safetensors" (the
            weights, for pseudoloss itself).
        best: the model of the epoch with the best accuracy, not of the last one.
    """
    if form not in FILES:
        raise InputError(f"--format {form}: must be one of {', '.join(FILES)}")
    folder = as_path(out, "--out")
    refuse_existing(folder)
    for name in NEEDS[form]:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--format {form} needs {name}: pip install 'pseudoloss[export]'")
    finished = load(run)
    model = open_model(run, best) if best else finished.model
    write = {"onnx": _write_onnx, "torchscript": _write_torchscript, "safetensors": _write_own}
    with new_folder(folder) as draft:
        try:
            with silence():
                write[form](model, draft / FILES[form])
        except OSError:
            raise
        except Exception as error:  # the exporters raise many kinds
            others = " or ".join(name for name in FILES if name != form)
            raise ExportError(
                f"--format {form}: {model.description.network} cannot be exported so "
                f"({first_line(error)}); try --format {others}"
            ) from None
        difference = compare(draft / FILES[form], form, model)
        write_json(draft / "classes.json", list(model.classes))
        write_json(draft / "preprocessing.json", preprocessing(model.description, form))
        if form in PROGRAMS:
            shutil.copyfile(image_files.__file__, draft / "image_files.py")
            write_bytes(draft / "predict.py", PROGRAMS[form].encode())
        card = model_card(finished, model.description, form, best)
        write_bytes(draft / "README.md", card.encode())
        files = sorted(path.name for path in draft.iterdir())
    return Exported(folder, files, difference)


# ---------------------------------------------------------------------------------- the formats


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

    # The exporter notes which lines of which files a node comes from, with paths of this machine.
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
    """Two images: one would be taken for the only number there can be."""
    return torch.rand(2, model.description.channels, *model.description.size)


def compare(path: Path, form: Format, model: Model) -> float | None:
    """By how much what was exported differs from the model, at most, on a few random images; an
    error if that is too much. None where the format cannot be read here."""
    random = np.random.default_rng(0)
    shape = (5, model.description.channels, *model.description.stored)
    brightness = np.linspace(0.2, 1, 5)[:, None, None, None]
    images = (random.integers(0, 256, shape) * brightness).astype(np.uint8)
    wanted = model.predict_proba(images)
    top, left, height, width = centre(model.description)
    pixels = images[:, :, top : top + height, left : left + width].astype(np.float32) / 255
    if form == "safetensors":
        found = load_model(path).predict_proba(images)
    else:
        if form == "onnx" and importlib.util.find_spec("onnxruntime") is None:
            return None
        with silence():
            predict = _read_onnx(path) if form == "onnx" else _read_torchscript(path)
            # One image, then several: the number of images must be free.
            found = np.concatenate([predict(pixels[:1]), predict(pixels[1:])])
    difference = float(np.abs(found - wanted).max())
    logs = np.abs(np.log(np.maximum(found, LEAST)) - np.log(np.maximum(wanted, LEAST))).max()
    if not (difference <= TOLERANCE and logs <= LOG_TOLERANCE):  # NaN is too much as well
        raise ExportError(
            f"--format {form}: what was exported differs from the model by {difference:.2g} in a "
            f"probability, and nothing is written; try another --format"
        )
    return difference


def _read_onnx(path: Path) -> Predict:
    import onnxruntime

    trainer = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: np.asarray(trainer.run(None, {"images": images})[0])


def _read_torchscript(path: Path) -> Predict:
    script = torch.jit.load(path, map_location="cpu")
    return lambda images: np.asarray(script(torch.from_numpy(images)).detach())


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The exporters print and warn a lot, none of it the user's business."""
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


# ------------------------------------------------------------------------------- what goes with it


def centre(description: Description) -> tuple[int, int, int, int]:
    """What the network sees of an image: top, left, height, width; as `Views.plain`."""
    (H, W), (height, width) = description.stored, description.size
    return (H - height) // 2, (W - width) // 2, height, width


def preprocessing(description: Description, form: Format) -> dict[str, Any]:
    """From a file to what the model takes, and what it gives."""
    (H, W), C = description.stored, description.channels
    top, left, height, width = centre(description)
    inside = form != "safetensors"
    fits = {
        "crop": "the shorter side is brought to the size and the centre kept: PIL.ImageOps.fit("
        f"image, ({W}, {H}), PIL.Image.Resampling.BICUBIC)",
        "stretch": f"all of the image in another shape: image.resize(({W}, {H}), "
        "PIL.Image.Resampling.BICUBIC)",
        "published-crop": f"the shorter side is brought to {max(H, W)} pixels, the other one "
        "rounded down, PIL.Image.Resampling.BICUBIC; then the centre is kept",
        "published-stretch": f"all of the image in another shape: image.resize(({W}, {H}), "
        "PIL.Image.Resampling.BILINEAR)",
    }
    ours = description.fit not in image_files.PUBLISHED
    pils = "as image.convert(mode) has it"
    return {
        "mode": "L" if C == 1 else "RGB",
        "channels": C,
        "orientation": "turned as EXIF says" if ours else "as it lies in the file",
        "transparency": "on white" if ours else pils,
        "deep": "grey values of 16 bits or fractions are scaled to 0..255" if ours else pils,
        "resize": {
            "fit": description.fit,
            "height": H,
            "width": W,
            "how": f"{fits[description.fit]}; nothing where it has that size",
            "jpeg": f"opened with image.draft(None, ({W}, {H})), which may decode a large "
            "one at a half, a quarter or an eighth of its size"
            if ours
            else "decoded in full",
        },
        "crop": {"top": top, "left": left, "height": height, "width": width},
        "scale": "float32(pixel) / 255",
        "range": [0, 1],
        "normalise": {
            "mean": description.mean,
            "std": description.std,
            "inside_the_model": inside,
            "how": "(value - mean) / std, for each channel",
        },
        "input": {
            "name": "images",
            "dtype": "float32",
            "shape": ["N", C, height, width],
            "holds": "pixels from 0 to 1" if inside else "normalised pixels",
        },
        "output": {
            "name": "probabilities" if inside else "logits",
            "dtype": "float32",
            "shape": ["N", len(description.classes)],
            "holds": ("probabilities" if inside else "logits, to be put through a softmax")
            + ", in the order of classes.json",
        },
    }


# predict.py, beside image_files.py, which is the very module that read the images to train on.
_PROGRAM = '''"""Say what is on images: python predict.py photo.jpg ...

Needs NumPy, Pillow and {package}. image_files.py reads files as they were read for training.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import {package}

from image_files import Reader, UnreadableError

HERE = Path(__file__).resolve().parent
CLASSES = json.loads((HERE / "classes.json").read_text(encoding="utf-8"))
STEPS = json.loads((HERE / "preprocessing.json").read_text(encoding="utf-8"))
{load}


def pixels(path):
    """A file as float32 channels, height, width, from 0 to 1."""
    resize, crop = STEPS["resize"], STEPS["crop"]
    size = (resize["height"], resize["width"])
    image = Reader(STEPS["channels"], size, resize["fit"]).read(path)
    rows = slice(crop["top"], crop["top"] + crop["height"])
    columns = slice(crop["left"], crop["left"] + crop["width"])
    return image[:, rows, columns].astype(np.float32) / 255


def probabilities(paths):
    """A row a file, a column a class."""
    images = np.stack([pixels(path) for path in paths])
    return {run}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python predict.py IMAGE ...")
    for path in sys.argv[1:]:
        try:
            found = probabilities([path])[0]
        except UnreadableError as error:
            print(f"{{path}}: left out ({{error}})", file=sys.stderr)
            continue
        try:
            print(path, CLASSES[found.argmax()], f"{{found.max():.4f}}", flush=True)
        except BrokenPipeError:  # whoever read it has gone, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            break
'''

PROGRAMS = {
    "onnx": _PROGRAM.format(
        package="onnxruntime",
        load='MODEL = onnxruntime.InferenceSession(str(HERE / "model.onnx"))',
        run='MODEL.run(None, {"images": images})[0]',
    ),
    "torchscript": _PROGRAM.format(
        package="torch",
        load='MODEL = torch.jit.load(HERE / "model.pt", map_location="cpu").eval()',
        run="MODEL(torch.from_numpy(images)).detach().numpy()",
    ),
}


def model_card(run: Run, description: Description, form: Format, best: bool) -> str:
    """README.md: where the model comes from, how good it is, how to use it."""
    summary, settings = run.summary, run.settings
    (H, W), (height, width) = description.stored, description.size
    colours = "grey" if description.channels == 1 else "RGB"
    started = vars(settings).get("weights")
    lines = [
        f"# {description.network}, trained on {_escaped(summary['source'])}",
        "",
        f"An image classifier of {len(description.classes)} classes, trained with pseudoloss "
        f"{__version__} on labels of which some are wrong. This is the model "
        + (f"of epoch {summary['accuracy']['best_epoch']}, the best one." if best else "")
        + ("" if best else f"after the last epoch ({summary['epochs']})."),
        "",
        "| | |",
        "|---|---|",
        f"| data | {_escaped(summary['source'])}: {summary['images']:,} images to train on |",
        f"| images | {colours}, read as {H}×{W} pixels, of which the network sees {height}×{width} "
        f"|",
        f"| classes | {_escaped(_some(description.classes))} |",
        f"| training | {settings.method}, {settings.epochs} epochs ({settings.warmup_epochs} of "
        f"them warm-up), batches of {settings.batch_size}, learning rate {settings.lr:g}, seed "
        f"{settings.seed}{f', from the weights {_escaped(started)}' if started else ''} |",
        f"| made with | torch {summary['torch']} |",
        "",
        "## How good it is",
        "",
        *_accuracy(summary["accuracy"], best),
        "",
        *_noise(estimated_noise(run.labels)),
        "",
        "It says one of its classes of every image, also of one that shows none of them.",
        "",
        "## How to use it",
        "",
        *_usage(description, form),
        "",
        "`classes.json` has the names of the classes in the order of the output, and "
        "`preprocessing.json` every step from a file to the input.",
    ]
    return "\n".join(lines) + "\n"


def _accuracy(accuracy: dict[str, Any], best: bool) -> list[str]:
    if accuracy["last"] is None:
        return ["Its accuracy was not measured: there were no images to test on."]
    last, top = f"{accuracy['last']:.2f}%", f"{accuracy['best']:.2f}%"
    on = _escaped(accuracy.get("on") or "the test images")
    lines = [
        f"Accuracy on {on}: {last} after the last epoch, {top} in epoch {accuracy['best_epoch']}, "
        "the best.",
    ]
    if accuracy.get("noisy_labels"):
        lines.append("Their labels may be wrong as well, so the true accuracy can be another.")
    if best:
        lines.append(
            "The epoch was chosen by that very accuracy, which flatters it: measure on other "
            "images."
        )
    return lines


def _noise(noise: dict[str, Any]) -> list[str]:
    worst = sorted(noise["by_class"].items(), key=lambda item: -item[1])[:WORST]
    lines = [f"{noise['rate']:.1%} of the labels it was trained on seem to be wrong. Most in:", ""]
    return lines + [f"- {_escaped(name)}: {share:.1%}" for name, share in worst]


def _usage(description: Description, form: Format) -> list[str]:
    if form == "safetensors":
        return [
            "`pseudoloss predict . photo.jpg` says what is on an image; in Python, in this folder:",
            "",
            "```python",
            "from pathlib import Path",
            "",
            "from pseudoloss.inference.model import load_model",
            "",
            'model = load_model(Path("model.safetensors"))',
            'print(model.predict_files(["photo.jpg"]))',
            "```",
        ]
    top, left, height, width = centre(description)
    package = "onnxruntime" if form == "onnx" else "torch"
    load, call = {
        "onnx": (
            'model = onnxruntime.InferenceSession("model.onnx")',
            '(probabilities,) = model.run(None, {"images": images})',
        ),
        "torchscript": (
            'model = torch.jit.load("model.pt")',
            "probabilities = model(torch.from_numpy(images)).detach().numpy()",
        ),
    }[form]
    return [
        f"`python predict.py photo.jpg` says what is on an image. It needs NumPy, Pillow and "
        f"{package}, and no pseudoloss. The same by hand, in this folder:",
        "",
        "```python",
        "import json",
        "",
        "import numpy as np",
        f"import {package}",
        "",
        "from image_files import Reader",
        "",
        f"reader = Reader(channels={description.channels}, size={description.stored}, "
        f'fit="{description.fit}")',
        f'image = reader.read("photo.jpg")[:, {top}:{top + height}, {left}:{left + width}]',
        "images = image[None].astype(np.float32) / 255  # as many as you like at once",
        load,
        call,
        'print(json.load(open("classes.json"))[probabilities[0].argmax()])',
        "```",
        "",
        f"The input `images` is float32, N×{description.channels}×{height}×{width}, pixels from 0 "
        f"to 1; the output `probabilities` is float32, N×{len(description.classes)}. "
        "Normalisation and softmax are inside.",
    ]


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:20]) + (f", … ({len(names)})" if len(names) > 20 else "")


def _escaped(text: str) -> str:
    """Fit for a line and a table of Markdown."""
    return " ".join(text.split()).replace("|", "\\|")
