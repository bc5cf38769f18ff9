"""Feed damaged files to everything that reads files, and count what happens.

    python benchmarks/fuzz.py --seconds 60 --out benchmarks/results/fuzz-cpu.json

Each target has a few valid files. They are mutated (bits, bytes, lengths, repetitions, splices, and
values that are famous for trouble), and read. A target passes an input if it returns, or raises an
`InputError` or `UnreadableError` of one line. Anything else is a failure: another exception, more
than --limit seconds, more than --memory GiB, a signal. Targets run in a process of their own with
a limit on its memory; the input that was being read is in a file, so that a crash can be repeated.

--guided lets atheris (`pip install atheris`) choose mutations that reach new code of pseudoloss.
"""

import argparse
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import machine
from pseudoloss.errors import InputError

FAMOUS = (
    *(b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00", b"\n", b'"'),
    *(b",", b"[", b"{", b"nan", b"Infinity", b"-1", b"1e999", b"99999999999999999999", b"null"),
    *(b"../", b"\x1b]0;x\x07", b"\xe2\x80\xae", b"%s%n", b"=1+1", b"\xed\xa0\x80", b"true"),
)
ALLOWED = ("InputError", "UnreadableError", "TrainingError", "ExportError")
LARGEST = 2**20  # bytes of an input

Target = tuple[dict[str, list[bytes]], Callable[[Path], Any]]


def mutate(content: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A few random changes."""
    data = bytearray(content)
    for _ in range(1 << rng.randrange(5)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 2:
            famous = rng.choice(FAMOUS)
            data[at : at + rng.choice((0, len(famous)))] = famous
        elif kind == 3:
            del data[at : at + 1 + rng.randrange(16)]
        elif kind == 4:
            data[at:at] = data[at : at + 1 + rng.randrange(64)] * rng.choice((1, 2, 100))
        elif kind == 5:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[at:] = other[start:]
        elif kind == 6:
            del data[at:]
        else:
            data[at:at] = rng.choice((b"[", b'{"a":', b"(")) * rng.choice((10, 3000))
    return bytes(data[:LARGEST])


# ----------------------------------------------------------------------------------- targets


def images(folder: Path) -> Target:
    from pseudoloss.data.decoding import Limits, Reader, full_pixels, header

    picture = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    )
    files: dict[str, list[bytes]] = {"image": []}
    for form, mode in (
        *(("JPEG", "RGB"), ("PNG", "RGBA"), ("PNG", "I;16"), ("GIF", "P"), ("BMP", "RGB")),
        *(("TIFF", "F"), ("TIFF", "CMYK"), ("WEBP", "RGB"), ("PPM", "L"), ("JPEG2000", "RGB")),
    ):
        content = io.BytesIO()
        (picture.convert("L") if mode in ("I;16", "F") else picture).convert(mode).save(
            content, form
        )
        files["image"].append(content.getvalue())
    limits = Limits(1, 2)
    readers = [Reader(3, (16, 16), "crop", limits), Reader(1, (16, 16), "stretch", limits)]

    def read(path: Path) -> None:
        header(path, limits)
        for reader in readers:
            assert reader.read(path).shape[1:] == (16, 16)
        full_pixels(path.read_bytes(), 8, limits)

    return files, read


def tables(folder: Path) -> Target:
    import pandas as pd

    from pseudoloss.data import find_source

    for i in range(4):
        Image.new("RGB", (16, 16), (i, i, i)).save(folder / f"{i}.png")
    rows = pd.DataFrame({"path": [f"{i}.png" for i in range(4)], "label": list("abab")})
    content = io.BytesIO()
    rows.to_parquet(content)
    text = rows.assign(split=["train", "train", "val", "test"]).to_csv(index=False).encode()
    quoted = b'path,label\n"0.png","a, b"\n1.png,"a, b"\n"2.png",c\n3.png,c\n'
    files = {
        "table.csv": [text, quoted],
        "table.tsv": [text.replace(b",", b"\t")],
        "table.parquet": [content.getvalue()],
    }
    return files, find_source


def settings(folder: Path) -> Target:
    from pseudoloss.presets import read_config, request

    toml = b'epochs = 5\nlr = 0.1\nmethod = "pls"\nmilestones = [1, 2]\n[settings]\nseed = 3\n'
    text = b'{"settings": {"epochs": 5, "lr": 0.1, "corrupt": "symmetric:0.2", "pad": null}}'

    def read(path: Path) -> None:
        request("scratch", path, {})
        read_config(path)

    return {"s.toml": [toml, b"epochs = 5\nseed = 2\n"], "s.json": [text]}, read


def models(folder: Path) -> Target:
    import pseudoloss as pl
    from pseudoloss.inference.model import load_model

    rng = np.random.default_rng(0)
    source = (rng.integers(0, 256, (16, 8, 8), dtype=np.uint8), np.arange(16) % 2)
    options = {"epochs": 1, "warmup": 1, "network": "small-cnn", "batch_size": 8, "pad": 0}
    run = pl.train(source, folder / "run", quiet=True, **options)
    content = (folder / "run" / "model.safetensors").read_bytes()
    # Without most of its weights: mutations hit the header.
    shown = np.zeros((2, 8, 8), np.uint8)

    def read(path: Path) -> None:
        load_model(path).predict_proba(shown)

    assert run.model is not None
    return {"model.safetensors": [content[:9000], content]}, read


def decisions(folder: Path) -> Target:
    from pseudoloss.labels.reviewed import read_decisions

    line = {
        "index": 3,
        "part": "train",
        "path": "a.png",
        "decision": "relabel",
        "label": "cat",
        "given_label": "dog",
        "time": "2026-01-01T00:00:00.000+00:00",
        "by": None,
    }
    lines = [line, line | {"decision": "undo"}, line | {"index": 4, "decision": "junk"}]
    content = "".join(json.dumps(one) + "\n" for one in lines).encode()
    return {"decisions.jsonl": [content]}, read_decisions


def arrays(folder: Path) -> Target:
    from pseudoloss.auditing.features import load_features
    from pseudoloss.data.pools import draw
    from pseudoloss.data.sources.npz import npz

    labels = np.arange(6) % 2
    pixels = np.zeros((6, 8, 8), np.uint8)
    plain, packed, features = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(plain, images=pixels, labels=labels)
    np.savez_compressed(packed, images=pixels, labels=labels, classes=np.array(["a", "b"]))
    np.save(features, np.ones((6, 4), np.float32))

    def read(path: Path) -> None:
        if path.suffix == ".npz":
            npz(str(path))
            return
        for call in (
            lambda: load_features(path, 6),
            lambda: draw(str(path), 2, (8, 8), 1, np.random.default_rng(0)),
        ):
            try:
                call()
            except InputError as error:
                check(error)

    return {
        "a.npz": [plain.getvalue(), packed.getvalue()],
        "a.npy": [features.getvalue()],
    }, read


def pickles(folder: Path) -> Target:
    import pickle

    from pseudoloss.data.pickles import read_arrays

    content = {"data": np.zeros((2, 12), np.uint8), "labels": [1, 2], b"x": np.float32(1)}
    files = [pickle.dumps(content, protocol) for protocol in (0, 2, 4)]
    return {"batch": files}, lambda path: read_arrays(path, "fuzz", "nobody")


def audits(folder: Path) -> Target:
    """The files of a folder that somebody else sent: config.json, summary.json, labels.csv."""
    import pseudoloss as pl
    from pseudoloss.labels.opening import open_labels
    from pseudoloss.report.reading import read_record

    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 4)).astype(np.float32)
    home = folder / "audit"
    pl.audit(features=features, labels=np.arange(40) % 2, out=home, folds=2, quiet=True)
    names = ("config.json", "summary.json", "labels.csv", "duplicates.csv", "examples.npz")
    whole = {name: (home / name).read_bytes() for name in names if (home / name).exists()}

    def read(path: Path) -> None:
        for name, content in whole.items():
            (home / name).write_bytes(path.read_bytes() if path.name == name else content)
        for call in (open_labels, read_record, pl.load_audit if hasattr(pl, "load_audit") else str):
            try:
                call(home)
            except InputError as error:
                check(error)

    return {name: [content] for name, content in whole.items()}, read


TARGETS: dict[str, Callable[[Path], Target]] = {
    target.__name__: target
    for target in (images, tables, settings, models, decisions, arrays, pickles, audits)
}


# -------------------------------------------------------------------------------------- runs


def check(error: Exception) -> None:
    """Errors are one line."""
    if len(str(error).splitlines()) > 1:
        raise AssertionError(f"several lines: {error}")


class SlowError(BaseException):
    """An input took too long."""


class Attempts:
    """Reads inputs of a target, and counts what happens."""

    def __init__(self, read: Callable[[Path], Any], limit: int, work: Path) -> None:
        self.read, self.limit, self.work = read, limit, work
        self.counts: Counter[str] = Counter()
        self.slowest = 0.0
        self.failures: dict[str, Any] = {}
        self.base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        signal.signal(signal.SIGALRM, self._alarm)

    def _alarm(self, *_: object) -> None:
        raise SlowError

    def __call__(self, file: str, content: bytes) -> None:
        path = self.work / file
        path.write_bytes(content)
        begun = time.monotonic()
        signal.alarm(self.limit)
        try:
            self.read(path)
            self.counts["accepted"] += 1
        except (Exception, SlowError) as error:
            self._count(error, path)
        finally:
            signal.alarm(0)
        self.slowest = max(self.slowest, time.monotonic() - begun)

    def _count(self, error: BaseException, path: Path) -> None:
        kind = type(error).__name__
        if kind in ALLOWED and len(str(error).splitlines()) <= 1:
            self.counts["refused"] += 1
            return
        self.counts["failed"] += 1
        place = traceback.extract_tb(error.__traceback__)[-1]
        key = f"{kind} at {Path(place.filename).name}:{place.lineno}"
        if key not in self.failures:
            kept = self.work / f"failure-{len(self.failures)}-{path.name}"
            kept.write_bytes(path.read_bytes())
            self.failures[key] = {
                "message": str(error)[:300],
                "file": str(kept),
                "trace": traceback.format_exc()[-1500:],
            }

    def result(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "inputs": sum(self.counts.values()),
            **{kind: self.counts[kind] for kind in ("accepted", "refused", "failed")},
            "slowest_seconds": round(self.slowest, 2),
            "more_memory_mib": round((peak - self.base) / 2**20),
            "failures": self.failures,
        }


def fuzz(args: argparse.Namespace) -> None:
    """Run one target in this process, and print the result."""
    if args.guided:
        import atheris

        with atheris.instrument_imports(include=["pseudoloss"]):
            files, read = TARGETS[args.inner](args.work)
    else:
        files, read = TARGETS[args.inner](args.work)
    attempts = Attempts(read, args.limit, args.work)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = now + args.memory * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    end = time.monotonic() + args.seconds
    if args.guided:
        guided(files, attempts, end, args)
        return
    rng = random.Random(args.seed)  # noqa: S311
    others = [content for group in files.values() for content in group]
    while time.monotonic() < end:
        file = rng.choice(list(files))
        attempts(file, mutate(rng.choice(files[file]), others, rng))
    print(json.dumps(attempts.result()))


def guided(
    files: dict[str, list[bytes]], attempts: Attempts, end: float, args: argparse.Namespace
) -> None:
    """The loop of atheris, which ends with the process. The first byte of an input chooses the
    file; half of the mutations are ours."""
    import atheris

    names = list(files)
    others = [content for group in files.values() for content in group]
    corpus = args.work / "corpus"
    corpus.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        for k, content in enumerate(files[name]):
            (corpus / f"{i}-{k}").write_bytes(bytes([i]) + content)

    def one(data: bytes) -> None:
        if time.monotonic() > end:
            print(json.dumps(attempts.result()), flush=True)
            os._exit(0)
        if data:
            attempts(names[data[0] % len(names)], data[1:])

    def change(data: bytes, largest: int, seed: int) -> bytes:
        rng = random.Random(seed)  # noqa: S311
        if rng.random() < 0.5 or not data:
            return bytes(atheris.Mutate(data, largest))
        return (data[:1] + mutate(data[1:], others, rng))[:largest]

    # Time and memory are limited by us.
    limits = ["-timeout=0", "-rss_limit_mb=0", "-handle_alrm=0", f"-max_len={LARGEST}"]
    command = [sys.argv[0], f"-seed={args.seed}", "-verbosity=0", *limits, str(corpus)]
    atheris.Setup(command, one, custom_mutator=change)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guided", action="store_true", help="mutations chosen by atheris")
    parser.add_argument("--limit", type=int, default=20, help="seconds for one input")
    parser.add_argument("--memory", type=int, default=4, help="GiB beyond what is loaded")
    parser.add_argument("--work", type=Path, help="folder for inputs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--inner", choices=TARGETS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        fuzz(args)
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.targets:
            work = (args.work or Path(temporary)) / name
            work.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, __file__, "--inner", name, "--work", str(work)]
            for option in ("seconds", "seed", "limit", "memory"):
                command += [f"--{option}", str(getattr(args, option))]
            command += ["--guided"] * args.guided
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                found[name] = {"crash": done.returncode, "stderr": done.stderr[-2000:]}
            else:
                found[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, json.dumps(found[name], indent=1), flush=True)
    failed = sum(bool(one.get("crash") or one["failed"]) for one in found.values())
    result = {"seconds": args.seconds, "memory_gib": args.memory, "targets": found}
    machine.write(args.out, result)
    if failed:
        sys.exit(f"{failed} targets failed")


if __name__ == "__main__":
    main()
