"""Train image classifiers on noisy labels, and find out which labels are wrong.

import pseudoloss as pl

run = pl.train("digits", out="run", corrupt="symmetric:0.4")
run.labels                                    # what is known about every label
pl.PLS(epochs=50).fit(images, labels).predict(new_images)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pseudoloss.version import __version__

if TYPE_CHECKING:
    from pseudoloss.config import Settings
    from pseudoloss.data import arrays
    from pseudoloss.engine.training import train
    from pseudoloss.errors import InputError, TrainingError
    from pseudoloss.estimator import PLS
    from pseudoloss.runs import Run, load

# Loaded when first used, so that importing pseudoloss is fast and does not load torch.
_MODULES = {
    "InputError": "errors",
    "PLS": "estimator",
    "Run": "runs",
    "Settings": "config",
    "TrainingError": "errors",
    "arrays": "data",
    "load": "runs",
    "train": "engine.training",
}

__all__ = [
    "PLS",
    "InputError",
    "Run",
    "Settings",
    "TrainingError",
    "__version__",
    "arrays",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(import_module(f"pseudoloss.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pseudoloss' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
