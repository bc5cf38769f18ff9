"""Presets of the other methods of the paper's tables.

A setting that depends on the noise rate is in a preset, never a default, with its source beside it.
The preset of a method for a row of a table has the name of the row's preset and of the method:
cifar100-id50-elr. Experiments find it by this name.
"""

from typing import Any

# Close to the network that made the published numbers (row 17).
PAPER: dict[str, Any] = {"network": "preactresnet18-stemnorm"}


def _elr(noise: float) -> dict[str, Any]:
    """ELR's own settings for CIFAR-100 (its released configuration), on our network."""
    return PAPER | {
        "method": "elr",
        "corrupt": f"symmetric:{noise:g}",
        "epochs": 150,
        "warmup": 0,
        "batch_size": 128,
        "lr": 0.02,
        "schedule": "steps:80,120:0.01",
        "weight_decay": 1e-3,
    }


def _co_teaching(noise: float) -> dict[str, Any]:
    """Co-teaching drops as much of a batch as is noisy, so its presets know the noise rate. The
    network, epochs and SGD are those of PLS; its authors used a small CNN and Adam."""
    return PAPER | {
        "method": "co-teaching",
        "corrupt": f"symmetric:{noise:g}",
        "forget_rate": noise,
    }


def _rrl(corrupt: str | None) -> dict[str, Any]:
    """RRL's own settings for CIFAR-100 (its released configuration), on our network. One set for
    every row: no settings of the rows at 0, 20 and 80%, nor of those with out-of-distribution
    images, are published."""
    noise = {} if corrupt is None else {"corrupt": corrupt}
    return (
        PAPER
        | {
            "method": "rrl",
            "projection": 50,
            "warmup": 15,  # soft labels begin in epoch 15, counted from 0
            "batch_size": 128,
            "lr": 0.02,
        }
        | noise
    )


_ID_NOISE = {"0": None} | {f"{rate}": f"symmetric:{rate / 100:g}" for rate in (20, 50, 80)}
_OUT_AND_IN_NOISE = {
    f"{out}-{inside}": f"symmetric:{inside / 100:g}+out:{out / 100:g}"
    for out, inside in ((20, 20), (40, 20), (60, 20), (40, 40))
}

RIVALS: dict[str, dict[str, Any]] = {
    **{f"cifar100-id{rate}-elr": _elr(rate / 100) for rate in (20, 50, 80)},
    **{f"cifar100-id{rate}-co-teaching": _co_teaching(rate / 100) for rate in (20, 50, 80)},
    **{f"cifar100-id{rate}-rrl": _rrl(corrupt) for rate, corrupt in _ID_NOISE.items()},
    **{
        f"cifar100-{pool}-{row}-rrl": _rrl(corrupt)
        for pool in ("inet", "places")
        for row, corrupt in _OUT_AND_IN_NOISE.items()
    },
}
