"""The list of experiments: names, presets, the paper's numbers."""

import re
import shlex
from pathlib import Path

import pytest
from experiment_files import ALL_CELLS, call

from pseudoloss.cli import train_parser
from pseudoloss.config import all_setting_types
from pseudoloss.experiments import cells
from pseudoloss.experiments.catalogue import EXPERIMENTS, PLOTS
from pseudoloss.presets import PRESETS


def test_names_are_unique_and_valid_as_folder_names():
    for experiment in EXPERIMENTS.values():
        names = [cell.name for cell in experiment.cells]
        assert len(set(names)) == len(names)
        assert len({(cell.row, cell.column) for cell in experiment.cells}) == len(names)
        for name in (experiment.name, *names):
            assert re.fullmatch(r"[a-z0-9.-]+", name)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_presets_and_settings_exist_and_commands_are_valid(experiment):
    """`train` accepts the commands that --dry-run prints, and reads the same settings from them."""
    for cell in experiment.cells:
        assert cell.preset in PRESETS
        assert set(cell.changes) <= set(all_setting_types())
        [job] = cells.plan(experiment, Path("out"), {}, seeds=[7], only=[cell.name])
        job.settings()
        args = train_parser(cell.preset).parse(shlex.split(job.command)[2:])
        given = {name: value for name, value in vars(args).items() if name in all_setting_types()}
        assert given == {"seed": 7, **job.changes}
        assert (args.source, args.preset, args.resume) == (job.source, cell.preset, True)


def test_there_is_a_cell_for_every_number_of_the_paper():
    """At 80% noise there is one more: with our stage 1 and with the released one."""
    counts = {name: len(experiment.choose(None)) for name, experiment in EXPERIMENTS.items()}
    assert counts == {
        **{"id-noise": 5, "ood-noise": 8, "cnwl": 4, "web-fg": 3, "ablation": 18},
        **{"mu": 6, "gamma": 6, "thresholds": 6, "selection": 4, "digits": 3},
    }
    for experiment, cell in ALL_CELLS:
        assert (cell.paper is None) == (experiment.name in ("selection", "digits"))
    assert len(EXPERIMENTS["id-noise"].choose(["*"])) == 13


def test_numbers_that_the_paper_prints_twice_are_equal():
    paper = {(experiment.name, cell.name): cell.paper for experiment, cell in ALL_CELLS}
    assert paper["ablation", "inet-40-20-none"] == paper["ood-noise", "inet-40-20-mixup"]
    assert paper["ablation", "cnwl-40-none"] == paper["cnwl", "cnwl-40-mixup"]
    assert paper["thresholds", "pseudo-loss"] == paper["mu", "mu-0.2"]


def test_list(capsys):
    code, text, _ = call("list", capsys=capsys)
    assert code == 0
    assert all(f"\n  {name} " in text for name in (*EXPERIMENTS, *PLOTS))
    _, text, _ = call("list", "thresholds", capsys=capsys)
    assert "--trust-metric threshold --trust-threshold 0.98" in text
    assert "paper 77.19" in text
    code, text, _ = call(capsys=capsys)
    assert (code, text.startswith("usage: pseudoloss experiments list|run|table|plot")) == (0, True)
