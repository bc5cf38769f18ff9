"""Files that a disk or a network has changed: noticed in one line, or without any effect."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import pseudoloss as pl
from conftest import TINY, assert_same_run, make_source
from pseudoloss import files
from pseudoloss.engine import checkpoint
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.files import (
    from_safetensors,
    read_checked,
    verify,
    write_checked,
    write_safetensors,
)
from pseudoloss.inference.model import load_model
from pseudoloss.labels.reviewed import Decision, parse_line, read_decisions
from pseudoloss.progress import TerminalReporter
from pseudoloss.review.log import DecisionLog
from pseudoloss.runs import RunFolder, open_model

ONE_BYTE = 0x01


def flip(path, position, bit=ONE_BYTE):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(bytes(content))


def header_size(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    pl.train(make_source(), out=out, quiet=True, **TINY)
    return out


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    """The folder of a run that stopped after two of three epochs: with two checkpoints."""
    out = tmp_path_factory.mktemp("two") / "run"
    for _ in range(2):
        pl.train(make_source(), out=out, resume=True, minutes=1e-9, quiet=True, **TINY)
    return out


@pytest.fixture
def broken(two_epochs, tmp_path):
    return shutil.copytree(two_epochs, tmp_path / "run")


def resume(out, **more):
    return pl.train(make_source(), out=out, resume=True, quiet=True, **more)


# ------------------------------------------------------------------------------ files of tensors


def test_every_flipped_bit_of_a_file_of_tensors_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(
        path, {"a": torch.arange(4.0), "b": torch.zeros(3, dtype=torch.bool)}, {"x": 1}
    )
    assert verify(path)
    intact = path.read_bytes()
    for position in range(len(intact)):  # another bit of every byte
        path.write_bytes(intact)
        flip(path, position, 1 << position % 8)
        with pytest.raises(ValueError, match=r"damaged|not written|header|Error"):
            from_safetensors(path)
    for length in range(0, len(intact), 7):
        path.write_bytes(intact[:length])
        with pytest.raises(ValueError, match=r"damaged|not"):
            from_safetensors(path)
    path.write_bytes(intact + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        from_safetensors(path)


def test_files_of_older_versions_have_no_checksum_and_are_read(tmp_path):
    from safetensors.torch import save

    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"a": torch.ones(2)}, {"pseudoloss": json.dumps({"x": 1})}))
    assert not verify(path)
    tensors, record = from_safetensors(path)
    assert (tensors["a"].tolist(), record) == ([1, 1], {"x": 1})
    path.write_bytes(save({"a": torch.ones(2)}, {"format": "pt"}))
    assert not verify(path)


def test_a_damaged_model_is_named(whole, tmp_path):
    model = shutil.copy(whole / "model.safetensors", tmp_path)
    flip(Path(model), header_size(Path(model)) + 1000)
    with pytest.raises(InputError, match=r"model.safetensors: .*damaged: its checksum is wrong"):
        load_model(Path(model))
    with pytest.raises(InputError, match=r"--weights .*model.safetensors: .*damaged"):
        pl.train(make_source(), quiet=True, network="resnet10t", weights=str(model), epochs=1)


# ----------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("place", ["length", "header", "tensor", "cut", "empty", "gone"])
def test_the_checkpoint_before_a_damaged_one_is_used(broken, whole, place, capsys):
    folder = RunFolder(broken)
    size = header_size(folder.checkpoint)
    if place in ("cut", "empty"):
        os.truncate(folder.checkpoint, size + 100 if place == "cut" else 0)
    elif place == "gone":
        folder.checkpoint.unlink()
    else:
        flip(folder.checkpoint, {"length": 1, "header": 300, "tensor": size + 5000}[place])
    run = pl.train(make_source(), out=broken, resume=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "the checkpoint before it is used" in said
    assert "resumed after epoch 1" in said
    assert run.finished
    assert_same_run(whole, broken)
    assert sorted(path.name for path in (broken / "checkpoint").iterdir()) == sorted(
        path.name for path in (whole / "checkpoint").iterdir()
    )


def test_a_good_checkpoint_is_not_replaced_by_a_damaged_one(broken, monkeypatch):
    """The next write fails after the run went back: the one before is still there."""
    folder = RunFolder(broken)
    before = folder.previous.read_bytes()
    flip(folder.checkpoint, -1)

    def full(path, tensors, record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_safetensors", full)
        with pytest.raises(TrainingError, match="No space left"):
            resume(broken)
    assert folder.previous.read_bytes() == before
    assert resume(broken).finished


def test_two_damaged_checkpoints_are_an_error(broken):
    for path in (RunFolder(broken).checkpoint, RunFolder(broken).previous):
        flip(path, -1)
    with pytest.raises(InputError, match=r"previous.safetensors: .*checksum is wrong") as error:
        resume(broken)
    assert "\n" not in str(error.value)


def test_missing_checkpoints_are_not_a_new_start(broken):
    shutil.rmtree(broken / "checkpoint")
    before = (broken / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"last.safetensors: is missing, and the run had one"):
        resume(broken)
    assert (broken / "metrics.jsonl").read_bytes() == before


def test_a_run_without_a_checkpoint_yet_says_that_it_starts_again(broken, whole, capsys):
    shutil.rmtree(broken / "checkpoint")
    RunFolder(broken).checkpointed.unlink()
    pl.train(make_source(), out=broken, resume=True)
    assert "there is no checkpoint yet: the run starts again" in capsys.readouterr().out
    assert_same_run(whole, broken)


WRONG = {
    "epochs": ["two", None, -1, 4, 1.5, True],
    "seconds": ["long", None],
    "best_epoch": [0, "first", 1.5],
    "notices": ["none", [1], [{}]],
    "last": [[]],
    "inside": [{}, 3, {"entry": 0, "done": 0, "step": 0, "seconds": 0}],
    "metrics": [[], [{"epoch": 2}], [1, 2], "no", {"a": 1}],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_with_wrong_values_is_one_line(broken, name):
    path = RunFolder(broken).checkpoint
    RunFolder(broken).previous.unlink()
    tensors, record = from_safetensors(path)
    for value in WRONG[name]:
        write_safetensors(path, tensors, record | {name: value})
        with pytest.raises(InputError, match=r"last.safetensors: ") as error:
            resume(broken)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("record", [[], 3, "text", None])
def test_a_record_that_is_no_object_is_one_line(broken, record):
    path = RunFolder(broken).checkpoint
    RunFolder(broken).previous.unlink()
    write_safetensors(path, from_safetensors(path)[0], record)
    with pytest.raises(InputError, match=r"last.safetensors: "):
        resume(broken)


def test_the_previous_checkpoint_keeps_its_best_model(tmp_path, monkeypatch):
    """The best epoch changes with every epoch here."""
    from pseudoloss.engine.trainer import Trainer

    accuracies = iter([10.0, 20.0, 30.0] * 3)

    def validate(trainer):
        trainer.accuracy = next(accuracies)
        return trainer.accuracy

    monkeypatch.setattr(Trainer, "validate", validate)
    out = tmp_path / "run"
    for _ in range(2):
        pl.train(make_source(), out=out, resume=True, minutes=1e-9, quiet=True, **TINY)
    folder = RunFolder(out)
    assert folder.best(1).exists()
    assert folder.best(2).exists()
    flip(folder.checkpoint, -1)
    accuracies = iter([20.0, 30.0])
    assert resume(out).summary["accuracy"]["best_epoch"] == 3
    assert [path.name for path in (out / "checkpoint").glob("best-*")] == ["best-3.safetensors"]


def test_a_damaged_best_model_is_said_and_not_published(broken, capsys, monkeypatch):
    from pseudoloss.engine.trainer import Trainer

    monkeypatch.setattr(Trainer, "validate", lambda trainer: 0.0)
    folder = RunFolder(broken)
    best = folder.best(from_safetensors(folder.checkpoint)[1]["best_epoch"])
    flip(best, -1)
    run = pl.train(make_source(), out=broken, resume=True)
    assert f"{best}: it is damaged" in "".join(capsys.readouterr().out.split("\n"))
    (said,) = (entry for entry in run.summary["notices"] if entry["kind"] == "best")
    assert "there is no best.safetensors" in said["text"]
    assert not (broken / "best.safetensors").exists()
    assert open_model(broken).classes == run.model.classes
    with pytest.raises(InputError, match="--best"):
        open_model(broken, best=True)


# ------------------------------------------------------------------------------ JSON of the folder


def test_every_changed_character_of_a_record_is_noticed_or_has_no_effect(tmp_path):
    path = tmp_path / "x.json"
    value = {"lr": 0.05, "name": "übel", "list": [1, None, True], "deep": {"a": 1e-9}}
    write_checked(path, value)
    assert read_checked(path) == value
    intact = path.read_bytes()
    seen = 0
    for position in range(len(intact)):
        path.write_bytes(intact)
        flip(path, position, 1 << position % 8)
        try:
            found = read_checked(path)
        except ValueError:
            seen += 1
            continue
        # Only the name of the checksum was changed, or a space.
        assert {key: found[key] for key in value} == value
    assert seen > 0.7 * len(intact)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "metrics.jsonl"])
def test_damaged_records_of_a_finished_run_are_one_line(whole, tmp_path, name):
    out = shutil.copytree(whole, tmp_path / "run")
    intact = (out / name).read_bytes()
    digits = [i for i, byte in enumerate(intact) if chr(byte).isdigit()]
    for position in random.Random(0).sample(digits, 20):
        flip(out / name, position)
        with pytest.raises(InputError, match=name.replace(".", r"\.")) as error:
            pl.load(out)
        assert "\n" not in str(error.value)
        (out / name).write_bytes(intact)
    (out / name).write_bytes(intact[: len(intact) // 2])
    with pytest.raises(InputError):
        pl.load(out)


def test_a_damaged_config_is_refused_by_resume_and_config(broken):
    config = broken / "config.json"
    config.write_text(config.read_text().replace('"lr": 0.05', '"lr": 0.06'))
    for call in (
        lambda: resume(broken),
        lambda: pl.train(make_source(), config=config, quiet=True),
    ):
        with pytest.raises(InputError, match=r"config.json: .*checksum is wrong. If you changed"):
            call()


@pytest.mark.parametrize("damage", ["digit", "cut", "gone", "binary"])
def test_damaged_metrics_of_a_run_that_goes_on_are_written_anew(broken, whole, damage):
    """The checkpoint holds them too."""
    path = broken / "metrics.jsonl"
    if damage == "digit":
        path.write_text(path.read_text().replace("loss", "loss ").replace("1", "2"))
    elif damage == "cut":
        path.write_text(path.read_text()[:50])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(os.urandom(500))
    assert resume(broken).finished
    assert_same_run(whole, broken)


def test_every_changed_bit_of_a_decision_is_noticed(tmp_path):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    log.append([Decision(3, "train", "a/b.png", "relabel", "bee", "ant", "2026-01-01", "Ann")])
    log.close()
    intact = path.read_bytes()
    ((key, wanted),) = read_decisions(path)[0].items()
    lost = 0
    for position in range(len(intact) - 1):
        path.write_bytes(intact)
        flip(path, position, 1 << position % 8)
        found, damaged = read_decisions(path)
        # A changed name of the checksum leaves the decision as it was.
        assert damaged or found == {key: wanted}
        lost += bool(damaged)
    assert lost > 0.8 * len(intact)


def test_lines_of_other_programs_need_no_checksum():
    line = {"index": 3, "part": "train", "decision": "keep", "given_label": "ant"}
    assert parse_line(json.dumps(line)) is not None
    assert parse_line(json.dumps(line | {"checksum": "0" * 64})) is None


# ----------------------------------------------------------------------------------- a full disk


def test_a_full_disk_leaves_no_draft(tmp_path, monkeypatch):
    """Whatever is written: a file that could not be completed is removed."""
    out = tmp_path / "run"
    real, sizes = os.fsync, []

    def full(descriptor):
        sizes.append(os.fstat(descriptor).st_size)
        if len(sizes) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(TrainingError, match=r"cannot be written \(No space left") as error:
            pl.train(make_source(), out=out, quiet=True, **TINY)
    assert f"pseudoloss train --out {out} --resume continues" in str(error.value)
    assert list(out.rglob("*.draft")) == []
    assert resume(out, **TINY).finished


def test_a_small_disk_that_is_really_full(tmp_path, commands, dataset):
    """A file system of 256 KiB, less than a model; skipped where none can be mounted."""
    import subprocess

    from processes import FLAGS

    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        code, output = commands.run("train", dataset, "--out", place / "run", "--quiet", *FLAGS)
        assert code == 1
        (line,) = output.splitlines()
        assert "cannot be written (No space left on device) at " in line
        assert ".safetensors; make room" in line
        assert list(place.rglob("*.draft")) == []
        room = os.statvfs(place)
        assert room.f_bavail * room.f_frsize > 150_000
        subprocess.run([*mount[:4], "remount,size=20m", "tmpfs", str(place)], check=True)
        assert commands.run("train", "--out", place / "run", "--resume", "--quiet") == (0, "")
    finally:
        subprocess.run(["umount", str(place)], check=False)


def test_drafts_of_a_killed_process_are_removed(broken):
    for path in (broken / ".labels.csv.draft", broken / "checkpoint" / ".best-9.safetensors.draft"):
        path.write_bytes(b"half")
    assert resume(broken).finished
    assert list(broken.rglob("*.draft")) == []


def test_a_finished_run_that_cannot_be_written_is_finished(whole, tmp_path, capsys, monkeypatch):
    """On a read-only disk: nothing is opened for writing."""
    out = shutil.copytree(whole, tmp_path / "run")
    real = Path.open

    def read_only(path, mode="r", *more, **options):
        if out in path.parents and set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert pl.train(make_source(), out=out, resume=True).finished
    assert capsys.readouterr().out == f"{out} is already finished.\n"


# ----------------------------------------------------------------------------- standard output


def test_training_goes_on_when_its_output_cannot_be_written(capfd):
    from rich.console import Console

    class Full:
        encoding = "utf-8"

        def __init__(self, error):
            self.error = error

        def write(self, text):
            raise self.error

        def flush(self):
            raise self.error

    for error in (OSError(errno.ENOSPC, "full"), BrokenPipeError(errno.EPIPE, "closed")):
        reporter = TerminalReporter(Console(file=Full(error)))
        with reporter:
            reporter.say("one")
            reporter.notice("two")
            reporter.step()
        assert capfd.readouterr().err.count("the output cannot be written") == 1
