"""The commands as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import make_images
from pseudoloss.cli import COMMANDS, main, train_parser
from pseudoloss.config import NO_SETTINGS, flag, setting_types
from pseudoloss.experiments import commands

SNAPSHOT = Path(__file__).parent / "options.txt"
QUICK = ["--network", "small-cnn", "--batch-size", "16", "--epochs", "2", "--pad", "0"]


def call(*words, capsys):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def help_of(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview(words, capsys):
    code, out, _ = call(*words, capsys=capsys)
    assert code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in out
    assert "pseudoloss demo" in out


def test_version(capsys):
    code, out, _ = call("--version", capsys=capsys)
    assert (code, out.split()[0]) == (0, "pseudoloss")


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["demo", "--help"], ["presets"], ["train", "--oot"]),
        *(["presets", "digits"], ["presets", "digit"]),
        *([name, "--help"] for name in ("predict", "evaluate", "export")),
        *(["predict", "run"], ["evaluate", "run", "x", "--part", "y"], ["export", "run"]),
        *(["inspect", "--help"], ["inspect"]),
        *(["experiments", name, "--help"] for name in commands.COMMANDS),
        *(["experiments", "list"], ["experiments", "list", "ablation"]),
        *(["experiments", "run", "nothing"], ["experiments", "table", "nothing"]),
    ],
)
def test_no_torch_until_a_command_needs_it(words):
    """What keeps --help fast."""
    program = (
        "import sys\nfrom pseudoloss.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'sklearn', 'pandas', 'timm', 'numpy', 'scipy', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)


def test_importing_the_package_is_light():
    program = "import sys, pseudoloss; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_options_are_those_we_know_of(capsys):
    """Changing an option is a decision: then change tests/options.txt too."""
    found = []
    for command in (*COMMANDS, *(f"experiments {name}" for name in commands.COMMANDS)):
        words = help_of(command, capsys).replace(",", " ").split()
        flags = dict.fromkeys(word for word in words if word.startswith("--"))
        found += [f"{command} {flag}" for flag in flags if flag.strip("-")]
    assert "\n".join(sorted(set(found))) + "\n" == SNAPSHOT.read_text()


def test_help_shows_the_values_of_a_preset(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--preset", "digits", "--help"])
    assert "(default: small-cnn)" in " ".join(capsys.readouterr().out.split())


def test_train(npz, tmp_path, capsys):
    out = tmp_path / "run"
    code, text, err = call(
        "train", npz(), "--out", out, *QUICK, "--corrupt", "symmetric:0.2", capsys=capsys
    )
    assert (code, err) == (0, "")
    assert "64 images of 8×8 grey, 4 classes" in text
    assert "epoch 1/2  warm-up" in text
    assert "epoch 2/2  pls" in text
    assert " left\n" in text
    assert "labels.csv" in text
    assert json.loads((out / "summary.json").read_text())["epochs"] == 2


def test_quiet_is_quiet(npz, tmp_path, capsys):
    code, text, err = call(
        "train", npz(), "--out", tmp_path / "run", "--quiet", *QUICK, capsys=capsys
    )
    assert (code, text, err) == (0, "", "")


def test_flags_overrule_the_preset_and_the_config(npz, tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text("epochs = 3\nlr = 0.03\n")
    words = [
        "--preset",
        "digits",
        "--config",
        config,
        "--epochs=2",
        "--batch_size",
        "16",
        "--no-mixup",
    ]
    code, *_ = call("train", npz(), "--out", tmp_path / "run", *words, capsys=capsys)
    assert code == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    wanted = {"network": "small-cnn", "epochs": 2, "lr": 0.03, "batch_size": 16, "mixup": False}
    assert {name: settings[name] for name in wanted} == wanted


def test_minutes_stop_a_run_and_tell_how_to_go_on(npz, tmp_path, capsys):
    out = tmp_path / "run"
    code, text, _ = call("train", npz(), "--out", out, "--minutes", "0.0001", *QUICK, capsys=capsys)
    assert code == 0
    assert f"stopped after epoch 1. Go on with:\n  pseudoloss train --out {out} --resume" in text
    assert "Done" not in text
    code, text, _ = call("train", "--out", out, "--resume", capsys=capsys)
    assert code == 0
    assert "resumed after epoch 1" in text
    assert "Done in" in text


def test_presets(capsys):
    code, out, _ = call("presets", capsys=capsys)
    assert code == 0
    assert "cifar100-id80" in out
    assert "--threshold 0.5" in out
    assert "--no-flip" in out
    network = "--network preactresnet18-stemnorm"
    noise = "--corrupt symmetric:0.2+out:0.4  (needs --pool POOL)"
    assert f"\ncifar100-inet-40-20    {network}  {noise}\n" in out
    assert f"\ncifar100n              {network}  (needs --corrupt human:FILE)\n" in out
    assert out.count("needs") == 10


def test_a_preset_in_full(capsys):
    code, out, _ = call("presets", "cifar100-inet-40-20", capsys=capsys)
    assert code == 0
    first, *lines, last = out.splitlines()
    assert first == "cifar100-inet-40-20  (needs --pool POOL)"
    assert [line.split()[-2] for line in lines] == [flag(name) for name in setting_types()]
    marked = [line.split() for line in lines if not line.startswith("  ")]
    noise = ["*", "--corrupt", "symmetric:0.2+out:0.4"]
    assert marked == [["*", "--network", "preactresnet18-stemnorm"], noise]
    assert "  --flip                     on" in lines
    assert last.startswith("* is not the default")


IMAGES, LABELS = make_images()

BAD = {
    "no such command": (["tran"], "tran: no such command; did you mean train"),
    "unknown option": (["train", "digits", "--epoch", "3"], "--epoch"),
    "no out": (["train", "digits"], "--out is missing"),
    "no source": (["train", "--out", "RUN"], "SOURCE is missing"),
    "unknown source": (["train", "digitz", "--out", "RUN"], "source digitz: no such source"),
    "unknown preset": (["train", "digits", "--out", "RUN", "--preset", "cifar"], "--preset cifar"),
    "unknown network": (
        ["train", "digits", "--out", "RUN", "--network", "resnet9000"],
        "--network resnet9000: no such network",
    ),
    "unknown method": (["train", "digits", "--out", "RUN", "--method", "magic"], "--method"),
    "no pool": (
        ["train", "digits", "--out", "RUN", "--corrupt", "symmetric:0.1+out:0.2"],
        "--corrupt symmetric:0.1+out:0.2: needs --pool",
    ),
    "a home of nobody: pool": (
        ["train", "digits", "--out", "RUN", "--corrupt", "out:0.2", "--pool", "~nobody-here/p"],
        "~nobody-here/p: no such file or folder",
    ),
    "a home of nobody: labels": (
        ["train", "digits", "--out", "RUN", "--corrupt", "labels:~nobody-here/p.csv"],
        "~nobody-here/p.csv: no such file",
    ),
    "a home of nobody: weights": (
        ["train", "digits", "--out", "RUN", "--network", "resnet18", "--weights", "~nobody-here/p"],
        "~nobody-here/p: no such file",
    ),
    "a home of nobody: source": (
        ["train", "cifar100:~nobody-here/p", "--out", "RUN"],
        "~nobody-here/p",
    ),
    "idle pool": (["train", "digits", "--out", "RUN", "--pool", "/x"], "--pool /x: nothing asks"),
    "unknown noise": (["train", "digits", "--out", "RUN", "--corrupt", "x:1"], "--corrupt x:1"),
    "noise rate": (
        ["train", "digits", "--out", "RUN", "--corrupt", "symmetric:2"],
        "--corrupt symmetric:2: the rate must be between 0 and 1",
    ),
    "not a number": (["train", "digits", "--out", "RUN", "--epochs", "many"], "--epochs"),
    "negative": (["train", "digits", "--out", "RUN", "--lr", "-1"], "--lr must be above 0"),
    "absurd": (["train", "digits", "--out", "RUN", "--threshold", "3"], "--threshold must be"),
    "batch": (
        ["train", "digits", "--out", "RUN", "--batch-size", "5000"],
        "--batch-size 5000 is larger than the set (1438 images of digits)",
    ),
    "warm-up": (
        ["train", "digits", "--out", "RUN", "--epochs", "3", "--warmup", "9"],
        "--warmup 9 must not exceed --epochs 3",
    ),
    "minutes": (
        ["train", "digits", "--out", "RUN", "--minutes", "-2"],
        "--minutes must be a number above 0",
    ),
    "config": (["train", "digits", "--out", "RUN", "--config", "no.toml"], "--config no.toml"),
    "device": (["train", "digits", "--out", "RUN", "--device", "cuda:99"], "--device cuda:99"),
    "cifar": (["train", "cifar100:nowhere", "--out", "RUN"], "cifar100:nowhere: no such folder"),
    "cifar without a place": (["train", "cifar10", "--out", "RUN"], "as in cifar10:DIR"),
    "no file": (["train", "no.npz", "--out", "RUN"], "no.npz: no such file"),
    "demo": (["demo", "--ot", "RUN"], "--ot"),
    "demo seed": (["demo", "--out", "RUN", "--seed", "-4"], "--seed must be"),
    "presets": (["presets", "--all"], "--all"),
    "no such preset": (["presets", "digit"], "digit: no such preset; did you mean digits"),
    "labels of people": (
        ["train", "cifar10:X", "--out", "RUN", "--preset", "cifar10n", *QUICK],
        "--preset cifar10n: add --corrupt human:FILE, the labels that people gave",
    ),
    "experiments": (["experiments", "rum"], "experiments rum: no such command; did you mean run?"),
    "experiment": (
        ["experiments", "run", "id-nose"],
        "id-nose: no such experiment; did you mean id-noise",
    ),
    "cells": (
        ["experiments", "run", "id-noise", "--only", "id55-pls"],
        "--only id55-pls: no such cell of id-noise; did you mean id50-pls",
    ),
    "no data": (["experiments", "run", "id-noise"], "--data cifar100=DIR is missing"),
    "no such data": (
        ["experiments", "run", "id-noise", "--data", "cifar10=x"],
        "--data cifar10=x: no such kind of data; did you mean cifar100?",
    ),
    "data without a place": (["experiments", "run", "digits", "--data", "x"], "must be KIND=DIR"),
    "set": (
        ["experiments", "run", "digits", "--set", "epoch=2"],
        "--set epoch=2: no such setting; did you mean epochs?",
    ),
    "set without a value": (["experiments", "run", "digits", "--set", "x"], "must be NAME=VALUE"),
    "set a seed": (["experiments", "run", "digits", "--set", "seed=2"], "chosen with --seeds"),
    "set to nonsense": (["experiments", "run", "digits", "--set", "lr=-1"], "--lr must be above 0"),
    "seeds": (["experiments", "run", "digits", "--seeds", "-1"], "--seed must be 0 to"),
    "no time": (["experiments", "run", "digits", "--minutes", "0"], "--minutes must be above 0"),
    "table": (["experiments", "table", "gama"], "gama: no such experiment; did you mean gamma"),
    "table of nothing": (["experiments", "table", "mu", "--out", "x"], "--out x: no such folder"),
    "no results": (
        ["experiments", "table", "mu", "--results", "x"],
        "--results x: no such folder",
    ),
    "figure": (
        ["experiments", "figure", "acuracy"],
        "acuracy: no such figure; did you mean accuracy?",
    ),
    "figure file": (["experiments", "figure", "bias", "--file", "x.gif"], "end in .svg or .png"),
}
BAD_SETS = {
    "wrong length": ({"labels": LABELS[:-1]}, "set.npz: labels: 63 labels for 64 images"),
    "out of range": (
        {"classes": np.array(["a", "b", "c"])},
        "set.npz: labels: 3 in row 3 is out of range (classes: 0 to 2)",
    ),
    "below zero": ({"labels": LABELS - 1}, "labels: -1 in row 0 is out of range"),
    "one class": ({"labels": LABELS * 0}, "all labels are of one class (0)"),
    "one image": (
        {"labels": np.where(LABELS == 3, 2, LABELS) + (np.arange(64) == 3)},
        "has one image",
    ),
    "empty": ({"images": IMAGES[:0], "labels": LABELS[:0]}, "no images (the dataset is empty)"),
    "pixels": ({"images": IMAGES.astype(np.float32)}, "float pixels must be between 0 and 1"),
}


def refused(words, message, capsys, tmp_path):
    code, out, err = call(*words, capsys=capsys)
    assert code == 2
    assert err.startswith("pseudoloss: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
    assert [path for path in tmp_path.iterdir() if path.suffix != ".npz"] == []


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_code_2(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, message = BAD[name]
    refused(words, message, capsys, tmp_path)


@pytest.mark.parametrize("name", BAD_SETS)
def test_bad_sets_are_one_line_and_code_2(name, npz, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, message = BAD_SETS[name]
    npz(**changes)
    refused(["train", "set.npz", "--out", "RUN", *QUICK], message, capsys, tmp_path)


def test_an_unknown_option_gets_a_hint(capsys):
    _, _, err = call("train", "digits", "--epoch", "3", capsys=capsys)
    assert "did you mean --epochs" in err


def test_a_taken_folder_is_refused(npz, tmp_path, capsys):
    out = tmp_path / "run"
    assert call("train", npz(), "--out", out, *QUICK, capsys=capsys)[0] == 0
    code, _, err = call("train", npz(), "--out", out, *QUICK, capsys=capsys)
    assert code == 2
    assert "add --resume" in err


def test_a_run_that_fails_exits_with_1(npz, tmp_path, capsys):
    words = [*QUICK, "--lr", "100", "--epochs", "40"]
    code, _, err = call("train", npz(), "--out", tmp_path / "run", *words, capsys=capsys)
    assert code == 1
    assert err.startswith("pseudoloss: error: the loss became")
    assert err.count("\n") == 1


def test_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "pseudoloss", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_a_reader_that_leaves_is_no_error():
    """The other end of the pipe is closed before the first word."""
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "pseudoloss", "presets"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_terminal_without_unicode(npz, tmp_path):
    words = ["train", npz(), "--out", tmp_path / "run", *QUICK]
    result = subprocess.run(
        [sys.executable, "-m", "pseudoloss", *map(str, words)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "8?8 grey" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "--out is missing"),
        (["train", "digits", "--out", ""], "--out: is empty"),
        (["train", "", "--out", "run"], "SOURCE is empty"),
        (["train", "digits", "--test", "", "--out", "run"], "--test is empty"),
        (["train", "digits", "--corrupt", "out:0.1", "--pool", "", "--out", "run"], "--pool is"),
        (["inspect", ""], "SOURCE is empty"),
    ],
)
def test_nothing_is_not_the_current_folder(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*words, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_setting_is_known_by_name():
    words = {action.dest for action in train_parser(None)._actions} - {"help", "source"}
    assert words - set(setting_types()) == set(NO_SETTINGS)
