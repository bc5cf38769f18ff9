"""Tables: our numbers beside the paper's."""

import json
import re
import shutil
from pathlib import Path
from statistics import mean

import pytest
from experiment_files import call, read_table, write_cell_run, write_result_file

from pseudoloss.experiments import tables
from pseudoloss.experiments.catalogue import EXPERIMENTS
from pseudoloss.experiments.matching import preset_settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ID20 = "cifar100:DIR --preset cifar100-id20"
ID50 = "cifar100:DIR --preset cifar100-id50"


def test_mean_std_and_difference(tmp_path, capsys):
    for seed, last, best in [(1, 75.0, 76.0), (2, 76.0, 77.0), (4, 77.0, 78.5)]:
        write_cell_run(tmp_path, "id50-pls", seed, last, best)
    row = read_table("id-noise", "--out", tmp_path, capsys=capsys)["id50-pls"]
    wanted = {
        **{"paper": 76.48, "paper_std": 0.25, "last": 76.0, "last_std": 1.0},
        **{"best": 77.1667, "best_std": 1.2583, "n": 3, "difference": 0.6867},
    }
    assert {key: float(row[key]) for key in wanted} == wanted
    _, text, _ = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["r_in = 0.0", "78.85 ± 0.21", "–", "–", "–", "–"] in rows
    ours = ["r_in = 0.5", "76.48 ± 0.25", "76.00 ± 1.00", "77.17 ± 1.26", "3", "+0.69"]
    assert ours in rows
    assert f"id50-pls: seeds 1 2 4 of {tmp_path}/id-noise/id50-pls" in text
    _, text, _ = call("table", "id-noise", "--out", tmp_path, "--seeds", "1", capsys=capsys)
    assert "76.48 ± 0.25        75.00        76.00   1          -0.48" in text
    file = tmp_path / "table.md"
    options = ["--only", "id50-*", "--format", "markdown", "--file", file]
    code, text, _ = call("table", "id-noise", "--out", tmp_path, *options, capsys=capsys)
    assert (code, text) == (0, "")
    markdown = file.read_text()
    assert "| r_in = 0.5 | PLS | 76.48 ± 0.25 | 76.00 ± 1.00 | 77.17 ± 1.26 | 3 | +0.69 |\n" in (
        markdown
    )
    assert "| r_in = 0.5 | cross-entropy | 46.59 | – | – | – | – |\n" in markdown


def test_details_are_time_memory_and_how_wrong_labels_are_found(tmp_path, capsys):
    for seed, seconds, gib in [(1, 100.0, 2), (2, 140.0, 4)]:
        path = write_cell_run(tmp_path, "id40-elr", seed, 60, 61)
        summary = json.loads((path / "summary.json").read_text())
        summary["seconds"], summary["peak_memory"] = seconds, gib * 2**30
        summary["detection"] = {"precision": 0.5, "recall": 1.0, "auc": 0.9}
        (path / "summary.json").write_text(json.dumps(summary))
    write_cell_run(tmp_path, "id40-ce", 1, 50, 51)  # its summary has no details
    rows = read_table("same-harness", "--out", tmp_path, capsys=capsys)
    names = ("seconds", "memory", "auc", "f1")
    assert [rows["id40-elr"][name] for name in names] == ["120.0", "3.0", "0.9", "0.6667"]
    assert [rows["id40-ce"][name] for name in names] == ["", "", "", ""]
    arguments = ("same-harness", "--out", tmp_path, "--method", "elr")
    _, text, _ = call("table", *arguments, capsys=capsys)
    assert "memory (GiB)" not in text
    _, text, _ = call("table", *arguments, "--details", capsys=capsys)
    assert re.search(r"ours, best +n +seconds +memory \(GiB\) +AUC +F1\n", text)
    assert "paper, best" not in text  # the paper has no such table
    assert re.search(r" 2 +120 +3.00 +0.900 +0.667\n", text)
    _, text, _ = call("table", *arguments, "--details", "--format", "markdown", capsys=capsys)
    assert " | 2 | 120 | 3.00 | 0.900 | 0.667 |\n" in text


def test_result_files_say_nothing_of_time(tmp_path):
    """Some of their runs shared a GPU."""
    name, found = "elr.json", {"precision": 1.0, "recall": 0.5, "auc": 0.8}
    arguments = "cifar100:DIR --preset cifar100-id40"
    write_result_file(tmp_path, name, arguments, [(1, 60, 61)], flags="-- --method elr")
    content = json.loads((tmp_path / name).read_text())
    content["runs"][0] |= {"seconds": 5.0, "peak_memory": 2**30, "detection": found}
    (tmp_path / name).write_text(json.dumps(content))
    (result,) = tables.read_result_file(tmp_path / name).results
    assert result.details == pytest.approx({"auc": 0.8, "f1": 2 / 3})


def test_trials_and_unfinished_and_damaged_runs_are_noted(tmp_path, capsys):
    write_cell_run(tmp_path, "id20-pls", 1, 9, 10, epochs=2, device="cpu")
    (write_cell_run(tmp_path, "id20-pls", 2, 80, 80) / "summary.json").unlink()
    (write_cell_run(tmp_path, "id20-pls", 3, 80, 80) / "config.json").write_text("{")
    row = read_table("id-noise", "--out", tmp_path, capsys=capsys)["id20-pls"]
    differs = "--epochs 2 (not --epochs 200)"
    assert (row["n"], row["differs"]) == ("1", differs)
    _, text, _ = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    assert "r_in = 0.2*" in text
    assert f"* id20-pls was trained with other settings: {differs}\n" in text
    assert "id20-pls: seed 2 is not finished" in text
    assert "id20-pls: seed 3 is left out, its folder is damaged" in text


def test_trials_count_only_if_there_are_no_other_runs(tmp_path, capsys):
    write_cell_run(tmp_path, "digits-ce", 1, 60, 95, epochs=2)
    write_cell_run(tmp_path, "digits-ce", 4, 60, 96, epochs=2)
    results = tmp_path / "results"
    runs = [(1, 70, 74), (2, 71, 75)]
    write_result_file(
        results, "ce.json", "digits --preset digits-id40", runs, flags="-- --method ce"
    )
    both = ["digits", "--out", tmp_path, "--results", results]
    row = read_table(*both, capsys=capsys)["digits-ce"]
    assert (row["best"], row["n"], row["differs"]) == ("74.5", "2", "")
    _, text, _ = call("table", *both, capsys=capsys)
    left = f"of {tmp_path}/digits/digits-ce is left out, it was trained with --epochs 2 (not"
    assert f"\ndigits-ce: seed 1 {left} --epochs 30)\n" in text
    assert f"\ndigits-ce: seed 4 {left} --epochs 30)\n" in text
    assert "\ndigits-ce: seeds 1 2 of ce.json\n" in text
    assert "labels*" not in text
    assert "\n* " not in text
    # Only runs that differ in the same way count together.
    write_cell_run(tmp_path, "digits-ce", 3, 60, 10, epochs=3)
    row = read_table("digits", "--out", tmp_path, capsys=capsys)["digits-ce"]
    differs = "--epochs 2 (not --epochs 30)"
    assert (row["best"], row["n"], row["differs"]) == ("95.5", "2", differs)
    _, text, _ = call("table", "digits", "--out", tmp_path, capsys=capsys)
    assert "digits-ce: seed 3 of" in text
    assert "is left out, it was trained with --epochs 3 (not --epochs 30)" in text
    # --seeds decides first which runs are considered.
    row = read_table(*both, "--seeds", 4, capsys=capsys)["digits-ce"]
    assert (row["best"], row["n"], row["differs"]) == ("96.0", "1", differs)


def test_another_pool_is_noted(tmp_path, capsys):
    name, differs = "inet-40-20-pls", "--pool ood32.npy (not imagenet32)"
    results = tmp_path / "results"
    arguments = ["ood-noise", "--out", tmp_path, "--results", results]
    write_cell_run(tmp_path, name, 1, 70, 71, pool="/my/tinyimagenet32/ood32.npy")
    preset = "cifar100:DIR --preset cifar100-inet-40-20"
    write_result_file(results, "a.json", preset, [(2, 72, 73)], flags="-- --pool ood32.npy")
    row = read_table(*arguments, capsys=capsys)[name]
    assert (row["best"], row["n"], row["differs"]) == ("72.0", "2", differs)
    _, text, _ = call("table", *arguments, capsys=capsys)
    assert "ImageNet32, r_out = 0.4, r_in = 0.2*" in text
    assert f"\n* {name} was trained with other settings: {differs}\n" in text
    write_cell_run(tmp_path, name, 3, 79, 80, pool="/data/ImageNet-32_train/batches")
    row = read_table(*arguments, capsys=capsys)[name]
    assert (row["best"], row["n"], row["differs"]) == ("80.0", "1", "")


def test_a_run_with_another_seed_is_left_out(tmp_path, capsys):
    first = write_cell_run(tmp_path, "id20-pls", 1, 70, 71)
    place = first.parent
    shutil.copytree(first, place / "seed2")
    row = read_table("id-noise", "--out", tmp_path, capsys=capsys)["id20-pls"]
    assert row["n"] == "1"
    _, text, _ = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    assert f"id20-pls: seed 2 of {place} is left out, it was trained with --seed 1\n" in text
    arguments = ["--out", tmp_path, "--data", "cifar100=/x", "--only", "id20-pls", "--seeds", "2"]
    code, _, err = call("run", "id-noise", *arguments, capsys=capsys)
    assert code == 2
    assert f"{place}/seed2: was started with --seed 1, not --seed 2; choose another --out" in err


def test_runs_of_another_source_are_left_out(tmp_path, capsys):
    place = write_cell_run(tmp_path, "cnwl-40-pls", 1, 70, 71, source="cnwl:/data:0.2").parent
    write_cell_run(tmp_path, "cnwl-20-pls", 1, 70, 71, source="cnwl:/data:0.2")
    results = tmp_path / "results"
    for name, source, last in (
        ("a", "cnwl:DIR:0.2", 1),
        ("b", "cnwl:DIR:0.4", 2),
        ("c", "cnwl:DIR", 3),
    ):
        write_result_file(results, f"{name}.json", f"{source} --preset cnwl-40", [(2, last, 1)])
    arguments = ["cnwl", "--out", tmp_path, "--results", results]
    rows = read_table(*arguments, capsys=capsys)
    assert rows["cnwl-20-pls"]["n"] == "1"
    assert (rows["cnwl-40-pls"]["last"], rows["cnwl-40-pls"]["n"]) == ("2.0", "1")
    _, text, _ = call("table", *arguments, capsys=capsys)
    why = "it was trained on cnwl:/data:0.2 (not cnwl:DIR:0.4)"
    assert f"\ncnwl-40-pls: seed 1 of {place} is left out, {why}\n" in text


def test_a_table_without_runs_says_where_it_looked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, err = call("table", "id-noise", capsys=capsys)
    assert (code, "78.85 ± 0.21" in text) == (0, True)
    assert err == "pseudoloss: no finished runs of id-noise found in experiments\n"
    write_cell_run(tmp_path / "experiments", "id0-pls", 1, 70, 71)
    Path("benchmarks/results").mkdir(parents=True)
    assert call("table", "id-noise", capsys=capsys)[2] == ""
    arguments = ["id-noise", "--seeds", "8", "9", "--format", "csv", "--file", "new/folder/t.csv"]
    code, text, err = call("table", *arguments, capsys=capsys)
    assert (code, text) == (0, "")
    assert "found in experiments and benchmarks/results with --seeds 8 9\n" in err
    assert Path("new/folder/t.csv").read_text().startswith("experiment,cell,")
    for flag in ("--out", "--results"):
        code, text, err = call("table", "id-noise", flag, "nowhere", capsys=capsys)
        assert (code, text) == (2, "")
        assert f"{flag} nowhere: no such folder" in err


def test_published_numbers_and_what_to_know_about_them(tmp_path, capsys):
    write_cell_run(tmp_path, "id80-pls", 1, 63, 64)
    arguments = ["id-noise", "--out", tmp_path, "--only", "id80-*"]
    _, text, _ = call("table", *arguments, capsys=capsys)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["r_in = 0.8", "Sel-CL+", "59.60", "–", "–", "published", "–"] in rows
    marked = next(row[2] for row in rows if row[1:2] == ["ELR+"])
    number = re.fullmatch(r"60\.08 \[(\d)\]", marked)[1]
    assert f"\n[{number}] published: probably a typo of 60.8" in text
    assert "\npublished, other methods: at 20, 50 and 80% from their papers" in text
    two = next(row[2] for row in rows if row[1:2] == ["Dynamic Bootstrapping"])
    assert re.fullmatch(r"45\.67 \[\d, \d\]", two)
    _, text, _ = call("table", *arguments, "--format", "markdown", capsys=capsys)
    assert f"| ELR+ | 60.08 [{number}] |" in text
    assert f"\n- [{number}] published: probably" in text
    row = read_table(*arguments, capsys=capsys)["id80-elr-plus"]
    assert (row["paper"], row["n"]) == ("60.08", "0")
    assert row["doubts"].startswith("probably a typo")
    # Nothing about others where only PLS is shown.
    _, text, _ = call("table", "id-noise", "--out", tmp_path, "--method", "pls", capsys=capsys)
    assert "published," not in text
    assert "extra" not in text


def test_extra_cells_are_counted_and_runs_of_them_mentioned(tmp_path, capsys):
    what = "extra cells (baselines, other methods, trials) are not shown; --only '*' shows all\n"
    count = len(EXPERIMENTS["id-noise"].choose_numbers(["*"])) - 5
    line = f"{count} {what}"
    assert call("table", "id-noise", "--out", tmp_path, capsys=capsys)[1].endswith(line)
    for arguments in (["id-noise", "--only", "*"], ["id-noise", "--only", "id0*"], ["mu"]):
        assert "extra" not in call("table", *arguments, "--out", tmp_path, capsys=capsys)[1]
    write_cell_run(tmp_path, "id50-ce", 1, 70, 71)
    _, _, err = call("table", "id-noise", "--out", tmp_path, capsys=capsys)
    assert err.endswith("; there are runs of extra cells, which --only '*' shows\n")
    assert call("table", "id-noise", "--out", tmp_path, "--only", "*", capsys=capsys)[2] == ""


# ------------------------------------------------------------------------------------- result files


def test_damaged_result_files_are_named(tmp_path, capsys):
    for seed, name in enumerate("abcd", 1):
        last = "many" if name == "c" else 70
        write_result_file(tmp_path, f"{name}.json", ID20, [(seed, last, 71)])
    (tmp_path / "b.json").write_text((tmp_path / "b.json").read_text()[:-20])
    content = json.loads((tmp_path / "d.json").read_text())
    content["command"] = content["command"].replace("benchmarks/run.py", "'benchmarks/run.py '")
    (tmp_path / "d.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text('{"command": "it isn\'t ours", "runs": 3}')
    (tmp_path / "list.json").write_text("[]")
    assert read_table("id-noise", "--results", tmp_path, capsys=capsys)["id20-pls"]["n"] == "1"
    _, text, _ = call("table", "id-noise", "--results", tmp_path, capsys=capsys)
    assert re.findall("(.*) is left out: it is damaged", text) == ["b.json", "c.json", "d.json"]


INVALID_ACCURACIES = [float("nan"), float("inf"), -1, 100.5, True, "71", None]


@pytest.mark.parametrize("value", INVALID_ACCURACIES, ids=str)
def test_an_invalid_accuracy_does_not_count(tmp_path, capsys, value):
    results = tmp_path / "results"
    write_result_file(results, "a.json", ID20, [(1, 0, 100)])
    write_result_file(results, "last.json", ID20, [(2, value, 71)])
    write_result_file(results, "best.json", ID20, [(3, 70, value)])
    write_cell_run(tmp_path, "id20-pls", 4, 70, value)
    arguments = ["id-noise", "--out", tmp_path, "--results", results]
    row = read_table(*arguments, capsys=capsys)["id20-pls"]
    assert (row["last"], row["best"], row["n"]) == ("0.0", "100.0", "1")
    _, text, _ = call("table", *arguments, capsys=capsys)
    why = f"an accuracy is {value!r}, not a number from 0 to 100"
    for name in ("last.json", "best.json"):
        line = next(line for line in text.splitlines() if line.startswith(f"{name} is left out"))
        assert why in line
    assert "id20-pls: seed 4 is left out, its folder is damaged (" in text
    assert f"not the summary.json of a run ({why})" in text


def test_files_belong_to_cells_by_source_preset_and_settings(tmp_path, capsys):
    results = tmp_path / "results"
    for name, flags, run in [
        ("a.json", "", (1, 76.0, 76.0)),
        ("b.json", "-- --method ce --device cuda", (1, 46.0, 46.0)),
        ("c.json", "-- --method=mixup", (1, 61.0, 61.0)),
        ("d.json", "-- --epochs 2", (1, 1.0, 1.0)),  # no cell
        ("e.json", "-- --no-contrast", (1, 2.0, 2.0)),  # no cell
        ("f.json", "-- --gamma 2.0 --contrast --method pls", (2, 77.0, 77.0)),  # as in the preset
    ]:
        write_result_file(results, name, ID50, [run], flags=flags)
    write_result_file(results, "g.json", "digits --preset cifar100-id50", [(5, 3.0, 3.0)])
    write_result_file(results, "h.json", ID50, [(1, 4.0, 4.0)])  # a second file of seed 1
    # The recorded settings count, not today's preset.
    settings = preset_settings("cifar100-id50", {"network": "small-cnn"})
    write_result_file(results, "i.json", ID50, [(3, 5.0, 5.0)], settings=settings)
    (results / "damaged.json").write_text("{")
    (results / "other.json").write_text('{"command": "python benchmarks/growth.py", "rows": []}')
    arguments = ["id-noise", "--results", results, "--only", "*"]
    rows = read_table(*arguments, capsys=capsys)
    found = {name: (row["best"], row["n"]) for name, row in rows.items() if row["n"] != "0"}
    wanted = {"id50-pls": ("76.5", "2"), "id50-ce": ("46.0", "1"), "id50-mixup": ("61.0", "1")}
    assert found == wanted
    _, text, _ = call("table", *arguments, capsys=capsys)
    assert "id50-pls: seed 1 of h.json is left out, it is in a.json" in text
    # A run folder takes precedence over a file.
    write_cell_run(tmp_path, "id50-pls", 1, 70, 71)
    rows = read_table(*arguments, "--out", tmp_path, capsys=capsys)
    assert (rows["id50-pls"]["best"], rows["id50-pls"]["n"]) == ("74.0", "2")


def test_the_committed_results(capsys, monkeypatch):
    """Without options, in the folder of the repository."""
    monkeypatch.chdir(RESULTS.parent.parent)
    rows = read_table("id-noise", capsys=capsys)
    assert list(rows) == ["id0-pls", "id20-pls", "id50-pls", "id80-pls", "id80-pls-loss"]
    for name, seeds in (("id80-pls", "3"), ("id80-pls-loss", "2")):
        assert (rows[name]["n"], rows[name]["differs"]) == (seeds, "")
    names = ("-first-two-seeds-h200", "-seeds-3-4-h200", "-h200")
    files = [json.loads((RESULTS / f"cifar100-id50{name}.json").read_text()) for name in names]
    runs = [run for file in files for run in file["runs"]]
    best = mean(run["accuracy"]["best"] for run in runs)
    assert int(rows["id50-pls"]["n"]) == len(runs)
    assert float(rows["id50-pls"]["difference"]) == pytest.approx(best - 76.48, abs=1e-4)
    rows = read_table("digits", capsys=capsys)
    assert (rows["digits-pls"]["n"], rows["digits-ce"]["n"]) == ("3", "3")


def test_every_format_has_a_line_for_every_cell(tmp_path):
    for experiment in EXPERIMENTS.values():
        lines, notes = tables.collect(experiment.cells, tmp_path, None)
        assert notes == []
        for form in tables.FORMATS.values():
            text = form(experiment, lines, notes)
            assert all(line == line.rstrip() for line in text.splitlines())
            for row in {cell.row for cell in experiment.cells}:
                assert len(re.findall(re.escape(row) + r"(?=\s|,|\"| \|)", text)) >= 1


def test_a_table_replaces_a_file_only_with_force(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text("mine")
    arguments = ("table", "digits", "--results", RESULTS, "--file", file)
    code, _, err = call(*arguments, capsys=capsys)
    assert (code, file.read_text()) == (2, "mine")
    assert "add --force" in err
    assert call(*arguments, "--force", capsys=capsys)[0] == 0
    assert "99.26" in file.read_text()
