"""The comparison of runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pseudoloss.report.comparing import (
    agreement,
    disagreements,
    join_rows,
    with_unique_names,
    write_comparison,
)
from pseudoloss.report.reading import read_record
from report_folders import HOSTILE, write_audit
from report_pages import Page, assert_accessible, assert_self_contained


@pytest.fixture
def folders(tmp_path):
    """Two audits of the same images with other scores."""
    first = write_audit(tmp_path, "first", truth=True)
    second = write_audit(tmp_path, "second", seed=1, truth=True)
    text = (first / "config.json").read_text()
    (second / "config.json").write_text(text)
    return first, second


def test_agreement_of_flags(folders):
    a, b = map(read_record, folders)
    found = agreement(a, b)
    one, two = (record.table["is_label_issue"].to_numpy() for record in (a, b))
    assert found.common == 60
    assert found.both == (one & two).sum()
    assert (found.only_first, found.only_second) == ((one & ~two).sum(), (~one & two).sum())
    assert found.overlap == pytest.approx((one & two).sum() / (one | two).sum())
    assert found.same == found.both  # both have the same candidates
    same = agreement(a, a)
    assert (same.overlap, same.only_first, same.only_second) == (1, 0, 0)


def test_images_are_matched_by_path_in_any_order(folders, tmp_path):
    a, b = map(read_record, folders)
    lines = (folders[1] / "labels.csv").read_text().splitlines()
    order = np.random.default_rng(0).permutation(len(lines) - 1) + 1
    (folders[1] / "labels.csv").write_text("\n".join([lines[0], *(lines[i] for i in order)]) + "\n")
    shuffled = agreement(a, read_record(folders[1]))
    assert shuffled == agreement(a, b)


def test_disagreements_are_flagged_by_one_run_only(folders):
    a, b = map(read_record, folders)
    for record, other, gallery in zip((a, b), (b, a), disagreements(a, b, 1000), strict=True):
        rows = [card.row for card in gallery["cards"]]
        assert len(rows) == gallery["total"]
        assert record.table.loc[rows, "is_label_issue"].all()
        assert not other.table.loc[rows, "is_label_issue"].any()
        scores = [card.p_noisy for card in gallery["cards"]]
        assert scores == sorted(scores, reverse=True)


def test_the_page(folders, tmp_path):
    html = write_comparison(folders, tmp_path / "c.html").read_text()
    page = Page(html)
    assert_self_contained(page)
    assert_accessible(page)
    assert page.sections == ["numbers", "agreement", "galleries", "noise"]
    assert page.all("img")
    assert "F1 of flagged labels" in page.text
    assert write_comparison(folders, tmp_path / "d.html").read_text() == html


def test_accuracy_curves_together(finished, whole_run, tmp_path):
    page = Page(write_comparison([finished, whole_run], tmp_path / "c.html").read_text())
    assert_accessible(page)
    assert len(page.all("polyline")) == 2
    assert "no images in common" in page.text


def test_hostile_names(tmp_path):
    folders = [write_audit(tmp_path, name, classes=HOSTILE) for name in ("<b>&", '"><i>')]
    page = Page(write_comparison(folders, tmp_path / "c.html").read_text())
    assert_self_contained(page)
    assert not {"b", "i"} & {tag for tag, _ in page.elements}
    assert "<b>&" in page.text


def test_names_are_unique(folders, tmp_path):
    record = read_record(folders[0])
    names = [one.name for one in with_unique_names([record, record, record])]
    parent = tmp_path.name
    assert names == [f"{parent}/first", f"{parent}/first (2)", f"{parent}/first (3)"]
    assert [one.name for one in with_unique_names([record])] == ["first"]


def test_images_of_a_corrected_table_are_those_of_its_source(tmp_path):
    """The table that `apply` wrote has whole paths."""
    record = read_record(write_audit(tmp_path, "audit"))
    whole = [str(Path(record.labels.source) / path) for path in record.table["path"]]
    fixed = replace(
        record,
        table=record.table.assign(path=whole),
        labels=replace(record.labels, source=str(tmp_path / "fixed.csv")),
    )
    assert len(join_rows(record, fixed)) == len(record.table)
