"""Faster calls on CUDA: compiled, and captured as one graph.

A step of many small kernels is limited by launching them. `torch.compile` makes fewer kernels; a
recorded graph launches all of them at once. For both, a call must have fixed shapes, read nothing
back to the host, and take everything that changes from tensors that are filled in place.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch

from pseudoloss.errors import first_line

PLAIN_CALLS = 3  # before recording, in which libraries choose algorithms and allocate memory

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Call = Callable[[], Result]
Failed = Callable[[str], None]  # gets the reason


def compiled(function: Function, whole: bool = True) -> Function:
    """The compiled function. `whole`: as one graph, for one set of shapes."""
    keep_compiled_kernels()
    # Advice that is not for the user: float32 is computed as float32 where it was asked for.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True} if whole else {}
    return torch.compile(function, **options)  # type: ignore[return-value]


def first_try(fast: Call[Result], plain: Call[Result], on_failure: Failed) -> Call[Result]:
    """`fast`, unless its first call fails: then `on_failure` gets the reason, and `plain` is used.

    Whether a function can be compiled shows in its first call, which may raise any kind of error.
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
    """Load the compilers in the background, which takes seconds. Returns a function that waits."""
    if not torch.cuda.is_available():
        return lambda: None

    def load() -> None:
        with suppress(ImportError):  # compiling fails later, with a notice
            importlib.import_module("torch._inductor.compile_fx")

    thread = Thread(target=load, daemon=True)
    thread.start()
    return thread.join


def keep_compiled_kernels() -> None:
    """Keep compiled kernels between runs, in the cache folder of the user."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(cache) if cache else Path.home() / ".cache") / "pseudoloss"
    except RuntimeError:  # there is no home folder: the compilers have defaults of their own
        return
    # Torch sets its own default when some of its modules are imported.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, _default_cache()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def _default_cache() -> str | None:
    """The folder that torch chooses for compiled graphs, in the folder for temporary files."""
    with suppress(ImportError, AttributeError, OSError, KeyError):
        utils = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
        return str(utils.default_cache_dir())
    return None


def capture(call: Call[Result], on_failure: Failed) -> Call[Result]:
    """A callable that does what `call` does, as one CUDA graph.

    Every call does its work: the first few are plain calls, and recording itself runs nothing.
    From then on the result is always the same tensors, filled again. If recording fails,
    `on_failure` gets the reason once, and plain calls continue.
    """
    calls = 0
    graph: torch.cuda.CUDAGraph | None = None
    result: Result
    stream: torch.cuda.Stream | None = None

    def replay() -> Result:
        nonlocal calls, graph, result, stream
        calls += 1
        stream = stream or torch.cuda.Stream()
        if calls == PLAIN_CALLS + 1 and _broken:
            on_failure(_broken[0])
        elif calls == PLAIN_CALLS + 1:
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream()
            try:
                # thread_local: another thread may pin memory at the same time
                mode = "thread_local"
                with torch.cuda.graph(graph, pool, stream, capture_error_mode=mode):
                    result = call()
            except RuntimeError as error:
                # After a failed recording, torch cannot record another one.
                torch.cuda.set_stream(before)
                _forget(pool)
                _broken.append(first_line(error))
                on_failure(first_line(error))
                graph = None
        if graph is None:
            return _on_stream(call, stream)
        graph.replay()
        return result

    return replay


_broken: list[str] = []


def _forget(pool: Any) -> None:
    """End a failed recording in the allocator: torch does not, and would refuse to free memory from
    then on."""
    for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(AttributeError, RuntimeError):
            getattr(torch._C, end)(torch.cuda.current_device(), pool)


def _on_stream(call: Call[Result], stream: torch.cuda.Stream) -> Result:
    """A plain call on another stream, as recording requires of the calls before it."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = call()
    torch.cuda.current_stream().wait_stream(stream)
    return result
