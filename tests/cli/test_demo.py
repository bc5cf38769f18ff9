import json
from pathlib import Path

import pytest

from pseudoloss.cli.demo import default_folder, run_demo
from pseudoloss.errors import InputError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    return folder, run_demo(folder, seed=1, resume=False)


def test_pls_beats_cross_entropy_on_noisy_digits(demo):
    """The promise of the README's first command."""
    folder, _ = demo
    summary = json.loads((folder / "summary.json").read_text())
    ce, pls = (summary["methods"][name]["accuracy"]["last"] for name in ("ce", "pls"))
    assert pls >= 96
    assert pls - ce >= 15


def test_noise_is_found_and_mended(demo):
    _, summary = demo
    pls = summary["methods"]["pls"]
    assert pls["noise_rate"] == pytest.approx(0.4, abs=0.001)
    assert pls["detection"]["precision"] > 0.9
    assert pls["detection"]["recall"] > 0.9
    assert pls["guesses"]["accuracy"] > 90


def test_both_methods_leave_run_folders(demo):
    folder, _ = demo
    for method in ("ce", "pls"):
        assert (folder / method / "labels.csv").exists()


def test_a_demo_is_never_overwritten(demo):
    folder, _ = demo
    with pytest.raises(InputError, match=r"--out .*exists already"):
        run_demo(folder, seed=1, resume=False)


def test_a_finished_demo_shows_its_table_again(demo, capsys):
    folder, summary = demo
    again = run_demo(folder, seed=1, resume=True)
    out = capsys.readouterr().out
    assert "Accuracy on the test images" in out
    assert f"{summary['methods']['pls']['accuracy']['last']:.1f}%" in out
    assert again == summary


def test_the_demo_finds_a_free_folder_or_the_one_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_folder(resume=False) == default_folder(resume=True) == Path("pseudoloss-demo")
    Path("pseudoloss-demo").mkdir()
    Path("pseudoloss-demo-2").mkdir()
    assert default_folder(resume=False) == Path("pseudoloss-demo-3")
    assert default_folder(resume=True) == Path("pseudoloss-demo-2")
