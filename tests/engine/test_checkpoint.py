"""Checkpoints: what is in them, and which ones are refused."""

import pytest
import torch

import pseudoloss as pl
from conftest import make_trainer
from pseudoloss.config import METHOD_SETTINGS
from pseudoloss.engine import checkpoint
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.runs import model_weights


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_a_restored_trainer_is_the_one_that_was_saved(tmp_path, method):
    """Networks, momentum and state; tensors are filled in place."""
    one, other = make_trainer(method=method), make_trainer(method=method, seed=2)
    for epoch in range(2):
        one.train_epoch(epoch)
        one.score(epoch)
        one.store_predictions(epoch)
        one.add_predictions(50.0)
    path = tmp_path / "last.safetensors"
    checkpoint.save(path, checkpoint.checkpoint_tensors(one), {"epochs": 2})
    places = {n: t.data_ptr() for n, t in checkpoint.checkpoint_tensors(other).items()}
    assert checkpoint.restore(path, other) == {"epochs": 2}
    restored = checkpoint.checkpoint_tensors(other)
    for name, tensor in checkpoint.checkpoint_tensors(one).items():
        assert torch.equal(tensor, restored[name]), name
        assert restored[name].data_ptr() == places[name]
    kinds = {name.partition(".")[0] for name in restored}
    assert kinds == {"networks", "momentum", "state", "history"}


@pytest.mark.parametrize("ensemble", [False, True])
def test_the_weights_of_the_model_are_among_its_tensors(ensemble):
    trainer = make_trainer(method="co-teaching", ensemble=ensemble)
    weights = model_weights(checkpoint.checkpoint_tensors(trainer), trainer.method.predicts)
    wanted = trainer.model.network.state_dict()
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "change",
    [{"projection": 64}, {"network": "preactresnet18"}, {"method": "ce"}, {"method": "elr"}],
    ids=str,
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(tmp_path, change):
    one = make_trainer()
    path = tmp_path / "last.safetensors"
    checkpoint.save(path, checkpoint.checkpoint_tensors(one), {})
    other = make_trainer(**({"seed": 2} | change))
    before = {n: t.clone() for n, t in checkpoint.checkpoint_tensors(other).items()}
    with pytest.raises(InputError, match="not a checkpoint of this run") as error:
        checkpoint.restore(path, other)
    assert "\n" not in str(error.value)
    for name, tensor in checkpoint.checkpoint_tensors(other).items():
        assert torch.equal(tensor, before[name]), name


def test_a_damaged_checkpoint_is_named(stopped, tiny_source):
    (stopped / "checkpoint" / "last.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"last.safetensors: not a checkpoint of this run"):
        pl.train(tiny_source, out=stopped, resume=True, quiet=True)


def test_a_record_of_another_version_is_named(stopped, tiny_source):
    path = stopped / "checkpoint" / "last.safetensors"
    tensors, record = from_safetensors(path)
    write_safetensors(path, tensors, record | {"new": 1})
    with pytest.raises(InputError, match=r"last.safetensors: of another version"):
        pl.train(tiny_source, out=stopped, resume=True, quiet=True)


def test_a_missing_model_of_the_best_epoch_is_noticed_at_once(stopped, tiny_source):
    (best,) = (stopped / "checkpoint").glob("best-*")
    best.unlink()
    with pytest.raises(InputError, match=rf"{best.name}: is missing, the model of the best epoch"):
        pl.train(tiny_source, out=stopped, resume=True, quiet=True)
