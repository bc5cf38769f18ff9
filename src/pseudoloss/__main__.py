"""The program: `pseudoloss`, or `python -m pseudoloss`."""

import os
import sys
from contextlib import suppress

from pseudoloss.interrupts import exit_code, raised, tell


def start() -> None:
    """Run the command line. From here on, a signal ends it with one line."""
    with raised():
        try:
            from pseudoloss.cli import main

            code = main()
        except KeyboardInterrupt as error:
            tell("interrupted; run the same command again")
            code = exit_code(error)
        if code >= 128:  # at once: threads and libraries may have no more to say
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    start()
