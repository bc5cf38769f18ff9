"""Do captured and plain steps train the same network? On a GPU, step for step.

    python benchmarks/agreement.py SOURCE [--preset NAME] [--out FILE.json]

Both begin with the same seed and draw the same random numbers. In float32 they agree to rounding;
in bf16 within its noise. Every method and every switch of the ablation is tried.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import machine
from pseudoloss.config import request
from pseudoloss.data import corrupt, open_source
from pseudoloss.progress import Silent
from pseudoloss.session import Session
from pseudoloss.training import private_chance

VARIANTS: dict[str, dict[str, Any]] = {
    "pls": {},
    "ce": {"method": "ce"},
    "mixup": {"method": "mixup"},
    "no correction": {"correct": False},
    "no contrast": {"contrast": False},
    "no trust in classification": {"trust_in_classification": False},
    "no trust in contrast": {"trust_in_contrast": False},
    "no balance": {"balance": 0.0},
    "no mixup": {"mixup": False},
    "guessing in eval": {"guess_mode": "eval"},
    "paper's forms": {"guess_norm": "max", "weighting": "together", "contrast_class": "own"},
}
EPOCHS = 4


class Told(Silent):
    """Remembers notices: a step that could not be captured says so."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def run(source: str, preset: str, precision: str, captured: bool, changes: dict[str, Any]) -> Any:
    """Losses of a few epochs, and the weights after them."""
    data = open_source(source)
    values = changes | {"epochs": EPOCHS, "warmup": 2, "precision": precision}
    settings = request(preset, None, values).settings(data.preset)
    train = corrupt(data.train, settings.corrupt or "symmetric:0.4", settings.seed)
    keep = slice(0, 40 * settings.batch_size)  # some forty steps an epoch
    train = type(train)(
        train.images_NCHW[keep], train.given_N[keep], train.classes, train.true_N[keep]
    )
    told = Told()
    with private_chance():
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        session = Session(type(data)(data.name, train), settings, told, captured)
        losses = []
        for epoch in range(EPOCHS):
            losses.append(session.train_epoch(epoch))
            session.track(epoch)
    weights = torch.cat([p.detach().double().flatten() for p in session.network.parameters()])
    return losses, weights, told.notices


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--preset", default="digits-id40")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for precision in ("float32", "bf16"):
        for name, changes in VARIANTS.items():
            plain, plain_weights, _ = run(args.source, args.preset, precision, False, changes)
            fast, fast_weights, notices = run(args.source, args.preset, precision, True, changes)
            distance = ((fast_weights - plain_weights).norm() / plain_weights.norm()).item()
            loss = max(abs(a - b) / abs(a) for a, b in zip(plain, fast, strict=True))
            rows.append(
                {
                    "precision": precision,
                    "variant": name,
                    "captured": not notices,
                    "weights": distance,
                    "loss": loss,
                }
            )
            print(
                f"{precision:8} {name:27} captured {'yes' if not notices else notices[0]:4} "
                f"weights {distance:.2e}  loss {loss:.2e}",
                flush=True,
            )
    if args.out:
        result = {
            "command": shlex.join(["python", "benchmarks/agreement.py", *sys.argv[1:]]),
            "commit": machine.commit(),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
