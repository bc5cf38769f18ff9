"""README, docs and CI agree with the code."""

import re
import runpy
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import pseudoloss
from pseudoloss.config import METHOD_SETTINGS, describe_settings, setting_types
from pseudoloss.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ROOT / "tests" / "cli" / "options.txt"
README = (ROOT / "README.md").read_text()
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def commands(text):
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_ci_runs_the_second_command_of_the_readme():
    first, second = commands(README)[:2]
    assert first == "pip install -c constraints.txt '.[review]' && pseudoloss demo"
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert second in [line.strip() for line in lines]


def test_the_settings_page_is_up_to_date():
    page = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == page


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="wants matplotlib")
def test_the_plot_of_stage_1_can_be_drawn():
    accuracies, *shares = runpy.run_path(str(ROOT / "docs" / "draw_stage1.py"))["draw"]().axes
    assert len(shares) == 3
    lengths = [len(line.get_ydata()) for line in accuracies.lines]
    assert lengths.count(200) == 2  # the mean of each metric; the other line marks the warm-up


def test_every_option_of_train_is_on_the_settings_page():
    page = (ROOT / "docs" / "settings.md").read_text()
    known = OPTIONS.read_text()
    options = [line.split()[-1] for line in known.splitlines() if line.startswith("train ")]
    told = set(re.findall(r"^\| `(--[a-z-]+)` \|", page, re.MULTILINE))
    told |= {option.replace("--", "--no-", 1) for option in told}
    assert {option for option in options if option != "--help"} <= told


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_every_setting_is_described(method):
    described = describe_settings(method)
    assert described.keys() == setting_types(method).keys()
    assert all(group and text.endswith(".") for group, text in described.values())


def test_the_readme_lists_every_module_and_package():
    package = Path(pseudoloss.__file__).parent
    names = [path.name for path in package.iterdir() if not path.name.startswith(("_", "py.typed"))]
    tree = README.split("## What is where")[1]
    assert [name for name in names if name not in tree] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


TORCHRUN = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
TORCHRUN |= {"--max-restarts"}
TORCHRUN |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task"}  # of SLURM


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_flags_and_presets_in_the_docs_exist(path):
    known = {line.split()[-1] for line in OPTIONS.read_text().splitlines()}
    # Of the benchmarks and of ./check.
    known |= {"--seeds", "--work", "--workers", "--plot", "--quick", "--fast", "--record"}
    known |= {"--features-dir", "--data", "--datalab", "--trials", "--base"}
    known |= {"--again", "--whole", "--folds", "--measure", "--stack"}
    known |= {"--birds", "--cifar", "--lite"}
    known |= {"--kills", "--jobs", "--signal", "--guided", "--seconds"}  # ..., and of SLURM
    known |= {"--read", "--strict", "--q", "--logdir"}  # of others: mkdocs, tensorboard, ...
    known |= TORCHRUN
    if path.name == "CHANGELOG.md":
        known |= {"--guess-norm", "--guess-mode"}  # former names
    for line in path.read_text().splitlines():
        if "pip " in line or "venv" in line:
            continue
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)) <= known, line
    for name in re.findall(r"--preset ([a-z0-9-]+)", path.read_text()):
        assert name in PRESETS


def test_the_version_is_in_the_changelog():
    assert f"## {pseudoloss.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names():
    assert len(pseudoloss.__all__) <= 12
    assert set(pseudoloss.__all__) == set(dir(pseudoloss))
    for name in pseudoloss.__all__:
        assert getattr(pseudoloss, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pseudoloss.nothing  # noqa: B018


def test_a_submodule_does_not_hide_a_function():
    import pseudoloss.engine.training

    assert callable(pseudoloss.train)


def test_numbers_in_the_results_have_a_file():
    named = re.findall(r"`([\w-]+\.json)`", (ROOT / "docs" / "results.md").read_text())
    assert named
    for name in named:
        assert (ROOT / "benchmarks" / "results" / name).exists(), name


def test_no_module_but_the_kernels_is_above_500_lines():
    package = Path(pseudoloss.__file__).parent
    long = [path for path in package.rglob("*.py") if len(path.read_text().splitlines()) > 500]
    assert [path.name for path in long] == ["kernels.py"]


def test_scripts_are_sound():
    for script in (ROOT / "check", ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", str(script)], check=True)
