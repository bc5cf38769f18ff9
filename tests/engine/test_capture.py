"""The calls of a captured step. Real graphs are checked on a GPU by benchmarks/agreement.py."""

import os
import warnings
from contextlib import contextmanager

import pytest
import torch

from pseudoloss.engine import capture as module
from pseudoloss.engine.capture import PLAIN_CALLS, capture, compiled, first_try, load_compilers


@pytest.fixture
def log(monkeypatch):
    """Graphs that only record what is called."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    @contextmanager
    def graph(recorded, pool, stream, capture_error_mode):
        assert pool == "pool"
        log.append("record")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(module, "_forget", lambda pool: log.append(f"forget {pool}"))
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"back to {stream}"))
    monkeypatch.setattr(module, "_on_stream", lambda call, stream: call())
    monkeypatch.setattr(module, "_broken", [])
    return log


def test_every_call_runs_once(log):
    """A few plain calls; then one is recorded and replayed at once; the rest are replays."""
    call = capture(lambda: log.append("call"), pytest.fail)
    for _ in range(PLAIN_CALLS + 3):
        call()
    plain = ["call"] * PLAIN_CALLS
    assert log == [*plain, "record", "call", "replay", "replay", "replay"]


def test_the_result_is_that_of_the_recorded_call(log):
    numbers = iter(range(100))
    call = capture(lambda: next(numbers), pytest.fail)
    found = [call() for _ in range(PLAIN_CALLS + 3)]
    assert found == [*range(PLAIN_CALLS), *[PLAIN_CALLS] * 3]


def test_a_call_that_cannot_be_recorded_says_so_once_and_stays_plain(log):
    said = []

    def call():
        if log and log[-1] == "record":
            log.append("refused")
            raise RuntimeError("not while capturing\nand more")
        log.append("call")

    captured = capture(call, said.append)
    for _ in range(PLAIN_CALLS + 3):
        captured()
    refused = ["record", "refused", "back to before", "forget pool"]
    assert log == [*["call"] * PLAIN_CALLS, *refused, *["call"] * 3]
    assert said == ["not while capturing"]
    log.clear()
    other = capture(call, said.append)  # after a failure nothing else is recorded
    for _ in range(PLAIN_CALLS + 2):
        other()
    assert log == ["call"] * (PLAIN_CALLS + 2)


def test_a_first_call_that_fails_says_so_once_and_the_rest_are_plain():
    said, calls = [], []

    def fast():
        calls.append("fast")
        raise ValueError("no compiler\nand a long story")

    call = first_try(fast, lambda: calls.append("plain"), said.append)
    for _ in range(3):
        call()
    assert calls == ["fast", "plain", "plain", "plain"]
    assert said == ["no compiler"]


def test_later_errors_are_raised():
    results = iter([1, ValueError("later")])

    def fast():
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    call = first_try(fast, pytest.fail, pytest.fail)
    assert call() == 1
    with pytest.raises(ValueError, match="later"):
        call()


def test_running_out_of_memory_is_raised():
    def fast():
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        first_try(fast, pytest.fail, pytest.fail)()


def test_compiling_is_for_one_set_of_shapes(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options))
    compiled(abs)
    compiled(abs, whole=False)
    assert asked == [{"dynamic": False, "fullgraph": True}, {}]


def test_compilers_are_loaded_in_a_thread(monkeypatch):
    loaded = []
    monkeypatch.setattr(module.importlib, "import_module", loaded.append)
    load_compilers()()
    assert loaded == []  # there is no GPU to compile for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    load_compilers()()
    assert loaded == ["torch._inductor.compile_fx"]


def test_the_folder_of_compiled_kernels(monkeypatch, tmp_path):
    """In the user's cache, unless the user has set another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    module.keep_compiled_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "pseudoloss" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "mine"


def test_the_reason_of_a_fallback_names_the_error_in_another_process():
    text = (
        "SubprocException: An exception occurred in a subprocess:\n\nName=some_kernel\n"
        "Traceback (most recent call last):\n  File 'compiler.py', line 1\n"
        "RuntimeError: PassManager::run failed\n\nSet VERBOSE=1 for more"
    )
    reasons = []

    def fast():
        raise RuntimeError(text)

    assert first_try(fast, lambda: 1, reasons.append)() == 1
    assert reasons == [
        "SubprocException: An exception occurred in a subprocess: "
        "RuntimeError: PassManager::run failed"
    ]


def test_advice_of_the_compiler_is_not_printed():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled(torch.sin)
        warnings.warn("TensorFloat32 tensor cores for float32 …", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(one.message) for one in said] == ["something else"]
