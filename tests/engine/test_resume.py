"""Whatever moment an interruption comes, a resumed run ends as if there had been none."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import pseudoloss as pl
from conftest import TINY, assert_same_run, make_images, make_source, metrics_of
from processes import FLAGS
from pseudoloss.engine import checkpoint
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.files import read_checked
from pseudoloss.runs import RunFolder

# ------------------------------------------------------------------------------- real processes


def wait_for(path, process):
    while not path.exists():
        assert process.wait(block=False) is None, process.output
        time.sleep(0.002)


def test_killed_at_random_moments_and_resumed_bit_for_bit(commands, dataset, whole_run, tmp_path):
    """SIGKILL while it starts, trains, scores and writes."""
    killed = tmp_path / "killed"
    folder = RunFolder(killed)
    command = ("train", dataset, "--out", killed, "--resume", *FLAGS)
    seconds = pl.load(whole_run).summary["seconds"]
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    kills = in_between = 0
    for attempt in range(6):
        process = commands.start(*command)
        if attempt == 2:  # at the latest here a kill comes after a checkpoint
            wait_for(folder.checkpoint, process)
        time.sleep(moments.uniform(0.05, 0.5) * seconds)
        os.kill(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            kills += 1
            in_between += folder.checkpoint.exists()
        if folder.finished:
            break
    assert kills >= 2, seed
    assert in_between >= 1, seed
    code, output = commands.run(*command)
    assert code == 0, (seed, output)
    assert_same_run(whole_run, killed)


def test_stopped_by_the_clock_and_resumed(commands, dataset, whole_run, tmp_path):
    """--minutes stops after an epoch; the command to resume needs nothing but the folder."""
    out = tmp_path / "my run"
    code, output = commands.run("train", dataset, "--out", out, "--minutes", "1e-9", *FLAGS)
    assert code == 0
    assert f"pseudoloss train --out '{out}' --resume" in output
    assert not (out / "summary.json").exists()
    assert len(metrics_of(out)) == 1
    assert commands.run("train", "--out", out, "--resume", "--quiet") == (0, "")
    assert_same_run(whole_run, out)


def test_ctrl_c_prints_how_to_resume(commands, dataset, tmp_path):
    out = tmp_path / "my run"
    process = commands.start("train", dataset, "--out", out, *FLAGS, "--epochs=1000")
    wait_for(out / "checkpoint" / "last.safetensors", process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert f"pseudoloss train --out '{out}' --resume" in process.output.splitlines()[-1]
    assert "Traceback" not in process.output


def test_two_processes_do_not_work_on_one_run(commands, dataset, tmp_path):
    out = tmp_path / "run"
    assert commands.run("train", dataset, "--out", out, "--minutes", "1e-9", *FLAGS)[0] == 0
    resume = ("train", "--out", out, "--resume", "--quiet")
    with RunFolder(out).lock():
        assert RunFolder(out).busy
        code, output = commands.run(*resume)
    assert code == 2
    assert "another process is working on this run" in output
    assert len(output.splitlines()) == 1
    assert not RunFolder(out).busy
    assert commands.run(*resume) == (0, "")


# --------------------------------------------------------------------------------- every write


@pytest.fixture(scope="module")
def four_epochs(tmp_path_factory):
    out = tmp_path_factory.mktemp("four") / "run"
    _train_four(out)
    return out


def _train_four(out, **more):
    settings = {"network": "small-cnn", "batch_size": 16, "epochs": 4, "warmup": 1, "pad": 0}
    settings |= {"lr": 0.05, "corrupt": "symmetric:0.3", "quiet": True}
    return pl.train(make_source(), out=out, **settings, **more)


@pytest.mark.parametrize("moment", ["add_metrics", "save_best", "checkpoint", "after"])
def test_interrupted_at_every_write_of_an_epoch(tmp_path, moment, monkeypatch, four_epochs):
    """A crash before each of the writes that end an epoch, then a resume."""
    places = {
        "add_metrics": (RunFolder, "add_metrics"),
        "save_best": (RunFolder, "best"),
        "checkpoint": (checkpoint, "save"),
        "after": (RunFolder, "forget_other_bests"),
    }
    owner, name = places[moment]
    intact, calls = getattr(owner, name), []

    def crash(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return intact(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(KeyboardInterrupt):
            _train_four(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    _train_four(tmp_path / "run", resume=True)
    assert_same_run(four_epochs, tmp_path / "run")


def test_stopped_by_the_clock_between_checkpoints(tmp_path, tiny_source, tiny_settings):
    """The stop writes one; otherwise a job that repeats the command would never end."""
    settings = tiny_settings | {"checkpoint_every": 10, "minutes": 1e-9, "resume": True}
    for epochs in (1, 2, 3):
        run = pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
        assert run.summary["epochs"] == epochs
    assert run.finished


def test_a_half_written_line_of_metrics_is_dropped(stopped, tiny_source):
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('[]\n{"epoch": 2, "los')
    run = pl.train(tiny_source, out=stopped, resume=True, quiet=True)
    assert run.metrics["epoch"].tolist() == [1, 2, 3]


# ------------------------------------------------------------------------------- what is refused


def test_an_existing_run_is_never_overwritten(stopped, tiny_source, tiny_settings):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"--out .*run.*--resume"):
        pl.train(tiny_source, out=stopped, quiet=True, **tiny_settings)
    assert before == {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}


def test_other_files_are_never_overwritten(tmp_path, tiny_source, tiny_settings):
    (tmp_path / "photo.png").touch()
    for resume in (False, True):
        with pytest.raises(InputError, match=r"--out .*files; choose another folder"):
            pl.train(tiny_source, out=tmp_path, resume=resume, quiet=True, **tiny_settings)
    with pytest.raises(InputError, match=r"--out .*photo.png: is a file"):
        pl.train(tiny_source, out=tmp_path / "photo.png", quiet=True, **tiny_settings)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_a_folder_that_cannot_be_written(tmp_path, tiny_source, tiny_settings):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--out .*file/run: .*\(Not a directory\)"):
        pl.train(tiny_source, out=tmp_path / "file" / "run", quiet=True, **tiny_settings)


def test_a_folder_that_cannot_be_made_leaves_no_parents(tmp_path, monkeypatch):
    whole = Path.open

    def refuse(self, *arguments, **options):
        if self.parent.name == ".lock":
            raise PermissionError(13, "Permission denied")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with (
        pytest.raises(InputError, match=r"cannot be written \(Permission denied\)"),
        RunFolder(tmp_path / "a" / "b" / "run").lock(),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_run_killed_while_it_started_can_be_started_again(tmp_path, tiny_source, tiny_settings):
    """Between making the folder and the first complete config.json."""
    out = tmp_path / "run"
    (out / "checkpoint").mkdir(parents=True)
    (out / ".lock").touch()
    (out / ".config.json.draft").write_text('{"half')
    run = pl.train(tiny_source, out=out, resume=True, quiet=True, **tiny_settings)
    assert run.finished


def test_two_processes_that_start_at_the_same_time(
    tmp_path, tiny_source, tiny_settings, monkeypatch
):
    """The folder was free when this process looked, and taken when it was ready."""
    out = tmp_path / "run"
    whole = Trainer.__init__

    def slow(self, data, settings, *rest):
        whole(self, data, settings, *rest)
        if settings.seed == 2:
            other = tiny_settings | {"seed": 1}
            pl.train(tiny_source, out=out, quiet=True, **other)

    monkeypatch.setattr(Trainer, "__init__", slow)
    with pytest.raises(InputError, match="another process has started a run here"):
        pl.train(tiny_source, out=out, quiet=True, **(tiny_settings | {"seed": 2}))
    assert pl.load(out).settings.seed == 1
    assert pl.load(out).summary["seed"] == 1


def test_resume_starts_a_run_where_there_is_none(tmp_path, tiny_source, tiny_settings):
    run = pl.train(tiny_source, out=tmp_path / "new", resume=True, quiet=True, **tiny_settings)
    assert run.finished


def test_resume_keeps_settings_and_refuses_others(stopped, tiny_source):
    with pytest.raises(InputError, match=r"--lr 0.2 differs from the --lr 0.05"):
        pl.train(tiny_source, out=stopped, resume=True, quiet=True, lr=0.2)
    with pytest.raises(InputError, match=r"--gamma 1.0 differs from the --gamma 2.0"):
        pl.train(tiny_source, out=stopped, resume=True, quiet=True, gamma=1)
    with pytest.raises(InputError, match=r"--method ce differs from the --method pls"):
        pl.train(tiny_source, out=stopped, resume=True, quiet=True, method="ce")
    run = pl.train(tiny_source, out=stopped, resume=True, quiet=True)
    assert run.settings.lr == 0.05
    assert run.finished


def test_resume_refuses_other_images(stopped):
    with pytest.raises(InputError, match="--resume: the images or labels of arrays are not those"):
        pl.train(make_images(seed=8), out=stopped, resume=True, quiet=True)


def test_resume_refuses_another_test_set(stopped, tiny_source):
    other = pl.arrays(*make_images(), true_labels=make_images()[1])
    assert torch.equal(other.train.given_N, tiny_source.train.given_N)
    with pytest.raises(InputError, match="are not those the run began with"):
        pl.train(other, out=stopped, resume=True, quiet=True)


def test_arrays_are_needed_again_to_resume(stopped):
    with pytest.raises(InputError, match=r"run .* with data in Python, .*resume=True"):
        pl.train(out=stopped, resume=True, quiet=True)


def test_a_finished_run_is_left_as_it_is(finished, tiny_source, capsys):
    before = (finished / "summary.json").stat().st_mtime_ns
    run = pl.train(tiny_source, out=finished, resume=True, corrupt="symmetric-exact:0.25")
    assert "is already finished" in capsys.readouterr().out
    assert run.finished
    assert (finished / "summary.json").stat().st_mtime_ns == before


# ---------------------------------------------------------------------------- files in settings


def test_resume_from_another_folder(npz, tmp_path, tiny_settings, monkeypatch):
    npz("set.npz")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    pl.train("set.npz", out=out, minutes=1e-9, quiet=True, **tiny_settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pl.train(out=out, resume=True, quiet=True).finished


def test_files_in_settings_are_found_from_another_folder(npz, tmp_path, tiny_settings, monkeypatch):
    """They are recorded with absolute paths, and the same relative path is no other setting."""
    npz("set.npz")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    labels = make_images()[1]
    rows = [f"{index},{label}" for index, label in enumerate(labels)]
    Path("given.csv").write_text("\n".join(["index,label", *rows]))
    out, settings = tmp_path / "run", tiny_settings | {"corrupt": "labels:given.csv"}
    for resume in (False, True):
        pl.train("set.npz", out=out, resume=resume, minutes=1e-9, quiet=True, **settings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = pl.train(out=out, resume=True, quiet=True)
    assert (run.finished, len(run.labels)) == (True, len(labels))
    assert run.settings.corrupt == f"labels:{tmp_path}/given.csv"


def test_a_file_of_labels_may_have_moved(tmp_path, tiny_source, tiny_settings):
    """Other labels in it are noticed."""
    labels = make_images()[1]
    out, files = tmp_path / "run", [tmp_path / "given.csv", tmp_path / "moved.csv"]

    def write(file, given):
        rows = [f"{index},{label}" for index, label in enumerate(given)]
        file.write_text("\n".join(["index,label", *rows]))

    def train(file, **more):
        settings = tiny_settings | {"corrupt": f"labels:{file}"} | more
        return pl.train(tiny_source, out=out, resume=True, quiet=True, **settings)

    write(files[0], labels)
    train(files[0], minutes=1e-9)
    files[0].unlink()
    write(files[1], [*labels[1:], labels[0]])
    with pytest.raises(InputError, match="are not those the run began with"):
        train(files[1])
    write(files[1], labels)
    with pytest.raises(InputError, match="differs from the --corrupt labels:"):
        train(files[1], corrupt="symmetric:0.2")
    run = train(files[1])
    assert run.finished


def test_published_weights_are_not_downloaded_again(stopped, tiny_source):
    config = read_checked(stopped / "config.json")
    config["settings"]["weights"] = "pretrained"  # refused for our own networks, were it used
    (stopped / "config.json").write_text(json.dumps(config))
    assert pl.train(tiny_source, out=stopped, resume=True, quiet=True).finished


def test_a_finished_run_is_loaded_without_its_data(tmp_path, npz, capsys):
    source, out = npz(), tmp_path / "run"
    settings = TINY | {"epochs": 1}
    whole = pl.train(str(source), out, quiet=True, **settings)
    source.unlink()
    again = pl.train(out=out, resume=True)
    assert capsys.readouterr().out == f"{out} is already finished.\n"
    pl.train("other.npz", out=out, resume=True)
    text = capsys.readouterr().out
    assert f"notice: the run is of {source}, not of other.npz" in " ".join(text.split())
    with pytest.raises(InputError, match="--strict is not what the run began with"):
        pl.train(out=out, resume=True, strict=True)
    assert again.labels.equals(pl.load(out).labels)
    assert len(again.labels) == len(whole.labels)
    with pytest.raises(InputError, match="--epochs 2 differs from the --epochs 1"):
        pl.train(out=out, resume=True, epochs=2)
