"""Runs `pseudoloss` commands in real processes that start quickly: torch is loaded once, and every
command runs in a fork. Requests and answers are lines of JSON on standard input and output."""

import contextlib
import json
import os
import runpy
import signal
import sys
import traceback

import numpy as np

import pseudoloss as pl
from pseudoloss.cli import main


def run(arguments, log, most_bytes, environment):
    """In a child: one command, or a script FILE.py, its output in the file `log`."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):  # SIGHUP is ignored if the tests run with nohup
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    if most_bytes is not None:  # no file may become larger
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        if arguments[0].endswith(".py"):
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        else:
            code = main(arguments)
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve():
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8), dtype=np.uint8)
    small = {"network": "small-cnn", "epochs": 2, "batch_size": 4, "device": "cpu"}
    pl.train((images, np.arange(8) % 2), quiet=True, **small)  # imports what is loaded late
    with contextlib.suppress(ImportError):  # an extra
        import pseudoloss.review.server  # noqa: F401
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            found, status = os.waitpid(asked["wait"], 0 if asked["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = os.fork()
            if answer == 0:
                run(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
