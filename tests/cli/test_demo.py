import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from pseudoloss.cli.demo import default_folder, run_demo
from pseudoloss.cli.demo_picture import picture
from pseudoloss.errors import InputError

SVG = "{http://www.w3.org/2000/svg}"
NAMES = {"ce": "cross-entropy", "pls": "PLS"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    return folder, run_demo(folder, seed=1, resume=False)


@pytest.fixture
def labels():
    """A label table: three flagged images, of which two get a suggestion, one of them wrong."""
    return pd.DataFrame(
        {
            "given_label": ["3", "1", "7", "4"],
            "suggested_label": ["8", "1", np.nan, "9"],
            "is_label_issue": [True, False, True, True],
            "action": ["relabel", "keep", "review", "relabel"],
            "true_label": ["8", "1", "2", "4"],
        }
    )


def draw(labels, accuracies=None, warmup=2):
    images_NHW = np.arange(len(labels) * 64).reshape(-1, 8, 8) % 17 * 15
    accuracies = accuracies or {"ce": [80.0, 90.0, 70.0], "pls": [75.0, 92.0, 99.16]}
    return picture(accuracies, warmup, labels, images_NHW, NAMES)


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.slow
def test_pls_beats_cross_entropy_on_noisy_digits(demo):
    """What the README promises of its first command."""
    folder, _ = demo
    summary = json.loads((folder / "summary.json").read_text())
    ce, pls = (summary["methods"][name]["accuracy"]["last"] for name in ("ce", "pls"))
    assert pls >= 96
    assert pls - ce >= 15


@pytest.mark.slow
def test_noisy_labels_are_found_and_corrected(demo):
    folder, summary = demo
    pls = summary["methods"]["pls"]
    assert pls["noise_rate"] == pytest.approx(0.4, abs=0.001)
    assert pls["detection"]["precision"] > 0.9
    assert pls["detection"]["recall"] > 0.9
    table = pd.read_csv(folder / "pls" / "labels.csv", dtype=str)
    relabelled = table[table["action"] == "relabel"]
    assert (relabelled["suggested_label"] == relabelled["true_label"]).mean() > 0.9


@pytest.mark.slow
def test_both_methods_write_run_folders(demo):
    folder, _ = demo
    for method in ("ce", "pls"):
        assert (folder / method / "labels.csv").exists()


@pytest.mark.slow
def test_the_demo_draws_a_picture(demo):
    folder, summary = demo
    shown = texts((folder / "demo.svg").read_text())
    for method, name in NAMES.items():
        accuracy = summary["methods"][method]["accuracy"]["last"]
        assert {name, f"{accuracy:.1f}%"} <= set(shown)
    assert sum(text.startswith("given ") for text in shown) == 12


@pytest.mark.slow
def test_the_rows_in_the_readme_are_those_of_the_audit(demo):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| (\d+ \| \d \|.*) \|$", readme, re.MULTILINE)
    assert len(rows) == 5
    table = pd.read_csv(demo[0] / "audit" / "labels.csv", dtype={"suggested_label": str})
    table = table.fillna({"suggested_label": ""})
    table = table[table["part"] == "train"].set_index("index")
    for row_text in rows:
        cells = [text.strip() for text in row_text.split("|")]
        index, given, suggested, p_noisy, candidate, trust, action = cells
        row = table.loc[int(index)]
        names = ("given_label", "suggested_label", "candidate_label", "action")
        assert [str(row[name]) for name in names] == [given, suggested, candidate, action]
        assert row["p_noisy"] == pytest.approx(float(p_noisy), abs=0.05)
        assert row["trust"] == pytest.approx(float(trust), abs=0.05)


@pytest.mark.slow
def test_an_existing_demo_is_never_overwritten(demo):
    folder, _ = demo
    with pytest.raises(InputError, match=r"--out .*already exists"):
        run_demo(folder, seed=1, resume=False)


@pytest.mark.slow
def test_a_finished_demo_prints_its_table_again(demo, capsys):
    folder, summary = demo
    again = run_demo(folder, seed=1, resume=True)
    out = capsys.readouterr().out
    assert "Accuracy on clean test images" in out
    assert f"{summary['methods']['pls']['accuracy']['last']:.1f}%" in out
    assert str(folder / "demo.svg") in out
    assert "pseudoloss audit photos/ --out audit" in out
    assert again == summary


def test_the_default_folder_is_new_or_the_one_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_folder(resume=False) == default_folder(resume=True) == Path("pseudoloss-demo")
    Path("pseudoloss-demo").mkdir()
    Path("pseudoloss-demo-2").mkdir()
    assert default_folder(resume=False) == Path("pseudoloss-demo-3")
    assert default_folder(resume=True) == Path("pseudoloss-demo-2")


def test_the_picture_shows_flagged_images_with_suggestions(labels):
    shown = texts(draw(labels))
    assert "the first 3 of 3 flagged images in 4" in shown
    assert [text for text in shown if text.startswith(("given", "suggested", "review"))] == [
        *("given 3", "suggested 8", "given 7", "review", "given 4", "suggested 9"),
        "review: no trusted suggestion",
    ]
    assert "suggestion right (1 of 2)" in shown


def test_the_picture_marks_right_and_wrong_suggestions(labels):
    svg = draw(labels)
    tick, cross = "M-5 0l3.5 4l6.5 -8", "M-4 -4l8 8m0 -8l-8 8"
    assert (svg.count(tick), svg.count(cross)) == (2, 1)  # one tick is in the note below


def test_the_picture_draws_every_pixel(labels):
    svg = draw(labels.head(1))
    image = re.search(r"<g .*?</g>", svg).group()
    pixels = (np.arange(64) % 17 > 0).sum()  # white ones are background
    assert image.count("h1v1h-1z") == pixels


def test_the_picture_labels_lines_at_their_ends(labels):
    shown = texts(draw(labels))
    assert {"PLS", "99.2%", "cross-entropy", "70.0%"} <= set(shown)
    assert any("end of warm-up" in text for text in shown)
    assert not any("end of warm-up" in text for text in texts(draw(labels, warmup=3)))


def test_labels_of_lines_that_end_at_the_same_place_do_not_overlap(labels):
    svg = draw(labels, {"ce": [90.0, 99.0], "pls": [90.0, 99.1]}, warmup=1)
    root = ElementTree.fromstring(svg)
    heights = [float(t.get("y")) for t in root.iter(f"{SVG}text") if t.text in NAMES.values()]
    assert abs(heights[0] - heights[1]) >= 30


def test_the_picture_refers_to_nothing_outside(labels):
    svg = draw(labels)
    assert "href" not in svg
    assert "url(" not in svg


def test_a_picture_without_flagged_images(labels):
    nothing = labels.assign(is_label_issue=False, action="keep")
    assert "the first 0 of 0 flagged images in 4" in texts(draw(nothing))


def test_an_interrupted_audit_names_the_command_to_resume(tmp_path, monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pseudoloss.cli.demo.audit", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"pseudoloss demo --out .* --resume"):
        run_demo(tmp_path / "out", seed=1, resume=False)
