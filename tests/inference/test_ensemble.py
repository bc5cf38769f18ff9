"""Models of several networks."""

import json

import numpy as np
import pytest
import torch

import pseudoloss as pl
from pseudoloss.errors import InputError
from pseudoloss.files import from_safetensors, write_safetensors
from pseudoloss.inference.ensemble import Ensemble, networks_of
from pseudoloss.inference.export import FILES, export_model
from pseudoloss.inference.model import (
    Description,
    Model,
    build_network,
    load_model,
    without_decoders,
)

DESCRIPTION = Description(
    network="small-cnn",
    classes=("a", "b", "c"),
    channels=1,
    stored=(10, 10),
    size=(8, 8),
    mean=(0.4,),
    std=(0.2,),
    projection=5,
    fit="crop",
)
IMAGES = np.random.default_rng(0).integers(0, 256, (9, 1, 10, 10)).astype(np.uint8)


def save(path, members):
    """An untrained model with non-trivial running statistics."""
    torch.manual_seed(0)
    description = Description(**vars(DESCRIPTION) | {"members": members})
    network = build_network(description)
    for member in networks_of(network.train()):
        for _ in range(3):
            member(torch.randn(8, 1, 8, 8))
        with torch.no_grad():
            member.classifier.weight *= 20
    Model(description, network, None).save(path)
    return load_model(path)


@pytest.fixture
def ensemble(tmp_path):
    return save(tmp_path / "model.safetensors", 2)


def inputs(model):
    return model.views.plain(torch.from_numpy(IMAGES))


def test_ensemble_averages_logits(ensemble):
    first, second = networks_of(ensemble.network)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    with torch.no_grad():
        logits, projection = ensemble.network(inputs(ensemble))
        outputs = [network(inputs(ensemble)) for network in (first, second)]
    torch.testing.assert_close(logits, (outputs[0][0] + outputs[1][0]) / 2)
    assert torch.equal(projection, outputs[0][1])
    found = ensemble.predict_proba(IMAGES)
    np.testing.assert_allclose(found, logits.double().softmax(1), rtol=1e-5)
    assert set(ensemble.predict(IMAGES)) <= set(DESCRIPTION.classes)


def test_single_image_gets_the_same_prediction(ensemble):
    together = ensemble.predict_proba(IMAGES)
    alone = np.concatenate([ensemble.predict_proba(image[None]) for image in IMAGES])
    np.testing.assert_allclose(alone, together, atol=1e-6)


def test_switches_reach_every_network(ensemble):
    network = ensemble.network
    assert (network.fused, network.precision) == (False, torch.float32)
    network.fused, network.precision = True, torch.bfloat16
    assert [member.fused for member in networks_of(network)] == [True, True]
    assert [member.precision for member in networks_of(network)] == [torch.bfloat16] * 2
    network.train()
    with network.frozen():
        assert not any(member.training for member in networks_of(network))
        assert all(member._folded is not None for member in networks_of(network))
    assert all(member._folded is None for member in networks_of(network))


def test_file_of_an_ensemble(tmp_path):
    path = tmp_path / "model.safetensors"
    ensemble = save(path, 3)
    tensors, record = from_safetensors(path)
    assert record["members"] == 3
    assert {name.partition(".")[0] for name in tensors} == {"0", "1", "2"}
    for i, network in enumerate(networks_of(ensemble.network)):
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensors[f"{i}.{name}"], tensor)


def test_file_of_one_network_has_no_prefixes(tmp_path):
    path = tmp_path / "model.safetensors"
    model = save(path, 1)
    tensors, record = from_safetensors(path)
    assert not isinstance(model.network, Ensemble)
    assert tensors.keys() == model.network.state_dict().keys()
    assert record.pop("members") == 1
    write_safetensors(tmp_path / "old.safetensors", tensors, record)  # as version 0.1 wrote it
    old = load_model(tmp_path / "old.safetensors")
    assert old.description == model.description
    np.testing.assert_array_equal(old.predict_proba(IMAGES), model.predict_proba(IMAGES))


@pytest.mark.parametrize("members", [0, -1, 3, "2", None])
def test_wrong_number_of_networks_is_refused(tmp_path, ensemble, members):
    tensors, record = from_safetensors(tmp_path / "model.safetensors")
    write_safetensors(tmp_path / "x.safetensors", tensors, record | {"members": members})
    with pytest.raises(InputError, match=r"x\.safetensors: not a model of pseudoloss"):
        load_model(tmp_path / "x.safetensors")


@pytest.mark.parametrize("form", list(FILES))
def test_export_of_an_ensemble(form, tmp_path, ensemble):
    found = export_model(ensemble, tmp_path / "out", form)
    assert found.difference < 1e-5
    card = (found.path / "README.md").read_text()
    assert "| network | 2 × small-cnn, mean of their logits |" in card
    assert "Accuracy" not in card
    assert json.loads((found.path / "classes.json").read_text()) == ["a", "b", "c"]
    if form == "safetensors":
        again = load_model(found.path / FILES[form])
        np.testing.assert_array_equal(again.predict_proba(IMAGES), ensemble.predict_proba(IMAGES))


def test_run_that_predicts_with_two_networks(npz, tmp_path, tiny_settings):
    settings = tiny_settings | {"method": "co-teaching", "epochs": 2}
    images = np.random.default_rng(0).integers(0, 256, (5, 1, 8, 8)).astype(np.uint8)
    for ensemble in (True, False):
        out = tmp_path / f"run-{ensemble}"
        run = pl.train(str(npz()), out, quiet=True, ensemble=ensemble, **settings)
        loaded = pl.load(out).model
        assert isinstance(loaded.network, Ensemble) == ensemble
        assert loaded.description.members == (2 if ensemble else 1)
        wanted = run.model.predict_proba(images)
        np.testing.assert_allclose(loaded.predict_proba(images), wanted, rtol=1e-6)


def test_weights_of_decoders_are_left_out():
    names = ["decoder.weight", "0.decoder.bias", "12.decoder.weight"]
    kept = ["0.backbone.decoder.weight", "backbone.decoder.bias", "projection.bias", "0.classifier"]
    weights = {name: torch.zeros(1) for name in names + kept}
    assert list(without_decoders(weights)) == kept
