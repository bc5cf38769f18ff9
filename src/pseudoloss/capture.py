"""Calling a step: on CUDA recorded once as a graph and replayed, elsewhere a plain call.

A step of many small kernels is bound by launching them; a replayed graph launches them at once.
The step must have fixed shapes, read nothing back, and take all that changes from tensors that are
filled in place.
"""

from collections.abc import Callable

import torch

PLAIN_CALLS = 3  # before recording: libraries choose their algorithms and allocate in these

Step = Callable[[], None]


def capture(step: Step, device: torch.device, on_failure: Callable[[str], None]) -> Step:
    """A callable that does what `step` does, faster where it can.

    Every call is one real step: the first few are plain calls, and recording itself runs nothing.
    Where recording fails, `on_failure` is told why, once, and plain calls go on.
    """
    if device.type != "cuda":
        return step
    calls = 0
    graph: torch.cuda.CUDAGraph | None = None

    def call() -> None:
        nonlocal calls, graph
        calls += 1
        if graph is not None:
            graph.replay()
        elif calls == PLAIN_CALLS + 1:
            graph = _record(step, on_failure)
            graph.replay() if graph is not None else step()
        else:
            _beside(step)

    return call


def _beside(step: Step) -> None:
    """A plain call on a stream of its own, as recording wants its predecessors to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def _record(step: Step, on_failure: Callable[[str], None]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        on_failure(str(error).strip().partition("\n")[0])
        return None
    return graph
