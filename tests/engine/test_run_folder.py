"""Run folders that are loaded: finished, damaged, and of version 0.1."""

import json

import numpy as np
import pandas as pd
import pytest

import pseudoloss as pl
from conftest import make_images, make_source
from pseudoloss import runs
from pseudoloss.config import PLSSettings
from pseudoloss.engine import loop
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, read_checked, write_safetensors
from pseudoloss.labels.table import read_labels
from pseudoloss.runs import RunFolder, open_model


def test_a_loaded_run_predicts_as_it_did(tiny_run):
    loaded = pl.load(tiny_run.path)
    images, _ = make_images(20, seed=5)
    np.testing.assert_allclose(
        loaded.model.predict_proba(images), tiny_run.model.predict_proba(images), atol=1e-6
    )
    assert loaded.model.predict(images).tolist() == tiny_run.model.predict(images).tolist()
    assert loaded.settings == tiny_run.settings
    assert loaded.finished
    pd.testing.assert_frame_equal(loaded.labels, tiny_run.labels, check_dtype=False, rtol=1e-4)
    assert loaded.metrics["epoch"].tolist() == [1, 2, 3]
    for shape in ((2, 8, 8, 3), (2, 16, 16), (2, 8, 9)):
        with pytest.raises(InputError, match="was trained on 1 channels, 8×8 pixels"):
            loaded.model.predict(np.zeros(shape, np.uint8))


def test_a_damaged_run_is_refused(finished):
    labels = (finished / "labels.csv").read_text()
    (finished / "labels.csv").write_text("\n".join(labels.splitlines()[:30]) + "\n")
    with pytest.raises(InputError, match=r"damaged \(labels.csv has 29 rows, not 64\)"):
        pl.load(finished)
    (finished / "labels.csv").unlink()
    with pytest.raises(InputError, match="damaged"):
        pl.load(finished)
    (finished / "labels.csv").write_text(labels)
    assert pl.load(finished).finished
    (finished / "model.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match=r"model.safetensors: not a model of pseudoloss"):
        pl.load(finished)
    (finished / "summary.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        pl.load(finished)


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"run 5: "):
        pl.load(5)
    with pytest.raises(InputError, match="not a run folder"):
        pl.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json: not the config.json of a run"):
        pl.load(tmp_path)


def test_an_unfinished_run_cannot_be_loaded(stopped):
    with pytest.raises(InputError, match="is not finished"):
        pl.load(stopped)


# -------------------------------------------------------------------------------- unfinished


def test_an_unfinished_run_has_a_label_table_of_a_known_epoch(stopped):
    folder = RunFolder(stopped)
    assert folder.labels_epoch == 1
    record = json.loads(folder.labels_record.read_text())
    assert (record["epoch"], record["epochs"], record["rows"]) == (1, 3, 64)
    assert sum(record["actions"].values()) == 64
    assert 0 <= record["estimated_noise"]["rate"] <= 1
    assert len(read_labels(stopped)) == 64


def test_the_epoch_of_the_table_of_a_finished_run(finished):
    assert RunFolder(finished).labels_epoch == 3
    assert not RunFolder(finished).labels_record.exists()
    (finished / "summary.json").unlink()
    assert RunFolder(finished).labels_epoch is None


def test_a_kill_while_the_table_is_written_leaves_no_wrong_epoch(stopped, monkeypatch):
    folder = RunFolder(stopped)
    table = read_labels(stopped)

    def crash(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "write_csv", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.write_table(table, {"epoch": 2})
    assert folder.labels_epoch is None


def test_tables_are_written_with_checkpoints(tmp_path, tiny_source, tiny_settings, monkeypatch):
    """With the first one, and then when it is time; the last one is that of the finished run."""
    written, pauses = [], iter([True, False, True])
    whole = RunFolder.write_table

    def spy(folder, table, record):
        epochs = from_safetensors(folder.checkpoint)[1]["epochs"]
        written.append((record["epoch"], epochs))
        whole(folder, table, record)

    monkeypatch.setattr(RunFolder, "write_table", spy)
    monkeypatch.setattr(loop.TableClock, "is_due", lambda clock: next(pauses))
    settings = tiny_settings | {"epochs": 8, "checkpoint_every": 2}
    pl.train(tiny_source, tmp_path / "run", quiet=True, **settings)
    assert written == [(2, 2), (6, 6)]
    assert RunFolder(tmp_path / "run").labels_epoch == 8


def test_tables_take_a_small_share_of_the_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    clock = loop.TableClock()
    assert clock.is_due()
    clock.written_at, clock.seconds = 100.0, 1.0
    for later, due in ((129, False), (131, True)):
        now[0] = later
        assert clock.is_due() == due
    clock.seconds = 10.0  # 5% of 200 seconds
    for later, due in ((131, False), (299, False), (301, True)):
        now[0] = later
        assert clock.is_due() == due


@pytest.mark.parametrize(
    "chosen", [{}, {"method": "co-teaching", "ensemble": True}, {"method": "elr"}], ids=str
)
def test_the_model_of_an_unfinished_run(tmp_path, tiny_source, tiny_settings, chosen):
    out, images = tmp_path / "run", make_images(20, seed=5)[0]
    run = pl.train(
        tiny_source, out, minutes=1e-9, quiet=True, device="cpu", **(tiny_settings | chosen)
    )
    said = []
    wanted = run.model.predict_proba(images)
    for best in (False, True):  # the first epoch is the best one so far
        found = open_model(out, best, notice=said.append).predict_proba(images)
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert said == [f"{out}: the run is not finished; this is the model of epoch 1 of 3"] * 2
    with pytest.warns(UserWarning, match="not finished"):
        open_model(out)


def test_an_unfinished_run_without_a_model(stopped, tmp_path, tiny_settings):
    tensors, record = from_safetensors(stopped / "checkpoint" / "last.safetensors")
    del record["model"]
    write_safetensors(stopped / "checkpoint" / "last.safetensors", tensors, record)
    with pytest.raises(InputError, match="its checkpoint is of an older version; continue it"):
        open_model(stopped)
    (stopped / "checkpoint" / "last.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match=r"last.safetensors: cannot be read"):
        open_model(stopped)
    (stopped / "checkpoint" / "last.safetensors").unlink()
    with pytest.raises(InputError, match="the run has no checkpoint yet"):
        open_model(stopped)
    images, labels = make_images(64)
    settings = tiny_settings | {"quiet": True, "minutes": 1e-9}
    pl.train((images, labels), tmp_path / "alone", hold_out=0, **settings)
    with pytest.raises(InputError, match=r"--best: .* has no test images"):
        open_model(tmp_path / "alone", best=True)


def test_labels_are_predicted_in_the_type_that_they_had(tmp_path, tiny_settings):
    images, labels = make_images(64)
    settings = tiny_settings | {"epochs": 1, "quiet": True}
    numbers, wanted = labels * 10, np.int64
    for given, kind in ((numbers, wanted), (labels > 1, np.bool_), (labels.astype(str), object)):
        out = tmp_path / str(kind)
        run = pl.train((images, given), out, **settings)
        for model in (run.model, pl.load(out).model):
            predicted = model.predict(images)
            assert predicted.dtype == kind
            assert set(predicted.tolist()) <= set(given.tolist())


# ------------------------------------------------------------------------------- of version 0.1

OLD_SETTINGS = {
    "method": "pls",
    "network": "small-cnn",
    "weights": None,
    "projection": 128,
    "epochs": 3,
    "warmup": 1,
    "batch_size": 16,
    "accumulate": 1,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.0005,
    "threshold": 0.95,
    "threshold_on": "noisy",
    "noise_metric": "loss",
    "gamma": 3.0,
    "guess_norm": "max",
    "guess_mode": "eval",
    "weighting": "together",
    "trust_metric": "pseudo-loss",
    "trust_threshold": 0.95,
    "mu": 0.2,
    "contrast_class": "mixed",
    "balance": 1.0,
    "balance_prior": "uniform",
    "correct": True,
    "contrast": True,
    "trust_in_classification": True,
    "trust_in_contrast": True,
    "mixup": True,
    "image_size": None,
    "pad": 1,
    "flip": True,
    "compare_metrics": False,
    "corrupt": "symmetric-exact:0.25",
    "pool": None,
    "seed": 1,
    "device": "auto",
    "precision": "auto",
    "images": "auto",
    "accelerate": "auto",
}


def make_old(finished, **changes):
    """Rewrite a run folder as version 0.1 would have written it."""
    config = read_checked(finished / "config.json")
    config["pseudoloss"], config["settings"] = "0.1.0", OLD_SETTINGS | changes
    (finished / "config.json").write_text(json.dumps(config))

    table = pd.read_csv(finished / "labels.csv", dtype=str, keep_default_na=False)
    table["action"] = table["action"].replace("review", "look")
    table.to_csv(finished / "labels.csv", index=False)

    summary = read_checked(finished / "summary.json")
    del summary["metrics_checksum"]
    summary["guesses"] = summary.pop("pseudo_labels")
    summary["actions"]["look"] = summary["actions"].pop("review")
    (finished / "summary.json").write_text(json.dumps(summary))

    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["guesses"] = line.pop("pseudo_labels")
        line["seconds"]["track"] = line["seconds"].pop("score")
        line["metrics"] = {"noise": {"loss": 0.5}, "guesses": {"entropy": 0.5}}
        line["bias"] = {"learnt": 0.25, "fitted": 0.5}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (finished / "metrics.jsonl").write_text(text)

    for name in ("model.safetensors", "best.safetensors"):
        tensors, description = from_safetensors(finished / name)
        del description["members"]
        write_safetensors(finished / name, tensors, description)
    return finished


def test_a_run_of_version_0_1_can_be_loaded(finished, tiny_run):
    run = pl.load(make_old(finished))
    assert run.finished
    assert run.settings.method_settings == PLSSettings(
        gamma=3, pseudo_label_norm="max", pseudo_label_mode="eval", weighting="interpolated"
    )
    assert run.settings.schedule == "cosine"
    assert run.labels["action"].tolist() == tiny_run.labels["action"].tolist()
    assert "look" not in set(run.labels["action"])
    assert run.summary["pseudo_labels"] == tiny_run.summary["pseudo_labels"]
    assert run.summary["actions"] == tiny_run.summary["actions"]
    assert run.metrics["pseudo_labels"].iloc[-1] == tiny_run.summary["pseudo_labels"]
    last = run.metrics.iloc[-1]
    assert set(last["seconds"]) == {"train", "score", "validate"}
    assert last["metrics"] == {"noise": {"loss": 0.5}, "pseudo_labels": {"entropy": 0.5}}
    assert last["bias"] == {"learned": 0.25, "fitted": 0.5}
    images, _ = make_images(20, seed=5)
    assert run.model.predict(images).tolist() == tiny_run.model.predict(images).tolist()
    assert open_model(finished, best=True).classes == tiny_run.model.classes


def test_a_class_may_have_a_name_that_was_renamed_elsewhere(finished):
    """Only keys are renamed, not the names of classes."""
    make_old(finished)
    summary = json.loads((finished / "summary.json").read_text())
    summary["estimated_noise"]["by_class"] = {"look": 0.5, "guesses": 0.25}
    (finished / "summary.json").write_text(json.dumps(summary))
    assert pl.load(finished).summary["estimated_noise"]["by_class"] == {
        "look": 0.5,
        "guesses": 0.25,
    }


def test_a_baseline_of_version_0_1_has_settings_that_it_did_not_use(finished):
    """They were recorded for every method."""
    run = pl.load(make_old(finished, method="ce"))
    assert run.settings.method == "ce"
    assert not hasattr(run.settings.method_settings, "gamma")


def test_an_unfinished_run_of_version_0_1_is_refused_in_one_line(finished):
    """Its checkpoint has other tensors."""
    make_old(finished, gamma=2.0, guess_norm="sum", guess_mode="train", weighting="apart")
    (finished / "summary.json").unlink()
    path = RunFolder(finished).checkpoint
    tensors, record = from_safetensors(path)
    old = {name.replace("networks.net.", "network."): value for name, value in tensors.items()}
    write_safetensors(path, old, record)
    with pytest.raises(
        InputError, match=r"last.safetensors: not a checkpoint of this run"
    ) as error:
        pl.train(make_source(), out=finished, resume=True, quiet=True)
    assert "\n" not in str(error.value)
