"""`pseudoloss doctor`: what it tells, what it hides, and that it notices what is broken."""

import builtins
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pseudoloss
from pseudoloss.cli import diagnosis, main, self_check
from pseudoloss.cli.diagnosis import anonymous, diagnose
from pseudoloss.data.loops import no_progress


def problems_of(section):
    found = []
    section(found.append)
    return found


# ------------------------------------------------------------------------------ the whole command


def test_quick_json(capsys):
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    versions = found["versions"]
    assert versions["pseudoloss"] == pseudoloss.__version__
    assert versions["python"] == platform.python_version()
    assert (versions["torch"], versions["numpy"]) == (torch.__version__, np.__version__)
    assert "self-check" not in found
    assert found["threads and limits"]["threads of torch"] == torch.get_num_threads()


def test_no_home_folder_and_no_user_name_is_shown(tmp_path, monkeypatch, capsys):
    home = tmp_path / "alice"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "alice")
    monkeypatch.setenv("TMPDIR", "/scratch/alice/tmp")
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    monkeypatch.delenv("PSEUDOLOSS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(home / "work")
    assert main(["doctor", "--quick"]) == 0
    text = capsys.readouterr().out
    assert "~/work, " in text
    assert "~/.cache/pseudoloss/features" in text
    assert "/scratch/USER/tmp" in text
    assert "alice" not in text
    assert "secret" not in text
    assert text.endswith("No problem found.\n")


def test_names_that_only_contain_the_home_folder_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    monkeypatch.setenv("LOGNAME", "al")
    assert anonymous(["/home/al/x: /home/al", "/home/alfred/x", "total"]) == [
        *("~/x: ~", "/home/alfred/x", "total")
    ]
    assert anonymous({"a": ["/data/al/b"], "n": 1}) == {"a": ["/data/USER/b"], "n": 1}


def test_problems_are_one_line_each_and_the_exit_code_is_1(monkeypatch, capsys):
    monkeypatch.setattr(
        diagnosis, "compilers", lambda tell: tell("no C compiler: install gcc") or {"C": "none"}
    )
    assert main(["doctor", "--quick"]) == 1
    captured = capsys.readouterr()
    assert captured.out.endswith("\nproblem: no C compiler: install gcc\n")
    assert captured.err.endswith("pseudoloss: error: 1 problem found, see above\n")


# ----------------------------------------------------------------------------- what may be broken


def test_a_library_that_cannot_be_imported(monkeypatch):
    real = importlib.import_module

    def broken(name, *more):
        if name == "timm":
            raise RuntimeError("operator torchvision::nms does not exist\nmore")
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", broken)
    (found,) = problems_of(diagnosis.versions)
    start = "timm cannot be imported (operator torchvision::nms does not exist): install it again"
    assert found.startswith(start)


def test_a_broken_torch_does_not_break_the_doctor(tmp_path):
    """In a process of its own, in which importing torch fails."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so is missing')")
    path = os.pathsep.join([str(tmp_path), str(Path(pseudoloss.__file__).parents[1])])
    result = subprocess.run(
        [sys.executable, "-m", "pseudoloss", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert any(
        text.startswith("torch cannot be imported (libcudart.so is missing)")
        for text in found["problems"]
    )
    assert "Traceback" not in result.stderr


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(diagnosis, "_nvidia_smi", lambda: "595.10")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = problems_of(diagnosis.devices)
    assert "there is an NVIDIA GPU that torch cannot use" in found
    assert "595.10" in found


class FakeCuda:
    """A GPU whose memory is full, and one that fails."""

    @staticmethod
    def mem_get_info(device):
        if device.index == 1:
            raise RuntimeError("CUDA error: out of memory\nlong")
        return 2**20, 80 * 2**30


def test_gpus_that_are_full_or_fail(monkeypatch):
    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("mem_get_info", FakeCuda.mem_get_info),
        ("get_device_name", lambda device: "H200"),
        ("get_device_capability", lambda device: (9, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.full(size, 1.0))
    found = {}
    problems = problems_of(lambda tell: found.update(diagnosis._gpus(torch, tell)))
    assert found["GPU 0"].startswith("H200, 0.0 of 80.0 GiB free, capability 9.0, fused kernels: ")
    assert problems == [
        "GPU 0 has 0.0 GiB free: end other programs that use it",
        "GPU 1 fails (CUDA error: out of memory): look at nvidia-smi; is it in use?",
    ]


def test_a_compiler_is_needed_on_a_gpu_only(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert problems_of(diagnosis.compilers) == []
    monkeypatch.setattr(diagnosis, "_has_cuda", lambda: True)
    monkeypatch.setattr(diagnosis.sysconfig, "get_path", lambda name: "/nowhere")
    first, second = problems_of(diagnosis.compilers)
    assert first.startswith("no C compiler: ")
    assert second.startswith("/nowhere/Python.h is missing: ")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PSEUDOLOSS_CACHE", str(tmp_path / "file"))
    found = problems_of(diagnosis.caches)
    assert len(found) == 2  # features and shards
    assert all("cannot be written (Not a directory): choose another" in text for text in found)


def test_disks_and_limits(monkeypatch):
    full = shutil._ntuple_diskusage(2**30, 2**30, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = problems_of(diagnosis.memory_and_disk)
    assert any(text.startswith("the working folder ") and "make room" in text for text in found)
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    found = problems_of(diagnosis.limits)
    assert found[0] == "at most 256 open files: run ulimit -n 4096 first"
    assert "--shm-size=2g" in found[1]


# ----------------------------------------------------------------------------------- self-check


@pytest.fixture
def few(monkeypatch):
    """A shorter training."""
    monkeypatch.setattr(self_check, "IMAGES", 64)
    changed = self_check.SETTINGS | {"epochs": 2, "batch_size": 16}
    monkeypatch.setattr(self_check, "SETTINGS", changed)


def test_the_self_check_of_the_cpu(few):
    found = diagnose(quick=False, progress=no_progress)
    checked = found["self-check"]
    assert checked["equal runs are equal bit for bit"] == "yes"
    assert checked["a resumed run is equal bit for bit"] == "yes"
    assert len(checked["checksum of the results"]) == 16
    assert found["problems"] == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("second", "two equal runs on the CPU gave different results"),
        ("resumed", "a run that was stopped and resumed gave other results"),
    ],
)
def test_results_that_differ_are_a_problem(few, monkeypatch, changed, message):
    real = self_check.checksum
    monkeypatch.setattr(
        self_check, "checksum", lambda run: "other" if run.name == changed else real(run)
    )
    results, problems = self_check.check_cpu()
    assert "NO" in results.values()
    assert [text.startswith(message) for text in problems] == [True]


def test_a_self_check_that_fails_is_a_problem(few, monkeypatch):
    monkeypatch.setattr(self_check, "train", lambda *a, **b: builtins.print(1 / 0))
    problems = []
    found = self_check.self_check(problems.append, no_progress)
    assert found["CPU"] == "failed (ZeroDivisionError: division by zero)"
    assert problems[0].startswith("the self-check of the CPU failed (division by zero): report it")


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_steps_that_train_something_else_are_a_problem(monkeypatch, factor):
    """The check of a GPU, on the CPU, where all steps are plain. The learning rate of the "fast"
    steps is wrong by the factor."""
    real = self_check.settings_with
    monkeypatch.setattr(self_check, "STEPS", (1, 2))
    monkeypatch.setattr(self_check, "FARTHEST", {"float32": 0.02})

    def settings(accelerate, **values):
        lr = real(accelerate="off", **values).lr * (factor if accelerate != "off" else 1)
        return self_check.request(
            "digits-id40", None, values | {"device": "cpu", "precision": "float32", "lr": lr}
        ).settings("digits")

    monkeypatch.setattr(self_check, "settings_with", settings)
    found, problems = self_check.check_gpu()
    assert len(found) == 2
    if factor == 1:
        assert problems == []
        assert found["captured steps, float32"] == "0.0e+00 from plain steps (at most 0)"
    else:
        assert len(problems) == 2
        assert "captured steps in float32 train something else than plain steps" in problems[0]
