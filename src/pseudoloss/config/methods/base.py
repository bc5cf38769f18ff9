"""What the settings of all methods have in common."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """Settings of a method. One that flags labels by a mixture extends `DetectionSettings`."""

    needs_warmup: ClassVar[str] = ""  # why the method cannot do without a warm-up, if it cannot
