import json
import os
import random
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from label_folders import scored_table
from pseudoloss.errors import InputError
from pseudoloss.labels.opening import open_labels
from pseudoloss.labels.reviewed import read_decisions
from pseudoloss.labels.table import read_labels
from pseudoloss.review import session
from pseudoloss.review.examples import EXAMPLES, Examples
from pseudoloss.review.log import DecisionLog
from pseudoloss.review.server import open_review
from pseudoloss.review.session import SHOW, SHOW_ACTIONS, Filter, Review, Wish
from pseudoloss.review.table import read_quickly, review_table
from review_runs import ATTACK, CLASSES, lines_of, write_review


def wish(review, position, decision, label=None, known=None):
    row = review.page(Filter(action="all", state="all"), 200)["rows"]
    row = next(one for one in row if one["position"] == position)
    known = row["version"] if known is None else known
    return Wish(position, row["index"], row["part"], known, decision, label)


def reopen(review):
    review.log.close()
    return open_review(open_labels(review.log.path.parent), DecisionLog(review.log.path))


# ------------------------------------------------------------------------------------------ table


def test_the_most_doubtful_come_first():
    table = scored_table(30).sample(frac=1, random_state=1).reset_index(drop=True)
    table.loc[[3, 8], "label_score"] = np.nan
    found = review_table(table)
    assert found.position_R[-2:].tolist() == [3, 8] or found.position_R[-2:].tolist() == [8, 3]
    score = table["label_score"][found.position_R]
    assert score.dropna().is_monotonic_increasing
    for rank, position in enumerate(found.position_R):
        row = table.loc[position]
        assert found.index_R[rank] == row["index"]
        assert found.classes[found.given_R[rank]] == row["given_label"]
        assert found.classes[found.suggested_R[rank]] == row["candidate_label"]
    assert (found.ranks_N()[found.position_R] == np.arange(30)).all()


def test_tables_without_candidates():
    """As older versions wrote them: the suggestion, or else the prediction."""
    table = scored_table(6).drop(columns="candidate_label")
    table["predicted_label"] = ["bee"] * 6
    table["suggested_label"] = ["bee", np.nan, np.nan, "bee", "ant", "ant"]
    found = review_table(table)
    suggested = {
        int(index): None if code < 0 else found.classes[code]
        for index, code in zip(found.index_R, found.suggested_R, strict=True)
    }
    # Given: ant and bee in turn.
    assert suggested == {0: "bee", 1: None, 2: "bee", 3: None, 4: "bee", 5: "ant"}


def test_parquet_and_csv_give_the_same_table(review_audit):
    labels = [open_labels(review_audit, read) for read in (read_labels, read_quickly)]
    assert isinstance(labels[1].table["given_label"].dtype, pd.CategoricalDtype)
    csv, parquet = (review_table(one.table, one.classes) for one in labels)
    for name, wanted in vars(csv).items():
        found = getattr(parquet, name)
        if isinstance(wanted, np.ndarray) and wanted.dtype.kind == "f":
            assert np.allclose(wanted, found, atol=1e-6, equal_nan=True)  # the CSV is rounded
        else:
            assert np.array_equal(wanted, found), name


def test_a_csv_that_was_changed_counts(review_audit):
    table = open_labels(review_audit).table.assign(given_label="ant")
    table.to_csv(review_audit / "labels.csv", index=False)
    later = (review_audit / "labels.parquet").stat().st_mtime_ns + 1
    os.utime(review_audit / "labels.csv", ns=(later, later))
    assert set(read_quickly(review_audit)["given_label"]) == {"ant"}
    os.utime(review_audit / "labels.csv", ns=(0, 0))
    assert set(read_quickly(review_audit)["given_label"]) == set(CLASSES)
    (review_audit / "labels.parquet").write_bytes(b"no table")
    assert set(read_quickly(review_audit)["given_label"]) == {"ant"}


def test_classes_keep_their_order_and_others_are_appended():
    table = scored_table(6)
    assert review_table(table, ["zoo", "bee"]).classes == ["zoo", "bee", "ant"]


def test_the_fingerprint_tells_tables_apart():
    table = scored_table(6)
    changed = table.assign(given_label=["ant"] * 6)
    found = {review_table(t).fingerprint(n) for t in (table, changed) for n in ("a", "b")}
    assert len(found) == 4
    assert review_table(table).fingerprint("a") in found


# --------------------------------------------------------------------------------------- examples


def test_examples_are_the_most_confident_of_the_class(opened_review):
    table = open_labels(opened_review.log.path.parent).table
    for row in opened_review.page(Filter(), 200)["rows"]:
        for kind in ("given", "suggested"):
            kept = table[(table["action"] == "keep") & (table["given_label"] == row[kind])]
            best = kept.sort_values("label_score", ascending=False).index[:EXAMPLES]
            assert row["examples"][kind] == list(best)


def test_stored_examples_come_first(review_audit, opened_review):
    file = review_audit / "examples.npz"
    np.savez(
        file,
        row_M=np.array([58, 56]),
        given_MK=np.array([[1, 58, -1], [-1, -1, -1]]),
        candidate_MK=np.array([[3, 5, 7], [9, -1, -1]]),
    )
    examples = Examples(opened_review.table, file)
    assert examples.of(int(opened_review.rank_N[58])) == ([1], [3, 5, 7])
    given, suggested = examples.of(int(opened_review.rank_N[56]))
    assert given == opened_review.examples.of(int(opened_review.rank_N[56]))[0]
    assert suggested == [9]


@pytest.mark.parametrize("change", [{"row_M": np.array([60])}, {"given_MK": np.zeros((2, 1))}])
def test_examples_of_another_table_are_refused(review_audit, opened_review, change):
    arrays = {"row_M": [1], "given_MK": [[2]], "candidate_MK": [[3]]} | change
    np.savez(review_audit / "examples.npz", **arrays)
    with pytest.raises(InputError, match=r"examples.npz: not the examples of this audit"):
        Examples(opened_review.table, review_audit / "examples.npz")


# ------------------------------------------------------------------------------------------ pages


def walk(review, wanted, limit):
    """All rows that match, page by page, and again from the end."""
    forward, page = [], review.page(wanted, limit)
    while True:
        forward.append(page)
        if page["next"] is None:
            break
        page = review.page(wanted, limit, after=page["next"])
    backward = [page]
    while page["previous"] is not None:
        page = review.page(wanted, limit, before=page["previous"])
        backward.append(page)
    return forward, backward


@pytest.mark.parametrize("action", SHOW_ACTIONS)
@pytest.mark.parametrize("state", SHOW)
def test_pages_hold_every_matching_row_once(opened_review, action, state):
    table = open_labels(opened_review.log.path.parent).table
    decided = dict(zip(range(40), ["keep", "relabel", "junk", "skip"] * 10, strict=True))
    opened_review.decide(
        [
            wish(opened_review, i, kind, "bee" if i // 2 % 4 != 1 else "ant")
            for i, kind in decided.items()
        ]
    )
    for given_label, suggested in [(None, None), ("ant", None), (None, "ant"), (ATTACK, "ant")]:
        wanted = [
            i
            for i in table.sort_values("label_score").index
            if action in ("all", table["action"][i])
            or (action == "issues" and table["action"][i] in ("relabel", "review"))
            if given_label in (None, table["given_label"][i])
            if suggested in (None, table["candidate_label"][i])
        ]
        shown = [
            i
            for i in wanted
            if state in ("all", decided.get(i, "open"))
            or (state == "decided" and decided.get(i, "skip") != "skip")
        ]
        forward, backward = walk(opened_review, Filter(action, given_label, suggested, state), 7)
        assert [row["position"] for page in forward for row in page["rows"]] == shown
        assert {row["position"] for page in backward for row in page["rows"]} == set(shown)
        assert {page["matching"] for page in forward} == {len(wanted)}
        assert {page["left"] for page in forward} == {sum(i not in decided for i in wanted)}
        assert [page["start"] for page in forward] == list(range(0, max(len(shown), 1), 7))


def test_no_row_is_passed_over_while_deciding(opened_review):
    """The list of open rows shrinks while one walks through it."""
    seen, page = [], opened_review.page(Filter(), 5)
    while page["rows"]:
        seen += [row["position"] for row in page["rows"]]
        opened_review.decide(
            [wish(opened_review, row["position"], "keep") for row in page["rows"][::2]]
        )
        if page["next"] is None:
            break
        page = opened_review.page(Filter(), 5, after=page["next"])
    assert seen == list(range(58, -1, -2))


@pytest.mark.parametrize(
    "wanted", [Filter(action="x"), Filter(state="x"), Filter(given="x"), Filter(suggested="x")]
)
def test_unknown_filters_are_refused(opened_review, wanted):
    with pytest.raises(InputError, match=" x: "):
        opened_review.page(wanted, 5)


# -------------------------------------------------------------------------------------- decisions


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_the_state_is_that_of_the_file_after_any_decisions(tmp_path_factory, seed):
    """Against a dictionary; and a restarted server knows the same."""
    review_audit = write_review(tmp_path_factory.mktemp("audit"), n=8)
    review = open_review(open_labels(review_audit), DecisionLog(review_audit / "decisions.jsonl"))
    chance, model, versions = random.Random(seed), {}, Counter()
    for _ in range(chance.randrange(12)):
        wishes = []
        for position in chance.sample(range(8), chance.randrange(1, 4)):
            decision = chance.choice(["keep", "relabel", "junk", "skip", "undo"])
            label = chance.choice(CLASSES)
            wishes.append(wish(review, position, decision, label))
            given_label = CLASSES[position // 2 % 4]
            if decision == "relabel" and label == given_label:
                decision = "keep"
            new = (decision, label if decision == "relabel" else None)
            new = None if decision == "undo" else new
            versions[position] += new != model.get(position)
            model[position] = new
        review.decide(wishes)
    for one in (review, reopen(review)):
        for row in one.page(Filter(action="all", state="all"), 200)["rows"]:
            found = row["decision"] and (row["decision"]["decision"], row["decision"]["label"])
            assert found == model.get(row["position"])
            assert row["version"] == versions[row["position"]]
        kinds = Counter(value[0] for value in model.values() if value)
        progress = one.progress()
        assert {kind: progress[kind] for kind in kinds} == kinds
        assert progress["left"] == sum(model.get(i) is None for i in range(0, 8, 2))
    assert len(lines_of(review_audit)) == sum(versions.values())
    # `pseudoloss apply` reads the same.
    applied, damaged = read_decisions(review_audit / "decisions.jsonl")
    decided = {(index, "train"): value for index, value in model.items() if value is not None}
    assert {key: (one.decision, one.label) for key, one in applied.items()} == decided
    assert damaged == 0


def test_a_line_has_all_fields(opened_review):
    opened_review.decide([wish(opened_review, 2, "relabel", "cat & dog")], by="Ann")
    (line,) = lines_of(opened_review.log.path.parent)
    assert line.pop("time").startswith("20")
    assert len(line.pop("checksum")) == 64
    assert line == {
        "index": 2,
        "part": "train",
        "path": "002 <b onclick=alert(1)>.png",
        "decision": "relabel",
        "label": "cat & dog",
        "given_label": "bee",
        "by": "Ann",
    }


def test_the_last_decision_wins_and_names_the_one_it_replaced(opened_review):
    opened_review.decide([wish(opened_review, 2, "junk")], by="Ann")
    (answer,) = opened_review.decide([wish(opened_review, 2, "keep", known=0)], by="Bob")
    assert (answer["replaced"]["decision"], answer["replaced"]["by"]) == ("junk", "Ann")
    assert (answer["decision"]["decision"], answer["version"]) == ("keep", 2)
    assert [line["decision"] for line in lines_of(opened_review.log.path.parent)] == [
        "junk",
        "keep",
    ]
    (answer,) = opened_review.decide([wish(opened_review, 2, "undo")])
    assert (answer["replaced"], answer["decision"]) == (None, None)
    (answer,) = opened_review.decide([wish(opened_review, 2, "junk", known=2)])
    assert answer["replaced"] == {"decision": "undo"}


def test_a_strict_decision_leaves_changed_rows_alone(opened_review):
    opened_review.decide([wish(opened_review, 2, "junk")])
    answers = opened_review.decide(
        [wish(opened_review, 2, "keep", known=0), wish(opened_review, 4, "keep")], strict=True
    )
    assert [answer["refused"] for answer in answers] == [True, False]
    assert [answer["decision"]["decision"] for answer in answers] == ["junk", "keep"]
    assert len(lines_of(opened_review.log.path.parent)) == 2


def test_a_repeated_request_changes_nothing(opened_review):
    asked = [wish(opened_review, 2, "relabel", "ant"), wish(opened_review, 4, "undo")]
    first, again = opened_review.decide(asked), opened_review.decide(asked)
    assert first == again
    assert again[0]["replaced"] is None
    assert len(lines_of(opened_review.log.path.parent)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": -1}, "position -1: no such row"),
        ({"position": 60}, "position 60: no such row"),
        ({"index": 4}, "position 2: is another image"),
        ({"part": "test"}, "position 2: is another image"),
        ({"decision": "open"}, "decision open: must be"),
        ({"label": "wasp"}, "label wasp: no such class"),
        ({"label": None}, "label None: no such class"),
    ],
)
def test_a_wrong_decision_is_refused_with_all_others(opened_review, changes, message):
    one = {"position": 2, "index": 2, "part": "train", "known": 0, "decision": "relabel"}
    right = wish(opened_review, 6, "keep")
    with pytest.raises(InputError, match=message):
        opened_review.decide([right, Wish(**(one | {"label": "ant"} | changes))])
    with pytest.raises(InputError, match="a row occurs twice"):
        opened_review.decide([right, right])
    assert lines_of(opened_review.log.path.parent) == []


def test_decisions_about_other_rows_and_labels_are_not_used(opened_review):
    opened_review.decide([wish(opened_review, 2, "keep")])
    (line,) = lines_of(opened_review.log.path.parent)
    del line["checksum"]
    wrong = [{"index": 60}, {"index": -1}, {"index": 2**70}, {"part": "val"}, {"given_label": "x"}]
    path = opened_review.log.path
    path.write_text("".join(json.dumps(line | change) + "\n" for change in [{}, *wrong]))
    again = reopen(opened_review)
    assert (again.unmatched, again.start()["unmatched"]) == (5, 5)
    assert list(again.decided) == [opened_review.rank_N[2]]


def test_changes_since(opened_review, monkeypatch):
    start = opened_review.start()
    assert (start["seq"], start["images"], start["classes"]) == (0, 60, 4)
    opened_review.decide([wish(opened_review, 2, "keep"), wish(opened_review, 4, "junk")])
    opened_review.decide([wish(opened_review, 4, "skip")])
    found = opened_review.changes(1)
    assert (found["seq"], found["reset"]) == (3, False)
    assert [(row["position"], row["decision"]["decision"]) for row in found["rows"]] == [
        (4, "skip")
    ]
    assert opened_review.changes(3)["rows"] == []
    assert opened_review.changes(4)["reset"]  # the file was replaced
    monkeypatch.setattr(session, "MAX_CHANGES", 2)  # then loading the page again is less work
    assert [opened_review.changes(i)["reset"] for i in range(4)] == [True, False, False, False]


# ---------------------------------------------------------------------------------------- classes


def test_search_finds_the_closest_names_first(tmp_path):
    names = ["red fox", "fox", "Foxtrot", "box_fox", "outfox", "ox", "bee"]
    review = open_review(
        open_labels(write_review(tmp_path, n=14, classes=names)),
        DecisionLog(tmp_path / "decisions.jsonl"),
    )
    found = [one["name"] for one in review.search_classes(" FOX ")]
    assert found == ["fox", "Foxtrot", "red fox", "box_fox", "outfox"]
    assert review.search_classes("wasp") == []
    assert {one["name"] for one in review.search_classes("")} == set(names)


def test_likely_classes_are_proposed(review_audit, opened_review):
    p_NC = np.full((60, 4), 0.001)
    p_NC[7] = [0.1, 0.001, 0.2, 0.7]
    review = Review(opened_review.table, opened_review.log, opened_review.examples, "x", p_NC)
    likely = [(one["name"], one["probability"]) for one in review.search_classes("", 7)]
    assert likely == [(ATTACK, 0.7), ("cat & dog", 0.2), ("ant", 0.1), ("bee", None)]
    with pytest.raises(InputError, match="position 60"):
        review.search_classes("", 60)


def test_pairs_are_counted_among_what_is_left(opened_review):
    opened_review.decide([wish(opened_review, i, "keep") for i in range(0, 30, 2)])
    table = open_labels(opened_review.log.path.parent).table
    left = table[table["is_label_issue"] & (table.index >= 30)]
    wanted = Counter(zip(left["given_label"], left["candidate_label"], strict=True))
    found = opened_review.pairs()
    assert {(one["given"], one["suggested"]): one["left"] for one in found} == wanted
    assert [one["left"] for one in found] == sorted(wanted.values(), reverse=True)
