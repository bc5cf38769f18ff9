"""The benchmark that needs neither a GPU nor much time runs through. No time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
