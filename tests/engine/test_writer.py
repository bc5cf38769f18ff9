"""Writing while training: what is written is the epoch as it was, and nothing is lost."""

import errno
import json
import os
import shutil
import threading
import time

import pytest
import torch

import pseudoloss as pl
from processes import FLAGS
from pseudoloss.engine import checkpoint
from pseudoloss.engine.trainer import Trainer
from pseudoloss.engine.writer import Writer
from pseudoloss.errors import TrainingError
from pseudoloss.files import from_safetensors
from pseudoloss.runs import RunFolder

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_is_a_copy(device):
    """Of any memory layout and type; tensors that share memory get copies of their own."""
    weight = torch.randn(2, 3, 4, 4, device=device).to(memory_format=torch.channels_last)
    tensors = {
        "weight": weight,
        "tied": weight,
        "count": torch.tensor(3, device=device),
        "mask": torch.tensor([True, False], device=device),
        "half": torch.randn(5, device=device, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(3, device=device)),
    }
    with Writer() as writer:
        wanted = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        taken = writer.snapshot(tensors)
        for tensor in tensors.values():
            tensor.detach().zero_()
        for name, copy in taken.items():
            assert copy.device.type == "cpu"
            assert copy.is_contiguous()
            assert copy.is_pinned() == (device == "cuda")
            assert torch.equal(copy, wanted[name]), name
        again = writer.snapshot(tensors)
        assert not again["weight"].any()
        assert again["weight"].data_ptr() == taken["weight"].data_ptr()  # allocated once


def test_writes_are_done_one_at_a_time_and_in_order():
    """Neither a snapshot nor another write starts before the last write is done."""
    done = []

    def slow(name):
        def write():
            time.sleep(0.05)
            done.append(name)

        return write

    with Writer() as writer:
        writer.start(slow(1))
        writer.start(slow(2))
        assert done == [1]
        writer.snapshot({})
        assert done == [1, 2]
        writer.start(slow(3))
    assert done == [1, 2, 3]


def use(*writes, then=None):
    """Start some writes, then fail with `then` if it is given."""
    with Writer() as writer:
        for write in writes:
            writer.start(write)
        if then is not None:
            raise then


def test_leaving_waits_for_writes_also_on_an_error():
    done = []

    def write():
        time.sleep(0.1)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        use(write, then=KeyboardInterrupt())
    assert done == [1]


def fail():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_is_raised_by_the_next_write_or_on_leaving():
    done = []
    with pytest.raises(OSError, match="No space left"):
        use(fail, lambda: done.append(1))
    assert done == []
    with pytest.raises(OSError, match="No space left"):
        use(fail)
    with pytest.raises(OSError, match="No space left"):
        use(fail, then=TrainingError("the checkpoint of epoch 3 is kept"))  # it is not


# ----------------------------------------------------------------------------- in a whole run


def test_steps_after_the_snapshot_do_not_show_in_it(
    tmp_path, tiny_source, tiny_settings, monkeypatch
):
    """Each epoch is written after all steps of the next one, and as it was before them."""
    save, add_metrics = checkpoint.save, RunFolder.add_metrics
    train_epoch = Trainer.train_epoch
    trained = [threading.Event() for _ in range(4)]

    def run(name, late):
        kept = tmp_path / f"{name}-kept"
        kept.mkdir()

        def keep(path, tensors, record):
            save(path, tensors, record)
            shutil.copy(path, kept / f"{record['epochs']}.safetensors")
            for best in path.parent.glob("best-*"):
                shutil.copy(best, kept)

        def add_late(folder, line):
            if late and line["epoch"] < 3:
                assert trained[line["epoch"]].wait(60)
            add_metrics(folder, line)

        def train(trainer, epoch):
            loss = train_epoch(trainer, epoch)
            trained[epoch].set()
            return loss

        monkeypatch.setattr(checkpoint, "save", keep)
        monkeypatch.setattr(RunFolder, "add_metrics", add_late)
        monkeypatch.setattr(Trainer, "train_epoch", train)
        pl.train(tiny_source, out=tmp_path / name, quiet=True, device="cpu", **tiny_settings)
        return kept

    usual = run("usual", late=False)
    for event in trained:
        event.clear()
    late = run("late", late=True)
    names = sorted(path.name for path in usual.iterdir())
    assert {"1.safetensors", "2.safetensors", "3.safetensors"} < set(names)
    assert names == sorted(path.name for path in late.iterdir())
    for name in names:
        (a, of_a), (b, of_b) = (from_safetensors(kept / name) for kept in (usual, late))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
        assert of_a.get("epochs") == of_b.get("epochs")
        assert of_a.get("best_epoch") == of_b.get("best_epoch")
    first, second = (from_safetensors(late / f"{epoch}.safetensors")[0] for epoch in (1, 2))
    assert not torch.equal(*(x["networks.net.classifier.weight"] for x in (first, second)))


def test_what_is_pending_at_ctrl_c_is_written(tmp_path, tiny_source, tiny_settings, monkeypatch):
    train_epoch, add_metrics = Trainer.train_epoch, RunFolder.add_metrics

    def interrupted(trainer, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        return train_epoch(trainer, epoch)

    def slow(folder, line):
        time.sleep(0.3)
        add_metrics(folder, line)

    monkeypatch.setattr(Trainer, "train_epoch", interrupted)
    monkeypatch.setattr(RunFolder, "add_metrics", slow)
    with pytest.raises(KeyboardInterrupt):
        pl.train(tiny_source, out=tmp_path / "run", quiet=True, **tiny_settings)
    folder = RunFolder(tmp_path / "run")
    assert from_safetensors(folder.checkpoint)[1]["epochs"] == 1
    assert len(folder.metrics()) == 1


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_full_disk_ends_the_run_and_it_can_be_resumed(
    tmp_path, tiny_source, tiny_settings, monkeypatch, epoch
):
    save, started = checkpoint.save, []

    def full(path, tensors, record):
        if record["epochs"] == epoch:
            fail()
        save(path, tensors, record)

    train_epoch = Trainer.train_epoch

    def train(trainer, epoch):
        started.append(epoch + 1)
        return train_epoch(trainer, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        patch.setattr(Trainer, "train_epoch", train)
        with pytest.raises(TrainingError, match=r"cannot be written \(No space left on") as error:
            pl.train(tiny_source, out=tmp_path / "run", quiet=True, **tiny_settings)
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, OSError)
    assert started == list(range(1, min(epoch + 1, 3) + 1))  # at the next save, or at the end
    folder = RunFolder(tmp_path / "run")
    assert len(folder.metrics()) == epoch
    assert not folder.finished
    run = pl.train(tiny_source, out=tmp_path / "run", resume=True, quiet=True, **tiny_settings)
    assert run.metrics["epoch"].tolist() == [1, 2, 3]


def test_a_folder_that_was_removed(tmp_path, tiny_source, tiny_settings, monkeypatch):
    train_epoch = Trainer.train_epoch

    def remove(trainer, epoch):
        shutil.rmtree(tmp_path / "run")
        return train_epoch(trainer, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", remove)
    with pytest.raises(TrainingError, match=r"run: cannot be written \(No such file"):
        pl.train(tiny_source, out=tmp_path / "run", quiet=True, **(tiny_settings | {"epochs": 1}))


def test_a_disk_that_is_really_full_is_one_line_with_exit_code_1(commands, dataset, tmp_path):
    """The system refuses: no file may become larger than some bytes."""
    pytest.importorskip("resource")
    limit = 100_000  # above the metrics, below the weights
    command = ("train", dataset, "--out", tmp_path / "run", "--quiet", *FLAGS)
    code, output = commands.run(*command, most_bytes=limit)
    assert code == 1
    assert len(output.splitlines()) == 1
    assert "run: cannot be written (File too large)" in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1]
