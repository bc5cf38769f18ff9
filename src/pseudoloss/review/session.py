"""The state of a review: the table, the decisions so far, and what the page may ask.

The server is the only writer. A decision changes the state after its line is on disk, and names the
version of the row it was made on: a decision made meanwhile elsewhere is reported, never dropped.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from pseudoloss.errors import InputError
from pseudoloss.labels.decisions import ACTIONS
from pseudoloss.labels.reviewed import Decision
from pseudoloss.review.examples import Examples
from pseudoloss.review.log import DecisionLog, now
from pseudoloss.review.table import NO_CLASS, ReviewTable

OPEN = 0
STATES = ("open", "keep", "relabel", "junk", "skip")  # of a row; the values of state_R
SHOW = (*STATES, "decided", "all")  # filters by state; `decided`: all but open and skip
SHOW_ACTIONS = ("issues", *ACTIONS, "all")  # filters by action; `issues`: relabel and review
MAX_ROWS = 200  # in one page
MAX_DECISIONS = 1000  # in one request
MAX_CHANGES = 1000  # in one answer
MAX_NAMES = 50  # classes or pairs in one answer


@dataclass(frozen=True)
class Filter:
    """Which rows to show; None: of any class."""

    action: str = "issues"
    given: str | None = None
    suggested: str | None = None
    state: str = "open"


@dataclass(frozen=True)
class Wish:
    """A decision as a page asks for it: `known` is the version of the row that the page shows."""

    position: int
    index: int
    part: str
    known: int
    decision: str
    label: str | None = None


class Review:
    """One review of one run. All methods may be called from several threads."""

    def __init__(
        self,
        table: ReviewTable,
        log: DecisionLog,
        examples: Examples,
        name: str,
        probabilities_NC: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            table: the rows.
            log: the open decisions file.
            examples: images to compare with.
            name: identifies the run, together with its rows.
            probabilities_NC: predictions, to propose likely classes; may be a memory map. Columns
                are the first classes of the table.
        """
        self.table, self.log, self.examples = table, log, examples
        self.probabilities_NC = probabilities_NC
        self.id = table.fingerprint(name)
        self.lock = threading.Lock()
        self.code_of = {label: code for code, label in enumerate(table.classes)}
        self.search_keys = [label.casefold() for label in table.classes]
        self.rank_N = table.ranks_N()
        self.issue_R = table.action_R != ACTIONS.index("keep")
        self.images_C = np.bincount(table.given_R, minlength=len(table.classes))
        self.state_R = np.zeros(len(table), dtype=np.uint8)
        self.version_R = np.zeros(len(table), dtype=np.int32)  # number of lines about the row
        self.decided: dict[int, Decision] = {}  # by rank
        self.changed: list[int] = []  # the rank of every line
        self.unmatched = 0  # decisions about rows or labels that the table does not have
        self.matching = lru_cache(maxsize=16)(self._matching)
        self._replay()

    # ------------------------------------------------------------------------------ decisions

    def _replay(self) -> None:
        """Take over the decisions in the file."""
        found = list(self.log.read())
        if not found:
            return
        part_of = {name: code for code, name in enumerate(self.table.parts)}
        key_R = _key(self.table.part_R.astype(np.int64), self.table.index_R)
        order = np.argsort(key_R, kind="stable")
        code = np.array([part_of.get(one.part, -1) for one in found], dtype=np.int64)
        index = np.array([min(max(one.index, -1), 2**40) for one in found], dtype=np.int64)
        wanted = _key(code, index)
        at = np.minimum(np.searchsorted(key_R, wanted, sorter=order), len(order) - 1)
        for one, rank, key in zip(found, order[at].tolist(), wanted.tolist(), strict=True):
            given = self.table.classes[self.table.given_R[rank]]
            if key != key_R[rank] or one.part not in part_of or one.given_label != given:
                self.unmatched += 1
            else:
                self._apply(rank, one)

    def _apply(self, rank: int, decision: Decision) -> None:
        self.version_R[rank] += 1
        self.changed.append(rank)
        if decision.decision == "undo":
            self.decided.pop(rank, None)
            self.state_R[rank] = OPEN
        else:
            self.decided[rank] = decision
            self.state_R[rank] = STATES.index(decision.decision)

    def decide(
        self, wishes: Sequence[Wish], by: str | None = None, strict: bool = False
    ) -> list[dict[str, Any]]:
        """Write decisions to disk, then take them over. All are valid, or none is written.

        Args:
            wishes: decisions about different rows.
            by: who decided.
            strict: leave a row alone if it was changed since the page saw it (for undo); otherwise
                the last decision wins, and the answer names the one it replaced.

        Returns:
            for each wish the row as it is now, with `replaced`: the decision of somebody else that
            was replaced, and `refused`.
        """
        ranks = [self._rank(wish) for wish in wishes]
        if len(set(ranks)) < len(ranks):
            raise InputError("decisions: a row occurs twice")
        decisions = [self._decision(*pair, by) for pair in zip(ranks, wishes, strict=True)]
        with self.lock:
            new: list[tuple[int, Decision]] = []
            answers: list[dict[str, Any]] = []
            for rank, wish, decision in zip(ranks, wishes, decisions, strict=True):
                current = self.decided.get(rank)
                stale = int(self.version_R[rank]) != wish.known
                answer: dict[str, Any] = {"replaced": None, "refused": False}
                # A repeated request (its answer was lost, say) changes nothing.
                if not _same(current, decision):
                    answer["refused"] = strict and stale
                    if not answer["refused"]:
                        new.append((rank, decision))
                        if stale:
                            answer["replaced"] = _as_json(current) or {"decision": "undo"}
                answers.append(answer)
            if new:
                self.log.append(decision for _, decision in new)
            for rank, decision in new:
                self._apply(rank, decision)
            return [self._state(r) | one for r, one in zip(ranks, answers, strict=True)]

    def _rank(self, wish: Wish) -> int:
        if not 0 <= wish.position < len(self.table):
            raise InputError(f"position {wish.position}: no such row")
        rank = int(self.rank_N[wish.position])
        part = self.table.parts[self.table.part_R[rank]]
        if (wish.index, wish.part) != (int(self.table.index_R[rank]), part):
            raise InputError(f"position {wish.position}: is another image")
        return rank

    def _decision(self, rank: int, wish: Wish, by: str | None) -> Decision:
        if wish.decision not in (*STATES[1:], "undo"):
            raise InputError(f"decision {wish.decision}: must be keep, relabel, junk, skip or undo")
        if wish.decision == "relabel" and wish.label not in self.code_of:
            raise InputError(f"label {wish.label}: no such class")
        given = self.table.classes[self.table.given_R[rank]]
        decision = Decision(
            index=wish.index,
            part=wish.part,
            path=self.table.path(rank),
            decision=wish.decision,
            label=wish.label if wish.decision == "relabel" else None,
            given_label=given,
            time=now(),
            by=by,
        )
        if decision.label == given:  # the same class again
            return replace(decision, decision="keep", label=None)
        return decision

    # ------------------------------------------------------------------------------------ rows

    def page(
        self, wanted: Filter, limit: int, after: int | None = None, before: int | None = None
    ) -> dict[str, Any]:
        """Up to `limit` rows that match, in order of doubt: the first ones with a rank of at least
        `after`, or the last ones with a rank below `before`. Ranks stay what they are while rows
        are being decided, so that no row is passed over."""
        matching_M = self.matching(wanted.action, wanted.given, wanted.suggested)
        limit = min(max(limit, 1), MAX_ROWS)
        with self.lock:
            state_M = self.state_R[matching_M]
            shown_S = matching_M[_shown(state_M, wanted.state)]
            start = int(np.searchsorted(shown_S, after or 0))
            if before is not None:
                start = max(0, int(np.searchsorted(shown_S, before)) - limit)
            ranks = shown_S[start : start + limit].tolist()
            rows = [self._row(rank) for rank in ranks]
        end = start + len(ranks)
        return {
            "rows": rows,
            "matching": len(matching_M),
            "left": int((state_M == OPEN).sum()),
            "shown": len(shown_S),
            "start": start,
            "previous": ranks[0] if ranks and start > 0 else None,
            "next": int(shown_S[end]) if end < len(shown_S) else None,
        }

    def _matching(self, action: str, given: str | None, suggested: str | None) -> np.ndarray:
        """Ranks of the rows with this action and these classes."""
        if action not in SHOW_ACTIONS:
            raise InputError(f"action {action}: must be one of {', '.join(SHOW_ACTIONS)}")
        if action == "issues":
            mask_R = self.issue_R.copy()
        elif action == "all":
            mask_R = np.ones(len(self.table), dtype=bool)
        else:
            mask_R = self.table.action_R == ACTIONS.index(action)
        for name, code_R in ((given, self.table.given_R), (suggested, self.table.suggested_R)):
            if name is not None:
                if name not in self.code_of:
                    raise InputError(f"class {name}: no such class")
                mask_R &= code_R == self.code_of[name]
        return np.flatnonzero(mask_R).astype(np.int32)

    def _row(self, rank: int) -> dict[str, Any]:
        table = self.table
        given, suggested = self.examples.of(rank)
        code = int(table.suggested_R[rank])
        return self._state(rank) | {
            "rank": rank,
            "path": table.path(rank),
            "given": table.classes[table.given_R[rank]],
            "suggested": None if code == NO_CLASS else table.classes[code],
            "action": ACTIONS[table.action_R[rank]],
            "p_noisy": _number(table.p_noisy_R[rank]),
            "trust": _number(table.trust_R[rank]),
            "label_score": _number(table.label_score_R[rank]),
            "examples": {"given": given, "suggested": suggested},
        }

    def _state(self, rank: int) -> dict[str, Any]:
        """The row's name and what was decided."""
        return {
            "position": int(self.table.position_R[rank]),
            "index": int(self.table.index_R[rank]),
            "part": self.table.parts[self.table.part_R[rank]],
            "version": int(self.version_R[rank]),
            "decision": _as_json(self.decided.get(rank)),
        }

    def changes(self, since: int) -> dict[str, Any]:
        """The rows that were decided after the first `since` decisions, and the progress. With
        `reset` the page should load its rows again."""
        with self.lock:
            count = len(self.changed)
            reset = not 0 <= since <= count or count - since > MAX_CHANGES
            ranks = [] if reset else dict.fromkeys(self.changed[since:])
            rows = [self._state(rank) for rank in ranks]
            return {"seq": count, "reset": reset, "rows": rows, "progress": self._progress()}

    def progress(self) -> dict[str, int]:
        """Numbers of issues, of those left, and of decisions of each kind."""
        with self.lock:
            return self._progress()

    def _progress(self) -> dict[str, int]:
        counts = np.bincount(self.state_R, minlength=len(STATES)).tolist()
        issues = self.state_R[self.issue_R]
        return {
            "issues": len(issues),
            "left": int((issues == OPEN).sum()),
            "keep": counts[1],
            "relabel": counts[2],
            "junk": counts[3],
            "skip": counts[4],
        }

    # --------------------------------------------------------------------------------- classes

    def search_classes(self, text: str, position: int | None = None) -> list[dict[str, Any]]:
        """Classes whose names contain the text: equal ones first, then those that start with it,
        then those with a word that does. Without text: the likely classes of the image at
        `position`, then those with most images."""
        wanted = text.casefold().strip()
        if wanted:
            found = [
                (_closeness(key, wanted), len(key), code)
                for code, key in enumerate(self.search_keys)
                if wanted in key
            ]
            codes = [code for *_, code in sorted(found)[:MAX_NAMES]]
            likely: dict[int, float] = {}
        else:
            likely = self._likely(position)
            largest = np.argsort(-self.images_C, kind="stable")[:MAX_NAMES].tolist()
            codes = list(dict.fromkeys([*likely, *largest]))[:MAX_NAMES]
        return [
            {
                "name": self.table.classes[code],
                "images": int(self.images_C[code]),
                "probability": likely.get(code),
            }
            for code in codes
        ]

    def _likely(self, position: int | None) -> dict[int, float]:
        """The most likely classes of an image, with their probabilities."""
        if self.probabilities_NC is None or position is None:
            return {}
        if not 0 <= position < len(self.table):
            raise InputError(f"position {position}: no such row")
        p_C = np.asarray(self.probabilities_NC[position], dtype=np.float32)
        top = np.argsort(-p_C, kind="stable")[:5].tolist()
        return {code: round(float(p_C[code]), 4) for code in top if p_C[code] >= 0.005}

    def pairs(self) -> list[dict[str, Any]]:
        """Which class is mistaken for which, among the issues that are left, most frequent
        first."""
        with self.lock:
            rank_O = np.flatnonzero(
                self.issue_R & (self.state_R == OPEN) & (self.table.suggested_R != NO_CLASS)
            )
        classes = len(self.table.classes)
        key_O = self.table.given_R[rank_O].astype(np.int64) * classes
        keys, counts = np.unique(key_O + self.table.suggested_R[rank_O], return_counts=True)
        most = np.argsort(-counts, kind="stable")[:MAX_NAMES]
        return [
            {
                "given": self.table.classes[key // classes],
                "suggested": self.table.classes[key % classes],
                "left": count,
            }
            for key, count in zip(keys[most].tolist(), counts[most].tolist(), strict=True)
        ]

    def start(self) -> dict[str, Any]:
        """What the page needs first."""
        return self.changes(len(self.changed)) | {
            "id": self.id,
            "images": len(self.table),
            "classes": len(self.table.classes),
            "unmatched": self.unmatched,
            "damaged": self.log.damaged,
        }


def _key(part: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.asarray(part * 2**41 + index)


def _shown(state_M: np.ndarray, show: str) -> np.ndarray:
    if show not in SHOW:
        raise InputError(f"state {show}: must be one of {', '.join(SHOW)}")
    if show == "all":
        return np.ones(len(state_M), dtype=bool)
    if show == "decided":
        return np.asarray((state_M != OPEN) & (state_M != STATES.index("skip")))
    return np.asarray(state_M == STATES.index(show))


def _same(current: Decision | None, new: Decision) -> bool:
    if current is None:
        return new.decision == "undo"
    return (current.decision, current.label) == (new.decision, new.label)


def _as_json(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    return {name: getattr(decision, name) for name in ("decision", "label", "time", "by")}


def _closeness(key: str, wanted: str) -> int:
    if key == wanted:
        return 0
    if key.startswith(wanted):
        return 1
    words = key.replace("_", " ").replace("-", " ")
    return 2 if f" {wanted}" in words else 3


def _number(value: Any) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None
