"""Faster calls on CUDA: compiled, and captured as one graph.

A step of many small kernels is bound by launching them. `torch.compile` makes fewer of them; a
graph that was recorded once launches all of them at once. For both, a call must have fixed shapes,
read nothing back, and take all that changes from tensors that are filled in place.
"""

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch

PLAIN_CALLS = 3  # before recording: libraries choose their algorithms and allocate in these

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Call = Callable[[], Result]
Failed = Callable[[str], None]  # is told why


def compiled(function: Function, on_failure: Failed) -> Function:
    """A function that computes what `function` does, in fewer kernels.

    Where compiling fails, which shows in the first call, `on_failure` is told why, and plain calls
    go on.
    """
    keep_compiled_kernels()
    chosen: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    proven = False

    def call(*args: Any) -> Any:
        nonlocal chosen, proven
        if proven:
            return chosen(*args)
        try:
            result = chosen(*args)
        except Exception as error:  # the compilers raise many kinds
            on_failure(_first_line(error))
            chosen = function
            result = chosen(*args)
        proven = True
        return result

    return call  # type: ignore[return-value]


def load_compilers() -> Callable[[], None]:
    """Load the compilers beside other work, which takes seconds; returns what waits for that."""
    if not torch.cuda.is_available():
        return lambda: None

    def load() -> None:
        with suppress(ImportError):  # then compiling fails, and says so
            importlib.import_module("torch._inductor.compile_fx")

    thread = Thread(target=load, daemon=True)
    thread.start()
    return thread.join


def keep_compiled_kernels() -> None:
    """Have compiled kernels kept between runs, in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pseudoloss"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def capture(call: Call[Result], on_failure: Failed) -> Call[Result]:
    """A callable that does what `call` does, as one CUDA graph.

    Every call is a real one: the first few are plain calls, and recording itself runs nothing.
    From then on the result is always the same tensors, filled anew. Where recording fails,
    `on_failure` is told why, once, and plain calls go on.
    """
    calls = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Result

    def replay() -> Result:
        nonlocal calls, graph, result
        calls += 1
        if calls == PLAIN_CALLS + 1:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    result = call()
            except RuntimeError as error:
                on_failure(_first_line(error))
                graph = None
        if graph is None:
            return _beside(call)
        graph.replay()
        return result

    return replay


def _beside(call: Call[Result]) -> Result:
    """A plain call on a stream of its own, as recording wants its predecessors to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = call()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
