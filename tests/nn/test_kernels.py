"""The kernels compile for GPUs. No GPU is needed for that, and the interpreter that the other tests
run them in forgives what a compiler does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("compile_kernels.py")
CONSUMER = 99 * 1024  # bytes of shared memory that a block may have on the smaller GPUs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("triton"))  # what was compiled before does not count
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_kernel_compiles(compiled):
    assert compiled["never"] == []
    assert {entry["capability"] for entry in compiled["found"]} == {80, 90}
    assert all(entry["bytes"] > 0 for entry in compiled["found"])


def test_small_gpus_have_room_for_them(compiled):
    assert [entry for entry in compiled["found"] if entry["shared"] > CONSUMER] == []
