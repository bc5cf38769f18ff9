"""`pseudoloss demo`."""

from pseudoloss.cli.parser import Parser, path, whole


def run(arguments: list[str]) -> None:
    """Audit and train on digits with 40% wrong labels, in about a minute.

    Uses scikit-learn's handwritten digits, so nothing is downloaded.
    """
    parser = Parser("demo", run)
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="folder to write, must not exist (default: pseudoloss-demo, or pseudoloss-demo-N if "
        "that exists)",
    )
    parser.add_argument(
        "--seed",
        type=whole,
        default=1,
        metavar="N",
        help="random seed of noise and training (default: 1)",
    )
    parser.add_argument("--resume", action="store_true", help="resume an interrupted demo")
    args = parser.parse(arguments)
    from pseudoloss.cli.demo import run_demo

    run_demo(args.out, args.seed, args.resume)
