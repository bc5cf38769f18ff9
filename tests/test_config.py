"""Settings: their limits, their owners, and those of earlier versions."""

import ast
import dataclasses
import json
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

import pseudoloss
from pseudoloss.config import (
    METHOD_SETTINGS,
    DetectionSettings,
    ELRSettings,
    PLSSettings,
    Settings,
    all_setting_types,
    as_flag,
    as_json,
    as_text,
    describe_settings,
    parse_schedule,
    setting_types,
    upgrade_settings,
)
from pseudoloss.errors import InputError
from pseudoloss.presets import request

SOURCE = Path(pseudoloss.__file__).parent
CONFIG = SOURCE / "config"
PRESETS = SOURCE / "presets"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
METHODS = tuple(METHOD_SETTINGS)
EXPENSIVE = ("torch", "numpy", "pandas", "sklearn", "timm")


# ------------------------------------------------------------------------------------- settings


def test_defaults_are_the_cifar_settings_of_the_paper():
    settings = Settings()
    assert (settings.epochs, settings.warmup_epochs, settings.batch_size) == (200, 30, 256)
    own = settings.method_settings
    assert (settings.lr, own.gamma, own.mu, own.threshold) == (0.1, 2, 0.2, 0.95)
    assert settings.weight_decay == 5e-4  # row 1: that of the released program


def test_a_method_has_at_most_fifty_settings():
    """But for pls-plus, whose switches are for experiments: those that help become defaults."""
    assert max(len(setting_types(method)) for method in METHODS if method != "pls-plus") <= 50


def test_every_setting_is_read_somewhere():
    """As an attribute of something called `settings`, `own` or `usual`."""
    read = set()
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(PRESETS) or path.is_relative_to(CONFIG):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            owner = node.value if isinstance(node, ast.Attribute) else None
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            if name in ("settings", "own", "usual"):
                read.add(node.attr)
    read |= {"warmup"} if "warmup_epochs" in read else set()
    assert all_setting_types().keys() - read == set()


def test_a_method_with_its_own_flags_has_no_settings_of_the_mixture():
    listed = r"pls, pls-plus, ce, .+ and evidential-mix"
    line = rf"--threshold: a setting of --method {listed}, not of rrl"
    with pytest.raises(InputError, match=line):
        Settings(method="rrl", threshold=0.5)


def test_names_of_shared_and_method_settings_never_clash():
    shared = {field.name for field in dataclasses.fields(Settings)}
    common = {field.name for field in dataclasses.fields(DetectionSettings)}
    assert not shared & common
    types = {}  # methods may share a setting, which then has one type and one limit
    for method, own in METHOD_SETTINGS.items():
        names = {field.name for field in dataclasses.fields(own)} - common
        assert not names & shared, method
        for name, hint in get_type_hints(own, include_extras=True).items():
            if name in names:
                assert repr(types.setdefault(name, hint)) == repr(hint), name
    assert shared | common | types.keys() == all_setting_types().keys() | {"method_settings"}


def test_no_default_lives_outside_config():
    """The parameters of the estimator are None until the user sets them."""
    from pseudoloss import PLS

    assert all(getattr(PLS(), name) is None for name in setting_types("pls"))


@pytest.mark.parametrize(
    "path",
    [*sorted(CONFIG.rglob("*.py")), *sorted(PRESETS.rglob("*.py"))],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_reading_settings_imports_no_large_package(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not [name for name in names if name.split(".")[0] in EXPENSIVE]


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_is_described_in_a_group(method):
    described = describe_settings(method)
    assert described.keys() == setting_types(method).keys()
    assert all(group and text.endswith(".") for group, text in described.values())


@pytest.mark.parametrize("method", METHODS)
def test_every_number_has_limits(method):
    """Numbers that are absurdly large or small are refused, not computed with."""
    for name, kind in setting_types(method).items():
        if not {int, float} & {kind, *get_args(kind)}:
            continue
        for absurd in (-1, 1e299):
            with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} "):
                Settings(**{"method": method, name: absurd})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("method", "divide", "--method divide: must be one of pls, pls-plus, ce, mixup"),
        ("network", "  ", "--network must be the name"),
        ("projection", 0, "--projection must be 1 to 65536, not 0"),
        ("epochs", 0, "--epochs must be 1"),
        ("epochs", -3, "--epochs must be 1"),
        ("epochs", 2.5, "--epochs must be a whole number, not 2.5"),
        ("epochs", "ten", "--epochs must be a whole number"),
        ("epochs", True, "--epochs must be a whole number"),
        ("warmup", -1, "--warmup must be 0 or more"),
        ("warmup", 201, "--warmup 201 must not exceed --epochs 200"),
        ("warmup", 0, "--warmup must be at least 1 for --method pls"),
        ("batch_size", 1, "--batch-size must be 2"),
        ("lr", 0, "--lr must be above 0"),
        ("lr", -0.1, "--lr must be above 0"),
        ("lr", float("nan"), "--lr must be a number"),
        ("lr", float("inf"), "--lr must be a number"),
        ("lr", "fast", "--lr must be a number"),
        ("momentum", 1.0, "--momentum must be at least 0 and below 1"),
        ("weight_decay", -1e-4, "--weight-decay must be"),
        ("threshold", 1.0, "--threshold must be between 0 and 1"),
        ("threshold_on", "dirty", "--threshold-on dirty"),
        ("noise_metric", "gain", "--noise-metric gain: must be one of loss, capped-loss"),
        ("trust_metric", "loss", "--trust-metric loss: must be one of pseudo-loss, confidence"),
        ("trust_threshold", 1.0, "--trust-threshold must be at least 0 and below 1"),
        ("gamma", 0, "--gamma must be above 0"),
        ("gamma", 1e300, "--gamma must be a"),
        ("gamma", 1e5, "--gamma must be above 0 and at most 100"),
        ("mu", 1e-9, "--mu must be 0.001 to 1000"),
        ("balance", 1e6, "--balance must be 0 to 1000"),
        ("epochs", 10**400, "--epochs must be 1 to 1000000, not 1000000"),
        ("seed", 10**400, "--seed must be 0"),
        ("method", np.zeros(3), "--method [0. 0. 0.]: must be one of"),
        ("mu", -0.2, "--mu must be 0.001 to 1000"),
        ("balance", -1, "--balance must be 0 to 1000"),
        ("image_size", 4, "--image-size must be 8"),
        ("pad", -1, "--pad must be 0"),
        ("seed", -1, "--seed must be 0"),
        ("flip", "yes", "--flip must be true or false"),
        ("corrupt", 0.4, "--corrupt must be text"),
        ("precision", "fp16", "--precision fp16"),
        ("accumulate", 0, "--accumulate must be 1"),
        ("accumulate", 3, "--accumulate 3 must divide --batch-size 256"),
        ("accumulate", 256, "--accumulate 256 must divide --batch-size 256"),
        (
            "schedule",
            "poly",
            "--schedule poly: must be cosine, linear, constant or such as steps:80",
        ),
        ("schedule", "cosine:3", "--schedule cosine:3: must be"),
        ("schedule", "steps:80", "--schedule steps:80: must be"),
        ("schedule", "steps:120,80:0.1", "--schedule steps:120,80:0.1: must be"),
        ("schedule", "steps:80:2", "--schedule steps:80:2: must be"),
        ("schedule", "steps:0:0.1", "--schedule steps:0:0.1: must be"),
        ("schedule", "steps:a:b", "--schedule steps:a:b: must be"),
        ("mixup_lambda", "beta", "--mixup-lambda beta: must be one of folded, uniform"),
        ("contrast_labels", "both", "--contrast-labels both: must be one of rows, mixed"),
        ("contrast_mix", "own", "--contrast-mix own: must be one of shared, separate"),
        ("weighting", "apart", "--weighting apart: must be one of separate, interpolated, first"),
        ("initial_trust", 1, "--initial-trust must be true or false, not 1"),
        ("protect_rare_classes", "no", "--protect-rare-classes must be true or false"),
    ],
)
def test_absurd_settings_are_refused_in_the_words_of_the_flag(name, value, message):
    with pytest.raises(InputError) as error:
        Settings(**{name: value})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "name", "value", "message"),
    [
        ("elr", "elr_lambda", -1, "--elr-lambda must be 0 to 1000, not -1"),
        ("elr", "elr_beta", 1, "--elr-beta must be at least 0 and below 1, not 1"),
        ("co-teaching", "forget_rate", 1, "--forget-rate must be at least 0 and below 1, not 1"),
        ("co-teaching", "forget_epochs", 0, "--forget-epochs must be 1 to 1000000, not 0"),
        ("co-teaching", "ensemble", "both", "--ensemble must be true or false"),
        ("ce", "threshold", 2, "--threshold must be between 0 and 1, not 2"),
    ],
)
def test_absurd_settings_of_other_methods_are_refused(method, name, value, message):
    with pytest.raises(InputError) as error:
        Settings(**{"method": method, name: value})
    assert str(error.value).startswith(message)


def test_numbers_take_their_declared_type():
    settings = Settings(epochs=np.int64(5), lr=1, warmup=2.0, gamma=3)
    assert (settings.epochs, settings.lr, settings.warmup) == (5, 1.0, 2)
    assert Settings(flip=np.False_).flip is False
    assert [type(v) for v in (settings.epochs, settings.lr, settings.warmup)] == [int, float, int]
    assert type(settings.method_settings.gamma) is float


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 1), (2, 1), (10, 2), (40, 6), (200, 30)])
def test_the_warm_up_is_a_share_of_the_epochs(epochs, warmup):
    assert Settings(epochs=epochs).warmup_epochs == warmup


@pytest.mark.parametrize(
    "method", [method for method in METHODS if not METHOD_SETTINGS[method].needs_warmup]
)
def test_other_methods_may_do_without_a_warm_up(method):
    assert Settings(method=method, warmup=0).warmup_epochs == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("cosine", None), ("constant", None), ("steps:80,120:0.1", ((80, 120), 0.1))],
)
def test_schedules(text, wanted):
    assert parse_schedule(text) == wanted
    assert Settings(schedule=text).schedule == text


# --------------------------------------------------------------------------- settings by method


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_the_method_are_kept_in_their_own_dataclass(method):
    own = METHOD_SETTINGS[method]
    name = dataclasses.fields(own)[0].name
    settings = Settings(**{"method": method, "epochs": 7, name: 0.6})
    assert type(settings.method_settings) is own
    assert getattr(settings.method_settings, name) == 0.6
    assert not hasattr(settings, name)


@pytest.mark.parametrize("method", METHODS)
def test_settings_as_json_are_one_flat_dictionary(method):
    name = dataclasses.fields(METHOD_SETTINGS[method])[0].name
    settings = Settings(**{"method": method, "seed": 7, name: 0.6})
    values = as_json(settings)
    assert values.keys() == setting_types(method).keys()
    assert (values["seed"], values[name]) == (7, 0.6)
    assert Settings(**json.loads(json.dumps(values))) == settings


def test_settings_can_be_replaced():
    settings = Settings(gamma=1, lr=0.3)
    changed = dataclasses.replace(settings, gamma=3, epochs=50)
    assert changed.method_settings == PLSSettings(gamma=3)
    assert (changed.epochs, changed.lr) == (50, 0.3)
    assert settings == Settings(gamma=1, lr=0.3)


def test_replacing_the_method_keeps_what_both_methods_have():
    settings = Settings(gamma=1, threshold=0.7, lr=0.3)
    changed = dataclasses.replace(settings, method="elr", elr_beta=0.5)
    assert changed.method_settings == ELRSettings(threshold=0.7, elr_beta=0.5)
    assert changed.lr == 0.3


@pytest.mark.parametrize(
    ("method", "name", "value", "owner"),
    [
        ("elr", "gamma", 1, "pls and pls-plus"),
        ("mixup", "mixup", False, "pls and pls-plus"),
        ("ce", "forget_rate", 0.2, "co-teaching"),
        ("pls", "elr_lambda", 3, "elr and elr-plus"),
        ("co-teaching", "contrast", True, "pls and pls-plus"),
    ],
)
def test_settings_of_another_method_are_refused_and_the_owner_is_named(
    method, name, value, owner, tmp_path
):
    line = f"a setting of --method {owner}, not of {method}"
    for refused in (
        lambda: Settings(method=method, **{name: value}),
        lambda: request(None, None, {"method": method, name: value}),
        lambda: dataclasses.replace(Settings(method=method), **{name: value}),
    ):
        with pytest.raises(InputError) as error:
            refused()
        assert str(error.value) == f"--{name.replace('_', '-')}: {line}"
    path = tmp_path / "mine.toml"
    path.write_text(f'method = "{method}"\n{name} = {json.dumps(value)}\n')
    with pytest.raises(InputError) as error:
        request(None, path, {})
    assert str(error.value) == f"--config {path}: {name}: {line}"


def test_unknown_settings_are_refused_with_a_hint():
    with pytest.raises(InputError, match=r"^--treshold: no such setting; did you mean .*threshold"):
        Settings(treshold=0.5)
    with pytest.raises(InputError, match=r"^--elr-lamda: no such setting; did you mean elr_lambda"):
        Settings(method="elr", elr_lamda=1)


# -------------------------------------------------------------------------- earlier versions


def results_with_settings():
    """Settings of committed results, those of version 0.1 among them."""
    for path in sorted(RESULTS.rglob("*.json")):
        recorded = json.loads(path.read_text()).get("settings")
        if recorded is not None:
            yield pytest.param(recorded, id=path.relative_to(RESULTS).as_posix())


@pytest.mark.parametrize("recorded", list(results_with_settings()))
def test_settings_of_committed_results_are_valid_under_their_new_names(recorded):
    upgraded = upgrade_settings(recorded)
    if recorded["precision"] == "fp16":  # of another program
        upgraded["precision"] = "auto"
    values = as_json(Settings(**upgraded))
    renamed = {"guess_norm": "pseudo_label_norm", "guess_mode": "pseudo_label_mode"}
    for old, value in recorded.items():
        name = renamed.get(old, old)
        if name not in values:
            assert name in all_setting_types()
            assert recorded["method"] != "pls"
        elif name == "weighting":
            assert (value, values[name]) in {("apart", "separate"), ("separate", "separate")}
        elif value != "fp16":
            assert values[name] == value, name


def test_some_committed_results_are_of_version_0_1():
    recorded = json.loads((RESULTS / "cifar100-id50-h200.json").read_text())["settings"]
    assert {"guess_norm", "guess_mode"} <= recorded.keys()
    baseline = json.loads((RESULTS / "cifar100-id0-mixup-h200.json").read_text())["settings"]
    assert "gamma" in baseline  # a setting of PLS by now


@pytest.mark.parametrize(
    ("old", "new"), [("apart", "separate"), ("together", "interpolated"), ("own", "first")]
)
def test_values_of_version_0_1_are_renamed(old, new):
    assert upgrade_settings({"weighting": old}) == {"weighting": new}
    assert upgrade_settings({"contrast_class": "own"}) == {"contrast_class": "own"}


def test_settings_of_this_version_are_unchanged_by_an_upgrade():
    for method in METHODS:
        values = as_json(Settings(method=method))
        assert upgrade_settings(values) == values


# --------------------------------------------------------------------------------- as text


@pytest.mark.parametrize(
    ("name", "value", "flag", "text"),
    [
        ("batch_size", 64, "--batch-size 64", "64"),
        ("flip", True, "--flip", "on"),
        ("protect_rare_classes", False, "--no-protect-rare-classes", "off"),
        ("warmup", None, "--warmup None", "–"),
    ],
)
def test_settings_as_flags_and_as_text(name, value, flag, text):
    assert as_flag(name, value) == flag
    assert as_text(value) == text
