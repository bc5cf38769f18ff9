"""When PLS tells that something goes wrong, and on which runs it did."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pseudoloss.config import Settings
from pseudoloss.methods import build, pls_notices
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pseudo_labels import PLSState

N, C = 5000, 100
GIVEN = torch.arange(N) % C
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def state():
    return PLSState.begin(GIVEN, C)


def fit_losses(state, low=0.0, high=1.0):
    """Losses with two modes."""
    state.loss_N.copy_(torch.linspace(low, high, N))
    state.fitted.copy_(fit_two_modes(state.loss_N).fitted)


def test_stage_1_finds_no_two_modes(state):
    text = pls_notices.stage1_collapsed(state)
    assert text.startswith("stage 1 found no two modes in the losses")
    assert "flags 0% of the labels" in text
    assert "two modes in the neighbour agreements" in pls_notices.stage1_collapsed(
        state, "agreement"
    )
    state.noisy_N.fill_(True)
    assert "flags 100% of the labels" in pls_notices.stage1_collapsed(state)


def test_stage_1_flags_no_label(state):
    fit_losses(state)
    assert pls_notices.stage1_collapsed(state).startswith("stage 1 flags no label")


def test_stage_1_flags_nearly_every_label(state):
    fit_losses(state)
    state.noisy_N.fill_(True)
    text = pls_notices.stage1_collapsed(state)
    assert text.startswith("stage 1 flags 100% of the labels: its mixture has collapsed")
    state.noisy_N[: N // 20] = False  # 95%, as after a healthy warm-up with 80% noise
    assert pls_notices.stage1_collapsed(state) is None


def test_stage_1_is_unstable():
    up_and_down = [0.9, 0.1, 0.95, 0.12]
    text = pls_notices.stage1_swings(up_and_down)
    assert text.startswith(
        "stage 1 is unstable: it flagged 95% of the labels after one epoch and 12% after the next, "
        "with 3 such jumps in 3 epochs."
    )
    assert "Try --noise-metric capped-loss, a longer --warmup" in text
    assert "Try a longer --warmup" in pls_notices.stage1_swings(up_and_down, "capped-loss")
    assert pls_notices.stage1_swings(up_and_down[:3]) is None  # two jumps are not enough
    assert pls_notices.stage1_swings([0.5] * 7 + up_and_down) is not None
    assert pls_notices.stage1_swings(up_and_down + [0.12] * 10) is None  # too long ago
    assert pls_notices.stage1_swings([0.9, 0.62] * 10) is None  # too small
    assert pls_notices.stage1_swings([]) is None


def flagged_by_epoch(name):
    """Shares of flagged labels of a committed run at 80% noise, from the last warm-up epoch on."""
    file = RESULTS / f"cifar100-id80-{name}-h200.json"
    return json.loads(file.read_text())["runs"][0]["noisy_by_epoch"][29:]


@pytest.mark.parametrize(("name", "epoch"), [("again", 55), ("seed-2", 43), ("stemnorm", 34)])
def test_committed_runs_that_were_unstable(name, epoch):
    """Each would have been noticed, in this epoch."""
    shares = flagged_by_epoch(name)
    noticed = [e for e in range(len(shares)) if pls_notices.stage1_swings(shares[: e + 1])]
    assert 30 + noticed[0] == epoch


@pytest.mark.parametrize("name", ["capped", "capped-seed-2", "capped-seed-3", "capped-released"])
def test_committed_runs_with_the_capped_loss_were_stable(name):
    shares = flagged_by_epoch(name)
    assert len(shares) == 171
    assert max(abs(a - b) for a, b in pairwise(shares)) < 0.025
    assert not any(pls_notices.stage1_swings(shares[: e + 1]) for e in range(len(shares)))


def test_committed_runs_at_40_percent_noise_were_stable():
    files = list((RESULTS / "experiments").rglob("metrics.jsonl"))
    assert files
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        shares = [line["noisy"] for line in lines if line["noisy"] is not None]
        steps = [abs(a - b) for a, b in pairwise(shares)]
        assert len(steps) > 150
        assert max(steps) < 0.05


def test_stage_2_finds_no_two_modes(state):
    state.noisy_N[:100] = True
    text = pls_notices.stage2_collapsed(state)
    assert text.startswith("stage 2 found no two modes in the pseudo-losses")
    assert "two modes in the entropies" in pls_notices.stage2_collapsed(state, "entropy")


def test_stage_2_trusts_no_pseudo_label(state):
    state.noisy_N[:100] = True
    state.trust_fitted.fill_(True)
    state.trust_N[:100] = 0.001
    assert pls_notices.stage2_collapsed(state).startswith("stage 2 trusts no pseudo-label")
    state.trust_N[:100] = 0.5
    assert pls_notices.stage2_collapsed(state) is None


def test_stage_2_says_nothing_where_at_most_two_labels_are_flagged(state):
    state.noisy_N[:2] = True
    assert pls_notices.stage2_collapsed(state) is None


def test_classes_with_every_label_flagged_are_named(state):
    names = [f"class {c}" for c in range(C)]
    assert pls_notices.classes_flagged(state, names) is None
    state.protected_C[7] = True
    text = pls_notices.classes_flagged(state, names)
    assert text.startswith("stage 1 flags every label of the class class 7;")
    state.protected_C[9] = True
    assert "class 7 and 1 more" in pls_notices.classes_flagged(state, names)


def test_which_notices_an_epoch_asks_for(state):
    """Stage 2 from the first epoch after the warm-up on; classes at the end."""
    method = build(Settings(epochs=9, warmup=3), GIVEN, C, False)
    names = [str(c) for c in range(C)]
    assert method.notices(state, 2, [0.3], names).keys() == {"stage 1", "swings"}
    assert method.notices(state, 3, [0.3], names).keys() == {"stage 1", "swings", "stage 2"}
    last = method.notices(state, 8, [0.3], names)
    assert last.keys() == {"stage 1", "swings", "stage 2", "classes"}
    uncorrected = build(Settings(epochs=9, warmup=3, correct=False), GIVEN, C, False)
    assert "stage 2" not in uncorrected.notices(state, 8, [0.3], names)


def test_the_metric_of_the_settings_is_named(state):
    settings = Settings(epochs=9, warmup=3, noise_metric="js", trust_metric="confidence")
    state.noisy_N[:100] = True
    found = build(settings, GIVEN, C, False).notices(state, 5, [], [])
    assert "the label divergences" in found["stage 1"]
    assert "the confidences of the pseudo-labels" in found["stage 2"]


def test_every_metric_of_the_settings_has_a_name():
    from typing import get_args

    from pseudoloss.config import setting_types

    types = setting_types("pls")
    asked = {*get_args(types["noise_metric"]), *get_args(types["trust_metric"])} - {"threshold"}
    assert asked == pls_notices.VALUES.keys()


def test_a_run_of_warm_up_epochs_only_is_noticed_at_the_start():
    def at_start(warmup):
        method = build(Settings(epochs=5, warmup=warmup), GIVEN, C, False)
        return method.notices_at_start()["warm-up only"]

    assert at_start(5).startswith("all epochs are warm-up")
    assert at_start(4) is None
