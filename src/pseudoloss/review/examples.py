"""Images to compare a doubtful one with: confident examples of its given and suggested class."""

from pathlib import Path

import numpy as np

from pseudoloss.errors import InputError
from pseudoloss.files import read_npz
from pseudoloss.labels.decisions import ACTIONS
from pseudoloss.review.table import NO_CLASS, ReviewTable

EXAMPLES = 4  # of each class


class Examples:
    """Positions of example images; the nearest ones where an audit has stored them, otherwise the
    most confident ones of the class."""

    def __init__(self, table: ReviewTable, file: Path | None = None) -> None:
        """`file` is the examples.npz of an audit; it may be missing."""
        self.table = table
        keep_R = table.action_R == ACTIONS.index("keep")
        rank_K = np.flatnonzero(keep_R)[::-1]  # the least doubtful first
        by_class_K = np.argsort(table.given_R[rank_K], kind="stable")
        self.confident_K = table.position_R[rank_K[by_class_K]]
        classes = np.arange(len(table.classes) + 1)
        self.start_C = np.searchsorted(table.given_R[rank_K[by_class_K]], classes)
        self.row_M = np.empty(0, dtype=np.int64)
        self.given_MK = self.suggested_MK = np.empty((0, 0), dtype=np.int64)
        if file is not None and file.exists():
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            arrays = read_npz(file)
            row_M, given_MK, suggested_MK = (
                np.asarray(arrays[name], dtype=np.int64)
                for name in ("row_M", "given_MK", "candidate_MK")
            )
            if not len(row_M) == len(given_MK) == len(suggested_MK):
                raise ValueError("its arrays differ in length")
            if max(array.max(initial=-1) for array in (row_M, given_MK, suggested_MK)) >= len(
                self.table
            ):
                raise ValueError("it names rows that labels.csv does not have")
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{file}: not the examples of this audit ({error})") from None
        order = np.argsort(row_M)
        self.row_M = row_M[order]
        self.given_MK, self.suggested_MK = given_MK[order], suggested_MK[order]

    def of(self, rank: int) -> tuple[list[int], list[int]]:
        """Positions of examples of the given and of the suggested class of a row."""
        position = int(self.table.position_R[rank])
        given: list[int] = []
        suggested: list[int] = []
        m = int(np.searchsorted(self.row_M, position))
        if m < len(self.row_M) and self.row_M[m] == position:
            given, suggested = self.given_MK[m].tolist(), self.suggested_MK[m].tolist()
        return (
            self._usable(given, position) or self._confident(self.table.given_R[rank], position),
            self._usable(suggested, position)
            or self._confident(self.table.suggested_R[rank], position),
        )

    def _confident(self, code: int, position: int) -> list[int]:
        if code == NO_CLASS:
            return []
        start, end = self.start_C[code], self.start_C[code + 1]
        found: list[int] = self.confident_K[start : min(end, start + EXAMPLES + 1)].tolist()
        return self._usable(found, position)

    @staticmethod
    def _usable(found: list[int], position: int) -> list[int]:
        return [one for one in found if one >= 0 and one != position][:EXAMPLES]
