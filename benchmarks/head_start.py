"""Default training of photographs on a CPU: PLS and cross-entropy from the same head start.

    python benchmarks/head_start.py SOURCE --test TEST [--noise 0 0.1 0.4] [--cases pls:3 ce:5]
        [--threads 1] [--out FILE.json]

SOURCE is a folder of photographs with correct labels; a share of them is replaced at random. A case
is METHOD:EPOCHS, or METHOD:EPOCHS:plain without the head start; the other settings are the defaults
of a CPU. Reported for each: accuracy on TEST at the start and after every epoch, and seconds.

To choose settings, leave out --test: a quarter of SOURCE is held out and judged by its true labels.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import machine
from pseudoloss.data import Data
from pseudoloss.engine.head_start import head_start
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.training import Job, prepare
from pseudoloss.presets import request
from pseudoloss.progress import SilentReporter

SHARE = 0.25


def measure(job: Job) -> dict[str, Any]:
    settings = job.settings
    found: dict[str, Any] = {"settings": {
        name: getattr(settings, name) for name in
        ("network", "head_start", "image_size", "epochs", "batch_size", "lr")
    }}  # fmt: skip
    start = time.monotonic()
    with Trainer(job.data, settings, SilentReporter()) as trainer:
        if settings.head_start:
            head_start(trainer)
            found["head_start_seconds"] = round(time.monotonic() - start, 1)
            found["accuracy_at_start"] = trainer.validate()
        found["accuracy"] = []
        for epoch in range(settings.epochs):
            trainer.train_epoch(epoch)
            if trainer.method.scores_after(epoch):
                trainer.score(epoch)
            trainer.store_predictions(epoch)
            found["accuracy"].append(trainer.validate())
    return found | {"seconds": round(time.monotonic() - start, 1)}


def judged_by_truth(data: Data) -> Data:
    """The held-out images with their true labels."""
    assert data.test is not None
    assert data.test.true_N is not None
    return replace(data, test=replace(data.test, given_N=data.test.true_N), noisy_test=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--test")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.1, 0.4])
    parser.add_argument("--cases", nargs="+", default=["pls:3", "ce:5"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for noise in args.noise:
            for case in args.cases:
                method, epochs, *plain = case.split(":")
                values = {"method": method, "seed": seed, "device": "cpu"}
                values |= {"corrupt": f"symmetric-exact:{noise:g}"}
                values |= {"epochs": int(epochs)}
                values |= {"head_start": False, "image_size": 128} if plain else {}
                reading = {"test": args.test} if args.test else {"hold_out": SHARE}
                asked = request("finetune", None, values)
                job = prepare(args.source, asked, None, reading, SilentReporter())
                if not args.test:
                    job.data = judged_by_truth(job.data)
                run = {"noise": noise, "seed": seed, "method": method} | measure(job)
                runs.append(run)
                start = f"{run['accuracy_at_start']:.1f} at the start, " if not plain else ""
                print(
                    f"{noise:.0%} wrong, {case}: {start}then "
                    f"{', '.join(f'{a:.1f}' for a in run['accuracy'])} in {run['seconds']:.0f} s",
                    flush=True,
                )
                folders = {args.source: "SOURCE"} | ({args.test: "TEST"} if args.test else {})
                machine.write(args.out, {"threads": args.threads, "runs": runs}, folders)


if __name__ == "__main__":
    main()
