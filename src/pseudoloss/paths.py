"""The path helpers of `files`, under their former name."""

from pseudoloss.files import as_path, at_home

__all__ = ["as_path", "at_home"]
