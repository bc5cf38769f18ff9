"""Do fast steps train the same network as plain steps? Step by step, on a GPU.

    python benchmarks/agreement.py SOURCE [--preset NAME] [--variants NAME ...] [--minutes M]
        [--quick] [--out FILE.json]

All runs start each phase with the same weights and use the same random numbers. Every method, every
switch, every row of the ablation and two large networks are compared. After the warm-up, random
images are flagged as noisy, each with a random trust. There are three comparisons with plain calls.
Each gives the distance between the weights after some steps, relative to the distance that the
plain calls have moved by then:

- captured: the same kernels, replayed as a graph. The distance must be zero.
- fast: fused, compiled and captured. These kernels round differently.
- rounding: plain calls from weights that differ in their last bit. This is the effect of rounding
  alone. Training amplifies any difference, so compare the other distances with this one.

In bf16, fast steps may round less than plain steps, because fused layers do not store intermediate
values. So there is a fourth comparison, with plain steps in float32: on average over the variants,
fast steps must not be farther from them than plain steps are. Each distance is measured once.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
from pseudoloss.data import Data, ImageSet, corrupt, open_source
from pseudoloss.engine import feed as feed_module
from pseudoloss.engine.agreement import distances, run_phases
from pseudoloss.presets import request

VARIANTS: dict[str, dict[str, Any]] = {
    "pls": {},
    "ce": {"method": "ce"},
    "mixup": {"method": "mixup"},
    "elr": {"method": "elr"},
    "elr-plus": {"method": "elr-plus"},
    "co-teaching": {"method": "co-teaching"},
    "divide-mix": {"method": "divide-mix"},
    "dsos": {"method": "dsos"},
    "rrl": {"method": "rrl"},
    "jo-src": {"method": "jo-src"},
    "hard bootstrapping": {"method": "dynamic-bootstrapping"},
    "soft bootstrapping": {"method": "dynamic-bootstrapping", "bootstrapping": "soft-to-hard"},
    "evidential-mix": {"method": "evidential-mix"},
    "pls-plus": {"method": "pls-plus"},
    "vote of neighbours": {"method": "pls-plus", "selection": "neighbours"},
    "no correction": {"correct": False},
    "no contrast": {"contrast": False},
    "no trust in classification": {"trust_in_classification": False},
    "no trust in contrast": {"trust_in_contrast": False},
    "no trust": {"trust_in_classification": False, "trust_in_contrast": False},
    "correction alone": {
        "contrast": False,
        "trust_in_classification": False,
        "trust_in_contrast": False,
    },
    "no balance": {"balance": 0.0},
    "no mixup": {"mixup": False},
    "pseudo-labels in eval": {"pseudo_label_mode": "eval"},
    "paper's forms": {
        "pseudo_label_norm": "max",
        "weighting": "interpolated",
        "contrast_class": "own",
        "contrast_labels": "mixed",
        "contrast_mix": "separate",
        "mixup_lambda": "uniform",
    },
    "weighted by the first": {"weighting": "first"},
    "standard network": {"network": "preactresnet18"},
    "released network": {"network": "preactresnet18-released"},
}
STEPS = (1, 5, 20, 40)  # in the warm-up, and again after it
BLOCK = 16  # steps whose random numbers are generated at once: several blocks in STEPS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--preset", default="digits-id40")
    parser.add_argument("--minutes", type=float, help="leave out what does not fit any more")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="few steps; only PLS if none is named")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    feed_module.BLOCK = BLOCK
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    data = open_source(args.source)
    train = corrupt(data.train, "symmetric:0.4", 1)
    rows = []
    steps = STEPS[:2] if args.quick else STEPS
    names = args.variants or (["pls"] if args.quick else VARIANTS)
    variants = {name: VARIANTS[name] for name in names}
    print(f"distance after {steps[0]} and {steps[-1]} steps behind the warm-up")
    for precision in ("float32", "bf16"):
        for name, changes in variants.items():
            if time.monotonic() > deadline:
                print("skipped: no time left")
                break
            values = changes | {"epochs": 2, "warmup": 1, "precision": precision, "corrupt": None}
            settings = request(args.preset, None, values).settings(data.preset)
            keep = slice(0, max(steps) * settings.batch_size)
            images = ImageSet(
                train.images_NCHW[keep], train.given_N[keep], train.classes, train.true_N[keep]
            )
            part = Data(data.name, images)
            plain, _ = run_phases(part, replace(settings, accelerate="off"), steps)
            rounding, _ = run_phases(
                part, replace(settings, accelerate="off"), steps, plain, nudge=True
            )
            captured, told = run_phases(part, replace(settings, accelerate="capture"), steps, plain)
            fast, told_too = run_phases(part, replace(settings, accelerate="auto"), steps, plain)
            row = {
                "precision": precision,
                "variant": name,
                "notices": told + told_too,
                "captured": distances(plain, captured),
                "fast": distances(plain, fast),
                "rounding": distances(plain, rounding),
            }
            if precision != "float32":
                exact, _ = run_phases(
                    part, replace(settings, accelerate="off", precision="float32"), steps, plain
                )
                row["from float32"] = {
                    "plain": distances(exact, plain),
                    "fast": distances(exact, fast),
                }
            rows.append(row)
            compared = {kind: row[kind] for kind in ("captured", "fast", "rounding")}
            for kind, found in row.get("from float32", {}).items():
                compared[f"{kind} from float32"] = found
            print(
                f"{precision:8} {name:27} "
                + "  ".join(
                    f"{kind} {found['main'][0]:.1e} {found['main'][-1]:.1e}"
                    for kind, found in compared.items()
                )
                + "".join(f"  ({text})" for text in row["notices"]),
                flush=True,
            )
    places = {args.source: machine.without_place(args.source)}
    machine.write(args.out, {"steps": steps, "rows": rows}, places)


if __name__ == "__main__":
    main()
