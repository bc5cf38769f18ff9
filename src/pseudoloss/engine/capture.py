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

from pseudoloss.errors import first_line

PLAIN_CALLS = 3  # before recording: libraries choose their algorithms and allocate in these

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Call = Callable[[], Result]
Failed = Callable[[str], None]  # is told why


def compiled(function: Function, whole: bool = True) -> Function:
    """A function that computes what `function` does, in fewer kernels. `whole`: as one graph, for
    one set of shapes."""
    keep_compiled_kernels()
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True} if whole else {}
    return torch.compile(function, **options)  # type: ignore[return-value]


def first_try(fast: Call[Result], plain: Call[Result], on_failure: Failed) -> Call[Result]:
    """`fast`, unless its first call fails: then `on_failure` is told why, and `plain` from now on.

    Whether something can be compiled shows in the first call. The compilers raise many kinds.
    """
    chosen: Call[Result] | None = None

    def call() -> Result:
        nonlocal chosen
        if chosen is not None:
            return chosen()
        try:
            result = fast()
            chosen = fast
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            on_failure(first_line(error))
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # a second stream may still be at work
            chosen = plain
            result = plain()
        return result

    return call


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
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(cache) if cache else Path.home() / ".cache") / "pseudoloss"
    except RuntimeError:  # nobody's home: the compilers have places of their own
        return
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
    stream: torch.cuda.Stream | None = None

    def replay() -> Result:
        nonlocal calls, graph, result, stream
        calls += 1
        stream = stream or torch.cuda.Stream()
        if calls == PLAIN_CALLS + 1 and not _broken:
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream()
            try:
                # thread_local: a loader's thread may pin memory meanwhile
                mode = "thread_local"
                with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
                    result = call()
            except RuntimeError as error:
                # A recording that fails leaves torch in a state in which no other succeeds.
                torch.cuda.set_stream(before)
                _forget(pool)
                _broken.append(first_line(error))
                on_failure(first_line(error))
                graph = None
        if graph is None:
            return _beside(call, stream)
        graph.replay()
        return result

    return replay


_broken: list[str] = []


def _forget(pool: Any) -> None:
    """Have the allocator end a recording that failed: torch itself does so for others only, and
    would refuse to free memory from then on."""
    for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(AttributeError, RuntimeError):
            getattr(torch._C, end)(torch.cuda.current_device(), pool)


def _beside(call: Call[Result], stream: torch.cuda.Stream) -> Result:
    """A plain call on another stream, as recording wants its predecessors to be."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = call()
    torch.cuda.current_stream().wait_stream(stream)
    return result
