"""The header of a model file: JSON that anybody may have written, checked before it is used."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from pseudoloss.data.decoding import Fit
from pseudoloss.data.images import LabelType
from pseudoloss.errors import InputError
from pseudoloss.nn.networks import check_known

# Far above what anybody uses; beyond it, a wrong number would only fill the memory.
MAX_SIDE, MAX_PROJECTION, MAX_MEMBERS = 8192, 65_536, 64


class _Field(NamedTuple):
    expected: str  # what the error says
    is_right: Callable[[Any], bool]
    required: bool = True


def _is_whole(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(_is_whole(x, MAX_SIDE) for x in value)
    )


def _are_numbers(value: Any, above: float = -math.inf) -> bool:
    return isinstance(value, list) and all(
        type(x) in (int, float) and math.isfinite(x) and x > above for x in value
    )


def _is_network(value: Any) -> bool:
    try:
        check_known(value)
    except (InputError, TypeError, AttributeError):
        return False
    return True


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(name, str) and name for name in value)
        and len(set(value)) == len(value)
    )


FIELDS = {
    "network": _Field("the name of a network", _is_network),
    "classes": _Field("a list of at least two different names", _are_names),
    "channels": _Field("1 or 3", lambda x: type(x) is int and x in (1, 3)),
    "stored": _Field(f"two whole numbers from 1 to {MAX_SIDE}", _is_size),
    "size": _Field(f"two whole numbers from 1 to {MAX_SIDE}", _is_size),
    "mean": _Field("a list of finite numbers", _are_numbers),
    "std": _Field("a list of numbers above 0", lambda x: _are_numbers(x, above=0)),
    "projection": _Field(
        f"a whole number from 1 to {MAX_PROJECTION}", lambda x: _is_whole(x, MAX_PROJECTION)
    ),
    "fit": _Field(f"one of {', '.join(get_args(Fit))}", lambda x: x in get_args(Fit), False),
    "members": _Field(
        f"a whole number from 1 to {MAX_MEMBERS}", lambda x: _is_whole(x, MAX_MEMBERS), False
    ),
    "label_type": _Field(
        f"one of {', '.join(get_args(LabelType))}", lambda x: x in get_args(LabelType), False
    ),
}


def checked_fields(record: Any) -> dict[str, Any]:
    """The fields of a `Description`, from the header of a file; ValueError if one is wrong."""
    if not isinstance(record, Mapping):
        raise ValueError("its header is not an object")
    found = {
        key: list(value) if isinstance(value, tuple) else value for key, value in record.items()
    }
    for key in found:
        if key not in FIELDS:
            raise ValueError(f"its header has an unknown field {str(key)[:40]}")
    for key, field in FIELDS.items():
        if key not in found:
            if field.required:
                raise ValueError(f"its header has no {key}")
        elif not field.is_right(found[key]):
            raise ValueError(f"{key} in its header must be {field.expected}")
    for key in ("mean", "std"):
        if len(found[key]) != found["channels"]:
            raise ValueError(f"{key} in its header must have one number per channel")
    if any(inner > outer for inner, outer in zip(found["size"], found["stored"], strict=True)):
        raise ValueError("size in its header must not be larger than stored")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
