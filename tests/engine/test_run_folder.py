"""Run folders that are loaded: finished, damaged, and of version 0.1."""

import json

import numpy as np
import pandas as pd
import pytest

import pseudoloss as pl
from conftest import make_images, make_source
from pseudoloss.config import PLSSettings
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
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
    config = json.loads((finished / "config.json").read_text())
    config["pseudoloss"], config["settings"] = "0.1.0", OLD_SETTINGS | changes
    (finished / "config.json").write_text(json.dumps(config))

    table = pd.read_csv(finished / "labels.csv", dtype=str, keep_default_na=False)
    table["action"] = table["action"].replace("review", "look")
    table.to_csv(finished / "labels.csv", index=False)

    summary = json.loads((finished / "summary.json").read_text())
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
