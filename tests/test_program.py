"""benchmarks/program.py: guard, runs and verdicts of the trials of PLS with additions."""

import hashlib
import importlib
import json
import math
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import make_images
from pseudoloss import cli
from pseudoloss.config import Settings
from pseudoloss.data.sources import cifar
from pseudoloss.presets import request

ROOT = Path(__file__).resolve().parent.parent
FEW = ["--network", "small-cnn", "--batch-size", "16", "--epochs", "3", "--warmup", "1"]
FEW += ["--lr", "0.05", "--no-flip", "--device", "cpu", "--quiet"]


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PSEUDOLOSS_COMMIT", "none")
    return importlib.import_module("program"), importlib.import_module("trials")


@pytest.fixture
def call(programs, monkeypatch, tmp_path, capsys):
    """Runs the program; trainings run in this process, one after another."""
    program, _ = programs
    commands = []

    def start(command, log):
        commands.append(command[3:])
        code = cli.main(command[3:])
        log.write_text(f"what {command[4]} said")
        return SimpleNamespace(poll=lambda: code, returncode=code)

    monkeypatch.setattr(program, "start", start)

    def run_program(*arguments):
        end = arguments.index("--") if "--" in arguments else len(arguments)
        out = ["--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["program.py", *arguments[:end], *out, *arguments[end:]])
        commands.clear()
        program.main()
        return capsys.readouterr().out, list(commands)

    return run_program


@pytest.fixture
def source(tmp_path):
    """Images without test images."""
    images, labels = make_images(200)
    path = tmp_path / "set.npz"
    np.savez(path, images=images, labels=labels, true_labels=labels)
    return str(path)


def results_in(folder):
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


# ------------------------------------------------------------------------------------------- guard


def test_sources_with_test_images_are_refused(call, tmp_path):
    images, labels = make_images(32)
    path = tmp_path / "with-test.npz"
    np.savez(path, images=images, labels=labels, test_images=images, test_labels=labels)
    for source in (str(path), "digits"):
        with pytest.raises(SystemExit, match="has test images, which must not decide anything"):
            call("run", source, "--work", str(tmp_path / "work"))


def test_the_test_file_of_cifar_is_never_opened(call, programs, monkeypatch, tmp_path):
    random, folder = np.random.default_rng(0), tmp_path / "cifar-100-python"
    folder.mkdir()
    labels = [i % 4 for i in range(80)]
    train = {
        b"data": random.integers(0, 256, (80, 3072), dtype=np.uint8),
        b"fine_labels": labels,
        b"coarse_labels": [label // 2 for label in labels],
        b"filenames": [b"x.png"] * 80,
    }
    for name, content in (
        ("train", train),
        ("meta", {b"fine_label_names": [b"a", b"b", b"c", b"d"]}),
    ):
        (folder / name).write_bytes(pickle.dumps(content))
        digest = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(cifar.CIFAR100_MD5, name, digest)
    (folder / "test").write_bytes(b"must not be read")
    opened, whole = set(), cifar.open_regular

    def watched(path, *rest):
        opened.add(Path(path).name)
        return whole(path, *rest)

    monkeypatch.setattr(cifar, "open_regular", watched)
    _, trials = programs
    monkeypatch.setattr(trials, "TRIALS", {})
    monkeypatch.setattr(
        programs[0], "TRIALS", {"6": trials.Trial("debias", ("asym40",), folds=(11,))}
    )
    work = str(tmp_path / "work")
    _, commands = call(
        "run", f"cifar100-train:{tmp_path}", "--work", work, "--", *FEW, "--epochs", "2"
    )
    assert len(commands) == 2
    assert opened == {"train", "meta"}
    for command in commands:
        assert command[1] == f"cifar100-train:{tmp_path}"
        assert command[command.index("--hold-out") + 1] == "0.1"
        assert command[command.index("--corrupt") + 1] == "asymmetric:0.4"
    for result in results_in(tmp_path / "out").values():
        assert (result["images"], result["held_out"]) == (72, 8)
        assert 0.1 < result["noise_rate"] < 0.7
        assert str(tmp_path) not in json.dumps(result)


def test_all_commands_of_the_documentation_are_those_of_the_plan(programs):
    """Every arm and level has settings that exist, and no arm depends on a level."""
    _, trials = programs
    notes = (ROOT / "docs/lab-notes.md").read_text()
    for number, trial in trials.TRIALS.items():
        assert re.search(rf"^\| {number} \| `{trial.arm}`", notes, re.MULTILINE), number
        for pair in trial.pairs("reference"):
            for run in pair:
                request("default", None, run.settings).settings("default")
                other = trials.Run(run.arm, run.length, "0", run.fold).settings
                assert {**other, "corrupt": None} == {**run.settings, "corrupt": None}
    used = {trial.arm for trial in trials.TRIALS.values()}
    assert used == set(trials.ARMS)
    assert Settings(**trials.Run("reference", "H", "50", 11).settings).warmup == 15


# -------------------------------------------------------------------------------------------- runs


def test_runs_are_kept_skipped_and_compared(call, programs, monkeypatch, tmp_path, source):
    _, trials = programs
    small = {
        "0": trials.Trial("reference", ("20",), trials.on_average(0.2), folds=(11,)),
        "4": trials.Trial("accumulated", ("20",), folds=(11,)),
        "11": trials.Trial("second", ("20",), folds=(11,)),
    }
    monkeypatch.setattr(programs[0], "TRIALS", small)
    work, out = tmp_path / "work", tmp_path / "out"
    listed, _ = call("list")
    assert "3 runs, about" in listed
    printed, commands = call("run", source, "--work", str(work), "--trials", "11", "--", *FEW)
    assert "all runs are done" in printed
    names = ["H-20-reference-fold11", "H-20-second-fold11"]
    assert [Path(c[c.index("--out") + 1]).name for c in commands] == names
    found = results_in(out)
    assert sorted(found) == sorted(names)
    first, second = (found[name] for name in names)
    assert first["run"] == {
        "name": names[0],
        "arm": "reference",
        "length": "H",
        "level": "20",
        "fold": 11,
    }
    assert second["noise_rate"] < first["noise_rate"]
    assert second["seconds_of_the_first_round"] == first["seconds"]
    assert first["accuracy"].keys() == {"weights", "average"}
    assert len(first["accuracy_by_epoch"]["average"]) == len(first["auc_by_epoch"]) == 3
    assert first["method_by_epoch"][-1]["separation"] > 0
    assert first["commit"] == importlib.import_module("machine").COMMIT
    assert first["command"].startswith("python benchmarks/program.py run")
    assert not any(str(tmp_path) in path.read_text() for path in out.glob("*.json"))
    # What is done is not trained again.
    printed, commands = call("run", source, "--work", str(work), "--", *FEW)
    assert [c[c.index("--loss-momentum") + 1] for c in commands] == ["0.8"]
    shown, _ = call("show")
    assert [line.split()[0] for line in shown.splitlines()] == ["trial", "0", "4", "11"]


def test_held_out_images_keep_their_true_labels_in_the_second_round(programs, tmp_path):
    program, trials = programs
    run = trials.Run("second+ema", "H", "50", 11)
    assert run.first == trials.Run("ema", "H", "50", 11)
    folder = tmp_path / run.first.name
    folder.mkdir()
    rows = ["index,part,given_label,suggested_label,action", "0,train,a,a,keep"]
    rows += ["2,train,a,b,relabel", "3,train,b,,review", "1,held-out,a,b,relabel"]
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    path = program.corrected(tmp_path, run)
    assert path.read_text().split() == ["index,label", "0,a", "2,b", "3,b"]


def test_failures_are_kept_and_reject_an_arm(call, programs, monkeypatch, tmp_path, source):
    _, trials = programs
    monkeypatch.setattr(
        programs[0], "TRIALS", {"4": trials.Trial("accumulated", ("20",), folds=(11,))}
    )
    arguments = ["run", source, "--work", str(tmp_path / "work")]
    printed, _ = call(*arguments, "--", *FEW, "--lr", "-1")
    found = results_in(tmp_path / "out")
    names = [f"H-20-{arm}-fold11.failed-1" for arm in ("accumulated", "reference")]
    assert sorted(found) == names
    assert all(result["failed"]["code"] == 2 for result in found.values())
    assert "reject (failed: H-20-accumulated-fold11, H-20-reference-fold11)" in printed
    assert call(*arguments, "--", *FEW)[1] == []
    printed, commands = call(*arguments, "--again", "--", *FEW)
    assert len(commands) == 2
    assert len(results_in(tmp_path / "out")) == 4
    assert "failed" not in printed.splitlines()[-2]


def test_a_limit_of_time_leaves_runs_for_the_next_call(
    call, programs, monkeypatch, tmp_path, source
):
    _, trials = programs
    monkeypatch.setattr(
        programs[0], "TRIALS", {"4": trials.Trial("accumulated", ("20",), folds=(11,))}
    )
    arguments = ["run", source, "--work", str(tmp_path / "work")]
    printed, commands = call(*arguments, "--minutes", "0.1", "--", *FEW)
    assert "2 runs are left" in printed
    assert commands == []
    whole = call(*arguments, "--minutes", "2", "--whole", "--", *FEW)  # a run takes 2.4
    assert ("2 runs are left" in whole[0], whole[1]) == (True, [])
    monkeypatch.setattr(programs[0], "LEAST_MINUTES", 0)
    printed, commands = call(*arguments, "--minutes", "0.01", "--", *FEW, "--minutes", "1e-9")
    assert "not finished" in printed
    assert call(*arguments, "--", *FEW)[0].endswith("all runs are done\n")


def test_a_second_round_waits_for_the_first(programs):
    program, trials = programs
    second = trials.Run("second", "H", "50", 11)
    waiting = program.deque([second, second.first])
    assert program.next_run(waiting, []) == second.first
    assert program.next_run(waiting, [second.first]) is None
    assert program.next_run(waiting, []) == second


def test_arms_are_joined(programs):
    _, trials = programs
    assert trials.join("reference", "strong") == "strong"
    assert trials.join("reference", "reference") == "reference"
    assert trials.join("ema+strong", "strong-trivial") == "ema+strong+strong-trivial"
    settings = trials.Run("ema+strong+strong-rand", "S", "0", 11).settings
    assert (settings["strong_view"], settings["ema_scoring"]) == ("rand", True)
    assert trials.Run("knn", "H", "0", 11).settings["warmup"] == 5
    with pytest.raises(SystemExit, match="no such arm: strnog"):
        trials.check_arm("ema+strnog")


# ---------------------------------------------------------------------------------------- verdicts


def compared(trials, differences, **more):
    folds = max(len(values) for values in differences.values())
    return trials.Compared(differences, more.get("arm", ()), more.get("against", ()), folds)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ({"20": [0.6, 0.6], "50": [0.6, 0.7]}, "accept"),
        ({"20": [0.3, 0.3], "50": [0.3, 0.4]}, "extend by folds 21, 22"),
        ({"20": [0.2, 0.3], "50": [0.2, 0.4]}, "reject"),
        ({"20": [-0.7, -0.6], "50": [3.0, 4.0]}, "reject (below -0.6 at 20)"),
        ({"20": [-0.6, -0.5], "50": [3.0, 4.0]}, "accept"),
        ({"20": [0.4] * 4}, "accept"),
        ({"20": [0.39] * 4}, "reject"),
    ],
)
def test_the_general_rule(programs, differences, verdict):
    _, trials = programs
    assert trials.general(compared(trials, differences)) == verdict


def test_special_rules(programs):
    _, trials = programs
    bounds = trials.each({"80": 1.0, "50": -0.3})
    assert bounds(compared(trials, {"80": [1.0, 1.2], "50": [-0.3]})) == "accept"
    assert bounds(compared(trials, {"80": [0.9], "50": [3.0]})) == "reject (too low at 80)"
    low, high = (
        {"run": {"level": "20"}, "detection": {"precision": p, "recall": 0.98}} for p in (0.8, 0.9)
    )
    finds = trials.finds_noise(trials.general, "20", 0.82, 0.97)
    assert finds(compared(trials, {"20": [1.0]}, arm=[low])) == "reject (precision 0.800 at 20)"
    assert finds(compared(trials, {"20": [1.0]}, arm=[low, high])) == "accept"
    faster, against = (
        trials.faster(trials.on_average(-0.2), 0.04),
        [{"epoch_seconds": {"pls": 1.0}}],
    )
    for seconds, verdict in ((0.97, "reject (epochs 3.0% faster)"), (0.9, "accept")):
        arm = [{"epoch_seconds": {"pls": seconds}}]
        assert faster(compared(trials, {"50": [0.0]}, arm=arm, against=against)) == verdict
    keeps = trials.keeps_auc(trials.on_average(0.8), 0.01)
    against = [{"auc_by_epoch": [None, 0.9, 0.9]}]
    for auc, verdict in ((0.88, "reject (AUC 0.880 after 0.900)"), (0.895, "accept")):
        arm = [{"auc_by_epoch": [None, auc, auc]}]
        assert keeps(compared(trials, {"50": [0.9]}, arm=arm, against=against)) == verdict


def result(weights, average=None):
    return {"accuracy": {"weights": weights, "average": average}}


def test_trials_are_compared_pair_by_pair(programs):
    _, trials = programs
    trial = trials.Trial("strong", ("20", "50"))
    results, wanted = {}, []
    for i, (arm, against) in enumerate(trial.pairs("ema")):
        assert (arm.arm, against.arm) == ("ema+strong", "ema")
        results[arm.name] = result(70 + i, 75 - i)
        results[against.name] = result(69.0, 75.0)
        wanted.append(1 + i)
    found, verdict = trials.compare(trial, results, "ema")
    assert found.all == wanted
    assert verdict == "accept"
    assert found.error == pytest.approx(np.std(wanted, ddof=1) / math.sqrt(4))
    assert trials.compare(trial, results, "ema", "average")[0].all == [0, -1, -2, -3]
    assert trials.compare(trial, results) == (None, "not run yet")
    del results[trial.pairs("ema")[3][0].name]
    assert trials.compare(trial, results, "ema")[1] == "3 of 4 pairs"


def test_the_average_is_compared_with_the_weights_of_the_same_run(programs):
    _, trials = programs
    trial = trials.TRIALS["0"]
    results = {
        arm.name: result(70.0, 70.2 + 0.1 * i)
        for i, (arm, _) in enumerate(trial.pairs("reference"))
    }
    found, verdict = trials.compare(trial, results)
    assert len(results) == 12
    assert found.mean == pytest.approx(0.2 + 0.1 * 5.5)
    assert (verdict, list(found.differences)[-1]) == ("accept", "S 50")
