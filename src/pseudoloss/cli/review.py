"""`pseudoloss review`."""

import shlex
from importlib.util import find_spec

from pseudoloss.cli.parser import Parser, path, whole
from pseudoloss.errors import InputError
from pseudoloss.files import free_name
from pseudoloss.terminal import show


def run(arguments: list[str]) -> None:
    """Look at doubtful labels in the browser and decide.

    RUN is the folder of a finished audit or training run. Prints the address of a page on this
    machine and opens it: images in order of doubt, with the given and the suggested label. Every
    decision is written to RUN/decisions.jsonl at once; pseudoloss apply reads it.
    """
    parser = Parser(
        "review",
        run,
        examples=("pseudoloss review audit", "pseudoloss review audit --port 9000 --no-browser"),
    )
    parser.usage = "pseudoloss review RUN [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="path of the run folder or audit")
    add(
        "--port",
        type=whole,
        metavar="N",
        help="port to listen on, 0 for any free one (default: 8765, or a free one if it is in use)",
    )
    add(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address to listen on; another one than 127.0.0.1 lets other machines in",
    )
    add("--no-browser", action="store_true", help="only print the address")
    add(
        "--decisions",
        type=path,
        metavar="FILE",
        help="write decisions to this file (default: decisions.jsonl in RUN)",
    )
    args = parser.parse(arguments)
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(
            f"review needs {' and '.join(missing)}: "
            "pip install -c constraints.txt '.[review]' in a clone of the repository"
        )
    from pseudoloss.review.server import serve

    served = serve(
        args.run,
        host=args.host,
        port=args.port,
        decisions=args.decisions,
        browser=not args.no_browser,
    )
    made = served.progress
    show(
        f"\n{made['relabel']:,} relabelled, {made['keep']:,} kept, {made['junk']:,} junk, "
        f"{made['skip']:,} skipped; {made['left']:,} left"
    )
    option = f" --decisions {shlex.quote(str(args.decisions))}" if args.decisions else ""
    out = free_name("fixed.csv" if served.are_files else "fixed.npz")
    if served.source.startswith(("hf:", "wds:")):
        out = f"{free_name('fixed')} --copy"
    show(f"Next: pseudoloss apply {shlex.quote(args.run)}{option} --out {out}")
