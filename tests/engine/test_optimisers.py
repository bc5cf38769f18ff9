"""The optimisers: their memory exists from the start, and their steps are those of torch."""

import pytest
import torch

import pseudoloss as pl
from conftest import TINY, assert_same_run, make_trainer, train_epoch_by_epoch
from pseudoloss.config import Settings
from pseudoloss.engine.checkpoint import checkpoint_tensors
from pseudoloss.engine.optimisers import build_optimiser, memory, reset
from pseudoloss.errors import InputError

OPTIMISERS = ("sgd", "nesterov", "adam", "muon")


@pytest.mark.parametrize("name", OPTIMISERS)
def test_their_memory_exists_from_the_start_and_is_zero(name):
    network = make_trainer().networks["net"]
    optimiser = build_optimiser(network, Settings(optimiser=name), torch.tensor(0.1))
    kinds = {"momentum"} if name != "adam" else {"momentum", "second_moment", "updates"}
    for parameter in network.parameters():
        found = memory(optimiser, parameter)
        assert found.keys() == kinds
        assert not any(tensor.any() for tensor in found.values())


def of_torch(name, network):
    if name == "adam":
        return torch.optim.Adam(
            network.parameters(), lr=0.01, betas=(0.8, 0.999), weight_decay=1e-3, foreach=False
        )
    nesterov = name == "nesterov"
    return torch.optim.SGD(
        *(network.parameters(), 0.01),
        momentum=0.8,
        weight_decay=1e-3,
        nesterov=nesterov,
        foreach=False,
    )


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam"])
def test_the_step_is_that_of_torch_optim(name):
    """With weight decay, without our tensors, and with no memory at the start."""
    settings = {"method": "ce", "momentum": 0.8, "weight_decay": 1e-3, "lr": 0.01}
    settings["optimiser"] = name
    ours, plain = make_trainer(**settings), make_trainer(**settings)
    network = plain.networks["net"]
    plain.optimisers["net"] = of_torch(name, network)
    plain.steps = [[plain._prepare(step, phase) for step in phase.steps] for phase in plain.phases]
    start = [p.detach().clone() for p in network.parameters()]
    for trainer in (ours, plain):
        trainer.train_epoch(0)
    assert not any(torch.equal(a, b) for a, b in zip(start[:3], network.parameters(), strict=False))
    for a, b in zip(ours.networks["net"].parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_phase_can_start_without_memory(name):
    trainer = make_trainer(method="ce", optimiser=name, lr=0.01)
    trainer.train_epoch(0)
    optimiser = trainer.optimisers["net"]
    pointers = [t.data_ptr() for t in checkpoint_tensors(trainer).values()]
    reset(optimiser)
    for parameter in trainer.networks["net"].parameters():
        assert not any(tensor.any() for tensor in memory(optimiser, parameter).values())
    assert [t.data_ptr() for t in checkpoint_tensors(trainer).values()] == pointers


@pytest.mark.parametrize("name", ["nesterov", "adam", "muon"])
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path, tiny_source, name):
    settings = TINY | {"method": "ce", "optimiser": name, "lr": 0.01, "device": "cpu"}
    pl.train(tiny_source, tmp_path / "whole", quiet=True, **settings)
    train_epoch_by_epoch(tiny_source, tmp_path / "stopped", **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_nesterov_needs_momentum():
    with pytest.raises(InputError, match="--optimiser nesterov needs a --momentum above 0"):
        Settings(optimiser="nesterov", momentum=0)
