import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pseudoloss.engine import health
from pseudoloss.engine.tracking import Stages
from pseudoloss.methods.memory import Memory
from pseudoloss.methods.mixture import fit_two_modes

N, C = 5000, 100


def memory_of(given):
    return Memory.of(given, C)


def stages_of(memory, judged=True):
    second = fit_two_modes(memory.pseudo_loss_N, memory.noisy_N) if judged else None
    return Stages(fit_two_modes(memory.loss_N), second)


@pytest.fixture
def given():
    return torch.arange(N) % C


def test_one_class_for_all_is_chance(given):
    memory = memory_of(given)
    memory.predicted_N.fill_(3)
    text = health.warm_up_at_chance(memory, given)
    assert text.startswith("the warm-up ended at chance: its predictions agree with 1.0%")
    assert "--seed" in text
    assert "--weight-decay" in text


def test_a_run_that_ends_at_chance(given):
    memory = memory_of(given)
    memory.predicted_N.fill_(3)
    text = health.ended_at_chance(memory, given)
    assert text.startswith("the run ended at chance: its predictions agree with 1.0%")
    memory.predicted_N.copy_(given)
    assert health.ended_at_chance(memory, given) is None


def test_random_predictions_are_chance(given):
    memory = memory_of(given)
    memory.predicted_N.copy_(torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(0)))
    assert health.warm_up_at_chance(memory, given) is not None


def test_a_little_learning_is_not_chance(given):
    """At 80% noise a healthy warm-up agrees with about 4% of the given labels."""
    memory = memory_of(given)
    memory.predicted_N.copy_((given + 1) % C)
    memory.predicted_N[: N * 4 // 100] = given[: N * 4 // 100]
    assert health.warm_up_at_chance(memory, given) is None


def test_chance_is_the_commonest_class():
    given = (torch.arange(1000) % 10 == 0).long()  # nine of ten are of one class
    memory = Memory.of(given, 2)
    memory.predicted_N.fill_(0)
    assert "90.0%" in health.warm_up_at_chance(memory, given)


def test_right_predictions_are_not_chance_where_classes_are_uneven():
    """They agree with less than naming the commonest class would, and still tell classes apart."""
    true = (torch.arange(4000) % 10 == 0).long()
    given = torch.where(torch.arange(4000) // 10 % 5 < 2, 1 - true, true)  # two of five are wrong
    memory = Memory.of(given, 2)
    memory.predicted_N.copy_(true)
    assert health.ended_at_chance(memory, given) is None


def test_where_nearly_all_are_of_one_class_nothing_can_tell():
    given = (torch.arange(100) < 3).long()
    memory = Memory.of(given, 2)
    for predicted in (given, torch.zeros_like(given)):
        memory.predicted_N.copy_(predicted)
        assert health.ended_at_chance(memory, given) is None


def test_stage_1(given):
    memory = memory_of(given)
    text = health.stage1_collapsed(stages_of(memory), memory)
    assert "no two modes in the losses" in text
    assert "takes 0% of the labels for wrong" in text
    broken = memory_of(given)
    broken.loss_N.fill_(torch.nan)
    broken.noisy_N.fill_(True)
    assert "takes 100% of the labels for wrong" in health.stage1_collapsed(
        stages_of(broken), broken
    )
    memory.loss_N.copy_(torch.linspace(0, 1, N))
    assert "every given label for right" in health.stage1_collapsed(stages_of(memory), memory)
    memory.noisy_N.fill_(True)
    assert "takes 100% of the given labels" in health.stage1_collapsed(stages_of(memory), memory)
    memory.noisy_N[: N // 2] = False
    assert health.stage1_collapsed(stages_of(memory), memory) is None


def test_stage_1_that_swings():
    up_and_down = [0.9, 0.1, 0.95, 0.12]
    text = health.stage1_swings(up_and_down)
    assert text.startswith(
        "stage 1 swings: it took 95% of the given labels for wrong after one epoch, 12% after the "
        "next, and leapt like that 3 times in 3 epochs."
    )
    assert "Try --noise-metric capped-loss, a longer --warmup" in text
    assert "Try a longer --warmup" in health.stage1_swings(up_and_down, "capped-loss")
    assert health.stage1_swings(up_and_down[:3]) is None  # twice is not yet
    assert health.stage1_swings([0.5] * 7 + up_and_down) is not None  # the step to 0.9 counts too
    assert health.stage1_swings(up_and_down + [0.12] * 10) is None  # over
    assert health.stage1_swings([0.9, 0.62] * 10) is None
    assert health.stage1_swings([]) is None


@pytest.mark.parametrize(("name", "epoch"), [("again", 55), ("seed-2", 43), ("stemnorm", 34)])
def test_runs_that_swung(name, epoch):
    """At 80% noise, on a GPU; each would have been told of, and when."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    file = results / f"cifar100-id80-{name}-h200.json"
    shares = json.loads(file.read_text())["runs"][0]["noisy_by_epoch"][29:]
    told = [e for e in range(len(shares)) if health.stage1_swings(shares[: e + 1])]
    assert 30 + told[0] == epoch


@pytest.mark.parametrize("name", ["capped", "capped-seed-2", "capped-seed-3", "capped-released"])
def test_the_capped_loss_does_not_swing(name):
    """At 80% noise, on a GPU."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    file = results / f"cifar100-id80-{name}-h200.json"
    shares = json.loads(file.read_text())["runs"][0]["noisy_by_epoch"][29:]
    assert len(shares) == 171
    assert max(abs(a - b) for a, b in pairwise(shares)) < 0.025
    assert not any(health.stage1_swings(shares[: e + 1]) for e in range(len(shares)))


def test_healthy_runs_do_not_swing():
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "experiments"
    files = list(results.rglob("metrics.jsonl"))
    assert files
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        shares = [line["noisy"] for line in lines if line["noisy"] is not None]
        steps = [abs(a - b) for a, b in pairwise(shares)]
        assert len(steps) > 150
        assert max(steps) < 0.05


def test_stage_2(given):
    memory = memory_of(given)
    memory.noisy_N[:100] = True
    assert "no two modes in the pseudo-losses" in health.stage2_collapsed(stages_of(memory), memory)
    memory.pseudo_loss_N.copy_(torch.linspace(0, 1, N))
    memory.trust_N[:100] = 0.001
    assert "trusts no guess" in health.stage2_collapsed(stages_of(memory), memory)
    memory.trust_N[:100] = 0.5
    assert health.stage2_collapsed(stages_of(memory), memory) is None
    assert health.stage2_collapsed(stages_of(memory, judged=False), memory) is None
    memory.noisy_N.fill_(False)
    assert health.stage2_collapsed(stages_of(memory), memory) is None  # nobody to trust


def test_a_class_that_is_lost_is_named():
    names = [f"class {c}" for c in range(C)]
    lost = torch.zeros(C, dtype=torch.bool)
    assert health.classes_lost(lost, names) is None
    lost[7] = True
    text = health.classes_lost(lost, names)
    assert text.startswith("stage 1 takes every label of the class class 7 for wrong")
    lost[9] = True
    assert "class 7 and 1 more" in health.classes_lost(lost, names)
