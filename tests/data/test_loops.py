import threading
import time

import pytest

from pseudoloss.data import loops
from pseudoloss.data.decoding import UnreadableError
from pseudoloss.data.loops import for_each


@pytest.mark.parametrize("seconds", [0, 0.001])
def test_results_are_in_order_and_errors_among_them(seconds):
    def function(i):
        time.sleep(seconds)
        if i % 7 == 3:
            raise UnreadableError(f"item {i}")
        return i * i

    seen = []
    found = for_each(range(600), function, "items", lambda *args: seen.append(args))
    assert [str(r) if isinstance(r, UnreadableError) else r for r in found] == [
        f"item {i}" if i % 7 == 3 else i * i for i in range(600)
    ]
    assert seen == [("items", done, 600) for done in (256, 512, 600)]


def test_only_slow_items_go_to_threads(monkeypatch):
    now = 0.0
    monkeypatch.setattr(loops, "perf_counter", lambda: now)

    def is_here(seconds):
        nonlocal now
        now += seconds
        return threading.current_thread() is threading.main_thread()

    slow = for_each([0.001] * 40, is_here, "items", lambda *_: None)
    assert slow == [True] * 3 + [False] * 37  # three in a row
    # Tried again after 1, 2, 4 chunks; as soon as a chunk is quick, after 1.
    long = for_each([0.001] * 256 * 8, is_here, "items", lambda *_: None)
    assert [i for i, here in enumerate(long) if here] == [
        256 * chunk + i for chunk in (0, 2, 5) for i in range(3)
    ]
    hiccup = [0.0] * 100 + [0.001] * 3 + [0.0] * 409  # two chunks
    several = for_each(hiccup * 3, is_here, "items", lambda *_: None)
    assert several == [
        *([True] * 103 + [False] * 153), *[False] * 256, *([True] * 103 + [False] * 153),
        *[False] * 512, *[True] * 256,
    ]  # fmt: skip
    mixed = for_each([0.0, 0.001, 0.001] * 20, is_here, "items", lambda *_: None)
    assert all(mixed)


def test_other_errors_are_raised():
    with pytest.raises(ZeroDivisionError):
        for_each([1, 0], lambda i: 1 / i, "items", lambda *_: None)
