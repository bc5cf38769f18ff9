"""The report at the end of a command."""

import sys
from pathlib import Path

from pseudoloss.errors import InputError
from pseudoloss.terminal import show


def add_report(folder: Path) -> Path | None:
    """Write the report of a finished run or audit into its folder. The results are written already,
    so a report that cannot be written is only a notice."""
    from pseudoloss.report.page import write_report

    try:
        return write_report(folder)
    except InputError as error:
        show(f"notice: no report ({error})", file=sys.stderr)
        return None
