"""Every preset, and what it changes."""

from typing import Any

from pseudoloss.config import EMBEDDED, EMBEDDED_NETWORK
from pseudoloss.presets.rivals import OUT_AND_IN, PAPER, RIVALS, WEB, mixed_noise

_DIGITS: dict[str, Any] = {
    "network": "small-cnn",
    "epochs": 30,
    "batch_size": 32,
    "lr": 0.05,
    "pad": 0,  # a digit fills its image: a shift would cut strokes off
    "flip": False,
}

_CNWL: dict[str, Any] = PAPER | {"warmup": 1}

# For your own images: photographs from weights that need no download, small images from scratch.
_FINETUNE: dict[str, Any] = {
    "network": EMBEDDED_NETWORK,
    "weights": EMBEDDED,
    "head_start": True,
    "epochs": 30,
    "batch_size": 64,
    "lr": 0.0012,
    "weight_decay": 1e-4,
}
NO_HEAD_START: dict[str, Any] = {"head_start": False, "lr": 0.04}  # ... from a new classifier
_SCRATCH: dict[str, Any] = {"epochs": 100, "batch_size": 128, "lr": 0.05}
HUMAN = ("cifar10n", "cifar100n")  # presets for labels given by people


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "finetune": _FINETUNE,
    "scratch": _SCRATCH,
    "digits": _DIGITS,
    "digits-id40": _DIGITS | {"corrupt": "symmetric-exact:0.4"},
    "cifar100-id0": PAPER,
    "cifar100-id20": PAPER | {"corrupt": "symmetric:0.2"},
    "cifar100-id40": PAPER | {"corrupt": "symmetric:0.4"},
    "cifar100-id50": PAPER | {"corrupt": "symmetric:0.5"},
    # The standard form of the network, and a stage 1 of ours (docs/results.md).
    "cifar100-id80": {
        "corrupt": "symmetric:0.8",
        "threshold": 0.5,
        "noise_metric": "capped-loss",
    },
    "cifar100-asym40": PAPER | {"corrupt": "asymmetric:0.4"},
    **{
        f"cifar100-{pool}-{out}-{inside}": PAPER | {"corrupt": mixed_noise(out, inside)}
        for pool in ("inet", "places")
        for out, inside in OUT_AND_IN
    },
    **RIVALS,
    **dict.fromkeys(HUMAN, PAPER),
    **{f"cnwl-{noise}": _CNWL for noise in (20, 40, 60, 80)},
    "web-aircraft": WEB,
    "web-bird": WEB,
    "web-car": WEB,
}
"""What each preset changes: one for every row of the paper's table of hyper-parameters, and more.

cifar100-inet-40-20 is 40% out-of-distribution and 20% in-distribution noise, the order of the
paper's table; --pool says where ImageNet32 (inet) or Places365 (places) is. The noise of cnwl and
web is in the source."""

NEEDS: dict[str, str] = dict.fromkeys(HUMAN, "--corrupt human:FILE") | {
    name: "--pool POOL"
    for name, changes in PRESETS.items()
    if "+out:" in changes.get("corrupt", "")
}
"""What a preset needs beside it on the command line."""
