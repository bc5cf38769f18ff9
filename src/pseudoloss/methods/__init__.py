"""Methods: one file each. base.py is the contract with the engine; building.py makes a method from
the settings of a run."""

from pseudoloss.methods.base import Method
from pseudoloss.methods.building import BUILDERS, Given, build, build_detector

__all__ = ["BUILDERS", "Given", "Method", "build", "build_detector"]
