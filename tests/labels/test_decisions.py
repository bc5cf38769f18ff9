import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pseudoloss.errors import InputError
from pseudoloss.labels.decisions import decide
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
    for row, (p_noisy, trust) in zip(table.itertuples(), scores, strict=True):
        if p_noisy < threshold:
            expected = ("keep", "ant")
        else:
            expected = ("relabel", "bee") if trust >= min_trust else ("review", None)
        suggested = None if pd.isna(row.suggested_label) else row.suggested_label
        assert (row.action, suggested) == expected
        assert row.is_label_issue == (row.action != "keep")


def test_a_row_without_a_candidate_is_never_relabelled():
    table = table_of([(0.9, 0.9)])
    table["candidate_label"] = np.nan
    assert decide(table)["action"].tolist() == ["review"]


@pytest.mark.parametrize("values", [(-0.1, 0.5), (0.5, 1.5)])
def test_thresholds_are_probabilities(values):
    with pytest.raises(InputError, match="must be from 0 to 1"):
        decide(table_of([(0.5, 0.5)]), *values)
