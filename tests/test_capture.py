"""The calls of a captured step. What a graph does is checked on a GPU: benchmarks/agreement.py."""

import os
from contextlib import contextmanager

import pytest
import torch

from pseudoloss import capture as module
from pseudoloss.capture import PLAIN_CALLS, capture, compiled, load_compilers


@pytest.fixture
def log(monkeypatch):
    """Graphs that only count."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    @contextmanager
    def graph(recorded):
        log.append("record")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(module, "_beside", lambda call: call())
    return log


def test_every_call_is_one_call(log):
    """A few plain ones, then one is recorded and replayed at once; the rest are replays."""
    call = capture(lambda: log.append("call"), pytest.fail)
    for _ in range(PLAIN_CALLS + 3):
        call()
    plain = ["call"] * PLAIN_CALLS
    assert log == [*plain, "record", "call", "replay", "replay", "replay"]


def test_the_result_is_that_of_the_recording(log):
    numbers = iter(range(100))
    call = capture(lambda: next(numbers), pytest.fail)
    found = [call() for _ in range(PLAIN_CALLS + 3)]
    assert found == [*range(PLAIN_CALLS), *[PLAIN_CALLS] * 3]


def test_a_call_that_cannot_be_recorded_says_so_once_and_goes_on(log):
    said = []

    def call():
        if log and log[-1] == "record":
            log.append("refused")
            raise RuntimeError("not while capturing\nand more")
        log.append("call")

    captured = capture(call, said.append)
    for _ in range(PLAIN_CALLS + 3):
        captured()
    assert log == [*["call"] * PLAIN_CALLS, "record", "refused", *["call"] * 3]
    assert said == ["not while capturing"]


def test_what_cannot_be_compiled_says_so_once_and_goes_on(monkeypatch):
    said = []

    def broken(function, **options):
        def call(*args):
            raise ValueError("no compiler\nand a long story")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    double = compiled(lambda x: 2 * x, said.append)
    assert [double(3), double(4)] == [6, 8]
    assert said == ["no compiler"]


def test_a_later_error_of_what_was_compiled_is_an_error(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inverse = compiled(lambda x: 1 / x, pytest.fail)
    assert inverse(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_compilers_are_loaded_beside(monkeypatch):
    loaded = []
    monkeypatch.setattr(module.importlib, "import_module", loaded.append)
    load_compilers()()
    assert loaded == []  # nothing to compile for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    load_compilers()()
    assert loaded == ["torch._inductor.compile_fx"]


def test_the_folder_of_compiled_kernels(monkeypatch, tmp_path):
    """In the user's cache, unless the user has said where."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    module.keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "pseudoloss" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
