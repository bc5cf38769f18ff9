"""Training the cells of an experiment: states, resuming, several processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from experiment_files import call, fake_training, write_cell_run, write_result_file, write_run

from pseudoloss import claims
from pseudoloss.errors import BusyError, InputError, TrainingError
from pseudoloss.experiments import cells
from pseudoloss.experiments.catalogue import EXPERIMENTS
from pseudoloss.runs import RunFolder

QUICK = ["--quiet", "--set", "epochs=1"]


def read_states(out, capsys, *more):
    """The states that --dry-run prints, by cell and seed."""
    _, text, _ = call("run", "digits", "--out", out, "--dry-run", *more, capsys=capsys)
    *jobs, total = [line for line in text.splitlines() if not line.startswith(" ")]
    assert total.startswith(f"{len(jobs)} run")
    lines = [line.split() for line in jobs]
    return {f"{name} {seed.rstrip(':')}": state for state, name, _, seed, *_ in lines}


# ----------------------------------------------------------------------------- states and folders


def test_dry_run_prints_the_commands_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "my out"
    arguments = ["run", "digits", "--out", out, "--dry-run", "--seeds", "1", "2"]
    arguments += ["--set", "epochs=2", "warmup=0"]
    code, text, err = call(*arguments, capsys=capsys)
    assert (code, text) == (2, "")
    assert "error: --warmup must be at least 1" in err
    code, text, _ = call(*arguments, "--only", "*-ce", "*-mixup", capsys=capsys)
    assert (code, list(tmp_path.iterdir())) == (0, [])
    assert text.splitlines()[:2] == [
        "new     digits-ce seed 1",
        f"        pseudoloss train digits --out '{out}/digits/digits-ce/seed1' --preset digits-id40"
        " --seed 1 --resume --method ce --epochs 2 --warmup 0",
    ]
    assert text.count("new     ") == 4
    assert text.endswith("4 runs: 4 new\n")


def test_finished_cells_are_skipped_and_other_settings_refused(tmp_path, capsys):
    arguments = ["run", "digits", "--out", tmp_path, "--only", "*-ce", "--seeds", "1", *QUICK]
    code, text, _ = call(*arguments, capsys=capsys)
    assert code == 0
    assert "[1/1] digits-ce seed 1: starts in" in text
    assert "[1/1] digits-ce seed 1: done, accuracy" in text
    following = f"pseudoloss experiments table digits --out {tmp_path} --only '*-ce'"
    assert f"1 done\nNext: {following}\n" in text
    run = tmp_path / "digits" / "digits-ce" / "seed1"
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, text, _ = call(*arguments, capsys=capsys)
    assert code == 0
    assert "[1/1] digits-ce seed 1: already done" in text
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == written
    states = read_states(tmp_path, capsys, "--seeds", "1", "--set", "epochs=1")
    assert states["digits-ce 1"] == "done"
    # A trial with other settings does not count as the cell.
    arguments = arguments[:-3]
    code, _, err = call(*arguments, capsys=capsys)
    assert code == 2
    assert "was started with --epochs 1, not --epochs 30; choose another --out" in err
    code, text, _ = call(*arguments, "--dry-run", capsys=capsys)
    assert code == 0
    line = "other   digits-ce seed 1: other settings: --epochs 1 (not --epochs 30)"
    assert text.splitlines()[0] == line


def test_a_cell_that_another_process_trains_is_skipped(tmp_path, capsys):
    folder = RunFolder(tmp_path / "digits" / "digits-pls" / "seed1")
    assert not folder.busy
    with folder.lock():
        assert folder.busy
        with pytest.raises(BusyError), folder.lock():
            pass
        assert read_states(tmp_path, capsys, "--seeds", "1")["digits-pls 1"] == "busy"
        arguments = ["run", "digits", "--out", tmp_path, "--only", "*pls", "--seeds", "1", *QUICK]
        code, text, _ = call(*arguments, capsys=capsys)
        assert code == 0
        assert text.count("another process is training it") == 1
        assert "\n1 busy\n" in text
    assert not folder.busy
    assert read_states(tmp_path, capsys, "--seeds", "1")["digits-pls 1"] == "new"


@pytest.mark.parametrize("damage", ["summary cut", "summary empty", "config cut", "no config"])
def test_a_damaged_folder_is_named_and_the_other_cells_are_trained(
    tmp_path, capsys, monkeypatch, damage
):
    folder = RunFolder(write_cell_run(tmp_path, "digits-pls", 1, 70, 71))
    file = folder.config if "config" in damage else folder.summary
    if damage == "no config":
        file.unlink()
    else:
        file.write_text("{}" if damage == "summary empty" else "{")
    assert read_states(tmp_path, capsys, "--seeds", "1") == {
        **{"digits-pls 1": "damaged", "digits-ce 1": "new", "digits-mixup 1": "new"}
    }
    monkeypatch.setattr(cells, "train", fake_training({}))
    code, text, err = call("run", "digits", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert code == 1
    assert "[1/3] digits-pls seed 1: its folder is damaged" in text
    assert text.count(": done, accuracy") == 2
    assert f"digits-pls seed 1: {file}: " in err
    assert f"the folder is damaged: remove or rename {folder.path}\n" in err


def test_a_run_of_another_source_is_not_the_cells(tmp_path, capsys):
    """All presets of CNWL are equal: the noise rate is in the source."""
    write_cell_run(tmp_path, "cnwl-40-pls", 1, 70, 71, source="cnwl:/data:0.2")
    write_cell_run(tmp_path, "cnwl-20-pls", 1, 70, 71, source="cnwl:/other/data:0.20")
    arguments = ["run", "cnwl", "--out", tmp_path, "--seeds", "1", "--data", "cnwl=here"]
    code, _, err = call(*arguments, "--only", "cnwl-40-pls", capsys=capsys)
    assert code == 2
    assert "was started with cnwl:/data:0.2, not cnwl:here:0.4; choose another --out" in err
    assert call(*arguments, "--only", "cnwl-20-pls", capsys=capsys)[0] == 0
    _, text, _ = call(*arguments, "--dry-run", capsys=capsys)
    assert "done    cnwl-20-pls seed 1\n" in text
    differs = "cnwl:/data:0.2 (not cnwl:here:0.4)"
    assert f"other   cnwl-40-pls seed 1: other settings: {differs}\n" in text


def test_a_finished_run_with_another_pool_is_not_the_cells(tmp_path, capsys):
    """The folder of a pool may differ between machines, so its name counts."""
    write_cell_run(tmp_path, "inet-20-20-ce", 1, 70, 71, pool="/my/ood32.npy")
    arguments = ["run", "ood-noise", "--out", tmp_path, "--only", "inet-20-20-ce", "--seeds", "1"]

    def run(pool, *more):
        return call(*arguments, "--data", "cifar100=x", f"imagenet32={pool}", *more, capsys=capsys)

    code, _, err = run("/data/imagenet32")
    assert code == 2
    why = "was started with --pool /my/ood32.npy, not --pool /data/imagenet32"
    assert f"{why}; choose another --out\n" in err
    other = "other   inet-20-20-ce seed 1: other settings: --pool /my/ood32.npy (not "
    assert other in run("/data/imagenet32", "--dry-run")[1]
    _, text, _ = call(*arguments, "--dry-run", capsys=capsys)
    assert text.startswith("done    inet-20-20-ce seed 1\n")
    code, text, _ = run("/elsewhere/ood32.npy")
    assert (code, "already done" in text) == (0, True)
    write_cell_run(tmp_path, "inet-40-20-ce", 1, 70, 71, pool="/data/imagenet32/train")
    arguments[arguments.index("inet-20-20-ce")] = "inet-40-20-ce"
    assert run("/elsewhere/Imagenet32_train_npz")[0] == 0
    code, _, err = run("/my/tiny/train")  # the same folder name, but not ImageNet32
    assert (code, "was started with --pool /data/imagenet32/train, not" in err) == (2, True)


# ------------------------------------------------------------------------- failures and time limits


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    started = []
    fake = fake_training({"pls": TrainingError("the loss became nan")}, started)
    monkeypatch.setattr(cells, "train", fake)
    code, _, err = call("run", "digits", "--out", tmp_path, "--seeds", "1", "2", capsys=capsys)
    assert code == 1
    assert "digits-pls seed 1: the loss became nan" in err
    assert [name[:2] for name in started] == [
        (method, seed) for seed in (1, 2) for method in ("pls", "ce", "mixup")
    ]


def test_cells_that_fail_for_one_reason_are_named_together(tmp_path, capsys, monkeypatch):
    damaged = InputError("train-list.txt: line 3 is not PATH:CLASS")
    monkeypatch.setattr(cells, "train", fake_training({"pls": damaged, "ce": damaged}))
    code, text, err = call("run", "digits", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert code == 1
    assert f"digits-pls seed 1, digits-ce seed 1: {damaged}\n" in err
    assert "[3/3] digits-mixup seed 1: done" in text


def test_a_cell_that_another_process_starts_first_is_tried_again_at_the_end(
    tmp_path, capsys, monkeypatch
):
    started = []
    monkeypatch.setattr(cells, "train", fake_training({"pls": BusyError("taken")}, started))
    code, text, _ = call("run", "digits", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert code == 0
    assert [method for method, *_ in started] == ["pls", "ce", "mixup", "pls"]
    assert "3 done" in text


def test_a_cell_that_another_process_trains_with_other_settings_is_not_done(
    tmp_path, capsys, monkeypatch
):
    started = []

    def train(source, out, **more):
        """Another process, with other settings, finishes the next cell in the meantime."""
        if not started:
            write_cell_run(tmp_path, "digits-ce", 1, 1, 2, epochs=3)
        return fake_training({}, started)(source, out, **more)

    monkeypatch.setattr(cells, "train", train)
    arguments = ["run", "digits", "--out", tmp_path, "--seeds", "1", *QUICK]
    code, text, err = call(*arguments, "--only", "*-pls", "*-ce", capsys=capsys)
    assert (code, [method for method, *_ in started]) == (1, ["pls"])
    assert "[2/2] digits-ce seed 1: has other settings\n" in text
    assert "digits-ce seed 1: " in err
    assert "was started with --epochs 3, not --epochs 1" in err


def test_minutes_limit_all_cells_together(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(cells, "train", fake_training({"ce": "time is up"}, started))
    arguments = ["run", "digits", "--out", tmp_path, "--seeds", "1"]
    code, text, _ = call(*arguments, "--minutes", "5", capsys=capsys)
    assert code == 0
    assert "[2/3] digits-ce seed 1: time is up; run the same command to resume" in text
    assert [method for method, *_ in started] == ["pls", "ce"]
    assert all(0 < minutes <= 5 for *_, minutes in started)
    # With little time, one cell is trained and no second one started.
    started.clear()
    code, text, _ = call(*arguments, "--seeds", "2", "--minutes", "0.2", capsys=capsys)
    assert [method for method, *_ in started] == ["pls"]
    assert "no time left; run the same command to resume" in text


def test_an_interrupted_run_suggests_no_table(tmp_path, capsys):
    arguments = ["run", "digits", "--out", tmp_path, "--only", "digits-pls", "--seeds", "1"]
    code, text, _ = call(*arguments, "--minutes", "0.0001", capsys=capsys)
    assert (code, "Next: " in text) == (0, False)
    assert "digits-pls seed 1: time is up; run the same command to resume" in text
    assert "1 started\n" in text


def test_the_runs_for_the_plots_suggest_a_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cells, "train", fake_training({}))
    arguments = ["run", "selection", "--out", tmp_path, "--only", "digits-with", "--seeds", "1"]
    _, text, _ = call(*arguments, "--quiet", capsys=capsys)
    chosen = f"--out {tmp_path} --only digits-with"
    assert text.endswith(
        f"Next: pseudoloss experiments table selection {chosen}\n"
        f"   or: pseudoloss experiments plot accuracy {chosen}\n"
    )


def test_notices_are_printed_after_a_cell_and_below_the_table(tmp_path, capsys, monkeypatch):
    notice = "the warm-up ended at chance: 1% agree. Try another --seed"
    left_out = "4 files are left out (the first: a.png, empty file); run/skipped.csv lists all"

    def train(source, out, *, preset, resume, minutes, quiet, **changes):
        write_run(out, source, preset, changes, 1.0, 2.0, [notice, left_out])
        return type("Run", (), {"finished": True})()

    monkeypatch.setattr(cells, "train", train)
    arguments = ["--out", tmp_path, "--only", "*-ce"]
    _, text, _ = call("run", "digits", "--seeds", "1", "--quiet", *arguments, capsys=capsys)
    short = notice.partition(".")[0]
    assert f"[1/1] digits-ce seed 1: notice: {short}\n" in text
    assert f"[1/1] digits-ce seed 1: notice: {left_out}\n" in text
    _, text, _ = call("table", "digits", *arguments, capsys=capsys)
    assert f"\ndigits-ce: notice of seed 1: {short}\n" in text
    assert f"\ndigits-ce: notice of seed 1: {left_out}\n" in text
    results = tmp_path / "results"
    write_result_file(
        results, "a.json", "digits --preset digits-id40", [(2, 70, 71)], notices=[notice]
    )
    _, text, _ = call("table", "digits", "--results", results, capsys=capsys)
    assert f"\ndigits-pls: notice of seed 2: {short}\n" in text


# ------------------------------------------------------------------------------- several processes


def command(out, *more):
    arguments = ["run", "digits", "--out", str(out), "--quiet", "--seeds", "1", *more]
    return [sys.executable, "-m", "pseudoloss", "experiments", *arguments]


@pytest.mark.slow
def test_two_processes_train_no_cell_twice(tmp_path):
    processes = [
        subprocess.Popen(
            command(tmp_path, "--set", "epochs=1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    texts = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    done = [re.findall(r"\] (.*): done, accuracy", text) for text in texts]
    names = [f"digits-{method} seed 1" for method in ("ce", "mixup", "pls")]
    assert sorted(done[0] + done[1]) == names
    for metrics in tmp_path.rglob("metrics.jsonl"):
        assert [json.loads(line)["epoch"] for line in metrics.open()] == [1]


@pytest.mark.slow
def test_a_killed_cell_resumes(tmp_path, capsys):
    more = ["--only", "*-pls", "--set", "epochs=4"]
    folder = RunFolder(tmp_path / "digits" / "digits-pls" / "seed1")
    process = subprocess.Popen(command(tmp_path, *more), stdout=subprocess.DEVNULL)
    while not folder.checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.02)
    assert read_states(tmp_path, capsys, "--seeds", "1", *more)["digits-pls 1"] == "busy"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.finished
    assert read_states(tmp_path, capsys, "--seeds", "1", *more)["digits-pls 1"] == "started"
    code, text, _ = call(*command(tmp_path, *more)[4:], capsys=capsys)
    assert (code, "digits-pls seed 1: resumes in" in text) == (0, True)
    assert len(folder.metrics()) == 4
    assert read_states(tmp_path, capsys, "--seeds", "1", *more)["digits-pls 1"] == "done"


def test_a_cell_whose_worker_on_another_machine_is_silent_is_taken_over(
    tmp_path, capsys, monkeypatch
):
    """The claim has not ended yet, but nothing has been heard of the worker for a while."""
    monkeypatch.setattr(cells, "train", fake_training({}))
    monkeypatch.setattr(claims, "RENEW_SECONDS", 0.01)
    arguments = ["run", "digits", "--out", tmp_path, "--only", "*-ce", "--seeds", "1"]
    place = tmp_path / "digits" / "digits-ce" / "seed1" / ".lock"
    place.mkdir(parents=True)
    (place / "1").write_text(json.dumps({"host": "node7", "pid": 9, "token": "t"}))

    def last_seen(seconds):
        os.utime(place / "1", (time.time() - seconds,) * 2)

    last_seen(5)  # it works: it is not waited for
    code, text, _ = call(*arguments, capsys=capsys)
    assert (code, text.count("another process is training it (process 9 on node7")) == (0, 1)
    assert "1 busy" in text
    last_seen(claims.EXPIRED_SECONDS - 0.5)
    real = cells.train

    def train(source, out, **more):
        assert claims.holder(out) is None
        shutil.rmtree(out)  # the stand-in wants to make the folder
        return real(source, out, **more)

    monkeypatch.setattr(cells, "train", train)
    code, text, _ = call(*arguments, capsys=capsys)
    assert (code, text.count("waiting for process 9 on node7")) == (0, 1)
    assert "1 done" in text


def test_a_claim_that_ends_between_two_looks_is_not_forgotten(tmp_path, capsys, monkeypatch):
    """The cell is busy when its state is read, and free when its worker is looked for."""
    monkeypatch.setattr(cells, "train", fake_training({}))
    place = tmp_path / "digits" / "digits-ce" / "seed1" / ".lock"
    place.mkdir(parents=True)
    (place / "1").write_text(json.dumps({"host": "node7", "pid": 9, "token": "t"}))
    real, looks = claims.holder, []

    def holder(path):
        if sys._getframe(1).f_code is cells.run.__code__:
            looks.append(path)
            if len(looks) == 2:
                shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(claims, "holder", holder)
    arguments = ["run", "digits", "--out", tmp_path, "--only", "*-ce", "--seeds", "1"]
    code, text, _ = call(*arguments, capsys=capsys)
    assert (code, len(looks)) == (0, 2)
    assert "1 done" in text


def test_loggers_are_passed_on(tmp_path, capsys, monkeypatch):
    found = []
    fake = fake_training({})

    def train(source, out, *, log, **more):
        found.append(log)
        return fake(source, out, **more)

    monkeypatch.setattr(cells, "train", train)
    monkeypatch.setattr(cells, "read_names", found.append)
    arguments = ["run", "digits", "--out", tmp_path, "--only", "*-ce", "--seeds", "1"]
    assert call(*arguments, "--log", "wandb,mlflow", capsys=capsys)[0] == 0
    assert found == ["wandb,mlflow", "wandb,mlflow"]


# ----------------------------------------------------------------------------------- invalid input


def test_missing_data_are_named_before_anything_is_trained(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(cells, "train", fake_training({}, started))
    inner = tmp_path / "data" / "cifar-100-python"
    inner.mkdir(parents=True)
    for name in ("train", "test", "meta"):
        (inner / name).touch()

    def refused(flag, message, *more):
        arguments = ["run", "ood-noise", "--out", tmp_path / "out", "--seeds", "1", *more]
        code, text, err = call(*arguments, "--data", *data.values(), capsys=capsys)
        assert (code, text, started, (tmp_path / "out").exists()) == (2, "", [], False)
        assert err.startswith(f"pseudoloss: error: {flag}: ")
        assert (message in err, err.count("\n")) == (True, 1)

    pool = tmp_path / "pool"
    pool.mkdir()
    places = {"cifar100": tmp_path / "dta", "imagenet32": pool, "places365": pool}
    data = {kind: f"{kind}={place}" for kind, place in places.items()}
    refused(f"--data cifar100={tmp_path}/dta", "cifar-100-python")
    data["cifar100"] = f"cifar100={tmp_path}/data"
    refused(f"--data imagenet32={pool}", "batch")
    (pool / "train_data_batch_1").touch()
    refused(f"--data imagenet32={pool}", "train_data_batch_2, train_data_batch_3")
    refused(f"--set pool={tmp_path}/poo", "no such", "--set", f"pool={tmp_path}/poo")
    for i in range(2, 11):
        (pool / f"train_data_batch_{i}").touch()
    data["places365"] = "places365=nowhere"
    refused("--data places365=nowhere", "no such")
    (inner / "test").unlink()
    refused(f"--data cifar100={tmp_path}/data", str(inner))
    # Finished cells need no data.
    for cell in EXPERIMENTS["ood-noise"].choose(None):
        write_cell_run(tmp_path / "out", cell.name, 1, 70, 71)
    arguments = ["run", "ood-noise", "--out", tmp_path / "out", "--seeds", "1", "--data"]
    assert call(*arguments, *data.values(), capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("name", "only", "kind", "missing"),
    [
        ("cnwl", "cnwl-40-*", "cnwl", "training"),
        ("web-fg", "bird-*", "web-bird", "train-list.txt"),
    ],
)
def test_missing_folders_of_images_are_named(name, only, kind, missing, tmp_path, capsys):
    arguments = ["--only", only, "--data", f"{kind}={tmp_path}/x"]
    code, _, err = call("run", name, "--out", tmp_path, *arguments, capsys=capsys)
    assert code == 2
    assert err.startswith(f"pseudoloss: error: --data {kind}={tmp_path}/x: ")
    assert missing in err


def test_settings_can_be_none_and_are_given_once():
    assert cells.read_changes(["weights=none", "warmup=None", "network=none"]) == {
        **{"weights": None, "warmup": None, "network": "none"}
    }
    assert cells.read_changes(["epochs=2", "epochs=2"]) == {"epochs": 2}
    with pytest.raises(InputError, match="--set epochs=3: epochs is already 2"):
        cells.read_changes(["epochs=2", "epochs=3"])
    assert cells.read_places(["cifar100=a", "cifar100=a"]) == {"cifar100": "a"}
    with pytest.raises(InputError, match="--data cifar100=b: cifar100 is already in a"):
        cells.read_places(["cifar100=a", "cifar100=b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "network=zzz"), "--network zzz: "),
        (("--set", "corrupt=foo:1"), "--corrupt foo:1: "),
        (("--set", "epochs=abc"), "--epochs must be "),
        (("--set", "device=xpu:9"), "--device xpu:9: "),
        (("--minutes", "nan"), "--minutes must be above 0"),
        (("--out", "a-file"), "--out: cannot create a-file/digits/digits-pls"),
    ],
)
def test_invalid_values_are_refused_before_the_first_cell(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    code, text, err = call("run", "digits", "--seeds", "1", *arguments, capsys=capsys)
    assert (code, text) == (2, "")
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]
    if "epochs" in message or "network" in message or "corrupt" in message:
        assert call("run", "digits", "--dry-run", *arguments, capsys=capsys)[:2] == (2, "")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "ood-noise",
            "pool=none",
            "--set pool=none: inet-20-20-pls needs a pool of out-of-distribution images",
        ),
        ("ood-noise", "corrupt=none", "--pool /pool: "),
        ("digits", "pool=/pool", "--pool /pool: "),
        ("digits", "corrupt=out:0.2", "--corrupt out:0.2: "),
        ("digits", "epochs=none", "--epochs must be "),
        ("digits", "method=none", "--method none: must be one of pls, pls-plus"),
    ],
)
def test_noise_must_match_the_pool_and_some_settings_cannot_be_none(
    name, change, message, tmp_path, capsys
):
    arguments = ["run", name, "--out", tmp_path / "out", "--seeds", "1", "--set", change]
    arguments += ["--data", "cifar100=/x", "imagenet32=/pool", "places365=/pool"]
    for more in ([], ["--dry-run"]):
        code, text, err = call(*arguments, *more, capsys=capsys)
        assert (code, text, (tmp_path / "out").exists()) == (2, "", False)
        assert err.startswith(f"pseudoloss: error: {message}")
        assert err.count("\n") == 1
