"""The benchmarks run. Their measurements are not checked."""

import argparse
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import make_images
from pseudoloss import cli
from pseudoloss.engine import feed
from pseudoloss.files import from_safetensors, write_safetensors

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def program(monkeypatch):
    """Imports a program of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PSEUDOLOSS_COMMIT", "none")  # an sdist has no commit
    return importlib.import_module


@pytest.fixture
def run(program, monkeypatch, tmp_path, capsys):
    """Runs a program in this process; returns the content of its result file and its output."""

    def run_program(name, *arguments):
        module, out = program(name), tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(out), *arguments])
        module.main()
        text = out.read_text()
        assert str(tmp_path) not in text  # no folder of this machine is published
        return json.loads(text), capsys.readouterr().out

    return run_program


@pytest.fixture
def train_here(monkeypatch):
    """Commands `python -m pseudoloss ...` run in this process, without the time of the imports."""

    def run_command(command, check, **streams):
        assert command[:3] == [sys.executable, "-m", "pseudoloss"]
        assert cli.main(command[3:]) == 0

    monkeypatch.setattr(subprocess, "run", run_command)


# ----------------------------------------------------------------------------------------- run.py


def test_whole_runs(run, program, train_here, monkeypatch, tmp_path):
    monkeypatch.setattr(program("run"), "measure_imports", lambda: 1.0)
    work = tmp_path / "runs"
    arguments = ["digits", "--preset", "digits-id40", "--work", str(work)]
    flags = ["--", "--epochs", "2", "--warmup", "1"]
    first, _ = run("run", *arguments, *flags)
    # Finished runs are not trained again; a copy stands for the run of a second seed.
    shutil.copytree(work / "run-seed1", work / "run-seed2")
    shutil.copy(work / "run-seed1.seconds", work / "run-seed2.seconds")
    written, printed = run("run", *arguments, "--seeds", "1", "2", *flags)
    assert {"command", "commit", "hardware", "versions", "settings"} < written.keys()
    assert (written["settings"]["epochs"], written["settings"]["warmup"]) == (2, 1)
    assert [one["seed"] for one in written["runs"]] == [1, 2]
    for one in written["runs"]:
        assert one["accuracy"].keys() >= {"last", "best"}
        assert (len(one["epoch_seconds"]), "warmup" in one["epoch_seconds"]) == (2, True)
        assert one["part_seconds"].keys() >= {"train", "validate"}
        assert one["startup_seconds"] > 1
        assert len(one["accuracy_by_epoch"]) == len(one["noisy_by_epoch"]) == one["epochs"] == 2
        assert one["seconds"] == first["runs"][0]["seconds"] > 0
    assert "mean of 2" in printed


def test_imports_are_measured_in_processes(program, monkeypatch):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    assert program("run").measure_imports() >= 0
    first, second = commands
    assert first == second
    assert first[:2] == [sys.executable, "-c"]
    exec(first[2], {})  # what they import exists


def test_runs_of_older_versions_are_read(program):
    folder = ROOT / "benchmarks/results/experiments/selection/id40-with/seed1"
    found = program("run").read_run(folder, 1.0)
    assert found["pseudo_labels"].keys() == {"accuracy", "auc"}
    assert found["part_seconds"].keys() == {"train", "track", "validate"}
    assert (found["epochs"], len(found["noisy_by_epoch"])) == (200, 200)


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("digits", "digits"),
        ("cifar100:/my/data", "cifar100:DIR"),
        ("cnwl:/my/data:0.2", "cnwl:DIR:0.2"),  # the noise rate is in the source
    ],
)
def test_folders_of_sources_are_not_published(program, source, written):
    assert program("machine").without_place(source) == written


def test_folders_of_label_files_are_not_published(program, tmp_path):
    module = program("run")
    args = argparse.Namespace(work=tmp_path, out=Path("x.json"))
    folder = module.run_path(args, 1)
    folder.mkdir()
    for corrupt, published in [
        ("labels:/my/labels.csv", "labels:labels.csv"),
        ("human:/my/a.pt:noisy", "human:a.pt:noisy"),
        ("symmetric:0.4", "symmetric:0.4"),
        (None, None),
    ]:
        (folder / "config.json").write_text(json.dumps({"settings": {"corrupt": corrupt}}))
        assert module.read_settings(args, 1) == {"corrupt": published}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("50, 1900, 1980, 690.5, 700", {"busy": 0.5, "clock_mhz": 1900, "power_w": 690.5}),
        ("[N/A], 1900, 1980, 690.5, 700", {}),
        ("", {}),
        (None, {}),  # no such program
    ],
)
def test_values_of_the_gpu_driver(program, tmp_path, monkeypatch, answer, found):
    if answer is not None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\necho '{answer}'\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with program("machine").GPUMonitor(every=0.001) as monitor:
        deadline = time.monotonic() + 60
        while monitor.thread.is_alive() and not monitor.samples and time.monotonic() < deadline:
            time.sleep(0.01)
    monitor.thread.join()
    assert monitor.means.items() >= found.items()
    assert bool(monitor.means) == bool(found)


# ---------------------------------------------------------------------------- the other programs


def test_agreement(run, monkeypatch):
    """On a CPU nothing is captured or fused, so the bits are the same."""
    monkeypatch.setattr(feed, "BLOCK", feed.BLOCK)  # the program changes it
    written, _ = run("agreement", "digits", "--quick")
    assert [row["precision"] for row in written["rows"]] == ["float32", "bf16"]
    for row in written["rows"]:
        for phase in ("warm-up", "main"):
            assert row["captured"][phase] == row["fast"][phase] == [0, 0]
            assert all(distance > 0 for distance in row["rounding"][phase])
    compared = written["rows"][1]["from float32"]
    assert compared["fast"] == compared["plain"]


def test_growth(run, program, monkeypatch):
    module = program("growth")
    monkeypatch.setattr(module, "SECONDS", 0.01)
    monkeypatch.setattr(module, "QUICK", ((10**3,), *module.QUICK[1:]))  # one process per number
    result, printed = run("growth", "--quick")
    assert result["command"].endswith("growth.py --out benchmarks/results/growth.json --quick")
    stored = {
        form: max(row["bytes_per_image"] for row in result["memory"] if row["form"] == form)
        for form in ("bounded", "whole")
    }
    assert stored["bounded"] <= 100 < stored["whole"]
    for table, columns in {
        "mixtures": {"images", "seconds", "peak_bytes"},
        "views": {"size", "weak_ms", "strong_ms"},
        "pseudo_labels": {"form", "classes", "store_ms", "pseudo_loss_ms"},
    }.items():
        assert result[table]
        assert all(row.keys() >= columns for row in result[table])
        assert table.replace("_", "-") in printed


def test_growth_draws_results_of_older_versions(program, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "growth.svg"
    results = ROOT / "benchmarks" / "results" / "growth-h200.json"
    arguments = ["growth.py", "--read", str(results), "--plot", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    program("growth").main()
    assert ">pseudo-loss, GPU<" in file.read_text()


def test_loader(run):
    written, printed = run("loader", "--quick", "--workers", "1")
    assert {"command", "commit", "hardware", "versions", "workers", "threads"} < written.keys()
    names = [row["name"] for row in written["rows"]]
    assert names[0] == "views, 32×32 colour, cpu"
    assert names[-1] == "epoch of digits, cpu, loader with 1 thread"
    assert all(row["ratio"] > 0 for row in written["rows"])
    assert all(name in printed for name in names)


def test_files(run):
    written, _ = run("files", "--quick", "--workers", "1")
    rows = written["rows"]
    assert rows.keys() >= {"loader, views only", "files, views only", "loader", "files", "memory"}
    assert all(row["images_per_second"] > 0 for row in rows.values())


@pytest.mark.slow
def test_review_load(run):
    result, printed = run("review_load", "--quick")
    assert result["start_seconds"]["parquet"] > 0
    assert all(request["median_ms"] > 0 for request in result["requests"])
    assert "200 decisions, on disk" in printed


def test_held_out(run, program, monkeypatch):
    monkeypatch.setattr(program("held_out"), "SUBSETS", 3)
    monkeypatch.setattr(program("held_out"), "CASES", (("pls", 0.4), ("ce", 0.4)))
    written, _ = run("held_out", "--quick")
    cases = written["cases"]
    assert (cases[0]["method"], cases[0]["noise"]) == ("pls", 0.4)
    for case in cases:
        assert case["rows"].keys() == {"train", "held-out"}
        found = case["stage_1_by_mixture_of"]["all"]["all images"]
        assert found.keys() == {"precision", "recall"}


def test_folder(run, program, train_here, npz):
    classes = program("folder").CLASSES
    images, labels = make_images(n=200, classes=10, size=16, channels=3)
    source = npz(
        images=images,
        labels=labels,
        test_images=images[:50],
        test_labels=labels[:50],
        classes=np.array(classes),
    )
    flags = ["--epochs", "2", "--warmup", "1", "--network", "small-cnn", "--batch-size", "32"]
    written, printed = run("folder", str(source), "--quick", "--", *flags)
    assert (written["images"], sum(written["skipped"].values())) == (200, 20)
    assert (written["network"], written["epochs"]) == ("small-cnn", 2)
    assert 0.2 < written["wrong"] < 0.4
    assert 0 <= written["auc"] <= 1
    assert "suggestions_right: " in printed


def test_step(tmp_path):
    """As a command: the other programs run in this process."""
    sizes = ["--images", "64", "--classes", "4", "--size", "8", "--steps", "1"]
    out = tmp_path / "step.json"
    arguments = [*sizes, "--preset", "digits", "--device", "cpu", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *arguments]
    environment = os.environ | {"PSEUDOLOSS_COMMIT": "none", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(out.read_text())
    assert found["tflop"].keys() == {row["part"] for row in found["rows"]}
    assert all(row["milliseconds"] > 0 for row in found["rows"])


# ---------------------------------------------------------------------------------- train_table.py


def test_the_label_table_of_train_is_measured(run, tmp_path):
    arguments = ("--quick", "--work", str(tmp_path / "work"))
    first, text = run("train_table", *arguments)
    assert "digits, pls, symmetric-exact:0.4, 2 epochs" in text
    (case,) = first["cases"]
    ways = ["flags", "final", "mean", "held-out final", "held-out", "test"]
    assert list(case["ways"]) == ways
    again, _ = run("train_table", *arguments)  # from the predictions that were kept
    assert again["cases"] == first["cases"]


# -------------------------------------------------------------------------------------- kills.py


def test_kills_compares_every_file(program, finished, tmp_path):
    kills = program("kills")
    other = shutil.copytree(finished, tmp_path / "other")
    assert kills.differences(finished, other) == []
    assert kills.state_of(other) == "finished"
    for name in ("labels.csv", "metrics.jsonl"):
        text = (other / name).read_text()
        (other / name).write_text(text.replace("1", "2", 9))
    tensors, record = from_safetensors(other / "checkpoint" / "last.safetensors")
    tensors["state.loss_N"] += 1
    write_safetensors(other / "checkpoint" / "last.safetensors", tensors, record)
    found = kills.differences(finished, other)
    assert found == ["labels.csv", "last.safetensors", "metrics.jsonl"]
    (other / "summary.json").unlink()
    assert kills.state_of(other) == "an epoch"


def test_kills_plans_so_many_of_each_kind(program):
    kills = program("kills")
    plan = kills.Plan({2: 1, 1: 2}, deadline=float("inf"))
    assert plan.next_run()[2] == 2  # of two processes first
    assert [plan.take(2), plan.take(2)] == [True, False]
    number, _, processes = plan.next_run()
    assert (number, processes) == (1, 1)
    plan.give_back(2)
    assert plan.next_run()[2] == 2
    assert kills.Plan({1: 5}, deadline=0.0).next_run() is None


def test_kills_knows_how_a_signal_ends_a_run(program):
    expected = program("kills").as_expected
    error = "Traceback (most recent call last):\n  File ...\n"
    assert expected(0, 15, "", 1)  # it came after the end
    assert expected(143, 15, "stopped; resume with ...\n", 1)
    assert not expected(143, 15, f"stopped\n{error}", 1)
    assert not expected(1, 15, "stopped\n", 1)
    assert expected(-9, 9, "", 1)
    assert not expected(137, 9, "", 1)
    assert expected(1, 9, f"another process ended\n{error}", 2)  # torchrun's own
    assert not expected(1, 9, error + error, 2)


# ------------------------------------------------------------------------------------- methods.py


def test_what_an_epoch_of_every_method_costs(run, program, monkeypatch):
    methods = program("methods")
    own = methods.settings_of

    def small(method, device):
        preset, settings = own(method, device)
        changes = {"network": "small-cnn", "batch_size": 8, "epochs": 6, "warmup": 2}
        return preset, dataclasses.replace(settings, **changes)

    monkeypatch.setattr(methods, "settings_of", small)
    assert methods.in_own_process(os.getpid) != os.getpid()
    monkeypatch.setattr(methods, "in_own_process", lambda function, *given: function(*given))
    names = ["ce", "divide-mix", "dsos"]
    arguments = ["--images", "200", "--steps", "1", "--device", "cpu", "--methods", *names]
    written, printed = run("methods", *arguments)
    assert list(written["methods"]) == names
    for one in written["methods"].values():
        assert one["epoch_seconds"] > 0
        assert one["finite"]
        assert one["main"]["steps"] > 0
    assert written["methods"]["divide-mix"]["preset"] == "cifar100-id50-divide-mix"
    assert written["methods"]["dsos"]["preset"] == "cifar100-inet-40-20-dsos"
    assert written["methods"]["ce"]["preset"] == "cifar100-id50"
    assert "divide-mix" in printed
