"""How long `pseudoloss inspect` takes for a table of many rows, and how much memory.

    python benchmarks/table_rows.py --rows 1000000 --out benchmarks/results/table-rows-cpu.json

The images are hard links to a few small files, so that every row names a file of its own.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import machine

FILES, SIDE, CLASSES, IN_FOLDER = 100, 32, 50, 10_000


def make_table(folder: Path, rows: int) -> Path:
    """A table with one hard link per row, in folders of 10,000."""
    random = np.random.default_rng(0)
    lines = ["path,label"]
    for i in range(FILES):
        pixels = random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    for i in range(rows):
        inner = f"{i // IN_FOLDER:04}"
        if i % IN_FOLDER == 0:
            (folder / inner).mkdir()
        os.link(folder / f"{i % FILES}.png", folder / inner / f"{i:08}.png")
        lines.append(f"{inner}/{i:08}.png,class{i % CLASSES}")
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    return table


def measure(table: Path, options: list[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "pseudoloss", "inspect", str(table), "--json", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return {
        "options": options,
        "images": found["train"] + found["test"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "load": round(os.getloadavg()[0], 1),  # of the machine, which others may use too
        "largest_memory_mib": round(after.ru_maxrss / 1024),  # of this and earlier measurements
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--folder", type=Path, help="where to make the files (default: /tmp)")
    parser.add_argument("--decode", action="store_true", help="also decode every image")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        table = make_table(Path(folder), args.rows)
        several = [["--no-duplicates", "--no-timing"]] + [["--no-timing"]] * args.decode
        runs = [measure(table, options) for options in several]
    result = {"rows": args.rows, "distinct_files": FILES, "side": SIDE, "runs": runs}
    machine.write(args.out, result, {str(args.folder): "FOLDER"})
    print(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
