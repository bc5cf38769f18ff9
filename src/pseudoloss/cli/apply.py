"""`pseudoloss apply`."""

import shlex
from typing import TYPE_CHECKING

from pseudoloss.cli.labels import add_thresholds
from pseudoloss.cli.parser import Parser, path
from pseudoloss.errors import InputError
from pseudoloss.files import free_name
from pseudoloss.terminal import one_line, show

if TYPE_CHECKING:
    from pseudoloss.labels.applying import Applied

SHOWN = 10  # pairs of classes


def run(arguments: list[str]) -> None:
    """Write a corrected table or folder of the images; the source is never changed.

    RUN is the folder of a run or an audit. Labels are changed as people decided (decisions.jsonl in
    RUN, written by pseudoloss review) and, where they did not, as the scores say; images marked as
    junk are left out. OUT is a table (.csv, .parquet), a folder of links to the images with one
    folder per class or, for a source of arrays, an .npz file. pseudoloss train and audit read it.
    """
    parser = Parser(
        "apply",
        run,
        examples=(
            "pseudoloss apply run --out fixed.csv",
            "pseudoloss apply run --min-trust 0.9 --drop review --out fixed.csv",
            "pseudoloss apply run --reviewed-only --out fixed/",
        ),
    )
    parser.usage = "pseudoloss apply RUN --out OUT [options]"
    add = parser.add_argument
    add("run", metavar="RUN", help="path of the run folder or audit")
    add("--out", type=path, metavar="OUT", help="file or folder to write, must not exist")
    add(
        "--decisions",
        type=path,
        metavar="FILE",
        help="decisions of people (default: decisions.jsonl in RUN, if it exists)",
    )
    add_thresholds(parser)
    add("--reviewed-only", action="store_true", help="change only what people decided")
    add(
        "--drop",
        nargs="+",
        action="extend",
        default=[],
        choices=("junk", "review"),
        help="also leave out images: review, those with a doubtful label that nobody decided on; "
        "junk is always left out",
    )
    add("--copy", action="store_true", help="copy images into the folder, instead of linking")
    args = parser.parse(arguments)
    if args.out is None:
        raise InputError("--out is missing: name what to write, such as --out fixed.csv")
    from pseudoloss.labels.applying import apply

    found = apply(
        args.run,
        args.out,
        decisions=args.decisions,
        threshold=args.threshold,
        min_trust=args.min_trust,
        drop=args.drop,
        reviewed_only=args.reviewed_only,
        copy=args.copy,
    )
    show(report(found))


def report(found: "Applied") -> str:
    """What was written and what changed."""
    lines = [
        f"{found.out}: {found.images:,} images, {found.changed:,} "
        f"label{'s' * (found.changed != 1)} changed "
        f"({found.by_score:,} by score, {found.by_person:,} by people)"
    ]
    width = max((len(given) for given, _, _ in found.pairs[:SHOWN]), default=0)
    for given, new, count in found.pairs[:SHOWN]:
        lines.append(f"  {count:5,}  {given:{width}} → {new}")
    if len(found.pairs) > SHOWN:
        more = len(found.pairs) - SHOWN
        lines.append(f"  and {more:,} other {'pair' if more == 1 else 'pairs'} of classes")
    if found.for_review:
        lines.append(f"left for review, with the given label: {found.for_review:,}")
    if len(found.left_out):
        reasons = found.left_out["reason"].value_counts()
        listed = ", ".join(f"{count:,} × {reason}" for reason, count in reasons.items())
        lines.append(f"left out: {listed}; listed in {found.left_out_file}")
    lines += [f"notice: {notice}" for notice in found.notices]
    follow = " --follow-links" if found.links else ""
    out = f"--out {free_name('run')}"
    lines.append(f"Next: pseudoloss train {shlex.quote(str(found.out))}{follow} {out}")
    return "\n".join(map(one_line, lines))
