"""Whole runs of every method: baselines, ELR and Co-teaching beside PLS."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import pseudoloss as pl
from conftest import (
    TINY,
    assert_same_run,
    make_images,
    metrics_of,
    save_images,
    train_epoch_by_epoch,
)
from pseudoloss.config import METHOD_SETTINGS, DetectionSettings
from pseudoloss.files import from_safetensors
from pseudoloss.inference.ensemble import Ensemble
from pseudoloss.labels.decisions import MIN_TRUST
from pseudoloss.runs import open_model

RIVALS = {
    "elr": {"elr_lambda": 3, "elr_beta": 0.7},
    "elr-plus": {},
    "co-teaching": {"forget_rate": 0.4, "forget_epochs": 2, "ensemble": True},
    "divide-mix": {},
    "dynamic-bootstrapping": {"bootstrapping": "soft-to-hard", "guided_epochs": 1},
    "dsos": {"correct_above": 0.5},
    "rrl": {"projection": 16, "neighbours": 20, "keep_threshold": 0.4, "prototype_ramp": 2},
    "evidential-mix": {"classifier_warmup": 1},
    "jo-src": {"label_smoothing": 0.3, "last_clean_threshold": 0.8},
}


@pytest.mark.parametrize("method", ["ce", "mixup"])
def test_baselines_have_a_label_table_too(tiny_source, tiny_settings, method):
    run = pl.train(tiny_source, method=method, quiet=True, **tiny_settings)
    assert run.summary["method"] == method
    assert run.summary["accuracy"]["last"] is not None
    assert run.metrics["phase"].tolist() == ["warm-up", method, method]
    assert run.labels["trust"].between(0, 1).all()
    assert (run.labels["candidate_label"] != run.labels["given_label"]).all()
    assert run.summary["pseudo_labels"] == {"accuracy": None, "auc": None}


# ------------------------------------------------------------------------------------ on digits


def train_on_digits(tmp_path_factory, method, epochs, **changes):
    """A short run on digits with 40% wrong labels."""
    settings = {"preset": "digits-id40", "epochs": epochs, "warmup": 1, "batch_size": 64, "lr": 0.1}
    settings |= {"method": method, "device": "cpu"} | RIVALS[method] | changes
    return pl.train("digits", tmp_path_factory.mktemp(method) / "run", quiet=True, **settings)


@pytest.fixture(scope="module")
def elr_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "elr", 5)


@pytest.fixture(scope="module")
def elr_plus_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "elr-plus", 4)


@pytest.fixture(scope="module")
def co_teaching_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "co-teaching", 4)


@pytest.fixture(scope="module")
def divide_mix_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "divide-mix", 3)


@pytest.fixture(scope="module")
def bootstrapping_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "dynamic-bootstrapping", 8)


@pytest.fixture(scope="module")
def dsos_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "dsos", 10)


@pytest.fixture(scope="module")
def rrl_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "rrl", 5, warmup=2)


@pytest.fixture(scope="module")
def evidential_mix_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "evidential-mix", 6, warmup=3, batch_size=32)


@pytest.fixture(scope="module")
def jo_src_run(tmp_path_factory):
    return train_on_digits(tmp_path_factory, "jo-src", 5)


@pytest.fixture(
    params=[
        *("elr_run", "elr_plus_run", "co_teaching_run", "divide_mix_run", "bootstrapping_run"),
        *("dsos_run", "rrl_run", "evidential_mix_run", "jo_src_run"),
    ]
)
def on_digits(request):
    return request.getfixturevalue(request.param)


def test_rivals_learn_despite_the_noise(on_digits):
    summary = on_digits.summary
    assert summary["accuracy"]["last"] > 90
    assert summary["detection"]["auc"] > 0.97
    assert summary["detection"]["recall"] > 0.85
    assert summary["pseudo_labels"]["accuracy"] > 85
    if summary["method"] == "evidential-mix":  # doubtful images count as out-of-distribution
        assert summary["detection"]["precision"] > 0.65
    else:
        assert summary["detection"]["precision"] > 0.9
        assert summary["pseudo_labels"]["auc"] > 0.75


def test_the_label_table_of_rivals_has_trust_and_suggestions(on_digits):
    table = pd.read_csv(on_digits.path / "labels.csv", dtype={"suggested_label": str})
    assert table["trust"].between(0, 1).all()
    assert table["trust"].nunique() > 100
    relabel = table[table["action"] == "relabel"]
    assert len(relabel) > 100
    assert (relabel["trust"] >= MIN_TRUST).all()
    assert (relabel["trust"] > 1 - relabel["p_noisy"]).all()
    assert (relabel["suggested_label"] == relabel["true_label"].astype(str)).mean() > 0.9
    review = table[table["action"] == "review"]
    assert review["suggested_label"].isna().all()
    assert ((review["trust"] < MIN_TRUST) | (review["trust"] <= 1 - review["p_noisy"])).all()
    keep = table[table["action"] == "keep"]
    assert (keep["suggested_label"] == keep["given_label"].astype(str)).all()


def test_a_finished_run_of_a_rival_can_be_loaded(on_digits):
    loaded = pl.load(on_digits.path)
    assert loaded.settings == on_digits.settings
    pd.testing.assert_frame_equal(loaded.labels, on_digits.labels, check_dtype=False, rtol=1e-4)


# -------------------------------------------------------------------------------------- resume


MORE = {
    "pls": {"initial_trust": True, "contrast_mix": "separate"},
    "pls-plus": {
        "noise_metric": "loss",
        "strong_loss": 1.0,
        "strong_loss_ramp": 2,
        "strong_view": "trivial",
        "strong_cutout": 0.5,
        "mixup_alpha": 4.0,
        "cutmix": 0.5,
        "first_epoch_trust": False,
        "debias": 1.0,
        "debias_momentum": 0.9,
        "ema_pseudo_labels": True,
        "ema_scoring": True,
        "ema_decay": 0.9,
        "loss_momentum": 0.8,
        "warmup_trend": True,
        "mode_gate": 0.1,
    },
    "elr": RIVALS["elr"],
    "co-teaching": RIVALS["co-teaching"],
    "divide-mix": {"noise_metric": "capped-loss", "loss_epochs": 2},
    "evidential-mix": {"noise_metric": "loss", "classifier_warmup": 1, "as_released": True},
    "dynamic-bootstrapping": RIVALS["dynamic-bootstrapping"],
    "dsos": {"as_released": True, "warmup_mixup": False, "main_batch_size": 16},
    "rrl": RIVALS["rrl"],
    "jo-src": {"label_smoothing": 0.2, "ema_decay": 0.8},
}
VOTE = {
    "method": "pls-plus",
    "selection": "neighbours",
    "neighbours": 9,
    "relabel": 0.5,
    "ema_prediction": True,
    "ema_decay": 0.9,
    "strong_loss": 1.0,
    "strong_view": "rand",
}


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_every_method_resumes_bit_for_bit(tmp_path, tiny_source, method):
    """Stopped after every epoch, with images in weak views so that no random number is missed."""
    settings = TINY | {"method": method, "epochs": 4, "warmup": 2}
    if issubclass(METHOD_SETTINGS[method], DetectionSettings):
        settings |= {"noise_metric": "kl"}
    settings |= {"corrupt": "symmetric-exact:0.25", "device": "cpu"} | MORE.get(method, {})
    pl.train(tiny_source, tmp_path / "whole", quiet=True, **settings)
    assert train_epoch_by_epoch(tiny_source, tmp_path / "stopped", **settings) == 4
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_vote_of_neighbours_resumes_bit_for_bit(tmp_path, tiny_source):
    settings = TINY | VOTE | {"corrupt": "symmetric-exact:0.25", "device": "cpu"}
    pl.train(tiny_source, tmp_path / "whole", quiet=True, **settings)
    assert train_epoch_by_epoch(tiny_source, tmp_path / "stopped", **settings) == 3
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_pls_plus_without_switches_is_pls(tmp_path, tiny_source):
    """Bit for bit: weights, label table, metrics, and all that PLS itself keeps."""
    settings = TINY | {"epochs": 4, "warmup": 2, "corrupt": "symmetric-exact:0.25", "device": "cpu"}
    runs = {
        method: pl.train(tiny_source, tmp_path / method, method=method, quiet=True, **settings)
        for method in ("pls", "pls-plus")
    }
    pls, plus = (run.path for run in runs.values())
    for name in ("model.safetensors", "best.safetensors"):
        ours, theirs = (from_safetensors(path / name)[0] for path in (plus, pls))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    assert (pls / "labels.csv").read_bytes() == (plus / "labels.csv").read_bytes()
    lines = metrics_of(plus)
    assert lines[1].pop("method").keys() == {"separation", "right_on_wrong"}
    assert [{k: v for k, v in line.items() if k != "method"} for line in lines] == metrics_of(pls)
    kept = "checkpoint/last.safetensors"
    ours, theirs = (from_safetensors(path / kept)[0] for path in (plus, pls))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_averaged_weights_follow_and_both_accuracies_are_measured(tmp_path, tiny_source):
    """Predicting with averaged weights changes nothing about training."""
    settings = TINY | {"method": "pls-plus", "ema_decay": 0.9, "device": "cpu", "quiet": True}
    runs = {}
    for on in ("ema_scoring", "ema_prediction"):
        runs[on] = pl.train(tiny_source, tmp_path / on, **settings, **{on: True})
    plain = pl.train(tiny_source, tmp_path / "plain", **(settings | {"ema_decay": 0.0}))
    predicted = metrics_of(runs["ema_prediction"].path)
    accuracies = [line["accuracy"] for line in metrics_of(plain.path)]
    assert [line["other_accuracies"] for line in predicted] == [{"net": a} for a in accuracies]
    assert all(
        line["other_accuracies"].keys() == {"ema"} for line in metrics_of(tmp_path / "ema_scoring")
    )
    tensors = {
        name: from_safetensors(tmp_path / name / "checkpoint/last.safetensors")[0]
        for name in ("plain", "ema_prediction", "ema_scoring")
    }
    name = "networks.net.classifier.weight"
    assert torch.equal(tensors["plain"][name], tensors["ema_prediction"][name])
    assert not torch.equal(tensors["plain"][name], tensors["ema_scoring"][name])
    averaged = tensors["ema_prediction"]["networks.ema.classifier.weight"]
    assert not torch.equal(averaged, tensors["ema_prediction"][name])


def test_a_method_keeps_its_state_in_the_checkpoint(tmp_path, tiny_source):
    wanted = {
        "divide-mix": {"state.w_2N", "state.keeps_2N", "state.recent_2EN", "state.scored"},
        "evidential-mix": {"state.p_N3", "state.clean_N", "state.closed_N"},
        "elr": {"state.target_NC"},
        "elr-plus": {"state.target_2NC", "state.seen_2"},
        "dynamic-bootstrapping": {"state.high_T", "state.temperature", "state.unfitted"},
        "co-teaching": {"state.kept", "state.confidence_N"},
    }
    for method, names in wanted.items():
        out = tmp_path / method
        pl.train(tiny_source, out, method=method, quiet=True, **TINY)
        tensors, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
        assert names <= tensors.keys()
    roles = {name.split(".")[1] for name in tensors if name.startswith(("networks", "momentum"))}
    assert roles == {"first", "second"}


def test_a_decoder_is_in_the_checkpoint_and_not_in_the_model(tmp_path, tiny_source):
    """Nor is it needed for the model of a run that is not finished."""
    out, settings = tmp_path / "run", TINY | {"method": "rrl", "device": "cpu"} | RIVALS["rrl"]
    unfinished = pl.train(tiny_source, out, quiet=True, minutes=1e-9, **settings)
    assert not unfinished.finished
    tensors, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
    names = {"networks.net.decoder.weight", "momentum.net.decoder.weight"}
    assert names | {"state.soft_NC", "state.prototype_CD", "state.used_N"} <= tensors.keys()
    assert tensors["momentum.net.decoder.weight"].abs().sum() > 0
    images, _ = make_images(12, size=8, seed=4)
    so_far = open_model(out, notice=lambda text: None)
    assert so_far.predict_proba(images).shape == (12, 4)
    run = pl.train(tiny_source, out, quiet=True, resume=True)
    for file in ("model", "best"):
        weights, _ = from_safetensors(out / f"{file}.safetensors")
        assert not [name for name in weights if "decoder" in name]
    loaded = torch.from_numpy(open_model(out).predict_proba(images))
    torch.testing.assert_close(loaded, torch.from_numpy(run.model.predict_proba(images)))


# ------------------------------------------------------------------------------- held-out images


@pytest.mark.parametrize("method", RIVALS)
def test_held_out_images_of_a_folder_have_rows(tmp_path, method):
    save_images(tmp_path / "photos", *make_images(64, channels=3))
    settings = TINY | {"method": method, "hold_out": 0.25, "image_size": 8} | RIVALS[method]
    run = pl.train(tmp_path / "photos", tmp_path / "run", quiet=True, **settings)
    assert run.labels["part"].value_counts().to_dict() == {"train": 48, "held-out": 16}
    held_out = run.labels[run.labels["part"] == "held-out"]
    assert held_out["trust"].between(0, 1).all()
    assert held_out["trust"].nunique() > 8
    assert held_out["label_score"].between(0, 1).all()
    assert held_out["p_noisy"].between(0, 1).all()
    assert len(pl.load(tmp_path / "run").labels) == 64


@pytest.mark.parametrize("method", RIVALS)
def test_the_prediction_for_a_held_out_image_is_that_of_the_model(method):
    settings = TINY | {"method": method, "hold_out": 0.25} | RIVALS[method]
    run = pl.train(make_images(64), quiet=True, **settings)
    images, _ = make_images(64)
    held_out = run.labels[run.labels["part"] == "held-out"]
    p = run.model.predict_proba(images[held_out["index"]])
    assert (held_out["predicted_label"] == [str(c) for c in p.argmax(1)]).all()


# ----------------------------------------------------------------------------------- ensembles


def test_an_ensemble_is_written_and_loaded_and_predicts_the_mean_of_the_logits(co_teaching_run):
    run = co_teaching_run
    images, _ = make_images(12, size=8, seed=4)
    shown = run.model.views.plain(torch.from_numpy(images).permute(0, 3, 1, 2))
    loaded, best = pl.load(run.path).model, open_model(run.path, best=True)
    for model in (run.model, loaded, best):
        assert model.description.members == 2
        assert isinstance(model.network, Ensemble)
        first, second = model.network.networks
        assert not torch.equal(first.classifier.weight, second.classifier.weight)
        with torch.no_grad(), model.network.frozen():
            logits, projection = model.network(shown)
            each = [member(shown) for member in (first, second)]
        mean = (each[0][0] + each[1][0]) / 2
        torch.testing.assert_close(logits, mean)
        torch.testing.assert_close(projection, each[0][1])
        p = torch.from_numpy(model.predict_proba(images))
        torch.testing.assert_close(p, F.softmax(mean.double(), dim=1), rtol=1e-5, atol=1e-6)
    wanted = torch.from_numpy(run.model.predict_proba(images))
    torch.testing.assert_close(torch.from_numpy(loaded.predict_proba(images)), wanted)


def test_without_ensemble_the_first_network_predicts(tmp_path, tiny_source):
    out = tmp_path / "run"
    run = pl.train(tiny_source, out, method="co-teaching", quiet=True, device="cpu", **TINY)
    assert run.model.description.members == 1
    tensors, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
    for name, tensor in run.model.network.state_dict().items():
        assert torch.equal(tensor, tensors[f"networks.first.{name}"])


def test_both_networks_of_co_teaching_train(tmp_path, tiny_source):
    out, settings = tmp_path / "run", TINY | {"method": "co-teaching", "device": "cpu"}
    pl.train(tiny_source, out, quiet=True, minutes=1e-9, **settings)
    before, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
    pl.train(tiny_source, out, quiet=True, resume=True)
    after, _ = from_safetensors(out / "checkpoint" / "last.safetensors")
    for role in ("first", "second"):
        name = f"networks.{role}.classifier.weight"
        assert not torch.equal(before[name], after[name])
