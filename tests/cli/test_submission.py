"""Workers of experiments: with submitit's local executor, and with a stand-in for sbatch."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pseudoloss.cli import main, submission

pytest.importorskip("submitit")
RUN = ["experiments", "run", "digits", "--seeds", "1", "--only", "*-ce"]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Commands named srun and sbatch; sbatch keeps its script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (
        ("srun", "exit 0"),
        ("sbatch", f'cp "$1" {shlex.quote(str(tmp_path))}/script; echo Submitted batch job 42'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "script"


@pytest.mark.slow
def test_two_workers_of_this_machine(tmp_path, monkeypatch):
    """One trains the cell; the other one finds it claimed or done."""
    command = [sys.executable, "-m", "pseudoloss", *RUN, "--out", "my out", "--set", "epochs=1"]
    command += ["--quiet", "--submit", "local", "--workers", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^worker \d+: done$", result.stdout, re.MULTILINE)) == 2
    logs = [path.read_text() for path in (tmp_path / "my out" / "workers").glob("*_log.out")]
    assert len(logs) == 2
    assert sum("digits-ce seed 1: done, accuracy" in log for log in logs) == 1
    assert (tmp_path / "my out" / "digits" / "digits-ce" / "seed1" / "summary.json").exists()


def test_what_slurm_gets(tmp_path, cluster, capsys):
    more = ["--workers", "3", "--partition", "vision", "--gpus", "2", "--time", "12h"]
    more += ["--sbatch", "account=me", "mem=64G", "--set", "epochs=1"]
    assert main([*RUN, "--out", str(tmp_path / "out"), "--submit", "slurm", *more]) == 0
    script = cluster.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, re.MULTILINE))
    assert asked["partition"] == "vision"
    assert asked["gpus-per-node"] == "2"
    assert asked["time"] == "720"
    assert asked["array"].startswith("0-2")
    assert (asked["account"], asked["mem"]) == ("me", "64G")
    assert "USR2" in asked["signal"]  # so that a worker is queued again in time
    text = capsys.readouterr().out
    assert "worker 42_0: writes" in text
    states = (
        "pseudoloss experiments run digits --out .* --seeds 1 --only '.-ce' --set epochs=1 --dry"
    )
    assert re.search(f"Next: {states}", text)


def test_a_worker_runs_the_command_and_is_queued_again(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("pseudoloss.cli.main", lambda arguments: said.append(arguments) or 0)
    worker = submission.Worker(["digits", "--out", "x"])
    assert worker() == 0
    assert said == [["experiments", "run", "digits", "--out", "x"]]
    again = worker.checkpoint()
    assert again.function.arguments == worker.arguments
    monkeypatch.setattr("pseudoloss.cli.main", lambda arguments: 1)
    with pytest.raises(RuntimeError, match="exit code 1"):
        worker()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "x"], "--partition: is for --submit slurm"),
        (["--workers", "2"], "--workers: is for --submit slurm and --submit local"),
        (["--submit", "local", "--sbatch", "a=b"], "--sbatch: is for --submit slurm"),
        (["--submit", "slurm", "--sbatch", "a b"], "--sbatch a b: must be NAME=VALUE"),
        (["--submit", "slurm", "--workers", "0"], "--workers must be 1 or more, not 0"),
        (["--submit", "slurm"], "--submit slurm: there is no SLURM on this machine"),
        (["--submit", "local", "--set", "network=zzz"], "--network zzz"),
    ],
)
def test_wrong_input_is_one_line_before_anything_is_written(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *arguments]) == 2
    error = capsys.readouterr().err
    assert (message in error, error.count("\n")) == (True, 1)
    assert list(Path().iterdir()) == []


def test_without_submitit(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main([*RUN, "--out", str(tmp_path / "out"), "--submit", "local"]) == 2
    assert "needs submitit: pip install 'pseudoloss[slurm]'" in capsys.readouterr().err
