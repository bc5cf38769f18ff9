import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pseudoloss.cli import main
from pseudoloss.errors import InputError
from pseudoloss.labels.decisions import MIN_TRUST, best_threshold, decide
from pseudoloss.labels.table import score_rows

SCORES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20)


def table_of(scores):
    p_noisy, trust = (np.array(column) for column in zip(*scores, strict=True))
    zero = np.zeros(len(p_noisy), dtype=int)
    return score_rows(
        "train",
        ("ant", "bee"),
        index=np.arange(len(p_noisy)),
        paths=None,
        given=zero,
        predicted=zero,
        candidate=zero + 1,
        label_score=1 - p_noisy,
        p_noisy=p_noisy,
        trust=trust,
    )


@given(SCORES, st.floats(0, 1), st.floats(0, 1))
def test_actions_follow_from_the_scores(scores, threshold, min_trust):
    table = decide(table_of(scores), threshold, min_trust)
    for row in table.itertuples():  # with scores as they are stored
        if row.p_noisy < threshold:
            expected = ("keep", "ant")
        else:
            better = row.trust > 1 - row.p_noisy  # than the given label
            relabel = better and row.trust >= min_trust
            expected = ("relabel", "bee") if relabel else ("review", None)
        suggested = None if pd.isna(row.suggested_label) else row.suggested_label
        assert (row.action, suggested) == expected
        assert row.is_label_issue == (row.action != "keep")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_no_other_threshold_has_a_higher_expected_f1(p_noisy):
    """Expected over calibrated labels: each is wrong with its probability."""

    def expected_f1(threshold):
        flagged = [p for p in p_noisy if p >= threshold]
        return 2 * sum(flagged) / max(len(flagged) + sum(p_noisy), 1e-300)

    chosen = best_threshold(np.array(p_noisy))
    assert 0.25 <= chosen <= 0.5
    best = max(p_noisy, key=expected_f1)
    if 0.25 <= best <= 0.5:
        assert expected_f1(chosen) == pytest.approx(expected_f1(best))
    # The best threshold is never above one half: such labels are wrong more often than right.
    assert expected_f1(0.5) <= expected_f1(chosen) + 1e-12 or best < 0.25


def test_labels_that_are_easy_to_tell_are_flagged_from_one_half():
    assert best_threshold(np.array([0.999] * 20 + [0.49] + [0.4] * 3 + [0.001] * 100)) == 0.49
    assert best_threshold(np.array([0.999] * 20 + [0.5] + [0.001] * 100)) == 0.5
    assert best_threshold(np.zeros(3)) == 0.5
    assert best_threshold(np.array([np.nan, 0.9])) == 0.5


def test_labels_that_are_hard_to_tell_are_flagged_earlier():
    p_noisy = np.array([0.8] * 5 + [0.3] * 20 + [0.05] * 75)
    assert best_threshold(p_noisy) == 0.3
    table = decide(table_of([(p, 0.6 * p) for p in p_noisy]))
    assert table["is_label_issue"].sum() == 25
    assert set(table["action"][5:25]) == {"review"}  # no new label is likely to be right


def test_a_row_without_a_candidate_is_never_relabelled():
    table = table_of([(0.9, 0.9)])
    table["candidate_label"] = np.nan
    assert decide(table)["action"].tolist() == ["review"]


@pytest.mark.parametrize("values", [(-0.1, 0.5), (0.5, 1.5)])
def test_thresholds_are_probabilities(values):
    with pytest.raises(InputError, match="must be from 0 to 1"):
        decide(table_of([(0.5, 0.5)]), *values)


@pytest.mark.parametrize("command", ["audit", "labels", "apply"])
def test_the_help_names_the_default(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f" {MIN_TRUST:g})" in text.partition("--min-trust X ")[2].partition(" --")[0]
