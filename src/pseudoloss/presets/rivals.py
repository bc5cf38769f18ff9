"""Presets of the other methods of the paper's tables.

A setting that depends on the noise rate is in a preset, never a default, with its source beside it.
The preset of a method for a row of a table has the name of the row's preset and of the method:
cifar100-id50-elr. Experiments find it by this name.
"""

from typing import Any

# Close to the network that made the published numbers (row 17).
PAPER: dict[str, Any] = {"network": "preactresnet18-stemnorm"}
POOLS = ("inet", "places")
OUT_AND_IN = ((20, 20), (40, 20), (60, 20), (40, 40))  # the paper's r_out and r_in, in percent


def mixed_noise(out: int, inside: int) -> str:
    """Out-of-distribution and in-distribution noise, from percentages."""
    return f"symmetric:{inside / 100:g}+out:{out / 100:g}"


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


def _dsos(out: int, inside: int) -> dict[str, Any]:
    """The settings of DSOS's released script for CIFAR-100 with ImageNet32, used for Places365 too.
    It mixes images during the warm-up where at most 60% of the labels are noisy: at 20+20 and
    40+20, not at 60+20 and 40+40."""
    return PAPER | {
        "method": "dsos",
        "corrupt": mixed_noise(out, inside),
        "epochs": 100,
        "warmup": 50,
        "batch_size": 64,
        "main_batch_size": 32,
        "lr": 0.03,
        "schedule": "steps:50,80:0.1",
        "warmup_mixup": out + inside <= 60,
    }


RIVALS: dict[str, dict[str, Any]] = {
    **{f"cifar100-id{rate}-elr": _elr(rate / 100) for rate in (20, 50, 80)},
    **{f"cifar100-id{rate}-co-teaching": _co_teaching(rate / 100) for rate in (20, 50, 80)},
    **{
        f"cifar100-{pool}-{out}-{inside}-dsos": _dsos(out, inside)
        for pool in POOLS
        for out, inside in OUT_AND_IN
    },
}
