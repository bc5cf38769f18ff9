"""Terminal output of long-running work: a progress bar, lines of text, notices."""

from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from pseudoloss.interrupts import tell
from pseudoloss.terminal import one_line, visible


class Reporter(AbstractContextManager["Reporter"], Protocol):
    """Receives messages and progress. Used as a context manager around the work."""

    def say(self, text: str) -> None:
        """Print a line."""

    def notice(self, text: str) -> None:
        """Print a line that should not be missed."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of anything but an epoch."""

    def begin_epoch(self, title: str, steps: int) -> None:
        """Start the progress bar of an epoch."""

    def step(self) -> None:
        """Advance the progress bar of the epoch by one step."""


class SilentReporter(Reporter):
    """Prints nothing."""

    def say(self, text: str) -> None: ...

    def notice(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def begin_epoch(self, title: str, steps: int) -> None: ...

    def step(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class TerminalReporter(Reporter):
    """Prints lines to standard output and, in a terminal, a progress bar below them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.console.on_broken_pipe = self._stop_printing  # type: ignore[method-assign]
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=None)

    def __enter__(self) -> "TerminalReporter":
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self.bar.stop()

    def say(self, text: str) -> None:
        self._print(escape(visible(text)))

    def notice(self, text: str) -> None:
        self._print(f"[yellow]notice:[/yellow] {escape(one_line(text))}")

    def _print(self, text: str) -> None:
        try:
            self.bar.console.print(text)
        except OSError:  # a full disk, or a terminal that was closed
            self._stop_printing()

    def _stop_printing(self) -> None:
        """Go on in silence: a night of training is worth more than what it prints."""
        self.console.quiet = True
        tell("the output cannot be written; the work goes on without it")

    def progress(self, what: str, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total, description=escape(one_line(what)))

    def begin_epoch(self, title: str, steps: int) -> None:
        self.bar.reset(self.task, total=steps, description=escape(one_line(title)))

    def step(self) -> None:
        self.bar.advance(self.task)


def stderr_reporter(bar: bool = True) -> TerminalReporter:
    """A reporter on standard error, so that standard output holds only results. `bar`: whether it
    may show a progress bar."""
    console = Console(
        stderr=True, highlight=False, soft_wrap=True, force_terminal=None if bar else False
    )
    return TerminalReporter(console)
