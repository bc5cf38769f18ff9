"""Training and audits on several real processes, with gloo."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import assert_same_run, make_images, metrics_of, save_images
from processes import FLAGS
from pseudoloss import distributed
from pseudoloss.engine.feed import Feed
from pseudoloss.errors import InputError
from pseudoloss.methods.base import Stream

# So small steps that the results of different orders of summation stay close.
SLOW = [*FLAGS, "--lr=0.001", "--epochs=3", "--quiet"]
SCRIPT = Path(__file__).with_name("two_processes.py")


def assert_near_run(a, b):
    """The same up to rounding."""
    for line, other in zip(metrics_of(a), metrics_of(b), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert line["accuracy"] == other["accuracy"]
        assert line["noisy"] == other["noisy"]
    rows, others = (list(csv.DictReader((run / "labels.csv").open())) for run in (a, b))
    for row, other in zip(rows, others, strict=True):
        assert row["action"] == other["action"]
        assert float(row["p_noisy"]) == pytest.approx(float(other["p_noisy"]), abs=1e-3)


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def slow_run(commands, dataset, tmp_path_factory):
    """A run of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert commands.run("train", dataset, "--out", out, *SLOW) == (0, "")
    return out


def test_inside_two_processes(commands):
    """For every method, losses, scores, flags and weights are those of one process."""
    codes, outputs = commands.run_group(SCRIPT)
    assert codes == [0, 0], outputs[0] + outputs[1]
    assert "all checked" in outputs[1]


def test_a_run_of_two_processes_is_that_of_one(commands, dataset, slow_run, tmp_path):
    codes, outputs = commands.run_group("train", dataset, "--out", tmp_path / "run", *SLOW)
    assert codes == [0, 0]
    assert outputs == ["", ""]
    assert_near_run(tmp_path / "run", slow_run)
    assert files_of(tmp_path / "run") == files_of(slow_run)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_resumes_with_another_number_of_processes(
    commands, dataset, slow_run, tmp_path, first, then
):
    out = tmp_path / "run"
    arguments = ["train", dataset, "--out", out, *SLOW]
    for processes, more in ((first, "--minutes=1e-9"), (then, "--resume")):
        codes, outputs = commands.run_group(*arguments, more, processes=processes)
        assert set(codes) == {0}, outputs
    assert_near_run(out, slow_run)


def test_files_are_decoded_by_different_processes(commands, tmp_path):
    images, labels = make_images(30, 3, 16, 3)
    paths = save_images(tmp_path / "photos", images, labels)
    paths[3].write_bytes(b"damaged")
    arguments = ["train", tmp_path / "photos", *SLOW, "--images=files", "--network=small-cnn"]
    arguments += ["--batch-size=8", "--corrupt=none", "--epochs=2", "--warmup=1"]
    assert commands.run(*arguments, "--out", tmp_path / "one")[0] == 0
    codes, outputs = commands.run_group(*arguments, "--out", tmp_path / "two")
    assert codes == [0, 0], outputs
    assert_near_run(tmp_path / "two", tmp_path / "one")
    configs = [json.loads((tmp_path / run / "config.json").read_text()) for run in ("one", "two")]
    assert configs[0]["data"] == configs[1]["data"]
    assert (tmp_path / "two" / "skipped.csv").read_text().count("\n") == 2


@pytest.mark.slow
def test_a_killed_process_ends_all_and_a_restart_resumes(commands, dataset, tmp_path):
    """As torchrun --max-restarts does it: the same command again, without --resume."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    arguments = ["train", dataset, *FLAGS, "--epochs=8"]
    assert commands.run_group(*arguments, "--out", whole)[0] == [0, 0]
    error_file = tmp_path / "torchrun" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    job = {"TORCHELASTIC_ERROR_FILE": str(error_file), "TORCHELASTIC_RESTART_COUNT": "0"}
    first, second = commands.start_group(*arguments, "--out", out, environment=job)
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline, first.output
        time.sleep(0.01)
    os.kill(second.pid, signal.SIGKILL)
    assert second.wait() == -9
    assert first.wait() == 1
    assert first.output.splitlines()[-1].startswith("pseudoloss: error: another process ended")
    assert not (out / "summary.json").exists()

    other_job = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "a" / "b" / "c" / "d.json")}
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    codes, outputs = commands.run_group(
        *arguments, "--out", out, environment=job | again | other_job
    )
    assert codes == [2, 2]
    assert "already contains a run" in outputs[0]
    codes, outputs = commands.run_group(*arguments, "--out", out, environment=job | again)
    assert codes == [0, 0], outputs
    assert "resumed after epoch" in outputs[0]
    assert_same_run(out, whole)


def test_a_signal_to_one_process_stops_all_after_the_same_step(commands, dataset, tmp_path):
    """They write a checkpoint inside the epoch, and resume to the same bits."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    arguments = ["train", dataset, *FLAGS, "--epochs=40"]
    assert commands.run_group(*arguments, "--out", whole)[0] == [0, 0]
    first, second = commands.start_group(*arguments, "--out", out)
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline, first.output
        time.sleep(0.01)
    os.kill(second.pid, signal.SIGTERM)
    assert [first.wait(), second.wait()] == [143, 143], first.output + second.output
    assert not (out / "summary.json").exists()
    codes, outputs = commands.run_group(*arguments, "--out", out, "--resume")
    assert codes == [0, 0], outputs
    assert_same_run(out, whole)


@pytest.mark.slow
def test_torchrun_restarts_killed_processes(dataset, tmp_path):
    """The real torchrun: its store still has what the first processes wrote."""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc to find the processes of torchrun")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "-m", "pseudoloss", "train", str(dataset), "--out", str(out)]
    with subprocess.Popen([*command, *FLAGS, "--epochs=20"], stdout=subprocess.PIPE) as torchrun:
        try:
            deadline = time.monotonic() + 120
            while not (out / "checkpoint" / "last.safetensors").exists():
                assert time.monotonic() < deadline
                assert torchrun.poll() is None
                time.sleep(0.01)
            children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
            os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
            output, _ = torchrun.communicate(timeout=120)
        finally:
            torchrun.terminate()
    assert torchrun.returncode == 0
    assert len(metrics_of(out)) == 20
    assert "resumed after epoch" in output.decode()


def test_errors_are_printed_once(commands, dataset, tmp_path):
    for arguments, message in (
        (["train", dataset, *FLAGS, "--batch-size=15"], "use a multiple of 2"),
        (["train", dataset, *FLAGS, "--accumulate=8", "--batch-size=24"], "a multiple of 16"),
        (["train", dataset, *FLAGS, "--device=mps"], "--device mps: with torchrun"),
        (["predict", "run", "photo.png"], "predict: works in one process"),
    ):
        codes, outputs = commands.run_group(*arguments, "--out", tmp_path / "run")
        assert codes == [2, 2]
        assert message in outputs[0]
        assert outputs[0].count("\n") == outputs[0].count("pseudoloss: error") + outputs[0].count(
            "Settings:"
        )
        assert outputs[1] == ""
        assert not (tmp_path / "run").exists()


def test_different_data_are_refused(commands, dataset, npz, tmp_path):
    """Say, each machine has its own copy."""
    _, labels = make_images()
    for name, given in (("0", labels), ("1", (labels + 1) % 4)):
        (tmp_path / name).mkdir()
        npz(f"{name}/set.npz", labels=given)
    group = commands.start_group(SCRIPT, tmp_path, tmp_path / "run", *SLOW)
    assert [process.wait() for process in group] == [2, 2]
    assert "fingerprint of the data differs between process 1 (" in group[0].output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_audit_on_two_processes(commands, photo_folder, tmp_path):
    arguments = ["audit", photo_folder, "--device=cpu", "--no-cache"]
    assert commands.run(*arguments, "--out", tmp_path / "one")[0] == 0
    codes, outputs = commands.run_group(*arguments, "--out", tmp_path / "two")
    assert codes == [0, 0], outputs
    assert outputs[1] == ""
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    tables = [
        list(csv.DictReader((tmp_path / name / "labels.csv").open())) for name in ("one", "two")
    ]
    for row, other in zip(*tables, strict=True):
        assert row["path"] == other["path"]
        assert row["action"] == other["action"]
        assert float(row["p_noisy"]) == pytest.approx(float(other["p_noisy"]), abs=1e-3)
    keys = [
        json.loads((tmp_path / name / "config.json").read_text())["features"]
        for name in ("one", "two")
    ]
    assert keys[0] == keys[1]


# ------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_shares_cover_all_rows(monkeypatch, processes):
    monkeypatch.setattr(distributed, "size", lambda: processes)
    for rows in range(1, 30):
        shares = [distributed.share(rows, i) for i in range(processes)]
        assert len({s.stop - s.start for s in shares}) == 1
        assert {i for s in shares for i in range(rows)[s]} == set(range(rows))
        parts = [distributed.part(rows, i) for i in range(processes)]
        assert [i for s in parts for i in range(rows)[s]] == list(range(rows))


@pytest.mark.parametrize(("size", "parts", "refused"), [(3, 1, True), (4, 1, False), (6, 2, True)])
def test_the_batch_of_every_stream_must_be_divided_evenly(monkeypatch, size, parts, refused):
    """With two streams both together are even, and views of one of them are not."""
    monkeypatch.setattr(distributed, "active", lambda: True)
    monkeypatch.setattr(distributed, "size", lambda: 2)

    def feed():
        return Feed([0] * 20, torch.zeros(20).long(), (Stream(), Stream()), size, parts, 1, 1)

    if not refused:
        assert feed().sizes == [size, size]
        return
    with pytest.raises(InputError, match=f"^--batch-size: .*batches of {size} images cannot be "):
        feed()


def test_without_torchrun_nothing_happens(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with distributed.session("cpu"):
        assert not distributed.active()
        assert distributed.size() == 1
        assert distributed.all_values(np.pi) == [np.pi]
    assert distributed.speaks()
