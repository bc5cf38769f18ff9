"""The command line: `main` and the table of commands.

Arguments are parsed before torch is imported, so that --help and errors are fast.
"""

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pseudoloss import distributed
from pseudoloss.cli import (
    apply,
    audit,
    demo_command,
    doctor,
    evaluate,
    experiments,
    export,
    inspect,
    labels,
    predict,
    presets,
    report,
    review,
    train,
)
from pseudoloss.cli.train import train_parser as train_parser
from pseudoloss.errors import InputError, TrainingError, name_hint, reason
from pseudoloss.interrupts import exit_code, raised
from pseudoloss.terminal import one_line, show
from pseudoloss.version import __version__

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130

COMMANDS: dict[str, Callable[[list[str]], None]] = {  # in the order in which they are used
    "demo": demo_command.run,
    "inspect": inspect.run,
    "audit": audit.run,
    "report": report.run,
    "review": review.run,
    "labels": labels.run,
    "apply": apply.run,
    "train": train.run,
    "evaluate": evaluate.run,
    "predict": predict.run,
    "export": export.run,
    "presets": presets.run,
    "experiments": experiments.run,
    "doctor": doctor.run,
}


SHARED = ("train", "audit")  # commands that torchrun can start on several processes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code (see `overview`)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # closed, as by `>&-`
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # for terminals that cannot show × or –
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with raised():
            try:
                _run(given)
            finally:  # also after --help, which exits
                sys.stdout.flush()
        return 0
    except InputError as error:
        return complain(str(error), WRONG_INPUT)
    except TrainingError as error:
        return complain(str(error), FAILED)
    except KeyboardInterrupt as error:
        return complain(str(error) or "interrupted; run the same command again", exit_code(error))
    except BrokenPipeError:  # the reader of the output has closed it, as with `| head`
        _drop_output()
        return 0
    except OSError as error:  # most likely the disk of the output is full
        _drop_output()
        file = error.filename or "standard output"
        return complain(f"{file}: cannot be read or written ({reason(error)})", FAILED)


def _run(given: list[str]) -> None:
    if given[:1] == ["help"]:  # pseudoloss help train
        given = [*given[1:], "--help"]
    if not given or given[0] in ("-h", "--help"):
        show(overview())
    elif given[0] == "--version":
        show(f"pseudoloss {__version__}")
    elif given[0].startswith("-"):
        raise InputError(f"{given[0]}: no such option (see pseudoloss --help)")
    elif given[0] not in COMMANDS:
        raise InputError(f"{given[0]}: no such command{name_hint(given[0], COMMANDS)}")
    else:
        if given[0] not in SHARED and distributed.launched() and "--help" not in given:
            distributed.refuse_several(given[0], SHARED)
        COMMANDS[given[0]](given[1:])


def _drop_output() -> None:
    """Let what is still to be written to standard output vanish, or Python would try it again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def overview() -> str:
    """The help of `pseudoloss` itself."""
    lines = [
        "usage: pseudoloss COMMAND [arguments] [options]",
        "",
        "Find the wrong labels in an image dataset, correct them, and train in spite of them.",
        "",
        "commands:",
        *(f"  {name:11} {_summary(command)}" for name, command in COMMANDS.items()),
        "",
        "options:",
        "  -h, --help  show this help and exit",
        "  --version   show the version and exit",
        "",
        "exit codes:",
        "  0    success",
        f"  {FAILED}    training or an export failed",
        f"  {WRONG_INPUT}    wrong input: the message names the option, file or row",
        f"  {INTERRUPTED}  interrupted by Ctrl-C; another signal: 128 and its number (SIGTERM 143)",
        "",
        "pseudoloss COMMAND --help describes a command. Start with: pseudoloss demo",
    ]
    return "\n".join(lines)


def complain(text: str, code: int) -> int:
    """Print an error in one line and return the exit code."""
    kind = "error: " if code < 128 else ""
    if not distributed.speaks():
        return code
    with suppress(OSError):  # the terminal may be gone
        show(f"pseudoloss: {kind}{one_line(' '.join(text.split()))}", file=sys.stderr)
    return code


def _summary(command: Callable[[list[str]], None]) -> str:
    return (command.__doc__ or "").strip().splitlines()[0]
