"""Signals that ask the program to stop: Ctrl-C, a terminal that closes, the end of a job.

A command raises `Interrupted` at once (`raised`); training first finishes its step and writes a
checkpoint (`deferred`). A second signal ends the process immediately. Files are replaced in one
step, so even then the last checkpoint is intact.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# SLURM sends SIGTERM, or with --signal=USR1@120 SIGUSR1, some time before it ends a job.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
RETRY = 0.02  # seconds
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]

Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """A signal asked the program to stop.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text)
        self.number = number


def exit_code(error: BaseException) -> int:
    """128 and the number of the signal, as shells have it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + (error.number if isinstance(error, Interrupted) else int(signal.SIGINT))


def renamed(error: KeyboardInterrupt, text: str) -> Interrupted:
    """The same interruption with another message."""
    return Interrupted(exit_code(error) - 128, text)


@contextmanager
def raised() -> Iterator[None]:
    """For a command: the first signal raises `Interrupted`, the second ends the process.

    While a module is imported, the first one waits: modules turn exceptions into others.
    """
    asked: int | None = None
    is_raised = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked is not None:
            exit_now(number)
        asked = number
        raise_if_possible(0, frame)

    def raise_if_possible(_: int, frame: FrameType | None) -> None:
        nonlocal is_raised
        if _in_an_import(frame) and hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, raise_if_possible)
            signal.setitimer(signal.ITIMER_REAL, RETRY)
            return
        is_raised = True
        assert asked is not None
        raise Interrupted(asked)

    with _handled(handle):
        try:
            yield
        finally:
            waits = asked is not None and not is_raised
            if waits:
                signal.setitimer(signal.ITIMER_REAL, 0)
    if waits:
        assert asked is not None
        raise Interrupted(asked)


def _in_an_import(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


class Stop:
    """Whether a signal has asked the program to stop."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    def raise_if_asked(self, text: str = "") -> None:
        if self.number is not None:
            raise Interrupted(self.number, text)


@contextmanager
def deferred(quiet: bool) -> Iterator[Stop]:
    """For work that ends at a place of its choice: the first signal is only noted in the `Stop`
    and, unless `quiet`, said. The second one ends a command, and raises `Interrupted` in a program
    that called us.

    A signal that nothing has acted on is raised at the end.
    """
    stop = Stop()
    is_command = any(getattr(signal.getsignal(n), "is_ours", False) for n in SIGNALS)

    def handle(number: int, frame: FrameType | None) -> None:
        if stop:
            if is_command:
                exit_now(number)
            raise Interrupted(number)
        stop.number = number
        name = signal.Signals(number).name
        if not quiet:
            tell(f"{name}: finishing the step and writing a checkpoint; once more stops at once")

    with _handled(handle):
        yield stop
    stop.raise_if_asked()


def exit_now(number: int) -> None:
    """End the process without any more work."""
    with suppress(OSError, ValueError):
        if sys.stdout.isatty():
            os.write(1, b"\x1b[?25h")  # a progress bar hides the cursor
    tell("stopped at once; the last checkpoint is intact")
    os._exit(128 + number)


def tell(text: str) -> None:
    """A line on standard error, from the handler of a signal: printing could be what the signal has
    interrupted."""
    with suppress(OSError):
        new_line = "\n" if os.isatty(2) else ""  # after a progress bar
        os.write(2, f"{new_line}pseudoloss: {text}\n".encode())


@contextmanager
def _handled(handle: Handler) -> Iterator[None]:
    """Handle the signals that nobody else handles. Those that are ignored stay so (nohup)."""
    handle.is_ours = True  # type: ignore[attr-defined]
    before: dict[int, Any] = {}
    with suppress(ValueError):  # raised where this is not the main thread
        for number in SIGNALS:
            current = signal.getsignal(number)
            usual = current in (signal.SIG_DFL, signal.default_int_handler)
            if usual or getattr(current, "is_ours", False):
                signal.signal(number, handle)
                before[number] = current
    try:
        yield
    finally:
        for number, current in before.items():
            signal.signal(number, current)
