"""A loop over many files that shows its progress and takes the threads that pay."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from pseudoloss.data.decoding import UnreadableError, no_warnings

CHUNK, AT_ONCE = 256, 8  # files that the thread pool, and a thread, get at a time
QUICK = 5e-5  # seconds: handing an item that takes no longer to a thread does not pay

Progress = Callable[[str, int, int], None]  # what is being done, number done, total number


def no_progress(what: str, done: int, total: int) -> None:
    """Report no progress."""


def for_each(
    items: Sequence[Any], function: Callable[[Any], Any], what: str, progress: Progress
) -> list[Any]:
    """The result of the function for each item, or the `UnreadableError` that it raised.

    Runs in threads: PIL releases the interpreter lock while it decodes, and a disk may be slow. As
    long as items take microseconds, they are done here: threads would only wait for the lock.
    """

    def attempt(some: Sequence[Any]) -> list[Any]:
        results: list[Any] = []
        for item in some:
            try:
                results.append(function(item))
            except UnreadableError as error:
                results.append(error)
        return results

    found: list[Any] = []
    in_threads, pause = 0, 1  # chunks until the next trial without threads, and after it
    with no_warnings(), ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(items), CHUNK):
            end = min(start + CHUNK, len(items))
            if in_threads:
                in_threads -= 1
            else:
                slow = 0  # items one after the other
                while slow < 3 and len(found) < end:
                    before = perf_counter()
                    found += attempt(items[len(found) : len(found) + 1])
                    slow = slow + 1 if perf_counter() - before > QUICK else 0
                in_threads, pause = (pause, 2 * pause) if slow == 3 else (0, 1)
            # A few at a time: handing over each of them takes as long as reading a header.
            parts = [items[i : min(i + AT_ONCE, end)] for i in range(len(found), end, AT_ONCE)]
            for results in threads.map(attempt, parts):
                found += results
            progress(what, len(found), len(items))
    return found
