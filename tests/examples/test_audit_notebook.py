"""The notebook runs from top to bottom, is stored without outputs, and its results are sane."""

import ast
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "audit.ipynb"
RESULTS = """{
    "noise": [noise["low"], noise["rate"], noise["high"]],
    "wrong": float((labels["truth"] == "wrong").mean()),
    "images": len(true),
    "right": [int(right_before), int(right_after)],
    "grid": [len(flagged), len(axes.flat)],
    "hits": int((by_pixels.labels["is_label_issue"].to_numpy() & wrong).sum()),
    "flagged": int(by_pixels.labels["is_label_issue"].sum()),
    "issues": int(len(issues)),
    "wrong_count": int(wrong.sum()),
}"""


@pytest.fixture
def notebook():
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


def test_it_is_stored_without_outputs(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
def test_it_runs(notebook, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    last = pytest.importorskip("nbformat").v4.new_code_cell(RESULTS)
    notebook.cells.append(last)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    found = ast.literal_eval(last.outputs[0]["data"]["text/plain"])
    low, rate, high = found["noise"]
    assert low < rate < high
    assert rate == pytest.approx(found["wrong"], abs=0.05)
    before, after = found["right"]
    assert before == found["images"] - found["wrong_count"]
    assert after > before + found["wrong_count"] / 2
    assert found["grid"] == [12, 12]
    assert found["hits"] > 0.9 * found["wrong_count"]
    assert found["hits"] > 0.9 * found["flagged"]
    assert found["issues"] == found["flagged"]
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
