"""The benchmarks run. What they measure is asserted nowhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_growth_runs_over_a_tiny_range(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "growth.py"), "--quick"]
    # An sdist has no commit to be read.
    environment = os.environ | {"PSEUDOLOSS_COMMIT": "of a test"}
    out = tmp_path / "growth.json"
    done = subprocess.run(
        [*command, "--out", str(out)], check=True, env=environment, capture_output=True, text=True
    )
    result = json.loads(out.read_text())
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
        assert part in done.stdout


def test_the_loader_benchmark_runs(tmp_path):
    out = tmp_path / "loader.json"
    words = [str(ROOT / "benchmarks" / "loader.py"), "--quick", "--workers", "1", "--out", str(out)]
    result = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PSEUDOLOSS_COMMIT": "none", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    written = json.loads(out.read_text())
    assert {"command", "commit", "hardware", "versions", "workers", "threads"} < written.keys()
    names = [row["name"] for row in written["rows"]]
    assert names[0] == "views, 32×32 colour, cpu"
    assert names[-1] == "epoch of digits, cpu, loader + 1"
    assert all(row["ratio"] > 0 for row in written["rows"])
    assert all(name in result.stdout for name in names)


def test_the_benchmark_of_files_runs(tmp_path):
    out = tmp_path / "files.json"
    words = [str(ROOT / "benchmarks" / "files.py"), "--quick", "--workers", "1", "--out", str(out)]
    result = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PSEUDOLOSS_COMMIT": "none", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert rows.keys() >= {"loader, views only", "files, views only", "loader", "files", "memory"}
    assert all(row["images_a_second"] > 0 for row in rows.values())


def test_the_benchmark_of_held_out_images_runs(tmp_path):
    out = tmp_path / "held-out.json"
    words = [str(ROOT / "benchmarks" / "held_out.py"), "--quick", "--out", str(out)]
    result = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PSEUDOLOSS_COMMIT": "none", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    cases = json.loads(out.read_text())["cases"]
    assert (cases[0]["method"], cases[0]["noise"]) == ("pls", 0.4)
    for case in cases:
        assert case["rows"].keys() == {"train", "held-out"}
        together = case["stage_1_by_mixture_of"]["all"]["all together"]
        assert together.keys() == {"precision", "recall"}


def test_the_benchmark_of_steps_runs(tmp_path):
    out = tmp_path / "step.json"
    sizes = ["--images", "64", "--classes", "4", "--size", "8", "--steps", "1"]
    words = [str(ROOT / "benchmarks" / "step.py"), *sizes, "--preset", "digits", "--device", "cpu"]
    result = subprocess.run(
        [sys.executable, *words, "--out", str(out)],
        env=os.environ | {"PSEUDOLOSS_COMMIT": "none", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert found["tflop"].keys() == {row["part"] for row in found["rows"]}
    assert all(row["milliseconds"] > 0 for row in found["rows"])
