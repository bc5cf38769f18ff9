"""Loggers, each with its real library, offline. What they hold must be what metrics.jsonl holds."""

import json
import struct
import sys
import threading
import time
from importlib.util import find_spec

import pytest

import pseudoloss as pl
from conftest import TINY, make_source, metrics_of
from pseudoloss import distributed
from pseudoloss.cli import main
from pseudoloss.engine import loggers
from pseudoloss.engine.loggers import LIBRARIES, Loggers, Opened, Start, flat, read_names
from pseudoloss.errors import InputError

NOISY = TINY | {"corrupt": "symmetric-exact:0.25"}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]


@pytest.fixture(scope="module", params=list(LIBRARIES))
def logged(request, tmp_path_factory):
    """A run that was stopped twice and resumed, with one logger; the logger's name and the run."""
    if find_spec(LIBRARIES[request.param]) is None:
        pytest.skip(f"needs {request.param}")
    root = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", (root / "mlruns").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("WANDB_MODE", "offline")
        while not (root / "run" / "summary.json").exists():
            settings = NOISY | {"out": root / "run", "minutes": 1e-9, "resume": True}
            pl.train(make_source(), quiet=True, log=request.param, device="cpu", **settings)
    return request.param, root / "run"


def read_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "loggers" / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


def read_mlflow(run):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run.parent / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'pseudoloss'")
    (found,) = client.search_runs([experiment.experiment_id])  # one run, although it was resumed
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["network"] == "small-cnn"
    run_id = found.info.run_id
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in found.data.metrics
    }


def wandb_records(path):
    """The records in a file of wandb: a log as LevelDB writes it, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        if kind in (1, 4):  # the whole record, or its last piece
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def read_wandb(run):
    found, ids = {}, set()
    for path in sorted(
        run.glob("loggers/wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime
    ):
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config = {item.key: item.value_json for item in record.run.config.update}
                assert config["network"] == '"small-cnn"'
            elif kind == "history":
                values = {
                    (i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item
                }
                for name, value in values.items():
                    found.setdefault(name, []).append((int(values["_step"]), json.loads(value)))
            elif kind == "summary":
                for item in record.summary.update:
                    name = item.key or "/".join(item.nested_key)
                    if name.startswith("final/"):
                        found[name] = [(3, json.loads(item.value_json))]
    assert len(ids) == 1  # one run, although it was resumed
    return {name: values for name, values in found.items() if not name.startswith("_")}


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}


def test_every_epoch_and_the_summary_are_logged_once(logged):
    name, run = logged
    found = READ[name](run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        for key, value in (("loss", line["loss"]), ("detection/auc", line["detection"]["auc"])):
            (logged_value,) = [x for step, x in found[key] if step == line["epoch"]]
            assert logged_value == pytest.approx(value, rel=1e-6)
    assert [step for step, _ in found["seconds/train"]] == [1, 2, 3]
    summary = json.loads((run / "summary.json").read_text())
    ((step, accuracy),) = found["final/accuracy/last"]
    assert (step, accuracy) == (3, pytest.approx(summary["accuracy"]["last"]))


def test_logging_changes_no_result(logged, tmp_path):
    _, run = logged
    pl.train(make_source(), out=tmp_path / "run", quiet=True, device="cpu", **NOISY)
    assert metrics_of(run) == metrics_of(tmp_path / "run")


def test_an_epoch_that_is_repeated_after_a_kill_is_not_logged_twice(logged):
    """What a kill leaves behind: the logger has more epochs than the checkpoint."""
    name, run = logged
    if name == "mlflow":
        return  # its store has been closed with the environment
    before = READ[name](run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        with Loggers([name], Start(run / "loggers", {"network": "small-cnn"})) as log:
            for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
                if line["epoch"] > 1:
                    log.epoch(line)
            log.finish(json.loads((run / "summary.json").read_text()))
    assert READ[name](run) == before


# ------------------------------------------------------------------------------------ failures


def test_a_library_that_is_missing_is_one_line_before_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    out = tmp_path / "run"
    assert main(["train", "digits", "--out", str(out), "--log", "tensorboard,wandb"]) == 2
    error = capsys.readouterr().err
    assert "--log tensorboard: needs tensorboard: pip install 'pseudoloss[tensorboard]'" in error
    assert (error.count("\n"), out.exists()) == (1, False)


def test_names():
    with pytest.raises(InputError, match="--log tensorbord: no such logger; did you mean tensorb"):
        read_names("wandb,tensorbord")
    assert read_names("") == read_names(()) == ()
    with pytest.raises(InputError, match="--log tensorboard: needs --out"):
        pl.train(make_source(), log="tensorboard")


@pytest.fixture
def fake(monkeypatch):
    """Replaces TensorBoard by calls of this test; returns what was logged."""
    logged = []

    def install(opening=lambda: None, log=lambda number: None, end=lambda: None):
        def open_fake(start):
            opening()
            return Opened(
                lambda number, values: (log(number), logged.append(number)), lambda summary: end()
            )

        monkeypatch.setitem(loggers.OPEN, "tensorboard", open_fake)
        monkeypatch.setattr(loggers, "find_spec", lambda name: True)
        return logged

    return install


def fail(*arguments):
    raise ConnectionError("no network\nlong details")


@pytest.mark.parametrize("where", ["opening", "log", "end"])
def test_a_logger_that_fails_is_one_notice_and_training_ends_as_usual(
    tmp_path, dataset, fake, capsys, where
):
    fake(**{where: fail})
    out = tmp_path / "run"
    assert main(["train", str(dataset), "--out", str(out), "--log=tensorboard", *FLAGS]) == 0
    text = capsys.readouterr().out
    failed = "--log tensorboard: logging failed (no network) and ends here"
    assert text.count(failed) == 1
    assert (out / "summary.json").exists()
    assert len(metrics_of(out)) == 3


def test_a_logger_that_hangs_does_not_hold_up_training(
    tmp_path, dataset, fake, monkeypatch, capsys
):
    forever = threading.Event()
    fake(log=lambda number: forever.wait())
    monkeypatch.setattr(loggers, "END_SECONDS", 0.1)
    arguments = ["train", str(dataset), "--out", str(tmp_path / "run"), *FLAGS]
    assert main([*arguments, "--log=tensorboard"]) == 0
    assert "takes longer than 0.1 seconds to send the rest" in capsys.readouterr().out
    forever.set()


def test_an_interrupted_run_waits_for_loggers_a_moment_only(tmp_path, fake, monkeypatch):
    forever = threading.Event()
    fake(end=lambda: forever.wait())
    monkeypatch.setattr(loggers, "KILL_SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Loggers(["tensorboard"], Start(tmp_path, {})):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 5
    forever.set()


def test_only_the_main_process_logs(tmp_path, fake, monkeypatch):
    logged = fake()
    for rank, expected in (("1", []), ("0", [1])):
        for name in distributed.VARIABLES:
            monkeypatch.setenv(name, "2")
        monkeypatch.setenv("RANK", rank)
        with Loggers(["tensorboard"], Start(tmp_path, {})) as log:
            log.epoch({"epoch": 1, "loss": 2.0})
        assert logged == expected


def test_a_run_without_loggers_loads_no_library(tmp_path):
    before = set(sys.modules)
    pl.train(make_source(), out=tmp_path / "run", quiet=True, device="cpu", **TINY)
    assert not {"wandb", "mlflow", "tensorboard"} & (set(sys.modules) - before)
    assert not (tmp_path / "run" / "loggers").exists()


def test_numbers_of_inner_groups_have_a_path():
    line = {"epoch": 3, "loss": float("nan"), "ok": True, "a": {"b": 1, "c": {"d": 2.5}, "e": None}}
    assert flat(line) == {"epoch": 3, "a/b": 1, "a/c/d": 2.5}
