"""Stopping and going on: whatever moment the kill comes, the run ends as if it had not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pseudoloss as pl
from conftest import make_images
from pseudoloss.config import Settings
from pseudoloss.engine import checkpoint
from pseudoloss.engine.trainer import Trainer
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.progress import SilentReporter
from pseudoloss.runs import RunFolder

SETTINGS = {"network": "small-cnn", "batch_size": 32, "epochs": 6, "lr": 0.05, "pad": 0}


def command(out, *more):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    return [
        *(sys.executable, "-m", "pseudoloss", "train", "digits", "--out", str(out), *flags),
        *("--corrupt=symmetric:0.4", "--quiet", *more),
    ]


def same_result(a: Path, b: Path):
    for name in ("model.safetensors", "best.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert (a / "labels.csv").read_bytes() == (b / "labels.csv").read_bytes()
    final, other = (load_file(run / "checkpoint" / "last.safetensors") for run in (a, b))
    assert final.keys() == other.keys()
    for name, tensor in final.items():
        assert torch.equal(tensor, other[name]), name
    lines, others = (_without_times(run) for run in (a, b))
    assert lines == others
    summary, other_summary = (json.loads((run / "summary.json").read_text()) for run in (a, b))
    for key in ("accuracy", "detection", "guesses", "actions", "notices", "epochs"):
        assert summary[key] == other_summary[key]


def _without_times(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.slow
def test_killed_for_real_and_resumed_bit_for_bit(tmp_path):
    """SIGKILL again and again, at moments spread over start-up, steps, tracking and writing."""
    subprocess.run(command(tmp_path / "whole"), check=True)
    killed = tmp_path / "killed"
    kills, in_between, delay = 0, 0, 1.5
    while not (killed / "summary.json").exists():
        process = subprocess.Popen(command(killed, "--resume"))
        try:
            process.wait(timeout=delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            in_between += (killed / "checkpoint" / "last.safetensors").exists()
        else:
            assert process.returncode == 0
        delay += 0.77
        assert kills < 40
    assert in_between >= 1  # some kill came after a checkpoint and before the end
    same_result(tmp_path / "whole", killed)


@pytest.mark.parametrize("moment", ["add_metrics", "save_best", "checkpoint", "after"])
def test_broken_off_at_every_write_of_an_epoch(tmp_path, moment, monkeypatch):
    """A crash before each of the writes that end an epoch, then a resume without it."""
    source = make_images(128)
    settings = SETTINGS | {"epochs": 4, "corrupt": "symmetric:0.3"}

    def run(name, **more):
        return pl.train(
            source_with_test(source), out=tmp_path / name, quiet=True, **settings, **more
        )

    run("whole")
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
            run("broken")
    run("broken", resume=True)
    same_result(tmp_path / "whole", tmp_path / "broken")


def source_with_test(source):
    test_images, test_labels = make_images(64, seed=3)
    return pl.arrays(*source, test_images=test_images, test_labels=test_labels)


@pytest.mark.slow
def test_stopped_by_the_clock_and_resumed(tmp_path):
    """--minutes stops after an epoch; the run goes on as if it had not."""
    subprocess.run(command(tmp_path / "whole"), check=True)
    stopped = command(tmp_path / "stopped", "--minutes", "0.0001")
    subprocess.run(stopped, check=True)
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert len(_without_times(tmp_path / "stopped")) == 1
    resume = [sys.executable, "-m", "pseudoloss", "train", "--out", str(tmp_path / "stopped")]
    subprocess.run([*resume, "--resume", "--quiet"], check=True)
    same_result(tmp_path / "whole", tmp_path / "stopped")


def test_ctrl_c_tells_how_to_go_on(tmp_path):
    out = tmp_path / "my run"
    words = [word for word in command(out) if word != "--quiet"]
    process = subprocess.Popen(
        [*words, "--epochs=100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (out / "checkpoint" / "last.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"go on with: pseudoloss train --out '{out}' --resume" in errors
    assert "Traceback" not in errors


# ------------------------------------------------------------------------------- what is refused


@pytest.fixture
def begun(tmp_path, tiny_source, tiny_settings):
    """A run of three epochs, stopped after the first."""
    out = tmp_path / "run"
    run = pl.train(tiny_source, out=out, minutes=1e-4, quiet=True, **tiny_settings)
    assert not run.finished
    return out


def test_an_existing_run_is_never_overwritten(begun, tiny_source, tiny_settings):
    before = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"--out .*holds a run already: add --resume"):
        pl.train(tiny_source, out=begun, quiet=True, **tiny_settings)
    assert before == {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}


def test_other_files_are_never_overwritten(tmp_path, tiny_source, tiny_settings):
    (tmp_path / "photo.png").touch()
    with pytest.raises(InputError, match=r"--out .*holds files that are no run"):
        pl.train(tiny_source, out=tmp_path, quiet=True, **tiny_settings)
    with pytest.raises(InputError, match=r"--out .*holds files that are no run"):
        pl.train(tiny_source, out=tmp_path, resume=True, quiet=True, **tiny_settings)
    with pytest.raises(InputError, match=r"--out .*photo.png: is a file"):
        pl.train(tiny_source, out=tmp_path / "photo.png", quiet=True, **tiny_settings)


def test_a_place_that_cannot_be_written(tmp_path, tiny_source, tiny_settings):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--out .*file/run: (cannot be written|no usable path)"):
        pl.train(tiny_source, out=tmp_path / "file" / "run", quiet=True, **tiny_settings)


def test_a_folder_that_cannot_be_made_leaves_no_parents(tmp_path, monkeypatch):
    whole = Path.open

    def refuse(self, *arguments, **options):
        if self.name == ".lock":
            raise PermissionError(13, "Permission denied")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with (
        pytest.raises(InputError, match=r"cannot be written \(Permission denied\)"),
        RunFolder(tmp_path / "a" / "b" / "run").lock(),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_run_killed_while_it_began_can_be_begun_again(tmp_path, tiny_source, tiny_settings):
    """Between making the folder and the first whole config.json."""
    out = tmp_path / "run"
    (out / "checkpoint").mkdir(parents=True)
    (out / ".lock").touch()
    (out / ".config.json.draft").write_text('{"half')
    run = pl.train(tiny_source, out=out, resume=True, quiet=True, **tiny_settings)
    assert run.finished


def test_two_processes_that_begin_at_once(tmp_path, tiny_source, tiny_settings, monkeypatch):
    """The folder was free when this process looked, and taken when it was ready."""
    out = tmp_path / "run"
    whole = Trainer.__init__

    def slow(self, data, settings, *rest):
        whole(self, data, settings, *rest)
        if settings.seed == 2:
            other = tiny_settings | {"seed": 1}
            pl.train(tiny_source, out=out, quiet=True, **other)

    monkeypatch.setattr(Trainer, "__init__", slow)
    with pytest.raises(InputError, match="another process has begun a run here"):
        pl.train(tiny_source, out=out, quiet=True, **(tiny_settings | {"seed": 2}))
    assert pl.load(out).settings.seed == 1
    assert pl.load(out).summary["seed"] == 1


def test_resume_begins_where_there_is_nothing(tmp_path, tiny_source, tiny_settings):
    run = pl.train(tiny_source, out=tmp_path / "new", resume=True, quiet=True, **tiny_settings)
    assert run.finished


def test_resume_keeps_settings_and_refuses_others(begun, tiny_source):
    with pytest.raises(InputError, match=r"--lr 0.2 differs from the --lr 0.05"):
        pl.train(tiny_source, out=begun, resume=True, quiet=True, lr=0.2)
    run = pl.train(tiny_source, out=begun, resume=True, quiet=True)
    assert run.settings.lr == 0.05
    assert run.finished


def test_resume_refuses_other_data(begun):
    with pytest.raises(InputError, match="--resume: the images or labels of arrays are not those"):
        pl.train(make_images(seed=8), out=begun, resume=True, quiet=True)


def test_resume_of_arrays_needs_them_again(begun):
    with pytest.raises(InputError, match=r"run began with data in Python, .*resume=True"):
        pl.train(out=begun, resume=True, quiet=True)


def test_a_finished_run_is_left_as_it_is(begun, tiny_source, capsys):
    pl.train(tiny_source, out=begun, resume=True, quiet=True)
    before = (begun / "summary.json").stat().st_mtime_ns
    run = pl.train(tiny_source, out=begun, resume=True)
    assert "finished already" in capsys.readouterr().out
    assert run.finished
    assert (begun / "summary.json").stat().st_mtime_ns == before


def test_an_unfinished_run_cannot_be_loaded(begun):
    with pytest.raises(InputError, match="is not finished"):
        pl.load(begun)


def test_resume_notices_another_test_set(begun, tiny_source):
    other = pl.arrays(*make_images(), true_labels=make_images()[1])
    assert torch.equal(other.train.given_N, tiny_source.train.given_N)
    with pytest.raises(InputError, match="are not those the run began with"):
        pl.train(other, out=begun, resume=True, quiet=True)


def test_resume_from_another_folder(npz, tmp_path, tiny_settings, monkeypatch):
    npz("set.npz")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    pl.train("set.npz", out=out, minutes=1e-4, quiet=True, **tiny_settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pl.train(out=out, resume=True, quiet=True).finished


def test_files_in_settings_are_found_from_another_folder(npz, tmp_path, tiny_settings, monkeypatch):
    """Recorded as they are found from anywhere; and the same words, said again, are the same."""
    npz("set.npz")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    labels = make_images()[1]
    rows = [f"{index},{label}" for index, label in enumerate(labels)]
    Path("given.csv").write_text("\n".join(["index,label", *rows]))
    out, settings = tmp_path / "run", tiny_settings | {"corrupt": "labels:given.csv"}
    for resume in (False, True):
        pl.train("set.npz", out=out, resume=resume, minutes=1e-4, quiet=True, **settings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = pl.train(out=out, resume=True, quiet=True)
    assert (run.finished, len(run.labels)) == (True, len(labels))
    assert run.settings.corrupt == f"labels:{tmp_path}/given.csv"


def test_a_file_of_labels_may_have_moved(tmp_path, tiny_source, tiny_settings):
    """Other labels in it are found out."""
    labels = make_images()[1]
    out, files = tmp_path / "run", [tmp_path / "given.csv", tmp_path / "moved.csv"]

    def write(file, given):
        rows = [f"{index},{label}" for index, label in enumerate(given)]
        file.write_text("\n".join(["index,label", *rows]))

    def train(file, **more):
        settings = tiny_settings | {"corrupt": f"labels:{file}"} | more
        return pl.train(tiny_source, out=out, resume=True, quiet=True, **settings)

    write(files[0], labels)
    train(files[0], minutes=1e-4)
    files[0].unlink()
    write(files[1], [*labels[1:], labels[0]])
    with pytest.raises(InputError, match="are not those the run began with"):
        train(files[1])
    write(files[1], labels)
    with pytest.raises(InputError, match="differs from the --corrupt labels:"):
        train(files[1], corrupt="symmetric:0.2")
    run = train(files[1])
    assert run.finished


def test_stopped_by_the_clock_between_checkpoints(tmp_path, tiny_source, tiny_settings):
    """The stop writes one, or a queue that repeats the command would never end."""
    settings = tiny_settings | {"checkpoint_every": 10, "minutes": 1e-4, "resume": True}
    for epochs in (1, 2, 3):
        run = pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
        assert run.summary["epochs"] == epochs
    assert run.finished


def test_published_weights_are_not_fetched_again(begun, tiny_source, monkeypatch):
    config = json.loads((begun / "config.json").read_text())
    config["settings"]["weights"] = "pretrained"  # refused for our own networks, were it asked
    (begun / "config.json").write_text(json.dumps(config))
    assert pl.train(tiny_source, out=begun, resume=True, quiet=True).finished


def test_a_record_of_another_version_is_named(begun, tiny_source):
    path = begun / "checkpoint" / "last.safetensors"
    tensors, record = from_safetensors(path)
    write_safetensors(path, tensors, record | {"new": 1})
    with pytest.raises(InputError, match=r"last.safetensors: of another version"):
        pl.train(tiny_source, out=begun, resume=True, quiet=True)


def test_a_half_written_line_of_metrics_is_forgotten(begun, tiny_source):
    with (begun / "metrics.jsonl").open("a") as file:
        file.write('[]\n{"epoch": 2, "los')
    run = pl.train(tiny_source, out=begun, resume=True, quiet=True)
    assert run.metrics["epoch"].tolist() == [1, 2, 3]


def test_a_broken_checkpoint_is_named(begun, tiny_source):
    (begun / "checkpoint" / "last.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"last.safetensors: not a checkpoint of this run"):
        pl.train(tiny_source, out=begun, resume=True, quiet=True)


def test_a_checkpoint_of_another_network_is_refused(tmp_path, tiny_source, tiny_settings):
    small = Trainer(tiny_source, Settings(**tiny_settings), SilentReporter())
    path = tmp_path / "last.safetensors"
    tensors = checkpoint.tensors_of(small.network, small.optimiser, small.memory)
    checkpoint.save(path, tensors, {})
    for change in ({"projection": 64}, {"network": "preactresnet18"}):
        other = Trainer(tiny_source, Settings(**(tiny_settings | change)), SilentReporter())
        with pytest.raises(InputError, match="not a checkpoint of this run"):
            checkpoint.restore(path, other.network, other.optimiser, other.memory)


def test_checkpoints_may_be_rarer(tmp_path, tiny_source, tiny_settings, monkeypatch):
    saved = []
    whole = checkpoint.save

    def spy(path, tensors, record):
        saved.append(record["epochs"])
        whole(path, tensors, record)

    monkeypatch.setattr(checkpoint, "save", spy)
    settings = tiny_settings | {"epochs": 5, "checkpoint_every": 2}
    pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
    assert saved == [2, 4, 5]


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
def test_two_processes_do_not_work_on_one_run(begun, tiny_source):
    with RunFolder(begun).lock():
        holder = [
            *(sys.executable, "-c"),
            "import sys; from pathlib import Path; from pseudoloss.runs import RunFolder\n"
            "with RunFolder(Path(sys.argv[1])).lock(): pass",
            str(begun),
        ]
        result = subprocess.run(holder, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "another process is working on this run" in result.stderr
    assert pl.train(tiny_source, out=begun, resume=True, quiet=True).finished


def test_the_model_of_the_best_epoch_is_missed_at_once(begun, tiny_source):
    (best,) = (begun / "checkpoint").glob("best-*")
    best.unlink()
    with pytest.raises(InputError, match=rf"{best.name}: is missing, the model of the best epoch"):
        pl.train(tiny_source, out=begun, resume=True, quiet=True)
