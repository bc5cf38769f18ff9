"""A signal during training: a complete checkpoint in the middle of an epoch, and the same bits
after it."""

import json
import math
import os
import random
import signal
import time
from contextlib import suppress

import numpy as np
import pytest
import torch

import pseudoloss as pl
from conftest import TINY, assert_same_run, make_source, metrics_of
from processes import FLAGS
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.engine import checkpoint, feed, loop, watch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.files import from_safetensors
from pseudoloss.interrupts import SIGNALS, Interrupted, deferred, raised
from pseudoloss.progress import SilentReporter
from pseudoloss.runs import RunFolder, open_model


@pytest.fixture
def signal_after(monkeypatch):
    """Sends this process a signal after some steps; a list that grows by one with each step."""

    def send(steps, number=signal.SIGTERM):
        taken = []

        def step(reporter):
            taken.append(1)
            if len(taken) == steps:
                signal.raise_signal(number)

        monkeypatch.setattr(SilentReporter, "step", step)
        return taken

    return send


def train_in_pieces(source, out, signal_after, steps, **settings):
    """A run that gets a signal after so many steps of every process; how often it was started."""
    for starts in range(1, 100):
        signal_after(steps)
        with suppress(Interrupted):
            pl.train(source, out=out, resume=True, quiet=True, **settings)
            return starts
    raise AssertionError("it never ends")


# ------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_every_method_resumes_in_the_middle_of_an_epoch(
    tmp_path, signal_after, monkeypatch, method
):
    """After every 3 steps: of most methods, after 3 steps of the first epoch, 2 of the second, 1 of
    the third and at its end. Random numbers come in blocks of 3 steps."""
    monkeypatch.setattr(feed, "BLOCK", 3)
    settings = TINY | {"method": method, "device": "cpu"}
    taken = signal_after(math.inf)
    pl.train(make_source(), out=tmp_path / "whole", quiet=True, **settings)
    starts = train_in_pieces(make_source(), tmp_path / "broken", signal_after, 3, **settings)
    assert starts == 1 + len(taken) // 3  # one more process for the end
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize(
    "more",
    [
        {"accumulate": 2},
        {"images": "host", "flip": True},
        {"checkpoint_every": 3},
        {"compare_metrics": True, "contrast_mix": "separate"},
    ],
    ids=str,
)
def test_other_settings_resume_in_the_middle_too(tmp_path, signal_after, more):
    settings = TINY | {"device": "cpu"} | more
    pl.train(make_source(), out=tmp_path / "whole", quiet=True, **settings)
    train_in_pieces(make_source(), tmp_path / "broken", signal_after, 3, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_random_numbers_inside_a_network_continue(tmp_path, signal_after, monkeypatch):
    """Dropout draws from torch's own generator."""
    build = Trainer._accelerate_networks

    def with_dropout(trainer):
        for network in trainer.networks.values():
            network.backbone.register_forward_hook(
                lambda module, _, out: torch.nn.functional.dropout(out, 0.3, module.training)
            )
        build(trainer)

    monkeypatch.setattr(Trainer, "_accelerate_networks", with_dropout)
    settings = TINY | {"method": "ce", "device": "cpu"}
    pl.train(make_source(), out=tmp_path / "whole", quiet=True, **settings)
    train_in_pieces(make_source(), tmp_path / "broken", signal_after, 3, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_signal_while_images_are_scored_ends_after_the_epoch(tmp_path, monkeypatch):
    score = Trainer.score

    def interrupted(trainer, epoch):
        if epoch == 1 and not trainer.inside:
            signal.raise_signal(signal.SIGINT)
        score(trainer, epoch)

    pl.train(make_source(), out=tmp_path / "whole", quiet=True, **TINY)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "score", interrupted)
        with pytest.raises(Interrupted):
            pl.train(make_source(), out=tmp_path / "broken", quiet=True, **TINY)
    record = from_safetensors(RunFolder(tmp_path / "broken").checkpoint)[1]
    assert (record["epochs"], record["inside"]) == (2, None)
    pl.train(make_source(), out=tmp_path / "broken", quiet=True, resume=True, **TINY)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_signal_while_results_are_written_comes_after_them(tmp_path, monkeypatch):
    """The run is finished then; but what would follow it is not started."""
    write = loop.write_checked

    def interrupted(path, value):
        signal.raise_signal(signal.SIGTERM)
        write(path, value)

    monkeypatch.setattr(loop, "write_checked", interrupted)
    with pytest.raises(Interrupted):
        pl.train(make_source(), out=tmp_path / "run", quiet=True, **TINY)
    assert pl.load(tmp_path / "run").finished


def test_long_epochs_have_checkpoints_inside(tmp_path, monkeypatch):
    """After every step here; the first epoch is not over when the process dies."""

    class Killed(BaseException):
        pass

    saved = []
    save = checkpoint.save

    def spy(path, tensors, record):
        saved.append((record["epochs"], record["inside"] and record["inside"]["done"]))
        save(path, tensors, record)

    def die(reporter):
        if len(saved) == 6:
            raise Killed

    pl.train(make_source(), out=tmp_path / "whole", quiet=True, **TINY)
    with monkeypatch.context() as patch:
        patch.setattr(watch, "CHECKPOINT_SECONDS", -1.0)
        patch.setattr(checkpoint, "save", spy)
        patch.setattr(SilentReporter, "step", die)
        with pytest.raises(Killed):
            pl.train(make_source(), out=tmp_path / "broken", quiet=True, **TINY)
    assert saved[:6] == [(0, 1), (0, 2), (0, 3), (0, 4), (1, None), (1, 1)]
    pl.train(make_source(), out=tmp_path / "broken", quiet=True, resume=True, **TINY)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


# ------------------------------------------------------------------------ what such a folder is


@pytest.fixture
def inside(tmp_path, signal_after):
    """A run that was interrupted in its second epoch."""
    signal_after(6)
    with pytest.raises(Interrupted):
        pl.train(make_source(), out=tmp_path / "run", quiet=True, **TINY)
    return tmp_path / "run"


def test_the_model_of_an_epoch_that_is_not_over(inside):
    said = []
    model = open_model(inside, notice=said.append)
    assert len(model.classes) == 4
    assert said == [
        f"{inside}: the run is not finished; this is the model of the middle of epoch 2 of 3"
    ]


def test_times_of_all_processes_are_added(inside):
    record = from_safetensors(RunFolder(inside).checkpoint)[1]
    assert record["inside"]["done"] == 2
    assert 0 < record["inside"]["seconds"] <= record["seconds"]
    run = pl.train(make_source(), out=inside, resume=True, quiet=True)
    assert run.metrics["seconds"].iloc[1]["train"] > record["inside"]["seconds"]


def test_an_epoch_can_be_continued_with_another_generator(inside):
    """On another kind of device, whose generator has another state, the order of the images stays
    and other random numbers follow."""
    path = RunFolder(inside).checkpoint
    tensors, record = from_safetensors(path)
    tensors["inside.random"] = torch.zeros(16, dtype=torch.uint8)  # like that of a GPU
    checkpoint.save(path, tensors, record)
    assert pl.train(make_source(), out=inside, resume=True, quiet=True).finished


def test_a_run_without_a_folder_stops_at_once(signal_after):
    signal_after(1, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as error:
        pl.train(make_source(), quiet=True, **TINY)
    assert type(error.value) is KeyboardInterrupt


# ------------------------------------------------------------------------------------- handlers


def test_handlers_are_put_back_and_those_of_others_stay():
    before = [signal.getsignal(number) for number in SIGNALS]
    mine = []
    signal.signal(signal.SIGUSR1, lambda *_: mine.append(1))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with deferred(True) as stop:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGHUP)
            assert not stop
            assert mine == [1]
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    with pytest.raises(Interrupted) as error, raised():
        signal.raise_signal(signal.SIGUSR2)
    assert error.value.number == signal.SIGUSR2
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_second_signal_is_not_deferred(capfd):
    """In a program that called us it raises; a command ends (below, in a real process)."""
    with deferred(False) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        stop.number = None  # otherwise it is raised at the end
    assert "SIGINT: finishing the step" in capfd.readouterr().err


# ------------------------------------------------------------------------------- real processes


def wait_until(condition, process):
    while not condition():
        assert process.wait(block=False) is None, process.output
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGUSR1", 138)]
)
def test_a_signal_prints_how_to_resume(commands, dataset, tmp_path, name, code):
    out = tmp_path / "my run"
    process = commands.start("train", dataset, "--out", out, *FLAGS, "--epochs=100000")
    wait_until(RunFolder(out).checkpoint.exists, process)
    os.kill(process.pid, getattr(signal, name))
    assert process.wait() == code
    lines = [line for line in process.output.splitlines() if line]
    assert (
        lines[-1]
        == f"pseudoloss: interrupted; resume with: pseudoloss train --out '{out}' --resume"
    )
    assert "Traceback" not in process.output
    assert from_safetensors(RunFolder(out).checkpoint)[1]["epochs"] == len(metrics_of(out))


def test_two_signals_end_a_command_at_once(commands, dataset, tmp_path):
    out = tmp_path / "run"
    process = commands.start("train", dataset, "--out", out, *FLAGS, "--epochs=100000")
    wait_until(RunFolder(out).checkpoint.exists, process)
    os.kill(process.pid, signal.SIGSTOP)  # so that both are there when it goes on
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait() in (130, 143)
    assert process.output.rstrip().endswith("stopped at once; the last checkpoint is intact")
    assert "Traceback" not in process.output
    assert from_safetensors(RunFolder(out).checkpoint)[1]["epochs"] >= 1


def test_random_kills_and_signals_end_with_the_same_bits(commands, dataset, whole_run, tmp_path):
    """SIGKILL and SIGTERM in turn, at random moments; benchmarks/kills.py does many more."""
    out = tmp_path / "killed"
    command = ("train", dataset, "--out", out, "--resume", *FLAGS)
    seconds, seed = pl.load(whole_run).summary["seconds"], random.randrange(2**32)
    moments = random.Random(seed)
    for attempt in range(6):
        process = commands.start(*command)
        time.sleep(moments.uniform(0.05, 0.6) * seconds)
        kill = signal.SIGTERM if attempt % 2 else signal.SIGKILL
        os.kill(process.pid, kill)
        assert process.wait() in (0, -signal.SIGKILL, 143), (seed, process.output)
    code, output = commands.run(*command)
    assert code == 0, (seed, output)
    assert_same_run(whole_run, out)


def test_other_commands_say_what_to_do(commands, dataset, tmp_path):
    """Also while they start: torch is loaded, files are read."""
    for arguments, text in (
        (("audit", dataset, "--out", tmp_path / "a"), "the same command continues"),
        (("demo", "--out", tmp_path / "demo"), "pseudoloss demo --out"),
    ):
        process = commands.start(*arguments)
        wait_until(lambda process=process: process.log.exists() and process.output, process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 143
        last = process.output.splitlines()[-1]
        assert last.startswith("pseudoloss: interrupted; ")
        assert text in last
        assert "Traceback" not in process.output


def test_a_moved_run_resumes(inside, tmp_path):
    """Nothing in a folder names its place."""
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    inside.rename(moved)
    run = pl.train(make_source(), out=moved, resume=True, quiet=True)
    assert run.finished
    whole = pl.train(make_source(), out=tmp_path / "whole", quiet=True, **TINY)
    assert np.array_equal(run.labels["p_noisy"], whole.labels["p_noisy"])
    assert json.loads((moved / "config.json").read_text())["source"] == "arrays"
