"""`pseudoloss export`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pseudoloss.cli.options import add_best
from pseudoloss.cli.parser import Parser, path
from pseudoloss.errors import InputError
from pseudoloss.terminal import show

if TYPE_CHECKING:
    from pseudoloss.inference.export import Exported
    from pseudoloss.inference.export_files import Format


def run(arguments: list[str]) -> None:
    """Export a trained model to ONNX, TorchScript or safetensors.

    Writes a folder with the model, its class names, its preprocessing and a model card. ONNX and
    TorchScript models take pixels, return probabilities and do not need pseudoloss; safetensors is
    for pseudoloss itself. The exported model is compared with the original before it is kept.
    """
    parser = Parser(
        "export",
        run,
        examples=(
            "pseudoloss export run --out model",
            "pseudoloss export run --out model --format torchscript --best",
        ),
    )
    parser.usage = "pseudoloss export RUN --out DIR [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="path of the run folder")
    add("--out", type=path, metavar="DIR", help="folder to write, must not exist")
    add(
        "--format",
        choices=("onnx", "torchscript", "safetensors"),
        default="onnx",
        help="format of the model (default: onnx)",
    )
    add_best(parser)
    args = parser.parse(arguments)
    if args.out is None:
        raise InputError("--out is missing: name the folder to write, such as --out model")
    show(report(export_run(args.run, args.out, args.format, args.best)))


def export_run(
    run: str | Path, out: str | Path, form: "Format" = "onnx", best: bool = False
) -> "Exported":
    """Export the model of a finished run (see `export_model`).

    Args:
        run: path of the run folder.
        out: the folder to write; must not exist.
        form: "onnx", "torchscript" or "safetensors".
        best: use the model of the epoch with the best test accuracy, not of the last epoch.
    """
    from pseudoloss.files import as_path, refuse_existing
    from pseudoloss.inference.export import export_model
    from pseudoloss.inference.export_files import Training
    from pseudoloss.runs import load, open_model

    refuse_existing(as_path(out, "--out"))
    finished = load(run)
    model = open_model(run, best=True) if best else finished.model
    return export_model(model, out, form, Training(finished.settings, finished.summary, best))


def report(found: "Exported") -> str:
    """What was written, and how close it is to the original."""
    lines = [f"written: {found.path}/: {', '.join(found.files)}"]
    if found.difference is None:
        lines.append("not compared with the original model: onnxruntime is not installed")
    else:
        lines.append(
            "compared with the original model on random images: probabilities differ by at most "
            f"{found.difference:.1g}"
        )
    folder = shlex.quote(str(found.path))
    program = "predict.py" in found.files
    command = f"python {folder}/predict.py" if program else f"pseudoloss predict {folder}"
    lines.append(f"Next: {command} photo.jpg")
    return "\n".join(lines)
