import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

import pseudoloss
from pseudoloss.config import Settings, as_json, read_config
from pseudoloss.presets import PRESETS, request
from pseudoloss.errors import InputError

SOURCE = Path(pseudoloss.__file__).parent
NAMES = [field.name for field in dataclasses.fields(Settings)]


def test_defaults_are_the_papers_cifar_settings():
    settings = Settings()
    assert (settings.epochs, settings.warmup_epochs, settings.batch_size) == (200, 30, 256)
    assert (settings.lr, settings.gamma, settings.mu, settings.threshold) == (0.1, 2, 0.2, 0.95)
    assert settings.weight_decay == 5e-4  # row 1: the released program's


def test_at_most_forty_settings():
    assert len(NAMES) <= 40


def test_every_setting_is_read_somewhere():
    read = set()
    for path in SOURCE.rglob("*.py"):
        if path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            owner = node.value if isinstance(node, ast.Attribute) else None
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            if name in ("settings", "chosen"):
                read.add(node.attr)
    read |= {"warmup"} if "warmup_epochs" in read else set()
    assert set(NAMES) - read == set()


def test_no_default_lives_outside_config():
    """The estimator's parameters are None until the user sets them."""
    from pseudoloss import PLS

    assert all(getattr(PLS(), name) is None for name in NAMES)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("method", "divide", "--method divide: must be one of pls, ce, mixup"),
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
    ],
)
def test_absurd_settings_are_refused_in_the_words_of_the_flag(name, value, message):
    with pytest.raises(InputError) as error:
        Settings(**{name: value})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_numbers_take_their_declared_type():
    settings = Settings(epochs=np.int64(5), lr=1, warmup=2.0)
    assert (settings.epochs, settings.lr, settings.warmup) == (5, 1.0, 2)
    assert Settings(flip=np.False_).flip is False
    assert [type(v) for v in (settings.epochs, settings.lr, settings.warmup)] == [int, float, int]


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 1), (2, 1), (10, 2), (40, 6), (200, 30)])
def test_warm_up_is_a_share_of_the_epochs(epochs, warmup):
    assert Settings(epochs=epochs).warmup_epochs == warmup


def test_contradictions_are_refused():
    with pytest.raises(InputError, match="--no-mixup contradicts --method mixup"):
        Settings(method="mixup", mixup=False)


def test_baselines_may_do_without_a_warm_up():
    assert Settings(method="ce", warmup=0).warmup_epochs == 0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    assert isinstance(request(name, None, {}).settings("default"), Settings)


def test_the_preset_of_80_percent_noise():
    """The paper's threshold, our stage 1; no other preset of a row of the paper departs from it."""
    settings = request("cifar100-id80", None, {}).settings("default")
    assert (settings.threshold, settings.noise_metric) == (0.5, "capped-loss")
    capped = [name for name, values in PRESETS.items() if "noise_metric" in values]
    assert capped == ["cifar100-id80"]


@pytest.mark.parametrize("pool", ["inet", "places"])
@pytest.mark.parametrize(("out", "inside"), [(20, 20), (40, 20), (60, 20), (40, 40)])
def test_presets_name_the_share_outside_first(pool, out, inside):
    """As the paper's table does."""
    settings = request(f"cifar100-{pool}-{out}-{inside}", None, {}).settings("default")
    assert settings.corrupt == f"symmetric:0.{inside // 10}+out:0.{out // 10}"
    assert (settings.epochs, settings.warmup_epochs, settings.threshold) == (200, 30, 0.95)


def test_presets_of_the_web_sets():
    for name in ("web-aircraft", "web-bird", "web-car"):
        web = request(name, None, {}).settings("default")
        assert (web.network, web.weights, web.image_size) == ("resnet50", "pretrained", 448)
        assert (web.epochs, web.warmup, web.batch_size) == (110, 10, 16)
        assert (web.lr, web.weight_decay, web.threshold) == (0.003, 1e-3, 0.95)
    for noise in (20, 40, 60, 80):
        cnwl = request(f"cnwl-{noise}", None, {}).settings("default")
        assert (cnwl.epochs, cnwl.warmup, cnwl.corrupt) == (200, 1, None)


def test_a_request_is_preset_then_file_then_single_settings(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 7\nlr = 0.02\n")
    settings = request("digits", path, {"lr": 0.01}).settings("default")
    assert (settings.network, settings.epochs, settings.lr) == ("small-cnn", 7, 0.01)


def test_the_source_chooses_the_preset_only_where_none_is_named():
    assert request(None, None, {}).settings("digits").network == "small-cnn"
    assert request("default", None, {}).settings("digits").network == "preactresnet18"


def test_the_config_of_a_run_can_be_used_again(tmp_path):
    path = tmp_path / "config.json"
    settings = Settings(epochs=9, corrupt="symmetric:0.1")
    path.write_text('{"source": "digits", "settings": ' + _json(settings) + "}")
    assert Settings(**read_config(path)) == settings


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "epochs = ", "--config .*a.toml: "),
        ("a.toml", "epoch = 3", "epoch: no such setting; did you mean .*epochs"),
        ("a.toml", "hold_out = 0.2", "hold_out: no such setting; .* to the command, as --hold-out"),
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


def test_batch_size_and_learning_rate_scale_together():
    assert request("digits", None, {"batch_size": 64}).settings("default").lr == 0.1
    assert request("digits", None, {"batch_size": 32}).settings("default").lr == 0.05
    assert request(None, None, {"batch_size": 128}).settings("digits").lr == 0.2
    assert request("digits", None, {"batch_size": 64, "lr": 0.3}).settings("default").lr == 0.3
    fitted = request("digits", None, {}).settings("default", {"batch_size": 16})
    assert (fitted.batch_size, fitted.lr) == (16, 0.025)
    with pytest.raises(InputError, match="--batch-size must be a whole number"):
        request("digits", None, {"batch_size": "many"}).settings("default")


def test_what_was_asked_for_wins_over_what_fits():
    asked = request("digits", None, {"batch_size": 8, "balance_prior": "uniform"})
    settings = asked.settings("default", {"batch_size": 16, "balance_prior": "given"})
    assert (settings.batch_size, settings.balance_prior) == (8, "uniform")


def test_the_same_command_resumes_what_was_fitted():
    asked = request("digits", None, {"network": "small-cnn"})
    recorded = asked.settings("default", {"batch_size": 16, "balance_prior": "given"})
    assert asked.resume(recorded) == recorded


def _json(settings):
    import json

    return json.dumps(as_json(settings))


def test_files_are_recorded_as_they_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value, recorded in [
        ("pool", "p.npy", f"{tmp_path}/p.npy"),
        ("pool", "~/p", str(Path("~/p").expanduser())),
        ("corrupt", "human:a.pt:noisy", f"human:{tmp_path}/a.pt:noisy"),
        ("corrupt", "labels:/b.csv", "labels:/b.csv"),
        ("corrupt", "symmetric:0.2+out:0.4", "symmetric:0.2+out:0.4"),
        ("weights", "w.pth", f"{tmp_path}/w.pth"),
        ("weights", "pretrained", "pretrained"),
        ("weights", None, None),
        ("network", "resnet18", "resnet18"),
    ]:
        assert request(None, None, {name: value}).values == {name: recorded}
