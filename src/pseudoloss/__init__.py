"""Train image classifiers on noisy labels, and find out which labels are wrong.

import pseudoloss as pl

pl.audit("photos/", out="audit").labels       # what is known about every label
run = pl.train("digits", out="run", corrupt="symmetric:0.4")
run.labels                                    # the same, from training
pl.PLS(epochs=50).fit(images, labels).predict(new_images)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pseudoloss.version import __version__

if TYPE_CHECKING:
    from pseudoloss.auditing.audit import audit
    from pseudoloss.auditing.estimator import LabelAudit
    from pseudoloss.auditing.folder import load
    from pseudoloss.config import Settings
    from pseudoloss.data import arrays
    from pseudoloss.engine.training import train
    from pseudoloss.errors import InputError, TrainingError
    from pseudoloss.estimator import PLS
    from pseudoloss.labels.applying import apply
    from pseudoloss.runs import Run

# Loaded when first used, so that importing pseudoloss is fast and does not load torch.
_MODULES = {
    "InputError": "errors",
    "LabelAudit": "auditing.estimator",
    "PLS": "estimator",
    "Run": "runs",
    "Settings": "config",
    "TrainingError": "errors",
    "apply": "labels.applying",
    "arrays": "data",
    "audit": "auditing.audit",
    "load": "auditing.folder",
    "train": "engine.training",
}

__all__ = [
    "PLS",
    "InputError",
    "LabelAudit",
    "Run",
    "Settings",
    "TrainingError",
    "__version__",
    "apply",
    "arrays",
    "audit",
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
