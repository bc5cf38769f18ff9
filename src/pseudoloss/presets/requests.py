"""What a user asks for on top of a preset."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from pseudoloss.config import (
    EMBEDDED,
    EMBEDDED_NETWORK,
    OWN,
    Settings,
    as_flag,
    as_json,
    flag,
    scaled_schedule,
    scaled_warmup,
    setting_types,
    unknown_setting,
    upgrade_settings,
)
from pseudoloss.errors import InputError, name_hint, reason
from pseudoloss.files import at_home, parse_json, read_text, without_checksum
from pseudoloss.presets.table import NO_HEAD_START, PRESETS
from pseudoloss.reading import READ_OPTIONS

OWN_LR = {"adam": 0.001, "muon": 0.02}  # with a preset whose learning rate is for SGD


@dataclass(frozen=True)
class Request:
    """What the user asked for: a preset, and values on top of it."""

    preset: str | None
    values: dict[str, Any]

    def settings(self, default_preset: str, fitting: Mapping[str, Any] | None = None) -> Settings:
        """The settings of a new run; where no preset was named, on top of `default_preset`.

        `fitting` are values that suit the data better than the preset's; what was asked for comes
        first. Settings of other methods are dropped from both. A batch size other than the preset's
        scales the learning rate in proportion, another number of epochs its warm-up and the steps
        of its schedule; and Adam and Muon have rates of their own.
        """
        preset = PRESETS[self.preset or default_preset]
        preset_method = preset.get("method", Settings.method)
        method = self.values.get("method", preset_method)
        preset = _for_method(method, preset)
        if method != preset_method and preset.get("warmup") == 0:
            del preset["warmup"]  # another method may need one
        values = preset | _for_method(method, fitting or {}) | self.values
        if "weights" not in self.values:  # those of the preset may be another network's
            if values.get("network") in OWN:
                values["weights"] = None
            elif values.get("weights") == EMBEDDED and values["network"] != EMBEDDED_NETWORK:
                values["weights"] = "pretrained"
        if "head_start" not in self.values and values.get("weights") is None:
            values["head_start"] = False
        if preset.get("head_start") and values["head_start"] is False:
            preset = preset | NO_HEAD_START
            values = values | {"lr": preset["lr"]} | self.values
        optimiser = str(values.get("optimiser"))
        if optimiser in OWN_LR and preset.get("optimiser") != optimiser:
            preset = preset | {"lr": min(preset.get("lr", Settings.lr), OWN_LR[optimiser])}
            values = values | {"lr": preset["lr"]} | self.values
        usual = Settings(**preset)
        batch_size = values.get("batch_size", usual.batch_size)
        whole = _is_whole(batch_size)
        if "lr" not in self.values and whole and batch_size != usual.batch_size:
            values["lr"] = usual.lr * int(batch_size) / usual.batch_size
        new_epochs = values.get("epochs", usual.epochs)
        if "schedule" not in self.values and "schedule" in values:
            values["schedule"] = scaled_schedule(values["schedule"], usual.epochs, new_epochs)
        of_preset = "warmup" not in {**self.values, **(fitting or {})}
        other = _is_whole(new_epochs) and new_epochs != usual.epochs
        if of_preset and other and usual.warmup is not None:
            values["warmup"] = scaled_warmup(usual.warmup, usual.epochs, int(new_epochs))
        return Settings(**values)

    def resume(self, recorded: Settings) -> Settings:
        """The settings of a resumed run: as it began, but on any device."""
        preset = _for_method(recorded.method, PRESETS[self.preset]) if self.preset else {}
        asked = {name: value for name, value in preset.items() if name not in FITTED}
        settings = dataclasses.replace(recorded, **(asked | self.values))
        recorded_values = as_json(recorded)
        for name, value in as_json(settings).items():
            before = recorded_values.get(name)
            if not same_for_a_run(name, before, value):
                said, what = as_flag(name, value), "it"
                if name not in self.values:
                    said, what = f"{said} (of --preset {self.preset})", "--preset"
                raise InputError(
                    f"{said} differs from the {as_flag(name, before)} that the run began with; "
                    f"leave {what} out to resume, or choose another --out"
                )
        return settings


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _for_method(method: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the settings of other methods."""
    types = setting_types(method)
    return {name: value for name, value in values.items() if name in types}


# What may differ from the preset because it was made to fit the data, the time or another setting.
FITTED = ("batch_size", "lr", "balance_prior", "epochs", "warmup", "schedule")

# A pool with other images is noticed: the fingerprint of the dataset differs.
MAY_CHANGE_ON_RESUME = ("device", "images", "accelerate", "pool")
LABEL_FILES = ("human", "labels")  # kinds of --corrupt whose labels come from a file


def same_for_a_run(name: str, before: Any, value: Any) -> bool:
    """Whether a run that began with one value of a setting can resume with another. A label file
    may have moved; other labels in it are noticed by the fingerprint, as another pool is."""
    kinds = {str(text).partition(":")[0] for text in (before, value)}
    moved = name == "corrupt" and len(kinds) == 1 and kinds <= set(LABEL_FILES)
    return name in MAY_CHANGE_ON_RESUME or moved or value == before


# Options of `pseudoloss train` that are not settings.
NO_SETTINGS = (
    *READ_OPTIONS,
    *("out", "preset", "config", "resume", "minutes", "time", "checkpoint_every", "quiet", "log"),
)


def request(preset: str | None, config: Path | None, explicit: Mapping[str, Any]) -> Request:
    """A request from the name of a preset, a file of settings, and single settings on top."""
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        hint = name_hint(str(preset), PRESETS)
        raise InputError(f"--preset {preset}: no such preset{hint}")
    from_file = {} if config is None else read_config(config)
    method = explicit.get("method", from_file.get("method"))
    if method is None:
        method = PRESETS[preset or "default"].get("method", Settings.method)
    types = setting_types(method)
    if from_file.get("method", method) != method:
        from_file = _for_method(method, from_file)
    values = from_file | dict(explicit)
    for name in values:
        if name not in types:
            where = flag(name) if name in explicit else f"--config {config}: {name}"
            on_line = f"no such setting; it is an option of the command, {flag(name)}"
            problem = on_line if name in NO_SETTINGS else unknown_setting(name, method)
            raise InputError(f"{where}: {problem}")
    return Request(
        preset, {name: _with_absolute_paths(name, value) for name, value in values.items()}
    )


def _with_absolute_paths(name: str, value: Any) -> Any:
    """The value of a setting; a relative path in it becomes absolute."""
    if not isinstance(value, str | Path) or not str(value):
        return value
    kind, colon, place = str(value).partition(":")
    if name == "corrupt" and kind in LABEL_FILES and place:
        return f"{kind}{colon}{_absolute(place)}"
    if name == "pool" or (name == "weights" and value not in (EMBEDDED, "pretrained")):
        return _absolute(value)
    return value


def _absolute(place: str | Path) -> str:
    return str(at_home(place).absolute())


def read_config(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or from the config.json of an earlier run."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: cannot be read ({reason(error)})") from None
    try:
        values = parse_json(text) if path.suffix == ".json" else tomllib.loads(text)
        values = without_checksum(values) if isinstance(values, dict) else values
    except RecursionError:
        raise InputError(f"--config {path}: nested too deeply") from None
    except ValueError as error:
        raise InputError(f"--config {path}: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("settings", {}), dict):
        raise InputError(f"--config {path}: must hold names and values")
    if "settings" in values:  # the config.json of a run, perhaps of an earlier version
        return upgrade_settings(values["settings"])
    return values


# ------------------------------------------------------------------- settings that suit the data

STEPS = 8  # an epoch should have at least this many
UNEVEN = 2  # a class with this many times the images of another makes a dataset imbalanced


def fit_to_data(counts: Mapping[str, int], usual: Settings) -> dict[str, Any]:
    """Settings that suit these numbers of images per class better than the preset does."""
    found: dict[str, Any] = {}
    images, parts, batch_size = sum(counts.values()), usual.accumulate, usual.batch_size
    # Halve the batch, into equal parts of at least two images, until an epoch has enough steps.
    while images < STEPS * batch_size and batch_size % (2 * parts) == 0 and batch_size >= 4 * parts:
        batch_size //= 2
    if batch_size != usual.batch_size:
        found["batch_size"] = batch_size
    if max(counts.values()) >= UNEVEN * max(min(counts.values()), 1):
        found["balance_prior"] = "given"
    return found
