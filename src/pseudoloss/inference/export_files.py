"""The files beside an exported model: preprocessing.json, predict.py and README.md."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pseudoloss.config import Settings
from pseudoloss.data import decoding
from pseudoloss.data.decoding import PUBLISHED
from pseudoloss.files import open_regular
from pseudoloss.inference.model import Description
from pseudoloss.terminal import CONTROLS
from pseudoloss.version import __version__

Format = Literal["onnx", "torchscript", "safetensors"]

SHOWN_CLASSES = 20  # in the table of the model card
WORST_CLASSES = 5  # classes with the most noise in the model card


class Training(NamedTuple):
    """Facts about the training of a model, for its card."""

    settings: Settings
    summary: Mapping[str, Any]  # of summary.json
    best: bool  # whether it is the model of the best epoch, not of the last one


def centre_crop(description: Description) -> tuple[int, int, int, int]:
    """Top, left, height and width of the network's input in an image; as in `Views.plain`."""
    (H, W), (height, width) = description.stored, description.size
    return (H - height) // 2, (W - width) // 2, height, width


# --------------------------------------------------------------------------- preprocessing.json


def preprocessing(description: Description, form: Format) -> dict[str, Any]:
    """All steps from a file to the input of the model, and the meaning of its output."""
    (H, W), C = description.stored, description.channels
    top, left, height, width = centre_crop(description)
    inside = form != "safetensors"
    fits = {
        "crop": "resize the shorter side and crop the centre: PIL.ImageOps.fit("
        f"image, ({W}, {H}), PIL.Image.Resampling.BICUBIC)",
        "stretch": f"resize without keeping the aspect ratio: image.resize(({W}, {H}), "
        "PIL.Image.Resampling.BICUBIC)",
        "published-crop": f"resize the shorter side to {max(H, W)} pixels and the other one in "
        "proportion, rounded down, PIL.Image.Resampling.BICUBIC; then crop the centre",
        "published-stretch": f"resize without keeping the aspect ratio: image.resize(({W}, {H}), "
        "PIL.Image.Resampling.BILINEAR)",
    }
    ours = description.fit not in PUBLISHED
    as_pil = "as in image.convert(mode)"
    return {
        "mode": "L" if C == 1 else "RGB",
        "channels": C,
        "orientation": "rotated as EXIF says" if ours else "as stored in the file",
        "transparency": "on a white background" if ours else as_pil,
        "deep": "16-bit and floating-point grey values are scaled to 0..255" if ours else as_pil,
        "resize": {
            "fit": description.fit,
            "height": H,
            "width": W,
            "how": f"{fits[description.fit]}; skipped if the image already has that size",
            "jpeg": f"opened with image.draft(None, ({W}, {H})), which may decode a large "
            "image at 1/2, 1/4 or 1/8 of its size"
            if ours
            else "decoded at full size",
        },
        "crop": {"top": top, "left": left, "height": height, "width": width},
        "scale": "float32(pixel) / 255",
        "range": [0, 1],
        "normalise": {
            "mean": description.mean,
            "std": description.std,
            "inside_the_model": inside,
            "how": "(value - mean) / std, per channel",
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
            "holds": ("probabilities" if inside else "logits (apply a softmax)")
            + ", in the order of classes.json",
        },
    }


# ----------------------------------------------------------------------------------- predict.py

# It needs image_files.py beside it, a copy of the module that read the training images.
_PROGRAM = '''"""Classify images: python predict.py photo.jpg ...

Needs NumPy, Pillow and {package}. image_files.py reads files exactly as in training.
"""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import {package}

from image_files import Reader, UnreadableError

HERE = Path(__file__).resolve().parent
CLASSES = json.loads((HERE / "classes.json").read_text(encoding="utf-8"))
STEPS = json.loads((HERE / "preprocessing.json").read_text(encoding="utf-8"))
CONTROLS = re.compile({controls!r})
{load}


def visible(text):
    """Names cannot control a terminal: control characters are shown as \\\\u001b."""
    text = CONTROLS.sub(lambda found: f"\\\\u{{ord(found[0]):04x}}", str(text))
    return " ".join(text.splitlines())


def pixels(path):
    """The pixels of a file: float32, channels first, from 0 to 1."""
    resize, crop = STEPS["resize"], STEPS["crop"]
    size = (resize["height"], resize["width"])
    image = Reader(STEPS["channels"], size, resize["fit"]).read(path)
    rows = slice(crop["top"], crop["top"] + crop["height"])
    columns = slice(crop["left"], crop["left"] + crop["width"])
    return image[:, rows, columns].astype(np.float32) / 255


def probabilities(paths):
    """One row per file, one column per class."""
    images = np.stack([pixels(path) for path in paths])
    return {run}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python predict.py IMAGE ...")
    for path in sys.argv[1:]:
        try:
            found = probabilities([path])[0]
        except UnreadableError as error:
            print(visible(f"{{path}}: skipped ({{error}})"), file=sys.stderr)
            continue
        try:
            name, label = visible(path), visible(CLASSES[found.argmax()])
            print(name, label, f"{{found.max():.4f}}", flush=True)
        except BrokenPipeError:  # the output was closed, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            break
'''


def image_reader() -> str:
    """The module that reads images, with the function that it imports from this package."""
    source = Path(decoding.__file__).read_text(encoding="utf-8")
    line = f"from {open_regular.__module__} import {open_regular.__name__}\n"
    return source.replace(line, f"\n\n{inspect.getsource(open_regular)}")


PROGRAMS = {
    "onnx": _PROGRAM.format(
        package="onnxruntime",
        load='MODEL = onnxruntime.InferenceSession(str(HERE / "model.onnx"))',
        run='MODEL.run(None, {"images": images})[0]',
        controls=CONTROLS.pattern,
    ),
    "torchscript": _PROGRAM.format(
        package="torch",
        load='MODEL = torch.jit.load(HERE / "model.pt", map_location="cpu").eval()',
        run="MODEL(torch.from_numpy(images)).detach().numpy()",
        controls=CONTROLS.pattern,
    ),
}


# ------------------------------------------------------------------------------------ README.md


def model_card(description: Description, form: Format, training: Training | None = None) -> str:
    """README.md: what the model is, how it was trained, how accurate it is, how to use it."""
    (H, W), (height, width) = description.stored, description.size
    colours = "grey" if description.channels == 1 else "RGB"
    crop = "" if (height, width) == (H, W) else f", cropped to {height}×{width}"
    network = description.network
    if description.members > 1:
        network = f"{description.members} × {network}, mean of their logits"
    about = {
        "network": network,
        "images": f"{colours}, {H}×{W} pixels{crop}",
        "classes": _escape(_shorten(description.classes)),
    }
    if training is not None:
        about |= _training_rows(training)
    source = f", trained on {_escape(training.summary['source'])}" if training else ""
    lines = [
        f"# {description.network}{source}",
        "",
        f"An image classifier with {len(description.classes)} classes, made with pseudoloss "
        f"{__version__}, which trains on noisy labels.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {title} | {text} |" for title, text in about.items()),
        "",
    ]
    if training is not None:
        lines += [
            "## Accuracy",
            "",
            *_accuracy(training.summary["accuracy"], training.best),
            "",
            *_noise(training.summary["estimated_noise"]),
            "",
        ]
    lines += [
        "The model predicts one of its classes for every image, even if the image shows none.",
        "",
        "## Usage",
        "",
        *_usage(description, form),
        "",
        "`classes.json` holds the class names in the order of the output, `preprocessing.json` "
        "all steps from a file to the input.",
    ]
    return "\n".join(lines) + "\n"


def _training_rows(training: Training) -> dict[str, str]:
    settings, summary, best = training
    epoch = f"the last one ({summary['epochs']})"
    if best:
        epoch = f"{summary['accuracy']['best_epoch']}, the one with the best accuracy"
    start = f", starting from the weights {_escape(settings.weights)}" if settings.weights else ""
    return {
        "data": f"{_escape(summary['source'])}: {summary['images']:,} training images",
        "training": f"{settings.method}, {settings.epochs} epochs ({settings.warmup_epochs} of "
        f"warm-up), batch size {settings.batch_size}, learning rate {settings.lr:g}, seed "
        f"{settings.seed}{start}",
        "epoch": epoch,
        "made with": f"torch {summary['torch']}",
    }


def _accuracy(accuracy: Mapping[str, Any], best: bool) -> list[str]:
    if accuracy["last"] is None:
        return ["The accuracy was not measured: there were no test images."]
    last, top = f"{accuracy['last']:.2f}%", f"{accuracy['best']:.2f}%"
    on = _escape(accuracy.get("on") or "the test images")
    lines = [
        f"Accuracy on {on}: {last} after the last epoch, {top} after the best epoch "
        f"({accuracy['best_epoch']}).",
    ]
    if accuracy.get("noisy_labels"):
        lines.append("Their labels may be wrong too, so the true accuracy may differ.")
    if best:
        lines.append(
            "The best epoch was chosen by this accuracy, which is therefore too optimistic: "
            "measure it on other images."
        )
    return lines


def _noise(noise: Mapping[str, Any]) -> list[str]:
    shares = {  # version 0.2 and before: numbers
        name: found if isinstance(found, int | float) else found["rate"]
        for name, found in noise["by_class"].items()
    }
    worst = sorted(shares.items(), key=lambda item: -item[1])[:WORST_CLASSES]
    if not noise.get("known", True):
        reasons = f": {_escape('; '.join(noise['reasons']))}" if noise.get("reasons") else ""
        return [f"How many of the training labels are wrong is not known{reasons}."]
    lines = [f"An estimated {noise['rate']:.1%} of the training labels are wrong; most in:", ""]
    return lines + [f"- {_escape(name)}: {share:.1%}" for name, share in worst]


def _usage(description: Description, form: Format) -> list[str]:
    if form == "safetensors":
        return [
            "`pseudoloss predict . photo.jpg` classifies an image. In Python, in this folder:",
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
    top, left, height, width = centre_crop(description)
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
        f"`python predict.py photo.jpg` classifies an image. It needs NumPy, Pillow and {package}, "
        "but not pseudoloss. Step by step, in this folder:",
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
        "images = image[None].astype(np.float32) / 255  # any number of images",
        load,
        call,
        'print(json.load(open("classes.json"))[probabilities[0].argmax()])',
        "```",
        "",
        f"The input `images` is float32, N×{description.channels}×{height}×{width}, pixels from 0 "
        f"to 1; the output `probabilities` is float32, N×{len(description.classes)}. "
        "Normalisation and softmax are inside the model.",
    ]


def _shorten(names: tuple[str, ...]) -> str:
    more = f", … ({len(names)})" if len(names) > SHOWN_CLASSES else ""
    return ", ".join(names[:SHOWN_CLASSES]) + more


def _escape(text: str) -> str:
    """One line without characters that would break a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
