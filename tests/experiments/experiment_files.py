"""Run folders and result files for the tests of experiments, written without training."""

import csv
import io
import json

from pseudoloss.cli import main
from pseudoloss.config import as_json
from pseudoloss.experiments import cells
from pseudoloss.experiments.catalogue import EXPERIMENTS
from pseudoloss.experiments.matching import training_cell
from pseudoloss.presets import request

ALL_CELLS = [(experiment, cell) for experiment in EXPERIMENTS.values() for cell in experiment.cells]


def call(*arguments, capsys):
    """Exit code, standard output and standard error of `pseudoloss experiments ARGUMENTS`."""
    code = main(["experiments", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def read_table(*arguments, capsys):
    """The rows of a table by cell."""
    code, text, err = call("table", *arguments, "--format", "csv", capsys=capsys)
    assert (code, err) == (0, "")
    return {row["cell"]: row for row in csv.DictReader(io.StringIO(text))}


def find_cell(name):
    return next(cell for _, cell in ALL_CELLS if cell.name == name)


def write_run(path, source, preset, changes, last, best, notices=()):
    """The files of a finished run that experiments read."""
    path.mkdir(parents=True)
    settings = as_json(request(preset, None, changes).settings(preset))
    config = {"source": source, "settings": settings, "data": {"fingerprint": "x"}}
    (path / "config.json").write_text(json.dumps(config))
    summary = {"accuracy": {"last": last, "best": best}}
    summary["notices"] = [{"epoch": 1, "kind": "k", "text": text} for text in notices]
    (path / "summary.json").write_text(json.dumps(summary))


def write_cell_run(out, name, seed, last, best, source=None, **settings):
    """A finished run of a cell; returns its folder."""
    cell = find_cell(name)
    path = cells.run_path(out, cell, seed)
    changes = {**training_cell(cell)[1].changes, "seed": seed, **settings}
    write_run(path, source or cell.source, cell.preset, changes, last, best)
    return path


def write_result_file(folder, name, arguments, runs, *, flags="", notices=(), settings=None):
    """A result file of benchmarks/run.py; `runs` holds (seed, last, best), `flags` come last."""
    folder.mkdir(exist_ok=True)
    command = f"python benchmarks/run.py {arguments} --work RUNS --out benchmarks/results/{name}"
    told = [{"epoch": 1, "kind": "k", "text": text} for text in notices]
    content = {
        "command": f"{command} {flags}".strip(),
        "commit": "x",
        "runs": [
            {"seed": seed, "accuracy": {"last": last, "best": best}, "notices": told}
            for seed, last, best in runs
        ],
    }
    if settings is not None:
        content["settings"] = settings
    (folder / name).write_text(json.dumps(content))


def fake_training(outcomes, started=None):
    """A replacement for `train` that raises or finishes, as `outcomes` says for each method."""
    started = [] if started is None else started

    def train(source, out, *, preset, resume, minutes, quiet, **changes):
        method = changes.get("method", "pls")
        started.append((method, changes["seed"], minutes))
        outcome = outcomes.get(method)
        if isinstance(outcome, Exception):
            outcomes.pop(method)
            raise outcome
        write_run(out, source, preset, changes, 1.0, 2.0)
        return type("Run", (), {"finished": outcome != "time is up"})()

    return train
