import errno
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.errors import BusyError, InputError
from pseudoloss.files import with_checksum
from pseudoloss.labels.reviewed import DECISIONS, Decision, parse_line
from pseudoloss.review import log as module
from pseudoloss.review.log import DecisionLog

ONE = Decision(3, "train", "a/b.png", "relabel", "bee", "ant", "2026-01-01T00:00:00+00:00", "Ann")

texts = st.text() | st.binary(max_size=20).map(os.fsdecode)  # file names need not be Unicode
decisions = st.builds(
    Decision,
    index=st.integers(0, 2**40),
    part=texts,
    path=st.none() | texts,
    decision=st.sampled_from(DECISIONS),
    label=texts,
    given_label=texts,
    time=texts,
    by=st.none() | texts,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.jsonl"


def read(path):
    log = DecisionLog(path)
    try:
        return list(log.read())
    finally:
        log.close()


def write(path, *found):
    log = DecisionLog(path)
    try:
        log.append(found)
    finally:
        log.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(decisions, max_size=3), max_size=4))
def test_what_is_written_is_read(batches):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        for batch in batches:
            write(path, *batch)
        assert read(path) == [one for batch in batches for one in batch]


@settings(max_examples=40, deadline=None)
@given(st.lists(decisions, min_size=1, max_size=4), st.data())
def test_a_cut_line_is_dropped_and_does_not_run_into_the_next(found, data):
    """A kill may cut the file anywhere; every line that is complete survives."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decisions.jsonl"
        write(path, *found)
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
        path.write_bytes(content[:cut])
        whole = found[: sum(end <= cut for end in ends)]
        assert read(path) == whole
        write(path, ONE)
        assert read(path) == [*whole, ONE]


def test_lines_are_the_documented_objects(path):
    write(path, ONE)
    assert json.loads(path.read_text()) == with_checksum(asdict(ONE))
    assert list(asdict(ONE)) == [
        "index",
        "part",
        "path",
        "decision",
        "label",
        "given_label",
        "time",
        "by",
    ]


@pytest.mark.parametrize(
    "line",
    [
        *("", "nul", "[]", "{}", "3", '"text"', "[" * 100_000),
        *(
            json.dumps(asdict(ONE) | change)
            for change in (
                {"index": "3"},
                {"index": True},
                {"decision": "burn"},
                {"label": None},
                {"label": 3},
                {"part": None},
                {"by": ["Ann"]},
            )
        ),
    ],
)
def test_damaged_lines_are_counted(path, line):
    assert parse_line(line) is None
    path.write_text(f"{line}\n{json.dumps(asdict(ONE))}\n")
    log = DecisionLog(path)
    assert list(log.read()) == [ONE]
    assert log.damaged == bool(line)
    log.close()


@pytest.mark.skipif(module.fcntl is None, reason="needs flock")
def test_a_second_server_is_refused(path):
    log = DecisionLog(path)
    with pytest.raises(BusyError, match="another pseudoloss review is using this file"):
        DecisionLog(path)
    log.close()
    DecisionLog(path).close()


def test_a_file_that_cannot_be_written(path):
    path.mkdir()
    with pytest.raises(InputError, match=r"decisions.jsonl: cannot be written .*--decisions FILE"):
        DecisionLog(path)


def test_a_full_disk_leaves_nothing_behind(path, monkeypatch):
    write(path, ONE)
    before, real = path.read_bytes(), os.write
    log = DecisionLog(path)

    def write_some(file, content):
        if len(content) > 10:
            return real(file, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        with pytest.raises(OSError, match="No space left"):
            log.append([replace(ONE, index=4)])
    assert path.read_bytes() == before
    log.append([replace(ONE, index=5)])
    assert [one.index for one in log.read()] == [3, 5]
    log.close()


def test_it_is_on_disk_before_append_returns(path, monkeypatch):
    synced = []
    log = DecisionLog(path)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(path.read_bytes()), real(file)))
    log.append([ONE])
    assert [json.loads(content) for content in synced] == [with_checksum(asdict(ONE))]
    log.close()
