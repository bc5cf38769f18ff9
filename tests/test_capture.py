"""The calls of a captured step. What a graph does is checked on a GPU: benchmarks/agreement.py."""

import pytest
import torch

from pseudoloss import capture as module
from pseudoloss.capture import PLAIN_CALLS, capture

CUDA = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch):
    """A step, and graphs that only count."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    def record(step, on_failure):
        log.append("record")
        return Graph()

    monkeypatch.setattr(module, "_record", record)
    monkeypatch.setattr(module, "_beside", lambda step: step())
    return log


def test_every_call_is_one_step(calls):
    step = capture(lambda: calls.append("plain"), CUDA, pytest.fail)
    for _ in range(PLAIN_CALLS + 3):
        step()
    assert calls == ["plain"] * PLAIN_CALLS + ["record"] + ["replay"] * 3


def test_where_recording_fails_plain_calls_go_on(calls, monkeypatch):
    said = []

    def fail(step, on_failure):
        on_failure("no graphs today")

    monkeypatch.setattr(module, "_record", fail)
    step = capture(lambda: calls.append("plain"), CUDA, said.append)
    for _ in range(PLAIN_CALLS + 5):
        step()
    assert calls == ["plain"] * (PLAIN_CALLS + 5)
    assert said == ["no graphs today"]


def test_on_the_cpu_a_step_is_a_plain_call():
    def step():
        pass

    assert capture(step, torch.device("cpu"), pytest.fail) is step
