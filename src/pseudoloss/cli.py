"""The commands. Words are parsed first; torch is loaded only when a command needs it."""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from pseudoloss import __version__
from pseudoloss.config import PRESETS, Settings, did_you_mean, flag, request
from pseudoloss.errors import InputError, TrainingError

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130

Parsed = TypeVar("Parsed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. 2 means that the input was wrong and nothing was written."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"pseudoloss {__version__}")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise InputError(f"{words[0]}: no such command{did_you_mean(words[0], COMMANDS)}")
        COMMANDS[words[0]](words[1:])
        return 0
    except InputError as error:
        return complain(error, WRONG_INPUT)
    except TrainingError as error:
        return complain(error, FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def overview() -> str:
    lines = [
        "usage: pseudoloss COMMAND ...",
        "",
        "Train image classifiers on labels that cannot be trusted, and learn which are wrong.",
        "",
        "commands:",
    ]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:9} {(command.__doc__ or '').strip().splitlines()[0]}")
    lines += [
        "",
        "pseudoloss COMMAND --help tells more. New here? pseudoloss demo",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ train


@dataclass(frozen=True)
class Train:
    """Train on a source of images; everything that is learnt goes into a run folder.

    SOURCE is digits, cifar10:DIR, cifar100:DIR, or the path of an .npz file with images and labels.
    """

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = None
    """What to train on. May be left out with --resume."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """The run folder: new, or with --resume one that a run was begun in."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Settings to start from (pseudoloss presets lists them). None: what fits the source."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A TOML file of settings, or the config.json of another run."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run in RUN from its last checkpoint; begin it where there is none."""
    minutes: Annotated[float | None, tyro.conf.arg(metavar="M")] = None
    """Stop after an epoch when M minutes are over; --resume goes on."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print nothing but errors."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)


def train(words: list[str]) -> None:
    """Train a classifier in spite of wrong labels; find out which they are."""
    named = _value_of(words, "--preset")
    base = request(named, None, {}).settings("default")
    parsed = parse(Train, words, "train", Train(preset=named, settings=base))
    if parsed.out is None:
        raise InputError("--out is missing: name the run folder to write, such as --out run")
    explicit = {
        name: value for name, value in vars(parsed.settings).items() if _is_given(words, name)
    }
    from pseudoloss.training import train as run_training
    from pseudoloss.wording import what_next

    with resumable(parsed.out):
        run = run_training(
            parsed.source,
            parsed.out,
            preset=parsed.preset,
            config=parsed.config,
            resume=parsed.resume,
            minutes=parsed.minutes,
            quiet=parsed.quiet,
            **explicit,
        )
    if run.finished and not parsed.quiet:
        print(what_next(parsed.out))


# ------------------------------------------------------------------------------------- demo


@dataclass(frozen=True)
class Demo:
    """Handwritten digits with 40% wrong labels: cross-entropy beside PLS, in under a minute.

    Needs no data: the digits come with scikit-learn.
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where to write; new. None: pseudoloss-demo, or that with a number behind it."""
    seed: int = 1
    """Seed of noise and training."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with a demo that was broken off."""


def demo(words: list[str]) -> None:
    """See it work: digits with 40% wrong labels, in under a minute."""
    parsed = parse(Demo, words, "demo", Demo())
    from pseudoloss.demo import run_demo

    run_demo(parsed.out, parsed.seed, parsed.resume)


# ---------------------------------------------------------------------------------- presets


@dataclass(frozen=True)
class Presets:
    """List the presets and what each of them changes."""


def presets(words: list[str]) -> None:
    """List the presets and what each of them changes."""
    parse(Presets, words, "presets", Presets())
    for name, changes in PRESETS.items():
        text = "  ".join(f"{flag(key)} {value}" for key, value in changes.items())
        print(f"{name:16} {text or '(all defaults: see pseudoloss train --help)'}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "train": train,
    "presets": presets,
}


# ---------------------------------------------------------------------------------- helpers


def parse(kind: type[Parsed], words: list[str], command: str, default: Parsed) -> Parsed:
    """`words` as a `kind`; a mistake in them becomes an error of one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                kind,
                prog=f"pseudoloss {command}",
                args=words,
                default=default,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as exit_:
        if not exit_.code:  # --help
            raise
        raise InputError(_first_sentence(box.getvalue(), command)) from None


def _first_sentence(box: str, command: str) -> str:
    """What tyro says in the first part of its error box, on one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    rows = [row.strip(" │|") for row in text.splitlines()]
    body = [row for row in rows if row and not row.startswith(("╭", "╰"))]
    rule = next((i for i, row in enumerate(body) if set(row) <= {"─", "-"}), len(body))
    close = [row for row in body[rule:] if row.startswith("--")]
    hint = f"; did you mean {close[0].split()[0]}?" if "Unrecognized" in text and close else ""
    return f"{' '.join(body[:rule])}{hint} (see pseudoloss {command} --help)"


@contextlib.contextmanager
def resumable(out: Path) -> Any:
    """Tell how to go on with a run that is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        command = f"pseudoloss train --out {shlex.quote(str(out))} --resume"
        print(f"\ninterrupted; go on with: {command}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def complain(error: Exception, code: int) -> int:
    print(f"pseudoloss: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _value_of(words: list[str], name: str) -> str | None:
    """The value of a flag, before the words are parsed properly."""
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _is_given(words: list[str], setting: str) -> bool:
    """Whether a setting is named on the command line, so that it overrules a preset."""
    name = flag(setting).removeprefix("--")
    forms = {f"--{name}", f"--no-{name}"}
    return any(word.partition("=")[0].replace("_", "-") in forms for word in words)
