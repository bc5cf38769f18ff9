"""The commands as users type them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import make_images
from processes import FLAGS
from pseudoloss.cli import COMMANDS, main
from pseudoloss.cli import experiments as commands
from pseudoloss.cli.train import next_steps, settings_of, train_parser
from pseudoloss.config import METHOD_SETTINGS, all_setting_types, flag
from pseudoloss.presets import NEEDS, NO_SETTINGS

SNAPSHOT = Path(__file__).parent / "options.txt"
QUICK = ["--network", "small-cnn", "--batch-size", "16", "--epochs", "2", "--pad", "0"]


def call(*arguments, capsys):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def help_of(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_overview_lists_commands_and_exit_codes(arguments, capsys):
    code, out, _ = call(*arguments, capsys=capsys)
    assert code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in out
    assert "\n  2    wrong input" in out
    assert "pseudoloss demo" in out


def test_help_of_a_command_by_name(capsys):
    wanted = help_of("predict", capsys)
    with pytest.raises(SystemExit) as end:
        main(["help", "predict"])
    assert (end.value.code, capsys.readouterr().out) == (0, wanted)
    assert "examples:\n  pseudoloss predict run photo.jpg\n" in wanted
    code, _, err = call("help", "tran", capsys=capsys)
    assert (code, "tran: no such command; did you mean train?" in err) == (2, True)


def test_version_is_printed(capsys):
    code, out, _ = call("--version", capsys=capsys)
    assert (code, out.split()[0]) == (0, "pseudoloss")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["train", "--help"], ["demo", "--help"], ["presets"], ["train", "--oot"]),
        *(["presets", "digits"], ["presets", "digit"]),
        *([name, "--help"] for name in ("predict", "evaluate", "export", "labels", "apply")),
        *(["labels"], ["apply", "run"]),
        *(["predict", "run"], ["evaluate", "run", "x", "--part", "y"], ["export", "run"]),
        *(["inspect", "--help"], ["inspect"], ["review", "--help"], ["review"]),
        *(["experiments", name, "--help"] for name in commands.COMMANDS),
        *(["experiments", "list"], ["experiments", "list", "ablation"]),
        *(["experiments", "run", "nothing"], ["experiments", "table", "nothing"]),
    ],
)
def test_help_and_errors_do_not_import_torch(arguments):
    program = (
        "import sys\nfrom pseudoloss.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'sklearn', 'pandas', 'timm', 'numpy', 'scipy', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)


def test_importing_the_package_does_not_import_torch():
    program = "import sys, pseudoloss; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_options_match_the_snapshot(capsys):
    """Changing an option is a decision: update tests/cli/options.txt with it."""
    names = [*COMMANDS, *(f"experiments {name}" for name in commands.COMMANDS)]
    helps = {name: help_of(name, capsys) for name in names}
    for method in METHOD_SETTINGS:
        helps["train"] += help_of(f"train --method {method}", capsys)
    found = set()
    for command, text in helps.items():
        flags = {part for part in text.replace(",", " ").split() if part.startswith("--")}
        found |= {f"{command} {flag}" for flag in flags if flag.strip("-")}
    assert "\n".join(sorted(found)) + "\n" == SNAPSHOT.read_text()


def test_the_help_names_every_method(capsys):
    text = help_of("train", capsys)
    start = text.index("--method NAME")
    joined = "".join(text[start : text.index("--network", start)].split())
    assert [name for name in METHOD_SETTINGS if name not in joined] == []
    assert "{" not in joined


def test_help_shows_the_defaults_of_a_preset(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--preset", "digits", "--help"])
    assert "(default: small-cnn)" in " ".join(capsys.readouterr().out.split())


def test_train_prints_one_line_per_epoch(npz, tmp_path, capsys):
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


def test_quiet_prints_nothing(npz, tmp_path, capsys):
    code, text, err = call(
        "train", npz(), "--out", tmp_path / "run", "--quiet", *QUICK, capsys=capsys
    )
    assert (code, text, err) == (0, "", "")


def test_options_override_config_file_and_preset(npz, tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text("epochs = 3\nlr = 0.03\n")
    options = [
        "--preset",
        "digits",
        "--config",
        config,
        "--epochs=2",
        "--batch_size",
        "16",
        "--no-mixup",
    ]
    code, *_ = call("train", npz(), "--out", tmp_path / "run", *options, capsys=capsys)
    assert code == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    wanted = {"network": "small-cnn", "epochs": 2, "lr": 0.03, "batch_size": 16, "mixup": False}
    assert {name: settings[name] for name in wanted} == wanted


def test_minutes_stop_a_run_that_can_be_resumed(npz, tmp_path, capsys):
    out = tmp_path / "run"
    code, text, _ = call("train", npz(), "--out", out, "--minutes", "0.0001", *QUICK, capsys=capsys)
    assert code == 0
    assert "Stopped after epoch 1 because of --minutes" in text
    assert f"\n  pseudoloss train --out {out} --resume" in text
    assert "Done" not in text
    code, text, _ = call("train", "--out", out, "--resume", capsys=capsys)
    assert code == 0
    assert "resumed after epoch 1" in text
    assert "Done in" in text


def test_presets_are_listed_with_their_changes(capsys):
    code, out, _ = call("presets", capsys=capsys)
    assert code == 0
    assert "cifar100-id80" in out
    assert "--threshold 0.5" in out
    assert "--no-flip" in out
    network = "--network preactresnet18-stemnorm"
    noise = "--corrupt symmetric:0.2+out:0.4  (needs --pool POOL)"
    ours, others = out.split("\n\nPresets of other methods:\n")
    assert "--method" not in ours
    assert all("--method" in line for line in others.splitlines())
    lines = dict(line.split(maxsplit=1) for line in (*ours.splitlines(), *others.splitlines()))
    assert lines["cifar100-inet-40-20"] == f"{network}  {noise}"
    assert lines["cifar100n"] == f"{network}  (needs --corrupt human:FILE)"
    assert {name for name, text in lines.items() if "(needs" in text} == set(NEEDS)


def test_all_settings_of_a_preset(capsys):
    code, out, _ = call("presets", "cifar100-inet-40-20", capsys=capsys)
    assert code == 0
    first, *lines, last = out.splitlines()
    assert first == "cifar100-inet-40-20  (needs --pool POOL)"
    assert [line.split()[-2] for line in lines] == [flag(name) for name in settings_of("pls")]
    marked = [line.split() for line in lines if not line.startswith("  ")]
    noise = ["*", "--corrupt", "symmetric:0.2+out:0.4"]
    assert marked == [["*", "--network", "preactresnet18-stemnorm"], noise]
    assert "  --flip                     on" in lines
    assert last.startswith("* differs from the default; pseudoloss train --method pls --help")


IMAGES, LABELS = make_images()

BAD = {
    "no such command": (["tran"], "tran: no such command; did you mean train"),
    "no such option": (["--verbose", "train"], "--verbose: no such option (see pseudoloss --help)"),
    "unknown command": (["fly"], "fly: no such command; known: apply, audit, demo,"),
    "unknown option": (["train", "digits", "--epoch", "3"], "--epoch"),
    "no out": (["train", "digits"], "--out is missing"),
    "no source": (["train", "--out", "RUN"], "SOURCE is missing"),
    "unknown source": (
        ["train", "digitz", "--out", "RUN"],
        "source digitz: no such file, folder or dataset",
    ),
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
    "no such home: pool": (
        ["train", "digits", "--out", "RUN", "--corrupt", "out:0.2", "--pool", "~nobody-here/p"],
        "~nobody-here/p: no such file or folder",
    ),
    "no such home: labels": (
        ["train", "digits", "--out", "RUN", "--corrupt", "labels:~nobody-here/p.csv"],
        "~nobody-here/p.csv: no such file",
    ),
    "no such home: weights": (
        ["train", "digits", "--out", "RUN", "--network", "resnet18", "--weights", "~nobody-here/p"],
        "~nobody-here/p: no such file",
    ),
    "no such home: source": (
        ["train", "cifar100:~nobody-here/p", "--out", "RUN"],
        "~nobody-here/p",
    ),
    "unused pool": (["train", "digits", "--out", "RUN", "--pool", "/x"], "--pool /x: nothing asks"),
    "unknown noise": (["train", "digits", "--out", "RUN", "--corrupt", "x:1"], "--corrupt x:1"),
    "noise rate": (
        ["train", "digits", "--out", "RUN", "--corrupt", "symmetric:2"],
        "--corrupt symmetric:2: the rate must be between 0 and 1",
    ),
    "not a number": (["train", "digits", "--out", "RUN", "--epochs", "many"], "--epochs"),
    "negative": (["train", "digits", "--out", "RUN", "--lr", "-1"], "--lr must be above 0"),
    "out of range": (
        ["train", "digits", "--out", "RUN", "--threshold", "3"],
        "--threshold must be",
    ),
    "batch": (
        ["train", "digits", "--out", "RUN", "--batch-size", "5000"],
        "--batch-size 5000 is larger than the dataset (1438 images in digits)",
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
    "cifar without a folder": (["train", "cifar10", "--out", "RUN"], "cifar10:DIR"),
    "no file": (["train", "no.npz", "--out", "RUN"], "no.npz: no such file"),
    "demo": (["demo", "--ot", "RUN"], "--ot"),
    "demo seed": (["demo", "--out", "RUN", "--seed", "-4"], "--seed must be"),
    "presets": (["presets", "--all"], "--all"),
    "no such preset": (["presets", "digit"], "digit: no such preset; did you mean digits"),
    "unlike any preset": (["presets", "x"], "x: no such preset (see pseudoloss presets)"),
    "CIFAR-N without labels": (
        ["train", "cifar10:X", "--out", "RUN", "--preset", "cifar10n", *QUICK],
        "--preset cifar10n: add --corrupt human:FILE",
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
    "data without a folder": (["experiments", "run", "digits", "--data", "x"], "must be KIND=DIR"),
    "set": (
        ["experiments", "run", "digits", "--set", "epoch=2"],
        "--set epoch=2: no such setting; did you mean epochs",
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
    "plot": (
        ["experiments", "plot", "acuracy"],
        "acuracy: no such plot; did you mean accuracy?",
    ),
    "plot file": (["experiments", "plot", "bias", "--file", "x.gif"], "end in .svg or .png"),
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


def assert_refused(arguments, message, capsys, tmp_path):
    code, out, err = call(*arguments, capsys=capsys)
    assert code == 2
    assert err.startswith("pseudoloss: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
    assert [path for path in tmp_path.iterdir() if path.suffix != ".npz"] == []


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_one_line_and_code_2(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[name]
    assert_refused(arguments, message, capsys, tmp_path)


@pytest.mark.parametrize("name", BAD_SETS)
def test_wrong_arrays_are_one_line_and_code_2(name, npz, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, message = BAD_SETS[name]
    npz(**changes)
    assert_refused(["train", "set.npz", "--out", "RUN", *QUICK], message, capsys, tmp_path)


def test_unknown_option_gets_a_suggestion(capsys):
    _, _, err = call("train", "digits", "--epoch", "3", capsys=capsys)
    assert "did you mean --epochs" in err


def test_existing_run_folder_is_refused(npz, tmp_path, capsys):
    out = tmp_path / "run"
    assert call("train", npz(), "--out", out, *QUICK, capsys=capsys)[0] == 0
    code, _, err = call("train", npz(), "--out", out, *QUICK, capsys=capsys)
    assert code == 2
    assert "add --resume" in err


def test_failed_training_exits_with_1(npz, tmp_path, capsys):
    options = [*QUICK, "--lr", "100", "--epochs", "40"]
    code, _, err = call("train", npz(), "--out", tmp_path / "run", *options, capsys=capsys)
    assert code == 1
    assert err.startswith("pseudoloss: error: the loss became")
    assert err.count("\n") == 1


def test_python_dash_m_pseudoloss():
    result = subprocess.run(
        [sys.executable, "-m", "pseudoloss", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_closed_output_pipe_is_not_an_error():
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


def test_terminal_without_unicode(npz, tmp_path):
    arguments = ["train", npz(), "--out", tmp_path / "run", *QUICK]
    result = subprocess.run(
        [sys.executable, "-m", "pseudoloss", *map(str, arguments)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "8?8 grey" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "--out is missing"),
        (["train", "digits", "--out", ""], "--out: is empty"),
        (["train", "", "--out", "run"], "SOURCE is empty"),
        (["train", "digits", "--test", "", "--out", "run"], "--test is empty"),
        (["train", "digits", "--corrupt", "out:0.1", "--pool", "", "--out", "run"], "--pool is"),
        (["inspect", ""], "SOURCE is empty"),
    ],
)
def test_empty_path_is_not_the_current_folder(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*arguments, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_options_that_are_not_settings_are_known_to_config():
    options = {action.dest for action in train_parser()._actions} - {"help", "source"}
    assert options - set(all_setting_types()) == set(NO_SETTINGS)


def test_help_shows_only_settings_of_the_method(capsys):
    assert "--gamma" in help_of("train", capsys)
    assert "--elr-lambda" not in help_of("train --method pls", capsys)
    text = " ".join(help_of("train --method=elr", capsys).split())
    assert "--elr-lambda" in text
    assert "(default: pls)" in " ".join(text.split())
    assert "--threshold" in text
    assert "--gamma" not in text


def test_settings_of_another_method_are_explained(tmp_path, monkeypatch, capsys):
    """They are parsed all the same: a config file may choose the method."""
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "digits", "--out", "RUN", "--gamma", "1.5"]
    message = "gamma: a setting of --method pls and pls-plus, not of ce"
    assert_refused([*arguments, "--method", "ce"], message, capsys, tmp_path)
    assert train_parser(None, "ce").parse(["x", "--gamma", "1.5"]).gamma == 1.5


# ----------------------------------------------------------------------- signals and full outputs


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["presets"], ["--help"], ["--version"]], ids=str)
def test_a_full_standard_output_is_one_line(monkeypatch, capsys, arguments):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err == (
        "pseudoloss: error: standard output: cannot be read or written (No space left on device)\n"
    )


def test_a_closed_standard_output_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)  # as after `>&-`
    assert main(["presets"]) == 0
    read, write = os.pipe()
    os.close(read)  # as after `| head`
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["presets"]) == 0


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_to_predict_is_one_line(tiny_run, photos, monkeypatch, capsys, name, code):
    from pseudoloss.inference import predictions

    def interrupted(*_, **__):
        signal.raise_signal(getattr(signal, name))

    monkeypatch.setattr(predictions, "predict_batches", interrupted)
    assert main(["predict", str(tiny_run.path), str(photos("a.png")), "--quiet"]) == code
    assert capsys.readouterr().err == "pseudoloss: interrupted; run the same command again\n"


def test_a_run_that_learned_nothing_does_not_suggest_to_use_it(tmp_path, dataset, capsys):
    flags = [*FLAGS, "--epochs", "2", "--warmup", "1", "--lr", "1e-9"]
    assert main(["train", str(dataset), "--out", str(tmp_path / "run"), *flags]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("Next: train with other settings")
    assert "pseudoloss audit SOURCE" in last[1]


@pytest.mark.parametrize("then", ["time.sleep(30)", "pass"])
def test_a_signal_during_an_import_is_raised_after_it(tmp_path, then):
    """A module may turn the exception into another one, as NumPy does."""
    (tmp_path / "slow.py").write_text(
        "import signal, time\n"
        "try:\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(0.1)\n"
        "except BaseException as error:\n    raise ImportError('broken') from error\n"
    )
    program = (
        "import time\nfrom pseudoloss.interrupts import Interrupted, raised\n"
        "try:\n    with raised():\n        import slow\n        done = 'imported'\n"
        f"        {then}\nexcept Interrupted as error:\n    print(done, error.number == 15)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr) == (["imported", "True"], "")


@pytest.mark.parametrize("wait", [0.1, 0.5])
def test_two_signals_while_a_command_starts(tmp_path, wait):
    """There is no traceback; before Python has loaded the program, a signal ends it as usual."""
    command = [sys.executable, "-m", "pseudoloss", "train", "digits", "--out", str(tmp_path / "r")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    time.sleep(wait)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (143, -signal.SIGTERM)
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2


def test_a_run_that_does_not_know_the_noise_suggests_an_audit(tmp_path):
    folder = tmp_path / "run"
    assert f"pseudoloss review {folder}" in next_steps(folder, learned_nothing=False)
    text = next_steps(folder, learned_nothing=False, noise_known=False)
    assert "audit the labels: pseudoloss audit SOURCE --out audit" in text
    assert "review" not in text


def test_a_missing_argument_is_named(capsys):
    assert main(["predict", "run"]) == 2
    assert "error: missing: IMAGES (see pseudoloss predict --help)" in capsys.readouterr().err
