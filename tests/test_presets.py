"""Presets, and what a user asks for on top of one."""

import dataclasses
import json
from pathlib import Path

import pytest

from pseudoloss.config import METHOD_SETTINGS, Settings, as_json
from pseudoloss.errors import InputError
from pseudoloss.presets import NEEDS, PRESETS, read_config, request

METHODS = tuple(METHOD_SETTINGS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_for_every_method(name):
    """A preset for one method gives another one its data, network and length."""
    changes = PRESETS[name]
    assert request(name, None, {}).settings("default").method == changes.get("method", "pls")
    for method in METHODS:
        values = as_json(request(name, None, {"method": method}).settings("default"))
        assert values["method"] == method
        for setting in values.keys() & changes.keys() - {"method", "warmup"}:
            assert values[setting] == changes[setting]


def test_only_a_warm_up_of_zero_is_not_handed_to_another_method():
    assert request("cifar100-id50-elr", None, {}).settings("default").warmup == 0
    assert request("cifar100-id50-elr", None, {"method": "pls"}).settings("default").warmup is None
    asked = {"method": "ce", "warmup": 0}
    assert request("cifar100-id50-elr", None, asked).settings("default").warmup == 0
    assert request("web-bird", None, {"method": "ce"}).settings("default").warmup == 10


@pytest.mark.parametrize("pool", ["inet", "places"])
@pytest.mark.parametrize(
    ("row", "mixed"), [("20-20", True), ("40-20", True), ("60-20", False), ("40-40", False)]
)
def test_presets_of_dsos(pool, row, mixed):
    found = request(f"cifar100-{pool}-{row}-dsos", None, {}).settings("default")
    usual = request(f"cifar100-{pool}-{row}", None, {}).settings("default")
    assert (found.corrupt, found.network) == (usual.corrupt, usual.network)
    assert (found.epochs, found.warmup_epochs, found.schedule) == (100, 50, "steps:50,80:0.1")
    assert (found.batch_size, found.lr, found.weight_decay) == (64, 0.03, 5e-4)
    own = found.method_settings
    assert (own.main_batch_size, own.warmup_mixup, own.as_released) == (32, mixed, False)


@pytest.mark.parametrize("pool", ["inet", "places"])
@pytest.mark.parametrize("row", ["20-20", "40-20", "60-20", "40-40"])
def test_presets_of_jo_src(pool, row):
    found = request(f"cifar100-{pool}-{row}-jo-src", None, {}).settings("default")
    usual = request(f"cifar100-{pool}-{row}", None, {}).settings("default")
    assert (found.corrupt, found.network) == (usual.corrupt, usual.network)
    assert (found.epochs, found.warmup_epochs, found.batch_size) == (200, 10, 128)
    assert (found.lr, found.schedule, found.weight_decay) == (0.1, "cosine", 5e-4)
    own = found.method_settings
    assert (own.label_smoothing, own.clean_threshold, own.last_clean_threshold) == (0.6, 0.75, 0.95)
    assert (own.ema_decay, own.consistency) == (0.99, 0.5)


@pytest.mark.parametrize("pool", ["inet", "places"])
@pytest.mark.parametrize("row", ["20-20", "40-20", "60-20", "40-40"])
def test_elr_has_a_preset_for_each_row_with_out_of_distribution_noise(pool, row):
    """Where the paper has its numbers. Only the noise is that of the row."""
    found = request(f"cifar100-{pool}-{row}-elr", None, {}).settings("default")
    usual = request("cifar100-id50-elr", None, {}).settings("default")
    noise = request(f"cifar100-{pool}-{row}", None, {}).settings("default").corrupt
    assert found == dataclasses.replace(usual, corrupt=noise)
    assert NEEDS[f"cifar100-{pool}-{row}-elr"] == "--pool POOL"


def test_presets_of_elr_and_co_teaching():
    elr = request("cifar100-id50-elr", None, {}).settings("default")
    assert (elr.lr, elr.schedule) == (0.02, "steps:80,120:0.01")
    assert (elr.batch_size, elr.epochs) == (128, 150)
    assert (elr.method_settings.elr_lambda, elr.method_settings.elr_beta) == (7, 0.9)
    for noise in (20, 50, 80):
        co = request(f"cifar100-id{noise}-co-teaching", None, {}).settings("default")
        assert co.method_settings.forget_rate == noise / 100
        assert co.corrupt == f"symmetric:{noise / 100:g}"


def test_presets_of_divide_mix():
    for noise, lambda_u in ((0, 0), (20, 25), (50, 150), (80, 150)):
        found = request(f"cifar100-id{noise}-divide-mix", None, {}).settings("default")
        assert found.method_settings.lambda_u == lambda_u
        assert found.corrupt == (f"symmetric:{noise / 100:g}" if noise else None)
        assert (found.epochs, found.warmup, found.batch_size, found.lr) == (300, 30, 64, 0.02)
        assert (found.schedule, found.network) == ("steps:150:0.1", "preactresnet18-stemnorm")
        own = found.method_settings
        assert (own.threshold, own.threshold_on) == (0.5, "clean")
        assert (own.mixup_alpha, own.temperature, own.ramp_epochs) == (4, 0.5, 16)
    web = request("web-bird-divide-mix", None, {}).settings("default")
    assert (web.image_size, web.method_settings.lambda_u) == (448, 0)


def test_presets_of_elr_plus():
    for noise in (0, 20, 50, 80):
        found = request(f"cifar100-id{noise}-elr-plus", None, {}).settings("default")
        assert found.corrupt == (f"symmetric:{noise / 100:g}" if noise else None)
        assert (found.epochs, found.warmup, found.batch_size, found.lr) == (250, 0, 128, 0.02)
        assert (found.schedule, found.weight_decay) == ("steps:200:0.1", 5e-4)
        own = found.method_settings
        assert (own.elr_lambda, own.elr_beta, own.mixup_alpha) == (7, 0.9, 1)
        assert (own.ema_decay, own.ramp_steps) == (0.997, 40_000)


def test_presets_of_evidential_mix():
    for pool, out, inside in (("inet", 20, 20), ("places", 60, 20)):
        name = f"cifar100-{pool}-{out}-{inside}"
        found = request(f"{name}-evidential-mix", None, {}).settings("default")
        assert found.corrupt == request(name, None, {}).settings("default").corrupt
        assert NEEDS[f"{name}-evidential-mix"] == "--pool POOL"
        assert (found.epochs, found.warmup, found.schedule) == (230, 30, "steps:131:0.1")
        own = found.method_settings
        assert (own.classifier_warmup, own.lambda_u, own.as_released) == (10, 25, False)


def test_presets_of_dynamic_bootstrapping():
    """Each row has the variant that made its number, or is better at its noise rate."""
    variants = {"id0": "s", "id20": "s", "id50": "s", "id80": "h"}
    variants |= {"inet-20-20": "s", "inet-40-20": "s", "inet-60-20": "h", "places-40-40": "h"}
    for row, variant in variants.items():
        base = request(f"cifar100-{row}", None, {}).settings("default")
        own = request(f"cifar100-{row}-dynamic-bootstrapping", None, {}).settings("default")
        assert own.method_settings.bootstrapping[0] == variant
        assert (own.epochs, own.warmup, own.batch_size) == (300, 105, 128)
        assert (own.lr, own.schedule, own.weight_decay) == (0.1, "steps:100,250:0.1", 1e-4)
        assert own.corrupt == (None if row == "id0" else base.corrupt)
    assert NEEDS["cifar100-inet-40-20-dynamic-bootstrapping"] == "--pool POOL"


def test_presets_of_rrl():
    """One set of settings for all rows of both tables; only the noise differs."""
    rows = [f"id{rate}" for rate in (0, 20, 50, 80)]
    rows += [f"{pool}-{r}" for pool in ("inet", "places") for r in ("20-20", "40-20", "60-20")]
    rows += ["inet-40-40", "places-40-40"]
    for row in rows:
        rrl = request(f"cifar100-{row}-rrl", None, {}).settings("default")
        plain = request(f"cifar100-{row}", None, {}).settings("default")
        assert rrl.corrupt == plain.corrupt
        assert (rrl.method, rrl.projection, rrl.warmup, rrl.epochs) == ("rrl", 50, 15, 200)
        assert (rrl.batch_size, rrl.lr, rrl.weight_decay) == (128, 0.02, 5e-4)
    assert NEEDS["cifar100-inet-40-20-rrl"] == "--pool POOL"


def test_what_presets_need_beside_them():
    assert NEEDS["cifar10n"] == "--corrupt human:FILE"
    assert NEEDS["cifar100-inet-40-20"] == "--pool POOL"
    assert "cifar100-id50" not in NEEDS


def test_the_preset_of_80_percent_noise():
    """The threshold of the paper, but our metric; no other preset departs from the loss."""
    own = request("cifar100-id80", None, {}).settings("default").method_settings
    assert (own.threshold, own.noise_metric) == (0.5, "capped-loss")
    capped = [name for name, values in PRESETS.items() if "noise_metric" in values]
    assert capped == ["cifar100-id80"]


@pytest.mark.parametrize("pool", ["inet", "places"])
@pytest.mark.parametrize(("out", "inside"), [(20, 20), (40, 20), (60, 20), (40, 40)])
def test_presets_name_the_out_of_distribution_share_first(pool, out, inside):
    """As in the table of the paper."""
    settings = request(f"cifar100-{pool}-{out}-{inside}", None, {}).settings("default")
    assert settings.corrupt == f"symmetric:0.{inside // 10}+out:0.{out // 10}"
    assert (settings.epochs, settings.warmup_epochs) == (200, 30)
    assert settings.method_settings.threshold == 0.95


@pytest.mark.parametrize(
    ("asked", "weights"),
    [
        ({}, "embedded"),
        ({"network": "tf_efficientnet_lite0"}, "embedded"),
        ({"network": "resnet50"}, "pretrained"),
        ({"network": "small-cnn"}, None),
        ({"network": "resnet50", "weights": None}, None),
        ({"weights": "pretrained"}, "pretrained"),
        ({"network": "resnet50", "weights": "embedded"}, "embedded"),  # and is refused later
    ],
)
def test_weights_that_suit_the_network(asked, weights):
    settings = request("finetune", None, asked).settings("default")
    assert settings.network == asked.get("network", "tf_efficientnet_lite0")
    assert settings.weights == weights


@pytest.mark.parametrize(
    ("asked", "start", "lr"),
    [
        ({}, True, 0.0012),
        ({"network": "resnet50"}, True, 0.0012),
        ({"head_start": False}, False, 0.04),
        ({"head_start": False, "batch_size": 32}, False, 0.02),
        ({"head_start": False, "lr": 0.3}, False, 0.3),
        ({"network": "small-cnn"}, False, 0.04),
        ({"network": "resnet50", "weights": None}, False, 0.04),
    ],
)
def test_a_head_start_needs_weights_and_a_lower_learning_rate(asked, start, lr):
    settings = request("finetune", None, asked).settings("default")
    assert (settings.head_start, settings.lr) == (start, lr)


def test_presets_of_the_web_datasets():
    for name in ("web-aircraft", "web-bird", "web-car"):
        web = request(name, None, {}).settings("default")
        assert (web.network, web.weights, web.image_size) == ("resnet50", "pretrained", 448)
        assert (web.epochs, web.warmup, web.batch_size) == (110, 10, 16)
        assert (web.lr, web.weight_decay) == (0.003, 1e-3)
        assert web.method_settings.threshold == 0.95
    for noise in (20, 40, 60, 80):
        cnwl = request(f"cnwl-{noise}", None, {}).settings("default")
        assert (cnwl.epochs, cnwl.warmup, cnwl.corrupt) == (200, 1, None)


# ------------------------------------------------------------------------------------- requests


def test_single_settings_win_over_a_file_and_a_file_over_the_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 7\nlr = 0.02\n")
    settings = request("digits", path, {"lr": 0.01}).settings("default")
    assert (settings.network, settings.epochs, settings.lr) == ("small-cnn", 7, 0.01)


def test_the_source_chooses_the_preset_only_if_none_is_named():
    assert request(None, None, {}).settings("digits").network == "small-cnn"
    assert request("default", None, {}).settings("digits").network == "preactresnet18"


@pytest.mark.parametrize("method", METHODS)
def test_the_config_of_a_run_can_be_used_again(method, tmp_path):
    path = tmp_path / "config.json"
    settings = Settings(method=method, epochs=9, corrupt="symmetric:0.1")
    path.write_text(json.dumps({"source": "digits", "settings": as_json(settings)}))
    assert Settings(**read_config(path)) == settings
    assert request(None, path, {}).settings("default") == settings
    other = request(None, path, {"method": "ce"}).settings("default")  # what both have
    assert (other.method, other.epochs, other.corrupt) == ("ce", 9, "symmetric:0.1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "epochs = ", "--config .*a.toml: "),
        ("a.toml", "epoch = 3", "epoch: no such setting; did you mean .*epochs"),
        ("a.toml", "hold_out = 0.2", "hold_out: no such setting; it is an option .*, --hold-out"),
        ("a.json", "[1, 2]", "must hold names and values"),
        ("a.json", "{", "--config .*a.json: "),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        request(None, path, {})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"--config .*nowhere.toml: cannot be read"):
        request(None, tmp_path / "nowhere.toml", {})


def test_unknown_names_get_a_hint():
    with pytest.raises(InputError, match=r"--preset cifar100-id5: no such preset; did you mean"):
        request("cifar100-id5", None, {})
    with pytest.raises(InputError, match=r"treshold: no such setting; did you mean threshold"):
        request(None, None, {"treshold": 1})
    with pytest.raises(InputError, match=r"known: .*digits"):
        request("zzz", None, {})


def test_resuming_keeps_the_settings_of_the_run():
    recorded = Settings(epochs=20, lr=0.05)
    assert request(None, None, {}).resume(recorded) == recorded
    assert request(None, None, {"epochs": 20}).resume(recorded) == recorded
    assert request(None, None, {"device": "cpu"}).resume(recorded).device == "cpu"
    with pytest.raises(
        InputError, match=r"--lr 0.1 differs from the --lr 0.05 that the run began with"
    ):
        request(None, None, {"lr": 0.1}).resume(recorded)
    with pytest.raises(
        InputError,
        match=r"^--network small-cnn \(of --preset digits\) differs .* leave --preset out",
    ):
        request("digits", None, {}).resume(recorded)


def test_a_run_cannot_be_resumed_with_another_method():
    recorded = Settings(epochs=20)
    for asked in (
        request(None, None, {"method": "elr"}),
        request("cifar100-id50-elr", None, {}),
        request(None, None, {"method": "elr", "elr_lambda": 3}),
    ):
        with pytest.raises(InputError, match=r"^--method elr .*differs from the --method pls"):
            asked.resume(recorded)
    with pytest.raises(InputError, match=r"^--gamma 1.0 differs from the --gamma 2.0"):
        request(None, None, {"gamma": 1}).resume(recorded)
    elr = request("cifar100-id50-elr", None, {}).settings("default")
    assert request("cifar100-id50-elr", None, {}).resume(elr) == elr


def test_batch_size_and_learning_rate_scale_together():
    assert request("digits", None, {"batch_size": 64}).settings("default").lr == 0.1
    assert request("digits", None, {"batch_size": 32}).settings("default").lr == 0.05
    assert request(None, None, {"batch_size": 128}).settings("digits").lr == 0.2
    assert request("digits", None, {"batch_size": 64, "lr": 0.3}).settings("default").lr == 0.3
    fitted = request("digits", None, {}).settings("default", {"batch_size": 16})
    assert (fitted.batch_size, fitted.lr) == (16, 0.025)
    with pytest.raises(InputError, match="--batch-size must be a whole number"):
        request("digits", None, {"batch_size": "many"}).settings("default")


def test_what_was_asked_for_wins_over_what_fits_the_data():
    asked = request("digits", None, {"batch_size": 8, "balance_prior": "uniform"})
    settings = asked.settings("default", {"batch_size": 16, "balance_prior": "given"})
    assert (settings.batch_size, settings.method_settings.balance_prior) == (8, "uniform")
    baseline = request("digits", None, {"method": "ce"})
    assert baseline.settings("default", {"balance_prior": "given"}).method == "ce"


def test_the_same_command_resumes_a_run_whose_settings_were_fitted():
    asked = request("digits", None, {"network": "small-cnn"})
    recorded = asked.settings("default", {"batch_size": 16, "balance_prior": "given"})
    assert asked.resume(recorded) == recorded


def test_relative_paths_are_recorded_as_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value, recorded in [
        ("pool", "p.npy", f"{tmp_path}/p.npy"),
        ("pool", "~/p", str(Path("~/p").expanduser())),
        ("corrupt", "human:a.pt:noisy", f"human:{tmp_path}/a.pt:noisy"),
        ("corrupt", "labels:/b.csv", "labels:/b.csv"),
        ("corrupt", "symmetric:0.2+out:0.4", "symmetric:0.2+out:0.4"),
        ("weights", "w.pth", f"{tmp_path}/w.pth"),
        ("weights", "pretrained", "pretrained"),
        ("weights", "embedded", "embedded"),
        ("weights", None, None),
        ("network", "resnet18", "resnet18"),
    ]:
        assert request(None, None, {name: value}).values == {name: recorded}


def test_unknown_names_in_the_config_of_a_run_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"source": "digits", "settings": {"method": "ce", "gamma": 2, "epoch": 3}}')
    with pytest.raises(InputError, match=r"config.json: epoch: no such setting; did you mean"):
        request(None, path, {})
    path.write_text('{"source": "digits", "settings": {"method": "divide", "epochs": 3}}')
    with pytest.raises(InputError, match=r"^--method divide: must be one of pls, pls-plus, ce"):
        request(None, path, {})


def test_a_shorter_run_of_a_preset_scales_the_steps_of_its_learning_rate():
    def settings(**values):
        return request("cifar100-id50-elr", None, values).settings("default")

    assert settings(epochs=15).schedule == "steps:8,12:0.01"
    assert settings(epochs=150).schedule == settings().schedule == "steps:80,120:0.01"
    assert settings(epochs=15, schedule="constant").schedule == "constant"


def test_a_shorter_run_of_a_preset_scales_its_warm_up():
    """As --time does; a warm-up longer than the run would be an error about a flag not given."""

    def warmup(preset, **values):
        return request(preset, None, values).settings("default").warmup

    bootstrapping = "cifar100-id50-dynamic-bootstrapping"
    assert warmup(bootstrapping) == warmup(bootstrapping, epochs=300) == 105
    assert warmup(bootstrapping, epochs=20) == 7
    assert warmup(bootstrapping, epochs=20, warmup=3) == 3
    assert warmup(bootstrapping, epochs=2) == warmup("cnwl-20", epochs=2) == 1
    assert warmup("cifar100-inet-40-20-dsos", epochs=40) == 20
    assert warmup("cifar100-id50-elr", epochs=20) == 0
    assert warmup("cifar100-id50", epochs=20) is None
    fitted = request(bootstrapping, None, {}).settings("default", {"epochs": 20, "warmup": 2})
    assert fitted.warmup == 2


def test_adam_has_a_learning_rate_of_its_own():
    def lr(**values):
        return request("cifar100-id50", None, values).settings("default").lr

    assert (lr(), lr(optimiser="nesterov"), lr(optimiser="adam")) == (0.1, 0.1, 0.001)
    assert lr(optimiser="muon") == 0.02
    assert lr(optimiser="adam", batch_size=128) == 0.0005
    assert lr(optimiser="adam", lr=0.02) == 0.02
    gentle = request("finetune", None, {"optimiser": "adam", "head_start": True})
    assert gentle.settings("default").lr == 0.001


def test_a_run_whose_epochs_were_fitted_to_the_time_resumes_with_its_preset():
    asked = request("cifar100-id50-elr", None, {})
    recorded = dataclasses.replace(asked.settings("default"), epochs=15, schedule="steps:8,12:0.01")
    assert asked.resume(recorded) == recorded
