"""The paper's experiments: what there is, cells that are trained once, tables, figures."""

import csv
import importlib.util
import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

from pseudoloss.cli import main, train_parser
from pseudoloss.config import PRESETS, Settings, as_json, setting_types
from pseudoloss.errors import BusyError, InputError, TrainingError
from pseudoloss.experiments import cells, figures, tables
from pseudoloss.experiments.catalogue import EXPERIMENTS, FIGURES, home, other_pool, what_counts
from pseudoloss.runs import RunFolder

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ALL = [(experiment, cell) for experiment in EXPERIMENTS.values() for cell in experiment.cells]


def call(*words, capsys):
    code = main(["experiments", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def cell_named(name):
    return next((e, c) for e, c in ALL if c.name == name)


# --------------------------------------------------------------------------------- the catalogue


def test_names_are_unique_and_can_be_folders():
    for experiment in EXPERIMENTS.values():
        names = [cell.name for cell in experiment.cells]
        assert len(set(names)) == len(names)
        places = {(cell.row, cell.column) for cell in experiment.cells}
        assert len(places) == len(names)
        for name in (experiment.name, *names):
            assert re.fullmatch(r"[a-z0-9.-]+", name)


@pytest.mark.parametrize(("experiment", "cell"), ALL, ids=lambda part: part.name)
def test_presets_and_settings_exist(experiment, cell):
    named = {cell.preset: PRESETS} | dict.fromkeys(cell.changes, setting_types())
    named |= {"pool": setting_types()} if cell.pool else {}
    assert [name for name, known in named.items() if name not in known] == []
    # The command that --dry-run shows is one that train understands, and means the same.
    [job] = cells.plan(experiment, Path("out"), {}, seeds=[7], only=[cell.name])
    Settings(**(PRESETS[cell.preset] | job.changes))
    args = train_parser(cell.preset).parse(shlex.split(job.command)[2:])
    said = {name: value for name, value in vars(args).items() if name in setting_types()}
    assert said == {"seed": 7, **job.changes}
    assert (args.source, args.preset, args.resume) == (job.source, cell.preset, True)


def test_as_many_cells_as_the_paper_has_numbers():
    """And one more: 80% noise with our stage 1 and with the released one."""
    counts = {name: len(experiment.choose(None)) for name, experiment in EXPERIMENTS.items()}
    assert counts == {
        **{"id-noise": 5, "ood-noise": 8, "cnwl": 4, "web-fg": 3, "ablation": 18},
        **{"mu": 6, "gamma": 6, "thresholds": 6, "selection": 4, "digits": 3},
    }
    for experiment, cell in ALL:
        assert (cell.paper is None) == (experiment.name in ("selection", "digits"))
    assert len(EXPERIMENTS["id-noise"].choose(["*"])) == 13


def test_numbers_that_the_paper_prints_twice():
    """Rows of the ablation stand in other tables too; the paper's full rows differ a little."""
    paper = {(experiment.name, cell.name): cell.paper for experiment, cell in ALL}
    assert paper["ablation", "inet-40-20-none"] == paper["ood-noise", "inet-40-20-mixup"]
    assert paper["ablation", "cnwl-40-none"] == paper["cnwl", "cnwl-40-mixup"]
    assert paper["thresholds", "pseudo-loss"] == paper["mu", "mu-0.2"]


def test_what_tables_share_is_trained_once():
    for experiment, name, where in [
        ("mu", "mu-0.2", ("selection", "id40-with")),
        ("gamma", "gamma-2", ("selection", "id40-with")),
        ("thresholds", "pseudo-loss", ("selection", "id40-with")),
        ("ablation", "inet-40-20-correct-cont-w", ("ood-noise", "inet-40-20-pls")),
        ("ablation", "cnwl-40-none", ("cnwl", "cnwl-40-mixup")),
        ("mu", "mu-0.1", ("mu", "mu-0.1")),
        ("ablation", "id40-correct-cont", ("selection", "id40-without")),
        ("cnwl", "cnwl-40-pls", ("selection", "cnwl-40-with")),
        ("selection", "id40-with", ("selection", "id40-with")),
        ("selection", "digits-with", ("selection", "digits-with")),  # a quick trial
        ("digits", "digits-pls", ("digits", "digits-pls")),
    ]:
        [cell] = EXPERIMENTS[experiment].choose([name])
        where_it_is, trained = home(cell)
        assert (where_it_is.name, trained.name) == where


def test_list(capsys):
    code, text, _ = call("list", capsys=capsys)
    assert code == 0
    assert all(f"\n  {name} " in text for name in (*EXPERIMENTS, *FIGURES))
    _, text, _ = call("list", "thresholds", capsys=capsys)
    assert "--trust-metric threshold --trust-threshold 0.98" in text
    assert "paper 77.19" in text
    code, text, _ = call(capsys=capsys)
    assert (code, text.startswith("usage: pseudoloss experiments list|run|")) == (0, True)


# -------------------------------------------------------------------------------------- the cells

QUICK = ["--quiet", "--set", "epochs=2"]


def states(out, capsys, *more):
    _, text, _ = call("run", "digits", "--out", out, "--dry-run", *more, capsys=capsys)
    lines = [line.split() for line in text.splitlines() if not line.startswith(" ")]
    return {f"{name} {seed.rstrip(':')}": state for state, name, _, seed, *_ in lines}


def test_dry_run_writes_nothing_and_shows_the_commands(tmp_path, capsys):
    out = tmp_path / "my out"
    words = ["run", "digits", "--out", out, "--dry-run", "--seeds", "1", "2", *QUICK]
    words += ["--set", "mixup=false"]
    code, text, err = call(*words, capsys=capsys)
    assert (code, text, "--no-mixup" in err) == (2, "", True)  # nothing that --method mixup can do
    code, text, _ = call(*words, "--only", "*-pls", "*-ce", capsys=capsys)
    assert (code, list(tmp_path.iterdir())) == (0, [])
    assert text.splitlines()[2:4] == [
        "free  digits-ce seed 1",
        f"      pseudoloss train digits --out '{out}/digits/digits-ce/seed1' --preset digits-id40 "
        "--seed 1 --resume --method ce --epochs 2 --no-mixup",
    ]
    assert text.count("free") == 4


def test_finished_cells_are_passed_over(tmp_path, capsys):
    words = ["run", "digits", "--out", tmp_path, "--only", "*-ce", "--seeds", "1", *QUICK]
    code, text, _ = call(*words, capsys=capsys)
    assert code == 0
    assert "[1/1] digits-ce seed 1: begins in" in text
    assert "[1/1] digits-ce seed 1: done, accuracy" in text
    next_one = f"pseudoloss experiments table digits --out {tmp_path} --only '*-ce'"
    assert f"1 done\nNext: {next_one}\n" in text
    run = tmp_path / "digits" / "digits-ce" / "seed1"
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    code, text, _ = call(*words, capsys=capsys)
    assert code == 0
    assert "[1/1] digits-ce seed 1: done already" in text
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == written
    more = ["--seeds", "1", "--set", "epochs=2"]
    assert states(tmp_path, capsys, *more)["digits-ce 1"] == "done"
    # A cell that was tried with other settings is not taken for the real one.
    code, _, err = call(*words[:-3], capsys=capsys)
    assert code == 2
    assert "began with --epochs 2, not with --epochs 30; choose another --out" in err
    code, text, _ = call(*words[:-3], "--dry-run", capsys=capsys)
    assert code == 0
    line = "other digits-ce seed 1: other settings: --epochs 2 (not --epochs 30)"
    assert text.splitlines()[0] == line


def test_a_busy_cell_is_passed_over(tmp_path, capsys):
    folder = RunFolder(tmp_path / "digits" / "digits-pls" / "seed1")
    assert not folder.busy
    with folder.lock():
        assert folder.busy
        with pytest.raises(BusyError), folder.lock():
            pass
        assert states(tmp_path, capsys, "--seeds", "1")["digits-pls 1"] == "busy"
        words = ["run", "digits", "--out", tmp_path, "--only", "*pls", "--seeds", "1", *QUICK]
        code, text, _ = call(*words, capsys=capsys)
        assert code == 0
        assert text.count("another process works on it") == 1
        assert "\n1 busy\n" in text
    assert not folder.busy
    assert states(tmp_path, capsys, "--seeds", "1")["digits-pls 1"] == "free"


def write_run(path, source, settings, last, best, notices=()):
    """A finished run folder, as far as one looks at those of cells."""
    path.mkdir(parents=True)
    settings = as_json(Settings(**settings))
    config = {"source": source, "settings": settings, "data": {"fingerprint": "x"}}
    (path / "config.json").write_text(json.dumps(config))
    summary = {"accuracy": {"last": last, "best": best}}
    summary["notices"] = [{"epoch": 1, "kind": "k", "text": text} for text in notices]
    (path / "summary.json").write_text(json.dumps(summary))


def fake_training(outcomes, began=None):
    """Stands for `train`: raises or finishes, as `outcomes` says of each method."""

    def train(source, out, *, preset, resume, minutes, quiet, **changes):
        method = changes.get("method", "pls")
        began.append((method, changes["seed"], minutes))
        outcome = outcomes.get(method)
        if isinstance(outcome, Exception):
            outcomes.pop(method)
            raise outcome
        write_run(out, source, PRESETS[preset] | changes, 1.0, 2.0)
        summary = {"accuracy": {"last": 1.0, "best": 2.0}}
        return type("Run", (), {"summary": summary, "finished": outcome != "time is up"})()

    return train


def test_a_cell_that_fails_does_not_keep_others_from_it(tmp_path, capsys, monkeypatch):
    began = []
    fake = fake_training({"pls": TrainingError("the loss became nan")}, began)
    monkeypatch.setattr(cells, "train", fake)
    code, _, err = call("run", "digits", "--out", tmp_path, "--seeds", "1", "2", capsys=capsys)
    assert code == 1
    assert "digits-pls seed 1: the loss became nan" in err
    assert [name[:2] for name in began] == [
        (method, seed) for seed in (1, 2) for method in ("pls", "ce", "mixup")
    ]


def test_what_is_wrong_with_one_cell_does_not_keep_others_from_it(tmp_path, capsys, monkeypatch):
    """Images that turn out to be damaged, say."""
    began, damaged = [], InputError("train-list.txt: line 3 is not PATH:CLASS")
    fake = fake_training({"pls": damaged, "ce": damaged}, began)
    monkeypatch.setattr(cells, "train", fake)
    code, text, err = call("run", "digits", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert code == 1
    assert f"digits-pls seed 1, digits-ce seed 1: {damaged}\n" in err
    assert "[3/3] digits-mixup seed 1: done" in text


@pytest.mark.parametrize("broken", ["summary", "summary of nothing", "config", "no config"])
def test_a_damaged_folder_is_named_and_the_others_go_on(tmp_path, capsys, monkeypatch, broken):
    folder = RunFolder(make_run(tmp_path, "digits-pls", 1, 70, 71))
    if broken == "no config":
        folder.config.unlink()
    else:
        file = folder.config if broken == "config" else folder.summary
        file.write_text("{}" if broken == "summary of nothing" else "{")
    file = folder.config if "config" in broken else folder.summary
    assert states(tmp_path, capsys, "--seeds", "1") == {
        **{"digits-pls 1": "damaged", "digits-ce 1": "free", "digits-mixup 1": "free"}
    }
    monkeypatch.setattr(cells, "train", fake_training({}, []))
    code, text, err = call("run", "digits", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert code == 1
    assert "[1/3] digits-pls seed 1: its folder is damaged" in text
    assert text.count(": done, accuracy") == 2
    assert f"digits-pls seed 1: {file}: " in err
    assert f"the folder is damaged: remove or rename {folder.path}\n" in err


def test_data_are_looked_for_before_anything_is_trained(tmp_path, capsys, monkeypatch):
    began = []
    monkeypatch.setattr(cells, "train", fake_training({}, began))
    inner = tmp_path / "data" / "cifar-100-python"
    inner.mkdir(parents=True)
    for name in ("train", "test", "meta"):
        (inner / name).touch()

    def refused(flag, message, *more):
        words = ["run", "ood-noise", "--out", tmp_path / "out", "--seeds", "1", *more]
        code, text, err = call(*words, "--data", *data.values(), capsys=capsys)
        assert (code, text, began, (tmp_path / "out").exists()) == (2, "", [], False)
        assert f"error: {flag}: {message}" in err
        assert err.count("\n") == 1

    (tmp_path / "pool").mkdir()
    places = {"cifar100": tmp_path / "dta"}
    places |= dict.fromkeys(("imagenet32", "places365"), tmp_path / "pool")
    data = {kind: f"{kind}={place}" for kind, place in places.items()}
    refused(f"--data cifar100={tmp_path}/dta", "no such folder; it should hold cifar-100-python/")
    data["cifar100"] = f"cifar100={tmp_path}/data"
    refused(f"--data imagenet32={tmp_path}/pool", "holds neither images nor batch files")
    (tmp_path / "pool" / "train_data_batch_1").touch()
    refused(f"--data imagenet32={tmp_path}/pool", "train_data_batch_2, train_data_batch_3, ")
    refused(f"--set pool={tmp_path}/poo", "no such file or folder", "--set", f"pool={tmp_path}/poo")
    for i in range(2, 11):
        (tmp_path / "pool" / f"train_data_batch_{i}").touch()
    data["places365"] = "places365=nowhere"
    refused("--data places365=nowhere", "no such file or folder")
    (inner / "test").unlink()
    refused(f"--data cifar100={tmp_path}/data", f"test missing in {inner}; its owners")
    # What is done needs no data any more.
    for cell in EXPERIMENTS["ood-noise"].choose(None):
        make_run(tmp_path / "out", cell.name, 1, 70, 71)
    words = ["run", "ood-noise", "--out", tmp_path / "out", "--seeds", "1", "--data"]
    assert call(*words, *data.values(), capsys=capsys)[0] == 0


def test_folders_of_images_are_looked_for_too(tmp_path, capsys):
    for name, only, kind, message in [
        ("cnwl", "cnwl-40-*", "cnwl", f"{tmp_path}/x/training is missing; "),
        ("web-fg", "bird-*", "web-bird", "no such folder; it should hold train-list.txt"),
    ]:
        words = ["--only", only, "--data", f"{kind}={tmp_path}/x"]
        code, _, err = call("run", name, "--out", tmp_path, *words, capsys=capsys)
        assert code == 2
        assert f"error: --data {kind}={tmp_path}/x: {message}" in err


def test_a_run_of_another_source_is_not_the_cells(tmp_path, capsys):
    """All presets of CNWL are equal: its noise is in the source."""
    make_run(tmp_path, "cnwl-40-pls", 1, 70, 71, source="cnwl:/data:0.2")
    make_run(tmp_path, "cnwl-20-pls", 1, 70, 71, source="cnwl:/other/data:0.20")
    words = ["run", "cnwl", "--out", tmp_path, "--seeds", "1", "--data", "cnwl=here"]
    code, _, err = call(*words, "--only", "cnwl-40-pls", capsys=capsys)
    assert code == 2
    assert "began with cnwl:/data:0.2, not with cnwl:here:0.4; choose another --out" in err
    assert call(*words, "--only", "cnwl-20-pls", capsys=capsys)[0] == 0
    _, text, _ = call(*words, "--dry-run", capsys=capsys)
    assert "done  cnwl-20-pls seed 1\n" in text
    differs = "cnwl:/data:0.2 (not cnwl:here:0.4)"
    assert f"other cnwl-40-pls seed 1: other settings: {differs}\n" in text


def test_a_finished_run_from_another_pool_is_not_the_cells(tmp_path, capsys):
    """A pool may lie elsewhere on another machine, so it is known by its name."""
    make_run(tmp_path, "inet-20-20-ce", 1, 70, 71, pool="/my/ood32.npy")
    words = ["run", "ood-noise", "--out", tmp_path, "--only", "inet-20-20-ce", "--seeds", "1"]

    def run(pool, *more):
        return call(*words, "--data", "cifar100=x", f"imagenet32={pool}", *more, capsys=capsys)

    code, _, err = run("/data/imagenet32")
    assert code == 2
    why = "began with --pool /my/ood32.npy, not with --pool /data/imagenet32"
    assert f"{why}; choose another --out\n" in err
    assert (
        "other inet-20-20-ce seed 1: other settings: --pool /my/ood32.npy (not "
        in (run("/data/imagenet32", "--dry-run")[1])
    )
    assert call(*words, "--dry-run", capsys=capsys)[1].startswith("done  inet-20-20-ce seed 1\n")
    code, text, _ = run("/elsewhere/ood32.npy")
    assert (code, "done already" in text) == (0, True)
    make_run(tmp_path, "inet-40-20-ce", 1, 70, 71, pool="/data/imagenet32/train")
    words[words.index("inet-20-20-ce")] = "inet-40-20-ce"
    assert run("/elsewhere/Imagenet32_train_npz")[0] == 0
    code, _, err = run("/my/tiny/train")  # of the same name, and yet not ImageNet32
    assert (code, "began with --pool /data/imagenet32/train, not with" in err) == (2, True)


def test_cells_that_another_process_began_otherwise_are_not_taken_for_done(
    tmp_path, capsys, monkeypatch
):
    began = []

    def train(source, out, **more):
        """Meanwhile another process, which was told other settings, does the next cell."""
        if not began:
            make_run(tmp_path, "digits-ce", 1, 1, 2, epochs=3)
        fake_training({}, began)(source, out, **more)
        return type("Run", (), {"finished": True})()

    monkeypatch.setattr(cells, "train", train)
    words = ["run", "digits", "--out", tmp_path, "--seeds", "1", *QUICK]
    code, text, err = call(*words, "--only", "*-pls", "*-ce", capsys=capsys)
    assert (code, [method for method, *_ in began]) == (1, ["pls"])
    assert "[2/2] digits-ce seed 1: has other settings\n" in text
    assert "digits-ce seed 1: " in err
    assert "began with --epochs 3, not with --epochs 2" in err


def test_what_a_cell_noticed_is_said_when_it_is_done_and_below_the_table(
    tmp_path, capsys, monkeypatch
):
    notice = "the warm-up ended at chance: 1% agree. Try another --seed"
    left_out = "4 files are left out (the first: a.png, empty file); run/skipped.csv lists all"

    def train(source, out, *, preset, resume, minutes, quiet, **changes):
        write_run(out, source, PRESETS[preset] | changes, 1.0, 2.0, [notice, left_out])
        return type("Run", (), {"finished": True})()

    monkeypatch.setattr(cells, "train", train)
    words = ["--out", tmp_path, "--only", "*-ce"]
    _, text, _ = call("run", "digits", "--seeds", "1", "--quiet", *words, capsys=capsys)
    short = notice.partition(".")[0]
    assert f"[1/1] digits-ce seed 1: notice: {short}\n" in text
    assert f"[1/1] digits-ce seed 1: notice: {left_out}\n" in text
    _, text, _ = call("table", "digits", *words, capsys=capsys)
    assert f"\ndigits-ce: notice of seed 1: {short}\n" in text
    assert f"\ndigits-ce: notice of seed 1: {left_out}\n" in text
    make_file(tmp_path / "results", "a.json", "digits --preset digits-id40", [(2, 70, 71)])
    content = json.loads((tmp_path / "results" / "a.json").read_text())
    content["runs"][0]["notices"] = [{"epoch": 30, "kind": "k", "text": notice}]
    (tmp_path / "results" / "a.json").write_text(json.dumps(content))
    words = ["digits", "--results", tmp_path / "results"]
    assert f"\ndigits-pls: notice of seed 2: {short}\n" in call("table", *words, capsys=capsys)[1]


def test_nothing_comes_next_where_nothing_is_done(tmp_path, capsys):
    words = ["run", "digits", "--out", tmp_path, "--only", "digits-pls", "--seeds", "1"]
    code, text, _ = call(*words, "--minutes", "0.0001", capsys=capsys)
    assert (code, "Next: " in text) == (0, False)
    assert "digits-pls seed 1: time is up; the same command goes on" in text
    assert "1 begun\n" in text


def test_what_comes_next(tmp_path, capsys, monkeypatch):
    """The runs behind the figures have no numbers of the paper: what one wants is the figures."""
    monkeypatch.setattr(cells, "train", fake_training({}, []))
    words = ["run", "selection", "--out", tmp_path, "--only", "digits-with", "--seeds", "1"]
    _, text, _ = call(*words, "--quiet", capsys=capsys)
    chosen = f"--out {tmp_path} --only digits-with"
    assert text.endswith(
        f"Next: pseudoloss experiments table selection {chosen}\n"
        f"   or: pseudoloss experiments figure accuracy {chosen}\n"
    )


def test_settings_may_be_none_and_are_said_once():
    assert cells.read_changes(["weights=none", "warmup=None", "network=none"]) == {
        **{"weights": None, "warmup": None, "network": "none"}
    }
    assert cells.read_changes(["epochs=2", "epochs=2"]) == {"epochs": 2}
    with pytest.raises(InputError, match="--set epochs=3: epochs is 2 already"):
        cells.read_changes(["epochs=2", "epochs=3"])
    assert cells.read_places(["cifar100=a", "cifar100=a"]) == {"cifar100": "a"}
    with pytest.raises(InputError, match="--data cifar100=b: cifar100 lies in a already"):
        cells.read_places(["cifar100=a", "cifar100=b"])


def test_a_cell_that_another_process_took_in_between_comes_last(tmp_path, capsys, monkeypatch):
    began = []
    monkeypatch.setattr(cells, "train", fake_training({"pls": BusyError("taken")}, began))
    code, text, _ = call("run", "digits", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert code == 0
    assert [method for method, *_ in began] == ["pls", "ce", "mixup", "pls"]
    assert "3 done" in text


def test_minutes_end_the_whole_set(tmp_path, capsys, monkeypatch):
    began = []
    monkeypatch.setattr(cells, "train", fake_training({"ce": "time is up"}, began))
    words = ["run", "digits", "--out", tmp_path, "--seeds", "1"]
    code, text, _ = call(*words, "--minutes", "5", capsys=capsys)
    assert code == 0
    assert "[2/3] digits-ce seed 1: time is up; the same command goes on" in text
    assert [method for method, *_ in began] == ["pls", "ce"]
    assert all(0 < minutes <= 5 for *_, minutes in began)
    # With little left, one cell is tried and no other one is begun.
    began.clear()
    code, text, _ = call(*words, "--seeds", "2", "--minutes", "0.2", capsys=capsys)
    assert [method for method, *_ in began] == ["pls"]
    assert "no time is left for it" in text


def command(out, *more):
    words = ["run", "digits", "--out", str(out), "--quiet", *more]
    return [sys.executable, "-m", "pseudoloss", "experiments", *words]


@pytest.mark.slow
def test_two_processes_do_no_cell_twice(tmp_path):
    words = command(tmp_path, "--seeds", "1", "2", "--set", "epochs=2")
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    texts = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], texts
    done = [re.findall(r"\] (.*): done, accuracy", text) for text in texts]
    assert sorted(done[0] + done[1]) == sorted(
        f"digits-{method} seed {seed}" for method in ("pls", "ce", "mixup") for seed in (1, 2)
    )
    for metrics in tmp_path.rglob("metrics.jsonl"):
        assert [json.loads(line)["epoch"] for line in metrics.open()] == [1, 2]


@pytest.mark.slow
def test_killed_and_gone_on_with(tmp_path, capsys):
    more = ["--only", "*-pls", "--seeds", "1", "--set", "epochs=8"]
    folder = RunFolder(tmp_path / "digits" / "digits-pls" / "seed1")
    process = subprocess.Popen(command(tmp_path, *more), stdout=subprocess.DEVNULL)
    while not folder.checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.02)
    assert states(tmp_path, capsys, *more)["digits-pls 1"] == "busy"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.finished
    assert states(tmp_path, capsys, *more)["digits-pls 1"] == "begun"
    text = subprocess.run(command(tmp_path, *more), check=True, capture_output=True, text=True)
    assert "digits-pls seed 1: goes on in" in text.stdout
    assert len(folder.metrics()) == 8
    assert states(tmp_path, capsys, *more)["digits-pls 1"] == "done"


# ------------------------------------------------------------------------------------- the tables


def make_run(out, name, seed, last, best, source=None, **settings):
    """A finished run of a cell."""
    _, cell = cell_named(name)
    path = cells.folder_of(out, cell, seed)
    values = PRESETS[cell.preset] | dict(home(cell)[1].changes) | {"seed": seed} | settings
    write_run(path, source or cell.source, values, last, best)
    return path


def make_file(folder, name, words, runs):
    folder.mkdir(exist_ok=True)
    runs = [{"seed": s, "accuracy": {"last": last, "best": best}} for s, last, best in runs]
    line = f"python benchmarks/run.py {words} --work RUNS --out benchmarks/results/{name}"
    content = {"command": line, "commit": "x", "runs": runs}
    (folder / name).write_text(json.dumps(content))


def table(*words, capsys):
    code, text, err = call("table", *words, "--format", "csv", capsys=capsys)
    assert (code, err) == (0, "")
    return {row["cell"]: row for row in csv.DictReader(io.StringIO(text))}


def test_mean_deviation_and_difference(tmp_path, capsys):
    for seed, last, best in [(1, 75.0, 76.0), (2, 76.0, 77.0), (4, 77.0, 78.5)]:
        make_run(tmp_path, "id50-pls", seed, last, best)
    row = table("id-noise", "--out", tmp_path, capsys=capsys)["id50-pls"]
    wanted = {
        **{"paper": 76.48, "paper_std": 0.25, "last": 76.0, "last_std": 1.0},
        **{"best": 77.1667, "best_std": 1.2583, "n": 3, "difference": 0.6867},
    }
    assert {key: float(row[key]) for key in wanted} == wanted
    _, text, _ = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    cut = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["r_in = 0.0", "78.85 ± 0.21", "–", "–", "–", "–"] in cut
    ours = ["r_in = 0.5", "76.48 ± 0.25", "76.00 ± 1.00", "77.17 ± 1.26", "3", "+0.69"]
    assert ours in cut
    assert f"id50-pls: seeds 1 2 4 of {tmp_path}/id-noise/id50-pls" in text
    _, text, _ = call("table", "id-noise", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert "76.48 ± 0.25        75.00        76.00   1          -0.48" in text
    file = tmp_path / "table.md"
    words = ["--only", "id50-*", "--format", "markdown", "--file", file]
    code, text, _ = call("table", "id-noise", "--out", tmp_path, *words, capsys=capsys)
    assert (code, text) == (0, "")
    assert "| r_in = 0.5 | PLS | 76.48 ± 0.25 | 76.00 ± 1.00 | 77.17 ± 1.26 | 3 | +0.69 |\n" in (
        file.read_text()
    )
    assert "| r_in = 0.5 | cross-entropy | 46.59 | – | – | – | – |\n" in file.read_text()


def test_trials_and_unfinished_runs_are_told_of(tmp_path, capsys):
    make_run(tmp_path, "id20-pls", 1, 9, 10, epochs=2, device="cpu")
    (make_run(tmp_path, "id20-pls", 2, 80, 80) / "summary.json").unlink()
    (make_run(tmp_path, "id20-pls", 3, 80, 80) / "config.json").write_text("{")
    rows = table("id-noise", "--out", tmp_path, capsys=capsys)
    assert rows["id20-pls"]["n"] == "1"
    assert rows["id20-pls"]["differs"] == "--epochs 2 (not --epochs 200)"
    _, text, _ = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    assert "r_in = 0.2*" in text
    assert "* id20-pls was not trained as its preset says: --epochs 2 (not --epochs 200)" in text
    assert "id20-pls: seed 2 is not finished" in text
    assert "id20-pls: seed 3 is left out, its folder is damaged" in text


def test_trials_count_only_where_nothing_else_does(tmp_path, capsys):
    make_run(tmp_path, "digits-ce", 1, 60, 95, epochs=2)
    make_run(tmp_path, "digits-ce", 4, 60, 96, epochs=2)
    results = tmp_path / "results"
    words = "digits --preset digits-id40"
    make_file(results, "ce.json", words, [(1, 70, 74), (2, 71, 75)])
    content = json.loads((results / "ce.json").read_text())
    content["command"] += " -- --method ce"
    (results / "ce.json").write_text(json.dumps(content))
    both = ["digits", "--out", tmp_path, "--results", results]
    row = table(*both, capsys=capsys)["digits-ce"]
    assert (row["best"], row["n"], row["differs"]) == ("74.5", "2", "")
    _, text, _ = call("table", *both, capsys=capsys)
    left = f"of {tmp_path}/digits/digits-ce is left out, it was trained with --epochs 2 (not"
    assert f"\ndigits-ce: seed 1 {left} --epochs 30)\n" in text
    assert f"\ndigits-ce: seed 4 {left} --epochs 30)\n" in text
    assert "\ndigits-ce: seeds 1 2 of ce.json\n" in text
    assert "*" not in text
    # Those that differ in the same way count together, and only they.
    make_run(tmp_path, "digits-ce", 3, 60, 10, epochs=3)
    row = table("digits", "--out", tmp_path, capsys=capsys)["digits-ce"]
    differs = "--epochs 2 (not --epochs 30)"
    assert (row["best"], row["n"], row["differs"]) == ("95.5", "2", differs)
    _, text, _ = call("table", "digits", "--out", tmp_path, capsys=capsys)
    assert "digits-ce: seed 3 of" in text
    assert "is left out, it was trained with --epochs 3 (not --epochs 30)" in text
    # What is not asked for has no say in it.
    row = table(*both, "--seeds", 4, capsys=capsys)["digits-ce"]
    assert (row["best"], row["n"], row["differs"]) == ("96.0", "1", differs)


def test_another_pool_is_told_of(tmp_path, capsys):
    name, differs = "inet-40-20-pls", "--pool ood32.npy (not imagenet32)"
    words = ["ood-noise", "--out", tmp_path, "--results", tmp_path / "results"]
    make_run(tmp_path, name, 1, 70, 71, pool="/my/tinyimagenet32/ood32.npy")
    make_file(tmp_path / "results", "a.json", "cifar100:DIR --preset cifar100-inet-40-20", [])
    content = json.loads((tmp_path / "results" / "a.json").read_text())
    content["command"] += " -- --pool ood32.npy"
    content["runs"] = [{"seed": 2, "accuracy": {"last": 72, "best": 73}}]
    (tmp_path / "results" / "a.json").write_text(json.dumps(content))
    row = table(*words, capsys=capsys)[name]
    assert (row["best"], row["n"], row["differs"]) == ("72.0", "2", differs)
    _, text, _ = call("table", *words, capsys=capsys)
    assert "ImageNet32, r_out = 0.4, r_in = 0.2*" in text
    assert f"\n* {name} was not trained as its preset says: {differs}\n" in text
    make_run(tmp_path, name, 3, 79, 80, pool="/data/ImageNet-32_train/batches")
    row = table(*words, capsys=capsys)[name]
    assert (row["best"], row["n"], row["differs"]) == ("80.0", "1", "")


def test_a_run_of_another_seed_is_left_out(tmp_path, capsys):
    first = make_run(tmp_path, "id20-pls", 1, 70, 71)
    place = first.parent
    shutil.copytree(first, place / "seed2")
    row = table("id-noise", "--out", tmp_path, capsys=capsys)["id20-pls"]
    assert row["n"] == "1"
    _, text, _ = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    assert f"id20-pls: seed 2 of {place} is left out, it was trained with --seed 1\n" in text
    words = ["--out", tmp_path, "--data", "cifar100=/x", "--only", "id20-pls", "--seeds", "2"]
    code, _, err = call("run", "id-noise", *words, capsys=capsys)
    assert code == 2
    assert f"{place}/seed2: began with --seed 1, not with --seed 2; choose another --out" in err


@pytest.mark.parametrize(
    ("pool", "is_the_papers"),
    [
        ("/data/imagenet32", True),
        ("Imagenet32_train_npz/", True),
        ("/data/ImageNet-32/train", True),
        ("/data/imagenet32/data/train_256", True),
        ("/x/imagenet32.npy", True),
        ("/x/train_imagenet32", True),
        ("/x/data/train_imagenet32standard", True),
        ("/x/imagenet32-stuff/mypool.npy", False),
        ("/x/imagenet32/mypool", False),
        ("/home/imagenet32/data/places365/train", False),
        ("/imagenet32/train.npy", False),  # a file is what someone made, and named
        ("/train", False),
        ("tinyimagenet32", False),
    ],
)
def test_a_pool_is_known_by_its_own_name(pool, is_the_papers):
    _, cell = cell_named("inet-40-20-pls")
    assert (other_pool(cell, pool) == "") == is_the_papers


def test_runs_of_another_source_are_left_out(tmp_path, capsys):
    place = make_run(tmp_path, "cnwl-40-pls", 1, 70, 71, source="cnwl:/data:0.2").parent
    make_run(tmp_path, "cnwl-20-pls", 1, 70, 71, source="cnwl:/data:0.2")
    results = tmp_path / "results"
    for name, source in (("a", "cnwl:DIR:0.2"), ("b", "cnwl:DIR:0.4"), ("c", "cnwl:DIR")):
        make_file(results, f"{name}.json", f"{source} --preset cnwl-40", [(2, ord(name), 1)])
    words = ["cnwl", "--out", tmp_path, "--results", results]
    rows = table(*words, capsys=capsys)
    assert rows["cnwl-20-pls"]["n"] == "1"
    assert (rows["cnwl-40-pls"]["last"], rows["cnwl-40-pls"]["n"]) == (f"{ord('b')}.0", "1")
    _, text, _ = call("table", *words, capsys=capsys)
    why = "it was trained on cnwl:/data:0.2 (not cnwl:DIR:0.4)"
    assert f"\ncnwl-40-pls: seed 1 of {place} is left out, {why}\n" in text


def test_a_table_of_nothing_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, err = call("table", "id-noise", capsys=capsys)
    assert (code, "78.85 ± 0.21" in text) == (0, True)
    assert err == "pseudoloss: no finished runs of id-noise were found in experiments\n"
    make_run(tmp_path / "experiments", "id0-pls", 1, 70, 71)
    Path("benchmarks/results").mkdir(parents=True)
    assert call("table", "id-noise", capsys=capsys)[2] == ""
    words = ["id-noise", "--seeds", "8", "9", "--format", "csv", "--file", "new/folder/t.csv"]
    code, text, err = call("table", *words, capsys=capsys)
    assert (code, text) == (0, "")
    assert "were found in experiments and benchmarks/results with --seeds 8 9\n" in err
    assert Path("new/folder/t.csv").read_text().startswith("experiment,cell,")
    for flag in ("--out", "--results"):
        code, text, err = call("table", "id-noise", flag, "nowhere", capsys=capsys)
        assert (code, text) == (2, "")
        assert f"{flag} nowhere: no such folder" in err


def test_a_table_without_runs_points_to_those_of_extra_cells(tmp_path, capsys):
    make_run(tmp_path, "id50-ce", 1, 70, 71)
    _, _, err = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    assert err.endswith("; there are some of the extra cells, which --only '*' shows\n")
    assert call("table", "id-noise", "--out", tmp_path, "--only", "*", capsys=capsys)[2] == ""


def test_damaged_result_files_are_named(tmp_path, capsys):
    make_file(tmp_path, "a.json", "cifar100:DIR --preset cifar100-id20", [(1, 70, 71)])
    make_file(tmp_path, "b.json", "cifar100:DIR --preset cifar100-id20", [(2, 70, 71)])
    (tmp_path / "b.json").write_text((tmp_path / "b.json").read_text()[:-20])
    make_file(tmp_path, "c.json", "cifar100:DIR --preset cifar100-id20", [(3, "many", 71)])
    make_file(tmp_path, "d.json", "cifar100:DIR --preset cifar100-id20", [(4, 70, 71)])
    content = json.loads((tmp_path / "d.json").read_text())
    content["command"] = content["command"].replace("benchmarks/run.py", "'benchmarks/run.py '")
    (tmp_path / "d.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text('{"command": "it isn\'t ours", "runs": 3}')
    (tmp_path / "list.json").write_text("[]")
    assert table("id-noise", "--results", tmp_path, capsys=capsys)["id20-pls"]["n"] == "1"
    _, text, _ = call("table", "id-noise", "--results", tmp_path, capsys=capsys)
    assert re.findall("(.*) is left out: it is damaged", text) == ["b.json", "c.json", "d.json"]


NO_ACCURACY = [float("nan"), float("inf"), -1, 100.5, True, "71", None]


@pytest.mark.parametrize("value", NO_ACCURACY, ids=str)
def test_what_is_no_accuracy_does_not_count(tmp_path, capsys, value):
    results = tmp_path / "results"
    make_file(results, "a.json", "cifar100:DIR --preset cifar100-id20", [(1, 0, 100)])
    make_file(results, "last.json", "cifar100:DIR --preset cifar100-id20", [(2, value, 71)])
    make_file(results, "best.json", "cifar100:DIR --preset cifar100-id20", [(3, 70, value)])
    make_run(tmp_path, "id20-pls", 4, 70, value)
    words = ["id-noise", "--out", tmp_path, "--results", results]
    row = table(*words, capsys=capsys)["id20-pls"]
    assert (row["last"], row["best"], row["n"]) == ("0.0", "100.0", "1")
    _, text, _ = call("table", *words, capsys=capsys)
    why = f"an accuracy is {value!r}, not a number from 0 to 100"
    for name in ("last.json", "best.json"):
        line = next(line for line in text.splitlines() if line.startswith(f"{name} is left out"))
        assert why in line
    assert "id20-pls: seed 4 is left out, its folder is damaged (" in text
    assert f"not the summary.json of a run ({why})" in text


def test_cells_that_are_not_shown_are_counted(tmp_path, capsys):
    line = "8 extra cells (baselines, trials) are not shown; --only '*' shows all\n"
    assert call("table", "id-noise", "--out", tmp_path, capsys=capsys)[1].endswith(line)
    for words in (["id-noise", "--only", "*"], ["id-noise", "--only", "id0*"], ["mu"]):
        assert "extra" not in call("table", *words, "--out", tmp_path, capsys=capsys)[1]


def test_files_belong_to_cells_by_preset_and_flags(tmp_path, capsys):
    results = tmp_path / "results"
    for name, flags, best in [
        ("a.json", "", 76.0),
        ("b.json", "-- --method ce --device cuda", 46.0),
        ("c.json", "-- --method=mixup", 61.0),
        ("d.json", "-- --epochs 2", 1.0),  # no cell
        ("e.json", "-- --no-contrast", 2.0),  # no cell
        ("f.json", "-- --gamma 2.0 --contrast --method pls", 77.0),  # as the preset says
    ]:
        make_file(results, name, "cifar100:DIR --preset cifar100-id50", [(1, best, best)])
        content = json.loads((results / name).read_text())
        content["command"] += f" {flags}"
        if name == "f.json":
            content["runs"][0]["seed"] = 2
        (results / name).write_text(json.dumps(content))
    make_file(results, "g.json", "digits --preset cifar100-id50", [(5, 3.0, 3.0)])  # another set
    make_file(results, "h.json", "cifar100:DIR --preset cifar100-id50", [(1, 4.0, 4.0)])  # again
    # What was trained counts, not what the preset means today.
    make_file(results, "i.json", "cifar100:DIR --preset cifar100-id50", [(3, 5.0, 5.0)])
    content = json.loads((results / "i.json").read_text())
    settings = what_counts("cifar100-id50", {"network": "small-cnn"})
    (results / "i.json").write_text(json.dumps(content | {"settings": settings}))
    (results / "damaged.json").write_text("{")
    (results / "other.json").write_text('{"command": "python benchmarks/growth.py", "rows": []}')
    words = ["id-noise", "--results", results, "--only", "*"]
    rows = table(*words, capsys=capsys)
    found = {name: (row["best"], row["n"]) for name, row in rows.items() if row["n"] != "0"}
    wanted = {"id50-pls": ("76.5", "2"), "id50-ce": ("46.0", "1"), "id50-mixup": ("61.0", "1")}
    assert found == wanted
    _, text, _ = call("table", *words, capsys=capsys)
    assert "id50-pls: seed 1 of h.json is left out, it is in a.json" in text
    # A run folder goes before a file.
    make_run(tmp_path, "id50-pls", 1, 70, 71)
    rows = table(*words, "--out", tmp_path, capsys=capsys)
    assert (rows["id50-pls"]["best"], rows["id50-pls"]["n"]) == ("74.0", "2")


def test_the_committed_results(capsys, monkeypatch):
    """As a newcomer calls it, in the folder of the repository."""
    monkeypatch.chdir(RESULTS.parent.parent)
    rows = table("id-noise", capsys=capsys)
    assert list(rows) == ["id0-pls", "id20-pls", "id50-pls", "id80-pls", "id80-pls-loss"]
    for name, seeds in (("id80-pls", "3"), ("id80-pls-loss", "2")):
        assert (rows[name]["n"], rows[name]["differs"]) == (seeds, "")
    names = ("-first-two-seeds-h200", "-seeds-3-4-h200", "-h200")
    paths = [RESULTS / f"cifar100-id50{name}.json" for name in names]
    files = [json.loads(path.read_text()) for path in paths]
    runs = [run for file in files for run in file["runs"]]
    best = mean(run["accuracy"]["best"] for run in runs)
    assert int(rows["id50-pls"]["n"]) == len(runs)
    assert float(rows["id50-pls"]["difference"]) == pytest.approx(best - 76.48, abs=1e-4)
    rows = table("digits", capsys=capsys)
    assert (rows["digits-pls"]["n"], rows["digits-ce"]["n"]) == ("3", "3")


def test_every_form_has_a_line_for_every_cell(tmp_path):
    for experiment in EXPERIMENTS.values():
        lines, notes = tables.collect(experiment.cells, tmp_path, None)
        assert notes == []
        for form in tables.FORMATS.values():
            text = form(experiment, lines, notes)
            assert all(line == line.rstrip() for line in text.splitlines())
            for row in {cell.row for cell in experiment.cells}:
                assert len(re.findall(re.escape(row) + r"(?=\s|,|\"| \|)", text)) >= 1


# ------------------------------------------------------------------------------------ the figures

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


def make_metrics(out, name, seed, epochs=6, finished=True, **settings):
    """A run with --compare-metrics; nothing in its first two epochs."""
    path = make_run(out, name, seed, 0, 0, **settings)
    if finished:
        (path / "summary.json").write_text(json.dumps({"epochs": epochs}))
    else:
        (path / "summary.json").unlink()
    counts = {"right": [9, 4, 1, 0], "wrong": [0, 1, 3, 2], "edges": [0.0, 1.0, 2.0, 3.0, 4.0]}
    modes = {"means": [0.5, 2.9], "variances": [0.2, 0.4], "weights": [0.7, 0.3]}
    lines = []
    for epoch in range(1, epochs + 1):
        up = 0.5 + epoch / 20 + seed / 100
        known = {
            "metrics": {
                "noise": {"loss": up, "agreement": up, "disagreement": None, "kl": up - 0.1},
                "guesses": {"pseudo-loss": up, "confidence": up - 0.1, "entropy": up - 0.2},
            },
            "bias": {"learnt": 1 - up, "fitted": 1.1 - up},
            "pseudo_loss": {"histogram": counts, "modes": modes if epoch > 3 else None},
        }
        line = {"epoch": epoch, "accuracy": 100 * up}
        lines.append(line | (known if epoch > 2 else dict.fromkeys(known)))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@needs_matplotlib
@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn(name, tmp_path, capsys):
    for cell in ("id40-with", "id40-without", "cnwl-40-with", "cnwl-40-without"):
        for seed in (1, 2):
            make_metrics(tmp_path, cell, seed, epochs=5 + seed)
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        file = tmp_path / "drawn" / f"{name}{ending}"
        code, text, err = call("figure", name, "--out", tmp_path, "--file", file, capsys=capsys)
        assert (code, text, err) == (0, f"written: {file}\n", "")
        assert file.read_bytes().startswith(start)
    drawn = file.read_text()
    words = {
        "noise-retrieval": ["small loss", "KL divergence of views", "with selection", "CNWL 40%"],
        "guess-retrieval": ["entropy", "epoch 4, seed 1", "epoch 6, seed 1", "low mode"],
        "accuracy": ["without selection", "test accuracy (%)", "CIFAR-100, r_in = 0.4"],
        "bias": ["wrong guess, and it is learnt from", "share of the images found noisy"],
    }
    for word in words[name]:
        assert f">{word}<" in drawn
    assert "neighbour disagreement" not in drawn  # it has no values
    file.write_text("mine")
    words = ("figure", name, "--out", tmp_path, "--file", file)
    code, _, err = call(*words, capsys=capsys)
    assert (code, file.read_text()) == (2, "mine")
    assert f"--file {file}: exists already; add --force to replace it" in err
    assert call(*words, "--force", capsys=capsys)[0] == 0
    assert file.read_text() == drawn


@needs_matplotlib
def test_figures_of_what_there_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("figure", "accuracy", "--force", capsys=capsys)
    assert code == 2
    assert "experiments: has no runs to draw; train them: pseudoloss experiments run sel" in err
    make_metrics(Path("experiments"), "digits-with", 1, epochs=3, finished=False)
    code, text, _ = call("figure", "accuracy", "--force", capsys=capsys)
    assert code == 0
    assert text.startswith("digits-with: seed 1 is not finished, epoch 3 so far\n")
    assert Path("accuracy.svg").exists()
    assert call("figure", "guess-retrieval", "--epochs", 3, 3, capsys=capsys)[0] == 0
    _, _, err = call("figure", "guess-retrieval", "--force", "--epochs", 1, 3, capsys=capsys)
    assert "--epochs 1: has no histogram" in err
    _, _, err = call("figure", "bias", "--force", "--epochs", 1, 3, capsys=capsys)
    assert "--epochs is for guess-retrieval" in err
    # A run without --compare-metrics has an accuracy and nothing else.
    metrics = Path("experiments/selection/digits-with/seed1/metrics.jsonl")
    metrics.write_text('{"epoch": 1, "accuracy": 3.0}\n')
    assert call("figure", "accuracy", "--force", capsys=capsys)[0] == 0
    for name in ("bias", "noise-retrieval", "guess-retrieval"):
        code, _, err = call("figure", name, "--force", capsys=capsys)
        assert (code, "was it trained with --compare-metrics?" in err) == (2, True)


@needs_matplotlib
def test_a_figure_mixes_nothing(tmp_path, capsys):
    """Runs of other settings and damaged ones are left out, and named."""

    def draw(file):
        words = ("figure", "accuracy", "--out", tmp_path, "--file", tmp_path / file)
        code, text, err = call(*words, capsys=capsys)
        assert (code, err) == (0, "")
        return (tmp_path / file).read_text(), text.splitlines()[:-1]

    first = make_metrics(tmp_path, "digits-with", 2)
    alone, notes = draw("alone.svg")
    assert notes == []
    make_metrics(tmp_path, "digits-with", 3, gamma=0.5)
    mixed, notes = draw("mixed.svg")
    assert (mixed, notes) == (
        alone,
        ["digits-with: seed 3: trained with --gamma 0.5 (not --gamma 2.0) and left out"],
    )
    # A copy is not another seed.
    shutil.copytree(first, first.with_name("seed5"))
    again, notes = draw("again.svg")
    assert again == alone
    assert "digits-with: seed 5 is left out: it was trained with --seed 2" in notes
    shutil.rmtree(first.with_name("seed5"))
    # A finished run has all its epochs.
    path = make_metrics(tmp_path, "digits-with", 4)
    (path / "summary.json").write_text('{"epochs": 9}')
    damaged, notes = draw("damaged.svg")
    assert damaged == alone
    reason = "metrics.jsonl has 6 of 9 epochs"
    assert f"digits-with: seed 4 is left out: {reason}" in notes
    # Where there is nothing else a trial is drawn, and said to be one.
    make_metrics(tmp_path, "digits-without", 1, gamma=0.5)
    trial, notes = draw("trial.svg")
    assert trial != alone
    assert "digits-without: seed 1: trained with --gamma 0.5 (not --gamma 2.0)" in notes
    # Nor is a run on other data one of the cell.
    path = make_metrics(tmp_path, "id40-with", 1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"source": "digits"}))
    other, notes = draw("other.svg")
    assert other == trial
    reason = "it was trained on digits, not on cifar100"
    assert any(note.startswith(f"id40-with: seed 1 is left out: {reason}") for note in notes)


def test_every_figure_can_be_drawn():
    assert figures.DRAWINGS.keys() == FIGURES.keys()


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = call("figure", "bias", "--out", tmp_path, capsys=capsys)
    assert code == 2
    assert "figures need matplotlib: pip install matplotlib, or pseudoloss[figures]" in err


def test_the_area_of_a_mode_is_its_weight():
    step = 0.001
    xs = [step * n for n in range(-4000, 6000)]
    assert sum(figures.normal(x, 0.5, 0.3, 0.7) for x in xs) * step == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "network=zzz"), "--network zzz: no such network"),
        (("--set", "corrupt=foo:1"), "--corrupt foo:1: no such noise"),
        (("--set", "epochs=abc"), "--epochs must be a whole number"),
        (("--set", "device=xpu:9"), "--device xpu:9: there is no such device"),
        (("--minutes", "nan"), "--minutes must be above 0"),
        (("--out", "a-file"), "--out: a-file/digits/digits-pls cannot be made"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_cell(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    code, text, err = call("run", "digits", "--seeds", "1", *words, capsys=capsys)
    assert (code, text) == (2, "")
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]
    if "epochs" in message or "network" in message or "corrupt" in message:
        assert call("run", "digits", "--dry-run", *words, capsys=capsys)[:2] == (2, "")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "ood-noise",
            "pool=none",
            "--set pool=none: inet-20-20-pls needs a pool, the images that belong to no class",
        ),
        ("ood-noise", "corrupt=none", "--pool /pool: nothing asks for it; add +out:RATE to "),
        ("digits", "pool=/pool", "--pool /pool: nothing asks for it; add +out:RATE to "),
        ("digits", "corrupt=out:0.2", "--corrupt out:0.2: needs --pool, the images that "),
        ("digits", "epochs=none", "--epochs must be a whole number, not 'none'"),
        ("digits", "method=none", "--method none: must be one of pls, ce, mixup"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_noise_and_pool_must_fit_and_not_everything_can_be_none(
    name, change, message, dry, tmp_path, capsys
):
    words = ["run", name, "--out", tmp_path / "out", "--set", change, *dry]
    words += ["--data", "cifar100=/x", "imagenet32=/pool", "places365=/pool"]
    code, text, err = call(*words, capsys=capsys)
    assert (code, text, (tmp_path / "out").exists()) == (2, "", False)
    assert err.startswith(f"pseudoloss: error: {message}")
    assert err.count("\n") == 1


def test_a_table_overwrites_nothing(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text("mine")
    words = ("table", "digits", "--results", RESULTS, "--file", file)
    code, _, err = call(*words, capsys=capsys)
    assert (code, file.read_text()) == (2, "mine")
    assert "exists already; add --force" in err
    assert call(*words, "--force", capsys=capsys)[0] == 0
    assert "99.26" in file.read_text()
