"""The label table against known true labels."""

import pandas as pd
import pytest

from pseudoloss.labels.truth import against_truth, truth_lines
from pseudoloss.report import findings


def table(**columns):
    rows = pd.DataFrame(
        {
            "given_label": ["a", "a", "b", "b", "b"],
            "suggested_label": ["b", "a", None, "a", "b"],
            "is_label_issue": [True, False, True, True, False],
            "action": ["relabel", "keep", "review", "relabel", "keep"],
            "candidate_label": ["b", "b", "a", "a", "a"],
            "label_score": [0.1, 0.9, 0.3, 0.2, 0.8],
            "p_noisy": [0.9, 0.1, 0.7, 0.8, 0.2],
            "trust": [0.9, 0.1, 0.4, 0.8, 0.1],
            "true_label": ["b", "a", "a", "b", None],
            "truth": ["wrong", "clean", "wrong", "clean", None],
        }
    )
    return rows.assign(**columns)


def test_the_terminal_and_the_report_have_the_same_numbers():
    found, shown = against_truth(table()), findings.against_truth(table())
    assert found["images"] == 4
    assert found["precision"] == shown.precision == pytest.approx(2 / 3)
    assert found["recall"] == shown.recall == 1
    assert found["relabelled"] == shown.suggestions == 2
    assert found["relabelled_right"] == shown.right_suggestions == 0.5
    assert found["labels_right_applied"] == shown.right_after
    assert truth_lines(found) == [
        "50.0% of 4 labels are wrong; flagged labels: F1 0.800, precision 0.667, recall 1.000, "
        "AUC of the ranking 0.750",
        "50.0% of 2 suggestions are right: right labels 50.0%, after relabelling 50.0%",
    ]


def test_a_table_without_truth_or_flags():
    assert against_truth(table(truth=None)) is None
    assert truth_lines(None) == []
    none = table(is_label_issue=False, action="keep", truth="clean")
    none["true_label"] = none["suggested_label"] = none["given_label"]
    assert truth_lines(against_truth(none)) == [
        "0.0% of 5 labels are wrong",
        "right labels 100.0%",
    ]
