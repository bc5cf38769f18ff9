"""Reports as files: what is in them, and that nothing else is needed to read them."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pseudoloss.cli import main
from pseudoloss.errors import InputError
from pseudoloss.labels.table import write_labels
from pseudoloss.report import page as page_module
from pseudoloss.report.page import MAX_BYTES, breakable_name, likely, write_report
from pseudoloss.report.svg import clean
from pseudoloss.report.texts import duration
from pseudoloss.spreadsheets import safe_text
from report_folders import HOSTILE, write_audit
from report_pages import Page, assert_accessible, assert_self_contained

ALWAYS = ["relabel", "review", "noise", "confusions", "scores", "settings"]


def read(path):
    page = Page(path.read_text(encoding="utf-8"))
    assert_self_contained(page)
    assert_accessible(page)
    return page


def decoded_images(page):
    """All images, decoded: their sizes are those that the page says."""
    sizes = []
    for found in page.all("img"):
        kind, _, content = found["src"].partition(";base64,")
        image = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
        assert kind == f"data:image/{image.format.lower()}"
        image.load()
        assert image.size == (int(found["width"]), int(found["height"]))
        sizes.append(image.size)
    return sizes


def change_summary(folder, **values):
    path = folder / "summary.json"
    changed = json.loads(path.read_text()) | values
    changed.pop("checksum", None)
    path.write_text(json.dumps(changed))


# ----------------------------------------------------------------------------------- what is shown


def test_the_report_of_an_audit(tmp_path):
    folder = write_audit(tmp_path, truth=True, size=200)
    path = write_report(folder)
    page = read(path)
    assert path == folder / "report.html"
    assert page.sections == [
        *("relabel", "review", "duplicates", "outliers", "noise", "confusions", "scores", "truth"),
        "settings",
    ]
    assert [link["href"] for link in page.all("a")] == [f"#{name}" for name in page.sections]
    assert "audit-photos" in page.text
    assert "60 images (48 train, 12 test)" in page.text
    assert "20.0%" in page.text
    assert "likely 15.0 to 25.0%" in page.text
    assert "the cache is full" in page.text
    assert "pseudoloss audit" in page.text
    sizes = decoded_images(page)
    assert max(map(max, sizes)) == 128
    assert {"64", "128"} == {found["width"] for found in page.all("img")}


def test_the_galleries_show_the_rows_of_the_table(tmp_path):
    folder = write_audit(tmp_path, n=30, size=12)
    page = read(write_report(folder, top=500))
    section = page.html.partition('id="relabel"')[2].partition("</section>")[0]
    table = page_module.read_record(folder).table
    wanted = table[table["action"] == "relabel"]
    files = re.findall(r'class="file" title="([^"]*)"', section)
    assert sorted(files) == sorted(wanted["path"])
    shown = [Page(card).text for card in re.findall(r"<figcaption>.*?</figcaption>", section, re.S)]
    by_path = wanted.set_index("path")
    for file, text in zip(files, shown, strict=True):
        row = by_path.loc[file]
        assert f"{row['given_label']} → {row['suggested_label']}" in text
        assert f"wrong {likely(row['p_noisy'])} trust {likely(row['trust'])}" in text


def test_the_report_of_a_training_run(whole_run, tmp_path):
    page = read(write_report(whole_run, tmp_path / "r.html"))
    assert {*ALWAYS, "training"} <= set(page.sections)
    assert "end of warm-up" in page.texts
    assert "--config run/config.json" in page.text
    assert decoded_images(page)  # from the .npz file
    assert set(page.with_class("pixels")) == {"img"}  # 8×8 pixels, not smoothed


def test_data_from_python_have_no_pictures(finished):
    page = read(write_report(finished))
    assert not page.all("img")
    assert "the data were passed in Python" in page.text
    assert {*ALWAYS, "training", "truth"} <= set(page.sections)


def test_a_run_without_candidates(finished):
    """Version 0.2 and before."""
    table = (finished / "labels.csv").read_text().splitlines()
    names = table[0].split(",")
    if "candidate_label" in names:
        at = names.index("candidate_label")
        rows = [line.split(",") for line in table]
        lines = [",".join(row[:at] + row[at + 1 :]) for row in rows]
        (finished / "labels.csv").write_text("\n".join(lines) + "\n")
    change_summary(finished, estimated_noise={"rate": 0.25, "by_class": {"0": 0.5, "1": 0.125}})
    page = read(write_report(finished))
    assert "older version" in page.text
    assert "25.0%" in page.text
    assert "12.5%" in page.text
    assert "interval" not in page.text


def test_a_run_that_is_not_finished(finished):
    (finished / "summary.json").unlink()
    noise = {"rate": 0.375, "by_class": {"0": 0.125}}
    (finished / "labels.json").write_text(json.dumps({"epoch": 2, "estimated_noise": noise}))
    page = read(write_report(finished))
    assert "37.5%" in page.text
    assert "not finished: the labels are as of epoch 2 of 3" in page.text
    (finished / "labels.csv").unlink()
    with pytest.raises(InputError, match="no label table yet"):
        write_report(finished)


def test_noise_that_is_not_known(tmp_path):
    noise = {"rate": 0.4, "low": 0.1, "high": 0.9, "known": False, "reasons": ["too few images"]}
    page = read(write_report(write_audit(tmp_path, summary={"estimated_noise": noise})))
    assert "about 40%" in page.texts
    assert "uncertain: too few images" in page.texts
    assert "too few images" in page.texts
    assert "it can be from 10.0 to 90.0%" in page.text
    noise |= {"low": 0.0, "high": 1.0}
    page = read(write_report(write_audit(tmp_path, "wide", summary={"estimated_noise": noise})))
    assert "not known" in page.texts
    assert "about 40%" not in page.texts


def test_images_that_are_gone(tmp_path):
    page = read(write_report(write_audit(tmp_path, images=False)))
    assert not page.all("img")
    assert "No pictures: " in page.text


def test_one_image_that_is_gone(tmp_path):
    folder = write_audit(tmp_path)
    first = re.search(r'title="([^"]*\.(?:png|jpg))"', write_report(folder).read_text())[1]
    (tmp_path / "audit-photos" / first).unlink()
    page = read(write_report(folder))
    assert "no picture" in page.texts
    assert "1 picture cannot be read" in page.text
    assert decoded_images(page)


def test_many_classes(tmp_path):
    classes = tuple(f"class number {c}" for c in range(300))
    page = read(write_report(write_audit(tmp_path, n=900, classes=classes, size=4)))
    assert "classes with lower shares are in summary.json" in page.text
    assert "300 classes have fewer than 5 images" in page.text
    assert page.html.count('class="rate"') == 200


def test_a_table_without_flags_or_metrics(tmp_path):
    folder = write_audit(tmp_path, settings={"threshold": 1.0})
    (folder / "duplicates.csv").unlink()
    (folder / "examples.npz").unlink()
    (folder / "pred_probs.npy").unlink()
    (folder / "summary.json").write_text("{}")
    page = read(write_report(folder))
    assert "No label has a trusted replacement." in page.text
    assert "duplicates" not in page.sections


def test_thresholds_of_an_audit_are_used(tmp_path):
    folder = write_audit(tmp_path, settings={"threshold": 0.9, "min_trust": 0.25})
    page = read(write_report(folder))
    assert "flagged from 90%" in page.texts
    assert "replaced from 25%" in page.texts
    assert "--threshold 0.9 --min-trust 0.25" in page.text


# ---------------------------------------------------------------------------------- hostile names


def test_hostile_names_stay_text(tmp_path):
    names = [f"{HOSTILE[i % len(HOSTILE)]}/{i}{HOSTILE[(i + 1) % len(HOSTILE)]}" for i in range(60)]
    folder = write_audit(
        tmp_path, classes=HOSTILE, names=names, source=HOSTILE[0],
        reading={"path_column": HOSTILE[1]}, settings={HOSTILE[0]: HOSTILE[1]},
        summary={"notices": list(HOSTILE), "device": HOSTILE[0],
                 "similar_classes": [{"classes": [HOSTILE[0], HOSTILE[1]], "share": 0.5}]},
    )  # fmt: skip
    page = read(write_report(folder))
    html = page.html
    assert "alert(1)" in page.text
    assert "<script" not in html
    assert "49" not in [text.strip() for text in page.texts]  # {{ 7*7 }} is no template
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f\x7f-\x9f]", html)


@given(st.text(max_size=200))
def test_breakable_names(name):
    page = Page(f"<p>{breakable_name(name)}</p>".replace("<wbr>", ""))
    assert "".join(page.texts) == safe_text(clean(name))
    assert [tag for tag, _ in page.elements] == ["p"]


# ---------------------------------------------------------------------------------------- the file


def test_equal_input_gives_equal_bytes(tmp_path):
    folder = write_audit(tmp_path, truth=True)
    first = write_report(folder, tmp_path / "a.html").read_bytes()
    assert write_report(folder, tmp_path / "b.html").read_bytes() == first


def test_the_file_stays_small(tmp_path, monkeypatch):
    """Noise does not compress: these images are as large as images can be."""
    folder = write_audit(tmp_path, n=100, size=140)
    large = write_report(folder, tmp_path / "large.html", top=500).stat().st_size
    monkeypatch.setattr(page_module, "MAX_IMAGES", large // 3)
    page = read(write_report(folder, tmp_path / "smaller.html", top=500))
    assert max(map(max, decoded_images(page))) < 128
    assert sum(len(found["src"]) for found in page.all("img")) <= large // 3
    monkeypatch.setattr(page_module, "MAX_IMAGES", 100_000)
    page = read(write_report(folder, tmp_path / "least.html", top=500))
    assert re.search(r"[\d,]+ pictures left out to keep this file small", page.text)
    assert decoded_images(page)


def test_long_names_do_not_make_the_file_large(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "MAX_BYTES", 300_000)
    names = [f"{i}{'<' * 3000}" for i in range(300)]
    folder = write_audit(tmp_path, n=300, classes=("<" * 5000, "&" * 5000), names=names, size=4)
    assert write_report(folder, top=500).stat().st_size < 300_000


def test_a_large_gallery_of_large_images_is_below_the_limit(tmp_path):
    folder = write_audit(tmp_path, n=400, size=128, settings={"threshold": 0.0, "min_trust": 0.0})
    assert write_report(folder, top=500).stat().st_size < MAX_BYTES == 8_000_000


def test_other_files_are_not_overwritten(tmp_path):
    folder = write_audit(tmp_path)
    path = tmp_path / "mine.html"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"mine\.html: exists and is not a report"):
        write_report(folder, path)
    assert path.read_text() == "mine"
    (folder / "report.html").write_text("mine")
    with pytest.raises(InputError, match="exists and is not a report"):
        write_report(folder)
    with pytest.raises(InputError, match="is a folder"):
        write_report(folder, tmp_path)


@pytest.mark.parametrize(
    ("probability", "wanted"),
    [(1.0, ">99%"), (0.991, ">99%"), (0.99, "99%"), (0.5, "50%"), (0.004, "<1%"), (np.nan, "–")],
)
def test_no_probability_is_shown_as_certain(probability, wanted):
    assert likely(probability) == wanted


# ------------------------------------------------------------------------------------- the command


def call(capsys, *arguments):
    code = main(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(tmp_path, capsys, monkeypatch):
    folder = write_audit(tmp_path)
    code, out, _ = call(capsys, folder)
    assert (code, (folder / "report.html").exists()) == (0, True)
    assert f"written: {folder}/report.html" in out
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    code, _, _ = call(capsys, folder, "--out", tmp_path / "a b.html", "--top", "3", "--open")
    assert (code, opened) == (0, [(tmp_path / "a b.html").as_uri()])
    assert len(Page((tmp_path / "a b.html").read_text()).with_class("card")) < 20
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert "no browser found; open file://" in call(capsys, folder, "--open")[1]


def test_several_runs_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [write_audit(tmp_path, name, seed=i) for i, name in enumerate("ab")]
    code, out, _ = call(capsys, *folders)
    assert (code, "written: report-compare.html" in out) == (0, True)
    assert re.search(r" \(\d+ kB\)\n", out)
    assert "Comparison of 2 runs" in (tmp_path / "report-compare.html").read_text()


def test_wrong_input_is_one_line(tmp_path, capsys):
    folder = write_audit(tmp_path)
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "examples.npz").write_bytes(b"not an archive")
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    arrays = {name: np.array([{}], dtype=object) for name in ("row_M", "given_MK", "candidate_MK")}
    np.savez(pickled / "examples.npz", **arrays)
    for arguments, message in (
        ([tmp_path / "nothing"], "no such run"),
        ([tmp_path], "neither a run folder nor an audit"),
        ([folder, "--top", "0"], "--top must be from 1 to 500, not 0"),
        ([folder, "--top", "x"], "--top: must be a whole number"),
        ([folder, "--out", tmp_path / "no" / "r.html"], "there is no folder"),
        ([damaged], "cannot be read"),
        ([pickled], "cannot be read"),
        ([folder] * 7, "2 to 6 runs"),
    ):
        code, _, err = call(capsys, *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


@pytest.mark.parametrize("arguments", [["--help"], [], ["run", "--oot"]])
def test_help_and_errors_do_not_import_torch(arguments):
    program = (
        "import sys\nfrom pseudoloss.cli import main\n"
        "try: main(['report', *sys.argv[1:]])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'pandas', 'numpy', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)


@pytest.mark.parametrize(("seconds", "text"), [(6.2, "6 s"), (65, "1:05 min"), (None, None)])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_one_image_is_not_all_1(tmp_path):
    folder = write_audit(tmp_path, n=30)
    labels = pd.read_csv(folder / "labels.csv")
    labels["p_noisy"] = [0.9] + [0.1] * (len(labels) - 1)
    labels["trust"], labels["outlier_score"] = 0.2, [0.9] + [0.1] * (len(labels) - 1)
    write_labels(labels, folder)
    text = Page(write_report(folder).read_text()).text
    assert "One image. The given label is probably wrong" in text
    assert "One image with a doubtful label that is far from all classes." in text
    assert "and then write a corrected copy: pseudoloss review audit" in " ".join(text.split())
