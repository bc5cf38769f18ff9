"""How quick the review page is with a large label table.

python benchmarks/review_load.py --out benchmarks/results/review-load-cpu.json

Writes a label table of 1,000,000 rows and 10,000 classes (JPEG files of 500×375 are shared by its
rows), starts `pseudoloss review` in a process of its own and measures: the start, every kind of
request, the first screen in Chromium where that is installed, and the memory of the server.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from machine import write
from pseudoloss.labels.table import score_rows, write_labels

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FILES = 400
PAGE = 24
VISIBLE = """
() => {
  const images = [...document.querySelectorAll('.card .open img')]
    .filter((image) => image.getBoundingClientRect().top < innerHeight);
  return images.length > 0 && images.every((image) => image.complete && image.naturalWidth);
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--quick", action="store_true", help="a small table, without Chromium")
    args = parser.parse_args()
    rows, classes, times = (3000, 100, 3) if args.quick else (1_000_000, 10_000, 50)
    with tempfile.TemporaryDirectory() as work:
        audit = write_audit(Path(work), rows, classes)
        load = [round(value, 1) for value in os.getloadavg()]  # of the machine, by others
        quick, measured = measure(audit, times, browser=not args.quick)
        starts = {"parquet": quick}
        if not args.quick:
            (audit / "labels.parquet").unlink()
            starts |= {"csv": measure(audit, 0, browser=False)[0], "imports_only": imports()}
    result = {
        "rows": rows,
        "classes": classes,
        "load_average": load,
        "start_seconds": starts,
        **measured,
    }
    print(json.dumps(result, indent=2))
    write(args.out, result)


def write_audit(work: Path, rows: int, classes: int) -> Path:
    """The folder of an audit: half of its labels are doubtful."""
    random = np.random.default_rng(0)
    (work / "photos").mkdir()
    for i in range(FILES):
        pixels = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        photo = Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC)
        photo.save(work / "photos" / f"{i}.jpg", quality=90)
    names = [f"class {i:05}" for i in range(classes)]
    given = random.integers(0, classes, rows)
    doubt = random.random(rows)
    table = score_rows(
        "train",
        names,
        index=np.arange(rows),
        paths=[f"{i % FILES}.jpg" for i in range(rows)],
        given=given,
        predicted=given,
        candidate=(given + random.integers(1, classes, rows)) % classes,
        label_score=1 - doubt,
        p_noisy=doubt,
        trust=random.random(rows),
    )
    audit = work / "audit"
    audit.mkdir()
    config = {"kind": "audit", "source": str(work / "photos"), "classes": names}
    config["settings"] = {"threshold": 0.5}
    (audit / "config.json").write_text(json.dumps(config))
    write_labels(table, audit)
    (audit / "summary.json").write_text("{}")
    return audit


def measure(audit: Path, times: int, browser: bool) -> tuple[float, dict[str, Any]]:
    """Seconds until the server printed its address, and the measurements of `times` requests of
    each kind."""
    command = [sys.executable, "-m", "pseudoloss", "review", str(audit), "--no-browser"]
    began = time.perf_counter()
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))
        seconds = round(time.perf_counter() - began, 3)
        result: dict[str, Any] = {}
        if browser and CHROMIUM:
            result |= first_screens(found[0])
        if times:
            result["requests"] = requests(found[0], times)
            result["peak_memory_mb"] = peak_memory(server.pid)
        return seconds, result
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate()


def imports() -> float:
    """Seconds of the start that the imports take."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import pseudoloss.review.server"], check=True)
    return round(time.perf_counter() - began, 3)


def first_screens(address: str) -> dict[str, list[float]]:
    """Seconds from opening the address to the last visible image, each time in a new browser; and
    of a page without content, which is what the browser itself takes."""
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = {"empty_page_seconds": [], "first_screen_seconds": []}
    with sync_playwright() as playwright:
        for _ in range(5):
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            for name, times in seconds.items():
                context = browser.new_context(viewport={"width": 1366, "height": 850})
                page = context.new_page()
                began = time.perf_counter()
                if name == "first_screen_seconds":
                    page.goto(address)
                    page.wait_for_function(VISIBLE, polling=10)
                else:
                    page.goto("data:text/html,<p>nothing")
                times.append(round(time.perf_counter() - began, 3))
                context.close()
            browser.close()
    return seconds


def requests(address: str, times: int) -> list[dict[str, Any]]:
    base = address.partition("/?")[0]
    random = np.random.default_rng(1)
    with httpx.Client(base_url=base, timeout=60) as client:
        client.get(address).raise_for_status()
        start = client.get("/api/start").json()
        images, classes = start["images"], start["classes"]

        def name() -> str:
            return f"class {random.integers(classes):05}"

        def rows(**query: Any) -> dict[str, Any]:
            return client.get("/api/rows", params={"limit": PAGE} | query).raise_for_status().json()

        def decide(count: int) -> Callable[[int], None]:
            def post(i: int) -> None:
                found = pages[i]["rows"][:count]
                decisions = [
                    {key: row[key] for key in ("position", "index", "part")}
                    | {"known": row["version"], "decision": "relabel", "label": row["suggested"]}
                    for row in found
                ]
                body = {"id": start["id"], "decisions": decisions}
                client.post("/api/decisions", json=body).raise_for_status()

            return post

        def image(size: str) -> Callable[[int], None]:
            def get(i: int) -> None:
                position = random.integers(images)
                client.get(f"/images/{start['id']}/{position}/{size}").raise_for_status()

            return get

        found = [
            timed("first answer", lambda i: client.get("/api/start"), times),
            timed("page of 24 rows, first", lambda i: rows(), times),
            timed(
                "page of 24 rows, anywhere",
                lambda i: rows(after=int(random.integers(images // 2))),
                times,
            ),
            timed("page of one class", lambda i: rows(given=name(), action="all"), times),
            timed("page of one pair", lambda i: rows(given=name(), suggested=name()), times),
            timed(
                "search for a class",
                lambda i: client.get("/api/classes", params={"search": str(i)}),
                times,
            ),
            timed("frequent mix-ups", lambda i: client.get("/api/pairs"), times),
            timed("small image", image("small"), times),
            timed("medium image", image("medium"), times),
        ]
        pages = [rows(after=i * images // (3 * times), limit=PAGE) for i in range(times)]
        found.append(timed("one decision, on disk", decide(1), times))
        pages = [rows(after=i * images // (3 * times), limit=200) for i in range(times)]
        found.append(timed("200 decisions, on disk", decide(200), times))
        found.append(
            timed("question for changes", lambda i: client.get("/api/changes?since=0"), times)
        )
    return found


def timed(name: str, request: Callable[[int], object], times: int) -> dict[str, Any]:
    milliseconds = []
    for i in range(times):
        began = time.perf_counter()
        request(i)
        milliseconds.append(1000 * (time.perf_counter() - began))
    ordered = sorted(milliseconds)
    return {
        "name": name,
        "first_ms": round(milliseconds[0], 2),
        "median_ms": round(statistics.median(ordered), 2),
        "p95_ms": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
    }


def peak_memory(pid: int) -> int | None:
    """The largest memory of a process so far, where the system tells."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


if __name__ == "__main__":
    main()
