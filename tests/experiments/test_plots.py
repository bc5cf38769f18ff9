"""Plots of the runs of experiments, and the helpers that draw them."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from experiment_files import call, write_cell_run

from pseudoloss.experiments import drawing, plots
from pseudoloss.experiments.catalogue import PLOTS

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


def write_metrics(out, name, seed, epochs=6, finished=True, **settings):
    """A run with --compare-metrics whose first two epochs have no metrics."""
    path = write_cell_run(out, name, seed, 0, 0, **settings)
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
                "pseudo_labels": {"pseudo-loss": up, "confidence": up - 0.1, "entropy": up - 0.2},
            },
            "bias": {"learned": 1 - up, "fitted": 1.1 - up},
            "pseudo_loss": {"histogram": counts, "modes": modes if epoch > 3 else None},
        }
        seconds = {"train": 2.0 + seed, "score": 0.5, "validate": 0.5}
        line = {"epoch": epoch, "accuracy": 100 * up, "seconds": seconds}
        lines.append(line | (known if epoch > 2 else dict.fromkeys(known)))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two data sets, with and without selection, two seeds."""
    out = tmp_path_factory.mktemp("runs")
    selection = ("id40-with", "id40-without", "cnwl-40-with", "cnwl-40-without")
    for cell in (*selection, "id40-pls", "id40-elr", "digits-ce"):
        for seed in (1, 2):
            write_metrics(out, cell, seed, epochs=5 + seed)
    return out


@needs_matplotlib
@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_drawn(name, runs, tmp_path, capsys):
    file = tmp_path / "drawn" / f"{name}.svg"
    code, text, err = call("plot", name, "--out", runs, "--file", file, capsys=capsys)
    assert (code, text, err) == (0, f"written: {file}\n", "")
    drawn = file.read_text()
    assert drawn.startswith("<?xml")
    expected = {
        "noise-detection": ["small loss", "KL divergence of views", "CNWL 40%, with selection"],
        "pseudo-labels": ["entropy", "without selection, epoch 4, seed 1", "low mode"],
        "accuracy": ["without selection", "test accuracy (%)", "CIFAR-100, r_in = 0.4"],
        "accuracy-over-time": ["PLS", "ELR", "cross-entropy", "digits, 40% wrong labels"],
        "bias": ["Wrong pseudo-labels that are trained on", "share of flagged images"],
    }
    for text in expected[name]:
        assert f">{text}<" in drawn
    assert "neighbour disagreement" not in drawn  # it has no values
    assert "fill-opacity: 0.2" in drawn  # a band over two seeds


@needs_matplotlib
def test_a_plot_replaces_a_file_only_with_force(runs, tmp_path, capsys):
    file = tmp_path / "accuracy.png"
    arguments = ("plot", "accuracy", "--out", runs, "--file", file)
    assert call(*arguments, capsys=capsys)[0] == 0
    drawn = file.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    file.write_text("mine")
    code, _, err = call(*arguments, capsys=capsys)
    assert (code, file.read_text()) == (2, "mine")
    assert err.startswith(f"pseudoloss: error: --file {file}: ")
    assert err.endswith("add --force to overwrite it\n")
    assert call(*arguments, "--force", capsys=capsys)[0] == 0
    assert file.read_bytes() == drawn


@needs_matplotlib
def test_unfinished_runs_and_runs_without_metrics(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("plot", "accuracy", "--force", capsys=capsys)
    assert code == 2
    assert "experiments: has no runs to draw; train them: pseudoloss experiments run sel" in err
    write_metrics(Path("experiments"), "digits-with", 1, epochs=3, finished=False)
    code, text, _ = call("plot", "accuracy", "--force", capsys=capsys)
    assert code == 0
    assert text.startswith("digits-with: seed 1 is not finished, epoch 3 so far\n")
    assert Path("accuracy.svg").exists()
    assert call("plot", "pseudo-labels", "--epochs", 3, 3, capsys=capsys)[0] == 0
    _, _, err = call("plot", "pseudo-labels", "--force", "--epochs", 1, 3, capsys=capsys)
    assert "--epochs 1: has no histogram" in err
    _, _, err = call("plot", "bias", "--force", "--epochs", 1, 3, capsys=capsys)
    assert "--epochs is for pseudo-labels" in err
    # A run without --compare-metrics has accuracies and nothing else.
    metrics = Path("experiments/selection/digits-with/seed1/metrics.jsonl")
    metrics.write_text('{"epoch": 1, "accuracy": 3.0}\n')
    assert call("plot", "accuracy", "--force", capsys=capsys)[0] == 0
    for name in ("bias", "noise-detection", "pseudo-labels"):
        code, _, err = call("plot", name, "--force", capsys=capsys)
        assert (code, "was it trained with --compare-metrics?" in err) == (2, True)


@needs_matplotlib
def test_runs_with_other_settings_and_damaged_runs_are_left_out(tmp_path, capsys):
    def draw(file):
        arguments = ("plot", "accuracy", "--out", tmp_path, "--file", tmp_path / file)
        code, text, err = call(*arguments, capsys=capsys)
        assert (code, err) == (0, "")
        return (tmp_path / file).read_text(), text.splitlines()[:-1]

    first = write_metrics(tmp_path, "digits-with", 2)
    alone, notes = draw("alone.svg")
    assert notes == []
    assert (">end of warm-up<" in alone, "fill-opacity" in alone) == (True, False)
    write_metrics(tmp_path, "digits-with", 3, gamma=0.5)
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
    path = write_metrics(tmp_path, "digits-with", 4)
    (path / "summary.json").write_text('{"epochs": 9}')
    damaged, notes = draw("damaged.svg")
    assert damaged == alone
    assert "digits-with: seed 4 is left out: metrics.jsonl has 6 of 9 epochs" in notes
    # A trial is drawn if there are no other runs of its cell.
    write_metrics(tmp_path, "digits-without", 1, gamma=0.5)
    trial, notes = draw("trial.svg")
    assert trial != alone
    assert "digits-without: seed 1: trained with --gamma 0.5 (not --gamma 2.0)" in notes
    # A run on other data is not a run of the cell.
    path = write_metrics(tmp_path, "id40-with", 1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"source": "digits"}))
    other, notes = draw("other.svg")
    assert other == trial
    reason = "it was trained on digits, not on cifar100"
    assert any(note.startswith(f"id40-with: seed 1 is left out: {reason}") for note in notes)


def test_every_plot_has_a_function():
    assert plots.DRAWINGS.keys() == PLOTS.keys()


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = call("plot", "bias", "--out", tmp_path, capsys=capsys)
    assert code == 2
    assert "plots need matplotlib: pip install matplotlib" in err


def test_the_area_of_a_mode_is_its_weight():
    step = 0.001
    xs = [step * n for n in range(-4000, 6000)]
    assert sum(plots.normal(x, 0.5, 0.3, 0.7) for x in xs) * step == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("ranges", "limits"),
    [
        ([(0.9, 1.0)], [(0.9, 1.0)]),
        ([(0.5, 0.6), (0.9, 1.0), (0.7, 0.95)], [(0.5, 1.0)]),
        ([(0.5, 0.55), (0.9, 1.0), (0.85, 0.95)], [(0.85, 1.0), (0.5, 0.55)]),
        ([(0.9, 0.9)], [(0.9, 0.9)]),
    ],
)
def test_the_y_axis_is_split_at_a_wide_gap(ranges, limits):
    found = plots.split_ranges(ranges)
    assert len(found) == len(limits)
    for (low, high), (first, last) in zip(found, limits, strict=True):
        space = 0.06 * (last - first or 0.1)
        assert (low, high) == pytest.approx((first - space, last + space))


@pytest.mark.parametrize(
    ("values", "moved"),
    [
        ([], []),
        ([5.0, 1.0], [5.0, 1.0]),
        ([2.0, 2.0], [1.5, 2.5]),
        ([3.0, 2.5, 9.0], [3.25, 2.25, 9.0]),
        ([0.0, 0.9, 1.8], [-0.1, 0.9, 1.9]),  # moving two apart would make them touch the third
    ],
)
def test_labels_are_moved_apart(values, moved):
    assert drawing.spread(values, gap=1.0) == pytest.approx(moved)


def test_svg_files_are_shrunk_without_changing_their_text():
    svg = """<svg>
 <metadata>
  <date>today</date>
 </metadata>
 <g id="text_1">
  <!-- 0.825 -->
  <text x="1.23456"
        y="2.0" transform="rotate(-0 1 2)">0.825</text>
 </g>
 <g clip-path="url(#p1)">
  <path d="M 10.98765 0
L 1 -2.3456"/>
 </g>
</svg>
"""
    assert drawing.shrink_svg(svg) == (
        '<svg>\n<text x="1.2" y="2.0">0.825</text>\n'
        '<g clip-path="url(#p1)">\n<path d="M 11.0 0 L 1 -2.3"/>\n</g>\n</svg>\n'
    )
