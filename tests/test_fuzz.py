"""The fuzz program: it mutates within bounds, and it notices what it is there to notice."""

import argparse
import importlib
import json
import random
import sys
from pathlib import Path

import pytest

from pseudoloss.errors import InputError


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("fuzz")
    sys.modules.pop("fuzz", None)


def test_mutations_are_repeatable_and_bounded(fuzz):
    def some():
        rng = random.Random(5)
        return [fuzz.mutate(b"a,b\n1,2\n", [b"x" * 50], rng) for _ in range(300)]

    assert some() == some()
    assert len(set(some())) > 200
    assert max(map(len, some())) <= fuzz.LARGEST


def test_a_bug_is_found_and_an_error_of_one_line_is_none(fuzz, tmp_path, monkeypatch, capsys):
    def read(path):
        if path.read_bytes().startswith(b"a"):
            raise InputError("wrong")
        raise KeyError("bug")

    monkeypatch.setattr(fuzz.resource, "setrlimit", lambda *_: None)
    monkeypatch.setitem(fuzz.TARGETS, "buggy", lambda folder: ({"in": [b"a" * 40]}, read))
    numbers = {"seconds": 0.2, "seed": 1, "limit": 5, "memory": 4}
    fuzz.fuzz(argparse.Namespace(inner="buggy", guided=False, work=tmp_path, **numbers))
    found = json.loads(capsys.readouterr().out)
    assert found["refused"] > 0
    assert found["failed"] > 0
    assert [key.partition(" ")[0] for key in found["failures"]] == ["KeyError"]
