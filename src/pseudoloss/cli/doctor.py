"""`pseudoloss doctor`."""

from pseudoloss.cli.parser import Parser
from pseudoloss.terminal import show


def run(arguments: list[str]) -> None:
    """Check this machine, and print what a bug report needs.

    Prints versions, devices, memory, disks, compilers, caches and limits, and trains a tiny network
    several times: on the CPU equal runs must give equal bits, also after an interruption; on a GPU
    fast steps must train what plain steps train. This takes about a minute; --quick skips it. The
    home folder is shown as ~, and no user name is shown. Exit code 1 if something is broken.
    """
    parser = Parser("doctor", run, examples=("pseudoloss doctor", "pseudoloss doctor --json"))
    parser.usage = "pseudoloss doctor [options]"
    parser.add_argument("--quick", action="store_true", help="skip the training of the self-check")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse(arguments)
    from pseudoloss.cli.diagnosis import as_text, diagnose
    from pseudoloss.errors import TrainingError
    from pseudoloss.files import to_json
    from pseudoloss.progress import stderr_reporter

    with stderr_reporter() as reporter:
        found = diagnose(quick=args.quick, progress=reporter.progress)
    show(to_json(found, indent=2) if args.json else as_text(found))
    problems = len(found["problems"])
    if problems:
        raise TrainingError(f"{problems} problem{'s' * (problems > 1)} found, see above")
