"""Networks, and the weights that they start from."""

import pytest
import torch
import torch.nn.functional as F

from pseudoloss.config import OWN
from pseudoloss.errors import InputError
from pseudoloss.nn.networks import build, wanted_input


def make(name, channels=3, size=(32, 32), classes=7, **options):
    torch.manual_seed(0)
    return build(name, channels=channels, size=size, classes=classes, projection=16, **options)


@pytest.mark.parametrize("name", [*OWN, "resnet10t"])
@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (32, 32)), (3, (40, 24))])
def test_logits_and_projection(name, channels, size):
    network = make(name, channels, size)
    logits, projection = network(torch.randn(2, channels, *size))
    assert logits.shape == (2, 7)
    assert projection.shape == (2, 16)
    (logits.sum() + projection.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", [*OWN, "resnet10t"])
def test_large_images(name):
    network = make(name).eval()
    with torch.no_grad():
        assert network(torch.randn(1, 3, 448, 448))[0].shape == (1, 7)


def test_transformer_is_built_for_the_image_size():
    network = make("vit_tiny_patch16_224", size=(64, 64))
    assert network(torch.randn(2, 3, 64, 64))[0].shape == (2, 7)


def slow_preactresnet(backbone, x, name):
    """Row 17, block by block: the norm before the pooling, or after the first convolution; in the
    released code every shortcut starts after norm and ReLU."""

    def activate(norm, x):
        return F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True))

    x = F.conv2d(x, backbone.stem.weight, padding=1)
    if name != "preactresnet18":
        x = activate(backbone.stem_norm, x)
    for i, block in enumerate(backbone.blocks):
        stride = 2 if i in (2, 4, 6) else 1
        before, x = x, activate(block.norm1, x)
        if i in (2, 4, 6):
            shortcut = F.conv2d(x, block.shortcut.weight, stride=2)
        else:
            shortcut = x if name == "preactresnet18-released" else before
        x = F.conv2d(x, block.conv1.weight, stride=stride, padding=1)
        x = F.conv2d(activate(block.norm2, x), block.conv2.weight, padding=1) + shortcut
    if name == "preactresnet18":
        x = activate(backbone.final_norm, x)
    return x.mean((2, 3))


@pytest.mark.parametrize("name", [name for name in OWN if name.startswith("preact")])
def test_preactresnet_variants(name):
    torch.manual_seed(1)
    backbone = make(name).backbone.double()
    for norm in backbone.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(backbone(x), slow_preactresnet(backbone, x, name))


def test_preactresnet_parameter_counts():
    """The norm before the pooling has 512 channels, the one after the first convolution 64."""
    standard, *others = (
        sum(p.numel() for p in make(name).backbone.parameters())
        for name in ("preactresnet18", "preactresnet18-stemnorm", "preactresnet18-released")
    )
    assert [standard - other for other in others] == [2 * (512 - 64)] * 2
    assert 11.1e6 < standard < 11.3e6  # the usual 11.2 million


def test_preactresnet_downsamples_three_times():
    backbone = make("preactresnet18").backbone
    shapes = []
    for block in backbone.blocks:
        block.register_forward_hook(lambda *seen: shapes.append(seen[-1][0].shape))
    backbone(torch.zeros(2, 3, 32, 32))
    assert [shape[1:] for shape in shapes[1::2]] == [
        (64, 32, 32),
        (128, 16, 16),
        (256, 8, 8),
        (512, 4, 4),
    ]


def test_outputs_are_float32_in_bf16():
    network = make("small-cnn", precision=torch.bfloat16)
    x = torch.randn(4, 3, 32, 32)
    logits, projection = network(x)
    assert logits.dtype == projection.dtype == torch.float32
    network.precision = torch.float32
    exact, _ = network(x)
    assert not torch.equal(exact, logits)
    torch.testing.assert_close(exact, logits, atol=0.1, rtol=0.1)


def test_weights_are_channels_last():
    weight = make("preactresnet18").backbone.blocks[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["preactresnet81", "resnet_fifty", "no such", "x" * 300])
def test_unknown_network_is_refused(name):
    with pytest.raises(InputError, match=r"--network .*no such network"):
        make(name)


def test_similar_network_is_suggested():
    with pytest.raises(InputError, match=r"did you mean .*resnet50"):
        make("resnet500")


def test_own_networks_have_no_pretrained_weights():
    with pytest.raises(InputError, match="--weights pretrained: small-cnn is trained from scratch"):
        make("small-cnn", weights="pretrained")


def test_failed_download_gives_one_error_line(monkeypatch):
    import timm

    def fail(name, **options):
        raise RuntimeError("no connection\nand more lines")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(
        InputError,
        match=r"--weights pretrained: .* resnet18 .*\(no connection\).*--weights FILE.* scratch",
    ):
        make("resnet18", weights="pretrained")
    with pytest.raises(InputError, match="timm cannot build it"):
        make("resnet18")


def test_unsupported_image_size_is_refused():
    with pytest.raises(InputError, match=r"--network .*does not take images of 8×8|cannot build"):
        make("inception_v3", size=(8, 8))


def test_wanted_input():
    assert wanted_input("resnet50") == (224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert wanted_input("small-cnn") is None
    with pytest.raises(InputError, match="no such network"):
        wanted_input("resnot")


# ---------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("name", [*OWN, "resnet10t"])
def test_a_decoder_adds_a_reconstruction_error_in_training(name):
    """The mean squared difference of ReLU(W·projection + b) and the features, of each image."""
    network = make(name, decoder=True)
    images = torch.randn(4, 3, 32, 32)
    seen = []
    network.backbone.register_forward_hook(lambda module, inputs, output: seen.append(output))
    logits, projection, error = network(images)
    assert (logits.shape, projection.shape, error.shape) == ((4, 7), (4, 16), (4, 1))
    features, z = seen[0].double(), projection.double()
    decoded = (z @ network.decoder.weight.double().T + network.decoder.bias.double()).clamp(min=0)
    wanted = ((decoded - features) ** 2).mean(1, keepdim=True)
    torch.testing.assert_close(error.double(), wanted, rtol=1e-4, atol=1e-6)
    error.sum().backward()
    for module in (network.decoder, network.projection, network.backbone):
        assert all(p.grad is not None for p in module.parameters())
    assert network.classifier.weight.grad is None
    assert len(network.eval()(images)) == 2


def test_a_decoder_changes_no_other_weight():
    plain, decoding = (make("small-cnn", decoder=decoder) for decoder in (False, True))
    own = decoding.state_dict()
    assert own.keys() - plain.state_dict().keys() == {"decoder.weight", "decoder.bias"}
    assert all(torch.equal(own[name], value) for name, value in plain.state_dict().items())


def test_a_decoder_in_bf16_returns_float32():
    network = make("small-cnn", decoder=True, precision=torch.bfloat16)
    assert all(output.dtype == torch.float32 for output in network(torch.randn(2, 3, 32, 32)))
    outputs = network.forward_views(*torch.randn(2, 2, 3, 32, 32), no_grad=1)
    assert [[t.requires_grad for t in view] for view in outputs] == [[False] * 3, [True] * 3]
