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
