"""The benchmarks run. What they measure is asserted nowhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(out, *words):
    """What a benchmark writes, and what it prints."""
    program, *rest = words
    command = [sys.executable, str(ROOT / "benchmarks" / program), *rest, "--out", str(out)]
    # An sdist has no commit to be read.
    environment = os.environ | {"PSEUDOLOSS_COMMIT": "none", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_growth_runs_over_a_tiny_range(tmp_path):
    out = tmp_path / "growth.json"
    result, printed = run(out, "growth.py", "--quick")
    assert result["command"].endswith("--quick --out benchmarks/results/growth.json")
    assert str(tmp_path) not in out.read_text()
    assert {row["bytes_an_image"] <= 100 for row in result["memory"]} == {True}
    for part, columns in {
        "mixtures": {"images", "seconds", "peak_bytes"},
        "views": {"size", "weak_ms", "strong_ms"},
        "guesses": {"classes", "remember_ms", "pseudo_loss_ms"},
    }.items():
        assert len(result[part]) >= 2
        assert all(row.keys() >= columns for row in result[part])
        assert part in printed


def test_the_loader_benchmark_runs(tmp_path):
    written, printed = run(tmp_path / "loader.json", "loader.py", "--quick", "--workers", "1")
    assert {"command", "commit", "hardware", "versions", "workers", "threads"} < written.keys()
    names = [row["name"] for row in written["rows"]]
    assert names[0] == "views, 32×32 colour, cpu"
    assert names[-1] == "epoch of digits, cpu, loader + 1"
    assert all(row["ratio"] > 0 for row in written["rows"])
    assert all(name in printed for name in names)


def test_the_benchmark_of_files_runs(tmp_path):
    written, _ = run(tmp_path / "files.json", "files.py", "--quick", "--workers", "1")
    rows = written["rows"]
    assert rows.keys() >= {"loader, views only", "files, views only", "loader", "files", "memory"}
    assert all(row["images_a_second"] > 0 for row in rows.values())


def test_the_benchmark_of_held_out_images_runs(tmp_path):
    written, _ = run(tmp_path / "held-out.json", "held_out.py", "--quick")
    cases = written["cases"]
    assert (cases[0]["method"], cases[0]["noise"]) == ("pls", 0.4)
    for case in cases:
        assert case["rows"].keys() == {"train", "held-out"}
        together = case["stage_1_by_mixture_of"]["all"]["all together"]
        assert together.keys() == {"precision", "recall"}


def test_the_benchmark_of_steps_runs(tmp_path):
    sizes = ["--images", "64", "--classes", "4", "--size", "8", "--steps", "1"]
    words = ["step.py", *sizes, "--preset", "digits", "--device", "cpu"]
    found, _ = run(tmp_path / "step.json", *words)
    assert found["tflop"].keys() == {row["part"] for row in found["rows"]}
    assert all(row["milliseconds"] > 0 for row in found["rows"])
