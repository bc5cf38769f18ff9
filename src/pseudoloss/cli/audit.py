"""`pseudoloss audit`."""

import argparse
import shlex
from pathlib import Path

from pseudoloss import distributed
from pseudoloss.cli.options import (
    COLUMNS,
    LIMITS,
    add_device,
    add_read_options,
    given_read_options,
)
from pseudoloss.cli.page import add_report
from pseudoloss.cli.parser import Parser, number, path, whole
from pseudoloss.errors import InputError
from pseudoloss.files import free_name
from pseudoloss.interrupts import renamed
from pseudoloss.terminal import show

METHODS = ("latent", "two-mixtures")
READING = (*COLUMNS, "strict", *LIMITS)


def run(arguments: list[str]) -> None:
    """Find wrong labels, without training a network.

    Writes a folder with labels.csv, one row per image: how likely its label is wrong, which label
    is suggested instead, and how far that can be trusted. A pretrained network turns images into
    features; cross-validated classifiers on them predict every label. All splits of SOURCE are
    audited together. Features are cached: a second audit of the same images takes seconds.

    SOURCE is one of
      FOLDER            one folder of images per class, or train/, val/ and test/ with such folders
      TABLE             a .csv, .tsv or .parquet file with the columns path and label
      FILE.npz          NumPy arrays: images, labels
      hf:NAME           a Hugging Face dataset; also hf:NAME:CONFIG and hf:FOLDER
      wds:SHARDS        WebDataset shards: wds:FOLDER or wds:FOLDER/train-{000..009}.tar
      digits            scikit-learn's handwritten digits
      cifar10:DIR, cifar100:DIR, imagenet32:DIR, cnwl:DIR:0.4,
      web-aircraft:DIR, web-bird:DIR, web-car:DIR
                        published datasets, from their original files in DIR
      cifar10-train:DIR, cifar100-train:DIR
                        their training images alone
    """
    args = audit_parser().parse(arguments)
    if args.source is None:
        raise InputError("SOURCE is missing: name what to audit, such as a folder of images")
    if args.out is None:
        raise InputError("--out is missing: name the folder to write, such as --out audit")
    from pseudoloss.auditing.audit import audit

    try:
        audit(
            args.source,
            features=args.features,
            out=args.out,
            method=args.method,
            folds=args.folds,
            seed=args.seed,
            device=args.device,
            corrupt=args.corrupt,
            cache=not args.no_cache,
            quiet=args.quiet,
            **{name: vars(args)[name] for name in ("threshold", "min_trust") if name in args},
            **given_read_options(args),
        )
    except KeyboardInterrupt as error:
        kept = "run the same command again"
        if not args.no_cache:
            kept = "the same command continues: features are in the cache"
        raise renamed(error, f"interrupted; {kept}") from None
    if distributed.is_main():
        finish(args.out, args.quiet, args.source)


def finish(folder: Path, quiet: bool, source: str) -> None:
    """What follows a finished audit: the report, and what to do next."""
    add_report(folder)
    if not quiet:
        show(next_steps(folder, source))


def next_steps(folder: Path, source: str) -> str:
    """What to do with a finished audit."""
    place = shlex.quote(str(folder))
    in_files = not source.startswith(("hf:", "wds:"))
    fixed = "table:      " if in_files else "folder:     "
    out = free_name("fixed.csv") if in_files else f"{free_name('fixed')} --copy"
    return (
        f"Next: look at the images:          open {folder}/report.html in a browser\n"
        f"  or decide image by image:        pseudoloss review {place}\n"
        f"  or write a corrected {fixed}pseudoloss apply {place} --out {out}"
    )


def audit_parser() -> Parser:
    parser = Parser(
        "audit",
        run,
        examples=(
            "pseudoloss audit photos/ --out audit",
            "pseudoloss audit labels.csv --out audit --features vit_small_patch14_dinov2.lvd142m",
            "pseudoloss audit labels.csv --out audit --features embeddings.npy",
            "pseudoloss audit digits --out audit --corrupt symmetric:0.2",
        ),
    )
    parser.usage = "pseudoloss audit SOURCE --out AUDIT [options]"
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help="images with labels")
    add(
        "--out",
        type=path,
        metavar="AUDIT",
        help="path of the folder to write; must be new, or hold the same audit, unfinished",
    )
    add(
        "--features",
        metavar="FEATURES",
        help="a timm model, run:RUN (the network of a run) or FILE.npy (one row per image); "
        "default: the embedded EfficientNet-Lite0",
    )
    add(
        "--method",
        choices=METHODS,
        default="latent",
        help="latent: the latent-label model; two-mixtures: as pseudo-loss selection "
        "(default: latent)",
    )
    add(
        "--threshold",
        type=number,
        default=argparse.SUPPRESS,
        metavar="X",
        help="flag a label if its probability of being wrong is at least X (default: that with the "
        "highest expected F1, from 0.25 to 0.5)",
    )
    add(
        "--min-trust",
        type=number,
        default=argparse.SUPPRESS,
        metavar="X",
        help="relabel if the probability that the suggestion is right is at least X and higher "
        "than that of the given label, else review (default: 0.4)",
    )
    add(
        "--folds",
        type=whole,
        default=5,
        metavar="N",
        help="folds of the cross-validation (default: 5)",
    )
    add("--seed", type=whole, default=1, metavar="N", help="random seed of the folds (default: 1)")
    add_device(parser)
    add(
        "--corrupt",
        metavar="NOISE",
        help="for experiments: add label noise to the training images, such as symmetric:0.2; "
        "see docs/settings.md",
    )
    add("--no-cache", action="store_true", help="neither read nor write cached features")
    add("--quiet", action="store_true", help="print only errors")
    add_read_options(parser, READING)
    return parser
