"""The numbers of the report, against scikit-learn and slow loops."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

from pseudoloss.report import findings
from pseudoloss.report.reading import read_record
from report_folders import write_audit


@pytest.fixture
def record(tmp_path):
    return read_record(write_audit(tmp_path, n=120, truth=True))


def test_scores_against_the_truth(record):
    table = record.table
    wrong = table["truth"] == "wrong"
    found = findings.against_truth(table)
    precision, recall, f1, _ = precision_recall_fscore_support(
        wrong, table["is_label_issue"], average="binary"
    )
    assert (found.precision, found.recall, found.f1) == pytest.approx((precision, recall, f1))
    assert found.auc == pytest.approx(roc_auc_score(wrong, -table["label_score"]))
    relabel = table[table["action"] == "relabel"]
    assert found.suggestions == len(relabel)
    right = (relabel["suggested_label"] == relabel["true_label"]).mean()
    assert found.right_suggestions == pytest.approx(right)
    applied = table["given_label"].where(table["action"] != "relabel", table["suggested_label"])
    assert found.right_after == pytest.approx((applied == table["true_label"]).mean())
    assert found.right_before == pytest.approx((table["given_label"] == table["true_label"]).mean())
    assert (found.images, found.noise) == (120, pytest.approx(wrong.mean()))


def test_only_rows_with_known_truth_count(record):
    table = record.table.copy()
    unknown = np.arange(len(table)) % 3 == 0
    table.loc[unknown, ["true_label", "truth"]] = np.nan
    assert findings.against_truth(table) == findings.against_truth(table[~unknown])
    table["truth"] = np.nan
    assert findings.against_truth(table) is None
    assert findings.against_truth(table.drop(columns=["truth", "true_label"])) is None


def test_an_image_without_class_is_wrong_and_no_suggestion_is_right(record):
    table = record.table.copy()
    table["truth"], table["true_label"] = "out", np.nan
    found = findings.against_truth(table)
    assert (found.noise, found.precision, found.auc) == (1, 1, None)
    assert (found.right_suggestions, found.right_after) == (0, 0)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_bins_of_a_reliability_diagram(pairs):
    predicted = np.array([p for p, _ in pairs])
    happened = np.array([h for _, h in pairs])
    error, bins = findings.reliability_bins(predicted, happened)
    assert sum(one.images for one in bins) == len(pairs)
    assert sum(one.images * one.predicted for one in bins) == pytest.approx(predicted.sum())
    assert sum(one.images * one.observed for one in bins) == pytest.approx(happened.sum())
    slow = sum(one.images * abs(one.predicted - one.observed) for one in bins) / len(pairs)
    assert error == pytest.approx(slow)
    assert all(0 <= one.observed <= 1 + 1e-12 for one in bins)


def test_pairs_are_the_counts_of_flagged_labels(record):
    table = record.table
    flagged = table[table["is_label_issue"]]
    found = findings.pairs(table)
    wanted = pd.crosstab(flagged["given_label"], flagged["candidate_label"])
    assert sum(pair.images for pair in found) == len(flagged)
    for pair in found:
        assert pair.images == wanted.loc[pair.given, pair.candidate]
        assert pair.share == pytest.approx(pair.images / (table["given_label"] == pair.given).sum())
    assert [pair.images for pair in found] == sorted((p.images for p in found), reverse=True)
    matrix = findings.pair_matrix(found, record.labels.classes)
    assert matrix.sum() == len(flagged)
    assert np.diag(matrix).sum() == 0


def test_galleries_are_ordered(record):
    relabels = findings.relabels(record, 1000)
    assert len(relabels) == (record.table["action"] == "relabel").sum()
    trusts = [card.trust for card in relabels]
    assert trusts == sorted(trusts, reverse=True)
    reviews = findings.reviews(record, 5)
    assert len(reviews) == 5
    doubts = [card.p_noisy for card in reviews]
    assert doubts == sorted(doubts, reverse=True)
    assert doubts[0] == record.table.query("action == 'review'")["p_noisy"].max()
    outliers = findings.outliers(record, 1000)
    assert {card.row for card in outliers} == set(np.flatnonzero(record.table.outlier_score >= 0.5))


def test_cards_have_examples_and_truth(record):
    for card in findings.relabels(record, 1000):
        row = record.table.iloc[card.row]
        assert (card.given, card.candidate) == (row["given_label"], row["candidate_label"])
        assert card.examples.given == (0, 1)  # -1 stands for none
        assert card.examples.candidate == (3, 4, 2)
        assert card.truth == ("right" if row["candidate_label"] == row["true_label"] else "wrong")


def test_groups_of_duplicates(record):
    contradicting, across = findings.duplicate_groups(record)
    assert [[card.row for card in group] for group in contradicting] == [[0, 1]]
    assert [[card.row for card in group] for group in across] == [[2, 117]]


def test_small_classes(tmp_path):
    record = read_record(write_audit(tmp_path, n=22, classes=tuple("abcde")))
    assert findings.small_classes(record) == [(name, 4) for name in "cde"]
