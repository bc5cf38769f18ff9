"""Whole runs, small: what is written, in which order things happen, what is noticed."""

import dataclasses
import gc
import itertools
import json
import math
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import pseudoloss as pl
from conftest import make_images
from pseudoloss.audit.labels import TRUTH
from pseudoloss.config import Settings
from pseudoloss.data import Data, arrays, corrupt
from pseudoloss.engine import trainer as trainer_module
from pseudoloss.nn.devices import choose_device, choose_precision, choose_size
from pseudoloss.engine.trainer import Trainer, learning_rate, stream_seed
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.progress import SilentReporter

# --------------------------------------------------------------------------------- the folder

ACCURACY = {"last", "best", "best_epoch", "on", "noisy_labels"}


def test_a_run_folder_holds_what_it_should(tmp_path, tiny_source, tiny_settings):
    out = tmp_path / "run"
    run = pl.train(
        tiny_source, out=out, corrupt="symmetric-exact:0.25", quiet=True, **tiny_settings
    )
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "summary.json", "labels.csv", "labels.parquet"),
        *("model.safetensors", "best.safetensors", "checkpoint", ".lock"),
    }
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads(json.dumps(run.summary))
    assert set(summary["accuracy"]) == ACCURACY
    recalls = {"recall", "recall_in", "recall_out"}
    assert set(summary["detection"]) == {"precision", "auc"} | recalls
    assert summary["noise"] == {"in": 0.25, "out": 0}
    assert set(summary["guesses"]) == {"accuracy", "auc"}
    assert (summary["epochs"], summary["images"], summary["classes"]) == (3, 64, 4)
    assert summary["noise_rate"] == 0.25
    assert summary["seconds"] > 0
    assert sum(summary["actions"].values()) == 64

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["phase"] for line in lines] == ["warm-up", "pls", "pls"]
    assert lines[-1]["accuracy"] == summary["accuracy"]["last"]
    assert max(line["accuracy"] for line in lines) == summary["accuracy"]["best"]

    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["epochs"] == 3
    assert config["data"]["noise_rate"] == 0.25
    table = pd.read_csv(out / "labels.csv")
    assert len(table) == 64
    assert table["index"].tolist() == list(range(64))


def test_a_run_can_be_loaded_and_predicts_as_it_did(tmp_path, tiny_source, tiny_settings):
    settings = tiny_settings | {
        "device": "cpu"
    }  # on a GPU it trains in bf16, and is loaded in float32
    run = pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
    loaded = pl.load(tmp_path / "run")
    images, _ = make_images(20, seed=5)
    np.testing.assert_allclose(
        loaded.model.predict_proba(images), run.model.predict_proba(images), atol=1e-6
    )
    assert loaded.model.predict(images).tolist() == run.model.predict(images).tolist()
    assert loaded.settings == run.settings
    assert loaded.finished
    pd.testing.assert_frame_equal(loaded.labels, run.labels, check_dtype=False, rtol=1e-4)
    assert loaded.metrics["epoch"].tolist() == [1, 2, 3]
    for shape in ((2, 8, 8, 3), (2, 16, 16), (2, 8, 9)):
        with pytest.raises(InputError, match="was trained on 1 channels, 8×8 pixels"):
            loaded.model.predict(np.zeros(shape, np.uint8))


def test_the_best_weights_are_those_of_the_best_epoch(tmp_path, tiny_source, tiny_settings):
    """The best epoch is the first that reached the best accuracy."""
    settings = tiny_settings | {"epochs": 6}
    run = pl.train(tiny_source, out=tmp_path / "run", quiet=True, **settings)
    best_epoch = run.summary["accuracy"]["best_epoch"]
    first = int(run.metrics["accuracy"].to_numpy().argmax()) + 1
    assert best_epoch == first
    best = load_file(tmp_path / "run" / "best.safetensors")
    last = load_file(tmp_path / "run" / "model.safetensors")
    same = all(torch.equal(best[name], last[name]) for name in best)
    assert same == (best_epoch == 6)
    kept = [p.name for p in (tmp_path / "run" / "checkpoint").iterdir()]
    assert sorted(kept) == sorted(["last.safetensors", f"best-{best_epoch}.safetensors"])


def test_everything_can_stay_in_memory(tiny_source, tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = pl.train(tiny_source, quiet=True, **tiny_settings)
    assert run.path is None
    assert len(run.labels) == 64
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["ce", "mixup"])
def test_baselines_go_through_the_same_loop(tiny_source, tiny_settings, method, tmp_path):
    run = pl.train(tiny_source, out=tmp_path / "run", method=method, quiet=True, **tiny_settings)
    assert run.summary["method"] == method
    assert run.summary["accuracy"]["last"] is not None
    assert run.metrics["phase"].tolist() == ["warm-up", method, method]
    assert run.labels["trust"].isna().all()
    assert set(run.labels["action"]) <= {"keep", "look"}
    assert run.summary["guesses"] == {"accuracy": None, "auc": None}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 19])
def test_grey_and_colour_of_any_size(channels, size, tiny_settings):
    source = make_images(channels=channels, size=size)
    run = pl.train(source, quiet=True, **tiny_settings)
    assert run.summary["accuracy"] == dict.fromkeys(ACCURACY)
    assert run.summary["noise_rate"] is None
    assert set(run.summary["detection"].values()) == {None}


def test_larger_images_are_cropped_to_image_size(tiny_settings):
    run = pl.train(make_images(size=16), image_size=8, quiet=True, **tiny_settings)
    assert run.model.views.size == (8, 8)
    assert len(run.model.predict(make_images(size=16)[0])) == 64
    with pytest.raises(InputError, match=r"--image-size 20 is larger than the images \(16×16"):
        pl.train(make_images(size=16), image_size=20, quiet=True, **tiny_settings)


def test_images_of_448_pixels(tiny_settings):
    """As the paper's web images: stored larger, seen at 448."""
    source = make_images(n=8, size=460, channels=3, classes=2)
    settings = tiny_settings | {"image_size": 448, "batch_size": 4, "epochs": 2}
    run = pl.train(source, quiet=True, **settings)
    assert run.metrics["loss"].map(math.isfinite).all()


SWITCHES = [
    {"correct": False},
    {"contrast": False},
    {"trust_in_classification": False},
    {"trust_in_contrast": False},
    {"balance": 0},
    {"mixup": False},
    {"threshold_on": "clean"},
    {"guess_norm": "max"},
    {"guess_mode": "eval"},
    {"weighting": "together"},
    {"weighting": "own"},
    {"contrast_class": "own"},
    {"balance_prior": "given"},
    {"precision": "bf16"},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_option_trains(tiny_source, tiny_settings, switch):
    run = pl.train(tiny_source, quiet=True, corrupt="symmetric:0.3", **tiny_settings, **switch)
    assert run.metrics["loss"].map(math.isfinite).all()


def test_a_warm_up_only_run_ends_with_its_first_mask_and_says_so(tiny_source, tiny_settings):
    run = pl.train(tiny_source, quiet=True, **(tiny_settings | {"epochs": 1}))
    assert run.metrics["noisy"].notna().all()
    assert run.labels["trust"].isna().all()
    assert run.summary["notices"][0]["kind"] == "warm-up only"


def test_a_run_stopped_in_the_warm_up_knows_its_labels(tiny_source, tiny_settings):
    settings = tiny_settings | {"epochs": 9, "warmup": 5, "minutes": 1e-4}
    run = pl.train(tiny_source, quiet=True, **settings)
    assert run.summary["epochs"] == 1
    assert run.labels["label_score"].between(0, 0.999).all()
    assert run.labels["p_noisy"].nunique() > 10


# ------------------------------------------------------------------------------- what is learnt


def test_pls_learns_in_spite_of_the_noise(tiny_settings):
    images, labels = make_images(400)
    test_images, test_labels = make_images(100, seed=9)
    source = arrays(images, labels, test_images=test_images, test_labels=test_labels)
    run = pl.train(
        source,
        corrupt="symmetric-exact:0.4",
        quiet=True,
        flip=False,
        **(tiny_settings | {"epochs": 12, "warmup": 3}),
    )
    assert run.summary["accuracy"]["last"] > 95
    assert run.summary["detection"]["auc"] > 0.95
    assert run.summary["guesses"]["accuracy"] > 90
    relabelled = run.labels[run.labels["action"] == "relabel"]
    assert len(relabelled) > 80
    right = np.array([str(label) for label in labels])[relabelled["index"]]
    assert (relabelled["suggested_label"] == right).mean() > 0.9


def test_training_never_sees_the_truth(tiny_settings):
    """Another truth beside the same given labels changes figures, and not a bit of the network."""
    images, labels = make_images()
    given = corrupt(arrays(images, labels).train, "symmetric:0.4", 1).given_N
    other = np.roll(labels, 1)
    runs = [
        pl.train(arrays(images, given, true_labels=truth), quiet=True, **tiny_settings)
        for truth in (labels, other, None)
    ]
    states = [run.model.network.state_dict() for run in runs]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])
        assert torch.equal(tensor, states[2][name])
    assert runs[0].summary["detection"] != runs[1].summary["detection"]
    pd.testing.assert_frame_equal(runs[0].labels.drop(columns=list(TRUTH)), runs[2].labels)


def test_images_of_no_class(tiny_source, tiny_settings, tmp_path, capsys):
    """They are counted apart, and training knows nothing of them: another truth, the same bits."""
    pool = tmp_path / "pool.npy"
    np.save(pool, np.random.default_rng(0).integers(0, 256, (40, 9, 9), dtype=np.uint8))
    settings = tiny_settings | {"epochs": 4}
    run = pl.train(
        tiny_source, tmp_path / "run", corrupt="pair:0.25+out:0.25", pool=str(pool), **settings
    )
    summary = run.summary
    assert summary["noise"]["out"] == 0.25
    assert summary["noise_rate"] == pytest.approx(sum(summary["noise"].values()))
    assert "25.0% of the images of no class" in capsys.readouterr().out
    assert {"recall_in", "recall_out"} <= summary["detection"].keys()
    noisy = corrupt(tiny_source.train, "pair:0.25+out:0.25", 1, str(pool))
    blind = Data("blind", noisy.with_labels(noisy.given_N, None), tiny_source.test)
    other = pl.train(blind, quiet=True, **settings)
    assert other.summary["noise"] == {"in": None, "out": None}
    for name, tensor in run.model.network.state_dict().items():
        assert torch.equal(tensor, other.model.network.state_dict()[name])
    pd.testing.assert_frame_equal(run.labels.drop(columns=list(TRUTH)), other.labels)
    shares = run.labels["truth"].value_counts(normalize=True)
    assert (shares["wrong"], shares["out"]) == tuple(summary["noise"].values())
    names = np.array(noisy.classes)[noisy.true_N]
    assert (run.labels["true_label"].dropna() == names[noisy.true_N >= 0]).all()
    assert (run.labels["true_label"].isna() == (run.labels["truth"] == "out")).all()
    again = pl.load(tmp_path / "run").labels
    kept, told = (labels[list(TRUTH)].fillna("–").to_numpy() for labels in (again, run.labels))
    assert kept.tolist() == told.tolist()


def test_a_pool_may_move_but_not_change(tiny_source, tiny_settings, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    pool, moved, changed = (str(tmp_path / name) for name in ("a.npy", "b.npy", "c.npy"))
    np.save(pool, images)
    settings = tiny_settings | {"corrupt": "out:0.25", "quiet": True}
    pl.train(tiny_source, tmp_path / "run", pool=pool, minutes=1e-9, **settings)
    Path(pool).rename(moved)
    np.save(changed, images + 1)
    with pytest.raises(InputError, match="are not those the run began with"):
        pl.train(tiny_source, tmp_path / "run", resume=True, pool=changed, **settings)
    run = pl.train(tiny_source, tmp_path / "run", resume=True, pool=moved, **settings)
    assert run.finished


def test_the_seed_decides_everything(tiny_source, tiny_settings):
    def weights(seed):
        settings = tiny_settings | {"seed": seed, "corrupt": "symmetric:0.2"}
        run = pl.train(tiny_source, quiet=True, **settings)
        return torch.cat([p.flatten() for p in run.model.network.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_users_random_state_is_left_alone(tiny_source, tiny_settings):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pl.train(tiny_source, quiet=True, **tiny_settings)
    assert torch.equal(torch.rand(3), expected)


# ----------------------------------------------------------------------------------- the timing


def test_timing_of_mask_and_trust(tiny_source, tiny_settings, monkeypatch):
    """Row 11, with W = 2: mask after epoch 1 (counted from 0), trust after epoch 2."""
    seen = []

    def spy(*arguments, judge_guesses, **options):
        seen.append(judge_guesses)
        return whole(*arguments, judge_guesses=judge_guesses, **options)

    whole = trainer_module.judge
    monkeypatch.setattr(trainer_module, "judge", spy)
    run = pl.train(tiny_source, quiet=True, **(tiny_settings | {"epochs": 5, "warmup": 2}))
    assert seen == [False, True, True, True]
    assert run.metrics["noisy"].isna().tolist() == [True, False, False, False, False]
    assert run.metrics["trust"].isna().tolist()[:2] == [True, True]


def test_the_learning_rate_is_the_released_cosine():
    settings = Settings(epochs=200, warmup=30, lr=0.1)
    rates = [learning_rate(settings, t) for t in range(200)]
    assert rates[:30] == [0.1] * 30
    for t in (30, 31, 100, 199):
        wanted = 0.5 * 0.1 * (1 + math.cos((t - 30 + 1) * math.pi / (200 - 30 + 1)))
        assert rates[t] == pytest.approx(wanted)
    assert all(a > b for a, b in itertools.pairwise(rates[29:]))
    assert 0 < rates[-1] < 1e-4


def test_an_epoch_visits_images_once_and_mixes_with_large_lambda(tiny_source, tiny_settings):
    trainer = Trainer(tiny_source, Settings(**tiny_settings), SilentReporter())
    visits, lams, partners = [], [], []

    def look():
        batch = trainer._batch(0)
        trainer.step += 1
        visits.extend(batch.index_B.tolist())
        lams.append(batch.lam.item())
        partners.append(sorted(batch.partner_B.tolist()))
        assert batch.draws_BK.std() > 0.2

    trainer.warm_up_step = look
    trainer.train_epoch(0)
    assert sorted(visits) == list(range(64))
    assert all(0.5 <= lam <= 1 for lam in lams)
    assert len(set(lams)) == len(lams)
    assert partners == [list(range(16))] * 4
    first = list(visits)
    visits.clear()
    trainer.train_epoch(0)
    assert visits == first  # an epoch begun again draws the same numbers
    visits.clear()
    trainer.warm_up_step, trainer.main_step = None, look
    trainer.train_epoch(1)
    assert sorted(visits) == list(range(64))
    assert visits != first


def test_without_mixup_lambda_is_one(tiny_source, tiny_settings):
    trainer = Trainer(tiny_source, Settings(mixup=False, **tiny_settings), SilentReporter())
    trainer.warm_up_step = lambda: None
    trainer.train_epoch(0)
    assert trainer._batch(0).lam.item() == 1


def test_the_step_is_the_optimisers(tiny_source, tiny_settings):
    """SGD with momentum and decay, as torch.optim does it without our tensors and zero buffers."""
    settings = Settings(method="ce", momentum=0.8, weight_decay=1e-3, **tiny_settings)
    ours, plain = (Trainer(tiny_source, settings, SilentReporter()) for _ in range(2))
    reference = torch.optim.SGD(
        plain.network.parameters(), lr=settings.lr, momentum=0.8, weight_decay=1e-3, foreach=False
    )
    plain.optimiser = reference
    for trainer in (ours, plain):
        trainer.train_epoch(0)
    for a, b in zip(ours.network.parameters(), plain.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_streams_are_apart():
    seeds = {stream_seed(s, name, e) for s in range(3) for name in "ab" for e in range(5)}
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)


# ------------------------------------------------------------------------------------- choices


def test_devices():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(InputError, match="--device cuda:97: there is no such device"):
        choose_device("cuda:97")
    with pytest.raises(InputError, match="--device tpu: must be auto, cpu, cuda"):
        choose_device("tpu")
    with pytest.raises(InputError, match="--device meta: there is no such device"):
        choose_device("meta")


def test_precision():
    assert choose_precision("auto", torch.device("cpu")) == torch.float32
    assert choose_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert choose_precision("bf16", torch.device("cpu")) == torch.bfloat16


def test_sizes():
    assert choose_size((40, 30), Settings()) == (40, 30)
    assert choose_size((40, 30), Settings(image_size=24)) == (24, 24)


# --------------------------------------------------------------------------------- things noticed


def test_a_loss_that_becomes_nan_stops_the_run(tmp_path, tiny_source, tiny_settings, monkeypatch):
    whole = Trainer.train_epoch

    def fail(self, epoch):
        return math.nan if epoch == 2 else whole(self, epoch)

    monkeypatch.setattr(Trainer, "train_epoch", fail)
    with pytest.raises(TrainingError, match=r"became nan in epoch 3.*epoch 2 is kept.*lower --lr"):
        pl.train(tiny_source, out=tmp_path / "run", quiet=True, **tiny_settings)
    assert (tmp_path / "run" / "checkpoint" / "last.safetensors").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_weights_that_become_nan_in_the_last_step_are_noticed(tiny_source, tiny_settings):
    """Its loss is that of the weights before it."""
    trainer = Trainer(tiny_source, Settings(**tiny_settings), SilentReporter())
    whole, steps = trainer.warm_up_step, []

    def step():
        whole()
        steps.append(1)
        if len(steps) == trainer.steps:
            next(trainer.network.parameters()).data[0] = math.nan

    trainer.warm_up_step = step
    assert math.isnan(trainer.train_epoch(0))


def test_a_diverging_run_is_noticed_for_real(tiny_source, tiny_settings):
    with pytest.raises(TrainingError, match=r"the loss became (nan|inf) in epoch"):
        pl.train(tiny_source, quiet=True, **(tiny_settings | {"lr": 100.0, "epochs": 30}))


def test_a_warm_up_at_chance_is_noticed(tiny_settings, capsys):
    """Random labels on noise: nothing can be learnt, and little enough is tried."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (400, 8, 8), dtype=np.uint8)
    labels = np.arange(400) % 20
    settings = tiny_settings | {"lr": 1e-6, "batch_size": 64, "epochs": 2}
    run = pl.train((images, labels), **settings)
    assert run.summary["notices"][0]["kind"] == "warm-up"
    assert "notice: the warm-up ended at chance" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["pls", "ce", "mixup"])
def test_a_collapse_behind_the_warm_up_is_noticed(method, monkeypatch):
    """The weights are lost in the last epoch; in the warm-up all was well."""
    track = Trainer.track

    def lose(trainer, epoch):
        if epoch + 1 == trainer.settings.epochs:
            for weights in trainer.network.parameters():
                weights.data.zero_()
        return track(trainer, epoch)

    settings = {"preset": "digits-id40", "method": method, "epochs": 3, "warmup": 2}
    healthy = pl.train("digits", quiet=True, **settings).summary["notices"]
    assert not {"warm-up", "end"} & {notice["kind"] for notice in healthy}
    monkeypatch.setattr(Trainer, "track", lose)
    found = pl.train("digits", quiet=True, **settings).summary["notices"]
    (notice,) = (notice for notice in found if notice["kind"] == "end")
    assert notice["text"].startswith("the run ended at chance: its predictions agree with ")
    assert notice["epoch"] == 3


@pytest.mark.parametrize("method", ["pls", "ce"])
def test_a_stage_1_that_swings_is_noticed(
    method, tiny_source, tiny_settings, monkeypatch, tmp_path
):
    """Though the run is broken off in between. Baselines do not learn from stage 1."""
    track = Trainer.track

    def swing(trainer, epoch):
        stages = track(trainer, epoch)
        trainer.memory.noisy_N.fill_(False)
        trainer.memory.noisy_N[: len(trainer.memory.noisy_N) * (9 if epoch % 2 else 1) // 10] = True
        return stages

    monkeypatch.setattr(Trainer, "track", swing)
    settings = tiny_settings | {"method": method, "epochs": 6, "warmup": 1}
    out = tmp_path / "run"
    pl.train(tiny_source, out=out, quiet=True, minutes=1e-9, **settings)
    while not (out / "summary.json").exists():
        run = pl.train(tiny_source, out=out, quiet=True, resume=True, minutes=1e-9)
    found = {notice["kind"]: notice for notice in run.summary["notices"]}
    assert ("swings" in found) == (method == "pls")
    if method == "pls":
        assert found["swings"]["epoch"] == 4
        assert "89% after the next" in found["swings"]["text"]


@pytest.mark.parametrize("method", ["ce", "mixup"])
def test_baselines_hear_nothing_of_stage_1(tiny_settings, method):
    """Which finds no modes in losses that are all equal, but is not learnt from."""
    images = np.zeros((64, 8, 8), np.uint8)
    settings = tiny_settings | {"method": method, "epochs": 4}
    run = pl.train((images, np.arange(64) % 4), quiet=True, **settings)
    assert {notice["kind"] for notice in run.summary["notices"]} <= {"warm-up", "end"}


def test_a_notice_is_given_once(tiny_settings, capsys):
    """Losses that are all equal leave stage 1 without modes, in every epoch."""
    images = np.zeros((64, 8, 8), np.uint8)
    run = pl.train((images, np.arange(64) % 4), **(tiny_settings | {"epochs": 4, "balance": 0}))
    kinds = [notice["kind"] for notice in run.summary["notices"]]
    assert len(kinds) == len(set(kinds)) > 0
    assert capsys.readouterr().out.count("notice: ") == len(kinds)


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 65}, r"--batch-size 65 is larger than the set \(64 images"),
        ({"network": "resnot"}, "--network resnot: no such network"),
        ({"corrupt": "salt:0.1"}, "--corrupt salt:0.1: no such noise"),
        ({"preset": "nothing"}, "--preset nothing: no such preset"),
        ({"learning_rate": 1}, "learning_rate: no such setting"),
        ({"device": "cuda:55"}, "--device cuda:55"),
        ({"minutes": 0}, "--minutes must be a number above 0, not 0"),
        ({"minutes": "1"}, "--minutes must be a number above 0, not '1'"),
        ({"hold_out": "0.1"}, "--hold-out must be a number from 0 to below 1, not '0.1'"),
        ({"strict": "no"}, "--strict must be True or False, not 'no'"),
        ({"weights": "pretrained"}, "--weights pretrained"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be 1 or more"),
        ({"time_budget": 0}, "--time must be a number above 0, not 0"),
        ({"time_budget": 1}, "--time chooses the epochs, and --epochs contradicts it"),
        ({"hold_out": 0.2}, "--hold-out: arrays has test images already"),
        ({"strict": True}, "--strict is for folders and tables"),
        ({"fit": "squash"}, "--fit must be crop or stretch, not squash"),
        ({"config": "nowhere.toml"}, "--config nowhere.toml"),
        ({"config": 5}, "--config 5: no usable path"),
        ({"preset": 5}, "--preset 5: no such preset"),
        ({"preset": ["digits"]}, "no such preset"),
        ({"pad": 8}, r"--pad 8 must be smaller than the images \(8×8 pixels\)"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, tiny_source, tiny_settings, changes, message):
    with pytest.raises(InputError, match=message) as error:
        pl.train(tiny_source, out=tmp_path / "run", quiet=True, **(tiny_settings | changes))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [{}, {"resume": True}])
def test_cifar_has_no_labels_of_people(tmp_path, more):
    """Its own would be trained on; said before anything is read."""
    message = r"--preset cifar100n: add --corrupt human:FILE, .*noisylabels"
    with pytest.raises(InputError, match=message):
        pl.train("cifar100:DIR", out=tmp_path / "run", preset="cifar100n", quiet=True, **more)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"cifar100:DIR.* no such folder|DIR.* is missing"):
        pl.train("cifar100:DIR", preset="cifar100n", corrupt=None, quiet=True)


@pytest.mark.parametrize(("named", "noise"), [({"corrupt": "pair:1"}, 1), ({}, 0)])
def test_presets_for_labels_of_people_take_those_of_other_sources(
    tmp_path, tiny_source, tiny_settings, named, noise
):
    """To resume, nothing needs to be named again."""
    words = {"out": tmp_path / "run", "preset": "cifar10n", "quiet": True}
    settings = tiny_settings | {"epochs": 2}
    run = pl.train(tiny_source, minutes=1e-4, **named, **words, **settings)
    assert (run.finished, run.summary["noise"]["in"]) == (False, noise)
    run = pl.train(tiny_source, resume=True, **words, **settings)
    assert (run.finished, run.summary["noise"]["in"]) == (True, noise)


def test_a_source_is_needed(tmp_path):
    with pytest.raises(InputError, match="SOURCE is missing"):
        pl.train(out=tmp_path / "run")


def test_loading_a_damaged_run(tmp_path, tiny_source, tiny_settings):
    out = tmp_path / "run"
    pl.train(tiny_source, out=out, quiet=True, **tiny_settings)
    labels = (out / "labels.csv").read_text()
    (out / "labels.csv").write_text("\n".join(labels.splitlines()[:30]) + "\n")
    with pytest.raises(InputError, match=r"damaged \(labels.csv has 29 rows, not 64\)"):
        pl.load(out)
    (out / "labels.csv").unlink()
    with pytest.raises(InputError, match="damaged"):
        pl.load(out)
    (out / "labels.csv").write_text(labels)
    assert pl.load(out).finished
    (out / "model.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match=r"model.safetensors: not a model of pseudoloss"):
        pl.load(out)
    (out / "summary.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        pl.load(out)


def test_loading_what_is_no_run(tmp_path):
    with pytest.raises(InputError, match="no usable path"):
        pl.load(5)
    with pytest.raises(InputError, match="not a run folder"):
        pl.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json: not the config.json of a run"):
        pl.load(tmp_path)


def test_normalisation_is_measured_where_none_is_published(tiny_source):
    assert isinstance(tiny_source, Data)
    mean, std = tiny_source.normalisation()
    assert len(mean) == len(std) == 1
    assert 0 < mean[0] < 1


def test_a_device_that_is_too_small_is_said_in_one_line(tiny_source, tiny_settings, monkeypatch):
    def step(self, epoch):
        raise torch.OutOfMemoryError("a long story\nof blocks")

    monkeypatch.setattr(Trainer, "train_epoch", step)
    with pytest.raises(TrainingError, match=r"^the GPU ran out of memory.*--batch-size \(now 16\)"):
        pl.train(tiny_source, quiet=True, **tiny_settings)


def test_the_start_ends_with_the_first_step(tiny_source, tiny_settings):
    summary = pl.train(tiny_source, quiet=True, **tiny_settings).summary
    assert 0 < summary["startup_seconds"] < summary["seconds"]


# ------------------------------------------------------------------------------- other metrics


@pytest.mark.parametrize(
    ("noise_metric", "captured"), [("loss", True), ("capped-loss", True), ("js", False)]
)
def test_a_tracking_pass_is_captured_if_it_is_one_pass(
    tiny_source, tiny_settings, monkeypatch, noise_metric, captured
):
    seen = []
    monkeypatch.setattr(Trainer, "_captured", lambda _, call, what: seen.append(what) or call)
    Trainer(tiny_source, Settings(**tiny_settings, noise_metric=noise_metric), SilentReporter())
    assert ("tracking pass" in seen) == captured


@pytest.mark.parametrize(
    "chosen",
    [
        {"noise_metric": "capped-loss"},
        {"noise_metric": "agreement"},
        {"noise_metric": "disagreement"},
        {"noise_metric": "js"},
        {"noise_metric": "kl"},
        {"trust_metric": "confidence"},
        {"trust_metric": "entropy"},
        {"trust_metric": "threshold", "trust_threshold": 0.5},
    ],
    ids=lambda chosen: next(iter(chosen.values())),
)
def test_each_stage_can_look_at_another_metric(chosen, tiny_source, tiny_settings):
    settings = Settings(**(tiny_settings | {"epochs": 2, "device": "cpu"} | chosen))
    source = dataclasses.replace(
        tiny_source, train=corrupt(tiny_source.train, "symmetric-exact:0.25", 1)
    )
    trainer = Trainer(source, settings, SilentReporter())
    for epoch in (0, 1):
        trainer.train_epoch(epoch)
        stages = trainer.track(epoch)
    memory = trainer.memory
    values = trainer.noise_metrics(settings.noise_metric)[settings.noise_metric]
    if settings.noise_metric == "capped-loss":
        cap = math.log(len(source.train.classes))
        assert (memory.loss_N > cap).any()
        assert torch.equal(values, memory.loss_N.clamp(max=cap))
    first = fit_two_modes(values)
    torch.testing.assert_close(memory.p_noisy_N, 1 - first.low_N)
    guesses = memory.guesses(slice(None))
    if settings.trust_metric == "threshold":
        confident = guesses.amax(1) / guesses.sum(1) > 0.5
        assert torch.equal(memory.trust_N == 1, ~memory.noisy_N | confident)
        assert stages.pseudo_loss is None
    else:
        values = trainer.guess_metrics()[settings.trust_metric]
        second = fit_two_modes(values, memory.noisy_N)
        torch.testing.assert_close(memory.trust_N, second.low_N)


def test_what_the_figures_need_is_recorded(tmp_path, tiny_source, tiny_settings):
    """And asking for it changes nothing in what is learnt."""
    settings = tiny_settings | {"corrupt": "symmetric-exact:0.25", "quiet": True}
    plain = pl.train(tiny_source, **settings)
    run = pl.train(tiny_source, out=tmp_path / "run", compare_metrics=True, **settings)
    for ours, theirs in zip(
        run.model.network.parameters(), plain.model.network.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    assert set(first["metrics"]["noise"]) == {"loss", "agreement", "disagreement", "js", "kl"}
    assert first["metrics"]["guesses"] is first["bias"] is first["pseudo_loss"] is None
    assert last["metrics"]["noise"]["loss"] == last["detection"]["auc"]
    assert set(last["metrics"]["guesses"]) == {"pseudo-loss", "confidence", "entropy"}
    assert set(last["bias"]) == {"learnt", "fitted"}
    counts = last["pseudo_loss"]["histogram"]
    assert sum(counts["right"]) + sum(counts["wrong"]) == round(last["noisy"] * 64)
    assert 0 <= last["knn_accuracy"] <= 100
    assert run.summary["knn_accuracy"] == last["knn_accuracy"]
    assert plain.summary["knn_accuracy"] is None
    assert not {"metrics", "bias", "pseudo_loss", "knn_accuracy"} & set(plain.metrics)


def test_metrics_are_compared_from_the_first_epoch_on(tiny_source, tiny_settings):
    """Also where the warm-up needs no tracking pass."""
    settings = tiny_settings | {"corrupt": "symmetric-exact:0.25", "quiet": True}
    settings |= {"epochs": 4, "warmup": 3, "compare_metrics": True}
    found = pl.train(tiny_source, **settings).metrics["metrics"]
    for epoch in range(4):
        assert all(0 <= found[epoch]["noise"][name] <= 1 for name in ("loss", "js", "kl"))
    assert len({found[epoch]["noise"]["loss"] for epoch in range(4)}) == 4


def test_without_selection_every_wrong_guess_is_learnt_from(tiny_source, tiny_settings):
    settings = tiny_settings | {"corrupt": "symmetric-exact:0.25", "quiet": True}
    settings |= {"epochs": 2, "compare_metrics": True, "trust_in_classification": False}
    last = pl.train(tiny_source, **settings).metrics.iloc[-1]
    wrong = 1 - last["guesses"]["accuracy"] / 100
    assert wrong > 0
    assert last["bias"]["learnt"] == pytest.approx(wrong)


def test_without_truth_or_test_images_those_figures_are_null(tiny_settings):
    run = pl.train(make_images(), quiet=True, compare_metrics=True, **tiny_settings)
    assert run.metrics[["metrics", "bias", "pseudo_loss", "knn_accuracy"]].isna().all(axis=None)


def test_views_that_are_the_same_cannot_be_compared(tiny_source, tiny_settings):
    settings = tiny_settings | {"pad": 0, "flip": False, "quiet": True}
    with pytest.raises(InputError, match="--noise-metric kl compares the plain view"):
        pl.train(tiny_source, noise_metric="kl", **settings)
    run = pl.train(tiny_source, compare_metrics=True, **settings)
    assert run.metrics["metrics"].iloc[-1]["noise"]["kl"] is None


def test_a_run_lets_go_of_its_session(tiny_source, tiny_settings, monkeypatch):
    """Or captured calls would keep its images and graphs on the device for a while."""
    alive = []
    whole = Trainer.__init__

    def remember(self, *arguments):
        whole(self, *arguments)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(Trainer, "__init__", remember)
    gc.disable()
    try:
        run = pl.train(tiny_source, quiet=True, **tiny_settings)
    finally:
        gc.enable()
    assert [reference() for reference in alive] == [None]
    assert not run.model.network.training


def test_a_step_that_cannot_be_compiled_is_a_plain_one(tiny_source, tiny_settings, monkeypatch):
    """And is said to be, once; the result is that of plain calls."""
    said = []

    class Told(SilentReporter):
        def notice(self, text):
            said.append(text)

    def broken(function, whole=True):
        def call(*arguments):
            raise RuntimeError("no compiler here\nand a long story")

        return call

    plain = Trainer(tiny_source, Settings(**tiny_settings), SilentReporter())
    other = Trainer(tiny_source, Settings(**tiny_settings), Told())
    monkeypatch.setattr(trainer_module, "compiled", broken)
    monkeypatch.setattr(other, "_captured", lambda call, what: call)
    other.accelerate = "auto"
    other.warm_up_step = other._step(other.method.warm_up)
    assert plain.train_epoch(0) == other.train_epoch(0)
    assert said == ["the step could not be compiled and runs slower (no compiler here)"]
