"""The list of experiments: names, presets, the paper's numbers."""

import re
import shlex
from pathlib import Path

import pytest
from experiment_files import ALL_CELLS, call

from pseudoloss.cli import train_parser
from pseudoloss.config import METHOD_SETTINGS, all_setting_types
from pseudoloss.errors import InputError
from pseudoloss.experiments import catalogue, cells, published
from pseudoloss.experiments.catalogue import EXPERIMENTS, PLOTS
from pseudoloss.experiments.definitions import Cell, Published
from pseudoloss.presets import PRESETS


def test_names_are_unique_and_valid_as_folder_names():
    for experiment in EXPERIMENTS.values():
        every = [*experiment.cells, *experiment.published]
        names = [cell.name for cell in every]
        assert len(set(names)) == len(names)
        assert len({(cell.row, cell.column) for cell in every}) == len(names)
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
        "same-harness": len(METHOD_SETTINGS),
    }
    ours_alone = ("selection", "same-harness", "digits")
    for experiment, cell in ALL_CELLS:
        if not cell.extra:
            assert (cell.paper is None) == (experiment.name in ours_alone)


# Counted in the paper: CIFAR-100 with in-distribution noise, with out-of-distribution images, web
# noise, web sets.
COUNTS = {
    **{"pls": (5, 8, 4, 3), "ce": (4, 8, 4, 3), "mixup": (4, 8, 4, 0)},
    **{"dynamic-bootstrapping": (4, 8, 0, 0), "rrl": (4, 8, 0, 0), "divide-mix": (4, 0, 4, 3)},
    **{"elr": (0, 8, 0, 0), "jo-src": (0, 8, 0, 0), "evidential-mix": (0, 8, 0, 0)},
    **{"dsos": (0, 8, 0, 0), "sncf": (0, 8, 4, 0), "elr-plus": (4, 0, 0, 0)},
    **{"moit-plus": (4, 0, 0, 0), "sel-cl-plus": (4, 0, 0, 0), "mentor-mix": (0, 0, 4, 0)},
    **{"famus": (0, 0, 4, 0), "scan-mix": (0, 0, 4, 0), "prop-mix": (0, 0, 4, 0)},
    **{"co-teaching": (0, 0, 0, 3), "pencil": (0, 0, 0, 3), "selfie": (0, 0, 0, 3)},
    **{"peer-learning": (0, 0, 0, 3), "plc": (0, 0, 0, 3)},
}


def test_every_method_of_the_paper_has_its_numbers():
    found = {}
    for position, name in enumerate(("id-noise", "ood-noise", "cnwl", "web-fg")):
        for number in EXPERIMENTS[name].choose_numbers(["*"]):
            if number.paper is not None:
                assert 20 < number.paper < 90
                counts = found.setdefault(number.method, [0, 0, 0, 0])
                counts[position] += 1
    assert {method: tuple(counts) for method, counts in found.items()} == COUNTS
    assert found.keys() == published.METHODS.keys()


def test_doubts_are_about_numbers_that_exist():
    for numbers in (published.ID_NOISE, published.OOD_NOISE, published.CNWL, published.WEB_FG):
        assert all(len(values) == len(numbers.rows) for values in numbers.methods.values())
        assert numbers.pls_std == () or len(numbers.pls_std) == len(numbers.rows)
        for doubt in numbers.doubts:
            assert doubt.method in numbers.methods
            assert set(doubt.rows) <= set(numbers.rows)
        for method, row in numbers.std:
            assert numbers.accuracy(method, row) is not None
    about = published.ID_NOISE.about("dynamic-bootstrapping", "id80")
    assert len(about) == 2
    assert about[1].endswith("other papers print 48.2")


def test_a_method_with_a_preset_gets_a_cell(monkeypatch):
    """Its published number is then printed beside ours."""
    monkeypatch.delitem(PRESETS, "cifar100-id50-sel-cl-plus", raising=False)

    def numbers():
        found = catalogue._numbers_of_row(
            published.ID_NOISE, "id50", "r_in = 0.5", "cifar100:DIR", "cifar100-id50"
        )
        return {number.method: number for number in found}

    before = numbers()["sel-cl-plus"]
    assert isinstance(before, Published)
    monkeypatch.setitem(PRESETS, "cifar100-id50-sel-cl-plus", {"method": "sel-cl-plus"})
    monkeypatch.setitem(PRESETS, "cifar100-id50-sel-cl-plus-long", {"method": "sel-cl-plus"})
    monkeypatch.setitem(PRESETS, "cifar100-id50-own", {"method": "own"})
    cell = numbers()["sel-cl-plus"]
    assert isinstance(cell, Cell)
    assert (cell.preset, cell.method) == ("cifar100-id50-sel-cl-plus", "sel-cl-plus")
    assert (cell.extra, cell.paper, cell.column) == (True, 72.4, "Sel-CL+")
    own = numbers()["own"]
    assert (own.preset, own.paper, own.column) == ("cifar100-id50-own", None, "own")


def test_choosing_by_method():
    experiment = EXPERIMENTS["id-noise"]
    names = [cell.name for cell in experiment.choose(methods=["elr", "ce"])]
    assert names == [f"id{rate}-ce" for rate in (0, 20, 50, 80)] + [
        f"id{rate}-elr" for rate in (20, 50, 80)
    ]
    assert [c.name for c in experiment.choose(["id50-*", "id20-*"], ["ce"])] == [
        *("id20-ce", "id50-ce"),
    ]
    for only, methods, message in [
        (None, ["moit-plus"], "--method moit-plus: the numbers of moit-plus in id-noise are pub"),
        (["id0-moit-plus"], None, "--only id0-moit-plus: the numbers of moit-plus in id-noise"),
        (None, ["dividemix"], "--method dividemix: no such method in id-noise; did you mean div"),
        (None, ["x"], "--method x: no such method in id-noise; known: ce, "),
        (["id50-ce"], ["pls"], "--only id50-ce --method pls: no cell of id-noise is both"),
    ]:
        with pytest.raises(InputError) as error:
            experiment.choose(only, methods)
        assert str(error.value).startswith(message)
    assert len(experiment.choose_numbers(None, ["moit-plus"])) == 4


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
