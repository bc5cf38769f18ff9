"""The kernels compile for GPUs. No GPU is needed for that. The other tests run the kernels in
Triton's interpreter, which accepts some code that the compiler does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("compile_kernels.py")
SHARED_MEMORY = 99 * 1024  # bytes for one block on consumer GPUs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("triton"))  # an empty cache
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_kernel_compiles(compiled):
    assert compiled["never"] == []
    assert {entry["capability"] for entry in compiled["found"]} == {80, 90}
    assert all(entry["bytes"] > 0 for entry in compiled["found"])


def test_kernels_fit_into_the_shared_memory_of_small_gpus(compiled):
    assert [entry for entry in compiled["found"] if entry["shared"] > SHARED_MEMORY] == []
