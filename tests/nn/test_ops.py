"""Fused and folded layers against eager ones. On the CPU, Triton's interpreter runs the kernels."""

import copy
from itertools import chain

import pytest
import torch
from torch import nn

import pseudoloss as pl
from conftest import make_images
from pseudoloss.config import OWN, Settings
from pseudoloss.engine.trainer import Trainer
from pseudoloss.nn.autograd import SideStream, cast_weights
from pseudoloss.nn.networks import build
from pseudoloss.nn.ops import Activations, EagerOps, FoldedOps, FusedOps
from pseudoloss.progress import SilentReporter

pytest.importorskip("triton")

C, SIZE = 8, 6
EAGER = EagerOps()
SIDE_STREAM = SideStream(torch.device("cpu"))
GROUPS = pytest.mark.parametrize(("groups", "no_grad"), [(1, 0), (3, 1), (2, 2)])


def random_images(*shape, scale=1.0, shift=0.0):
    x = torch.randn(*shape) * scale + shift
    return x.contiguous(memory_format=torch.channels_last)


def activations(x, groups=1, no_grad=0):
    with_grad = x[len(x) // groups * no_grad :].clone(memory_format=torch.channels_last)
    return Activations(x, with_grad.requires_grad_())


def fused(*convolutions, groups=1, no_grad=0):
    weights = {conv.weight: conv.weight for conv in convolutions}
    return FusedOps(weights, groups, no_grad, SIDE_STREAM)


def random_norm(channels):
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var)
    return norm


# -------------------------------------------------------------------------------- norm and ReLU


@pytest.mark.parametrize(("groups", "no_grad"), [(1, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("channels", [8, 72])
def test_norm_relu(groups, no_grad, with_skip, channels):
    """Same as eager layers on one group after another."""
    torch.manual_seed(groups)
    norm, eager_norm = [copy.deepcopy(norm) for norm in [random_norm(channels)] * 2]
    shape = (groups * 4, channels, SIZE, SIZE)
    x = activations(random_images(*shape, scale=2, shift=3), groups, no_grad)
    skip = activations(random_images(*shape), groups, no_grad) if with_skip else None
    targets = [random_images(*x.with_grad.shape) for _ in range(2)]

    total, out = fused(groups=groups, no_grad=no_grad).sum_norm_relu(norm, x, skip, keep_sum=True)
    inputs = [x.with_grad, norm.weight, norm.bias] + ([skip.with_grad] if skip else [])
    loss = (total.with_grad * targets[0]).sum() + (out.with_grad * targets[1]).sum()
    found = [*total, *out, *torch.autograd.grad(loss, inputs)]

    all_x, all_skip = (v and v.images.clone().requires_grad_() for v in (x, skip))
    pairs = [
        EAGER.sum_norm_relu(
            eager_norm,
            all_x.chunk(groups)[g],
            None if skip is None else all_skip.chunk(groups)[g],
            keep_sum=True,
        )
        for g in range(groups)
    ]
    total, out = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    start = no_grad * 4
    loss = (total[start:] * targets[0]).sum() + (out[start:] * targets[1]).sum()
    inputs = [all_x, eager_norm.weight, eager_norm.bias] + ([all_skip] if skip else [])
    gradients = list(torch.autograd.grad(loss, inputs))
    for i in (0, 3) if skip else (0,):
        gradients[i] = gradients[i][start:]
    expected = [total, total[start:], out, out[start:], *gradients]

    for a, b in zip(
        found + list(norm.buffers()), expected + list(eager_norm.buffers()), strict=True
    ):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("keep_sum", [False, True])
def test_norm_relu_with_running_statistics(with_skip, keep_sum):
    norm = random_norm(C).eval()
    x = random_images(3, C, SIZE, SIZE)
    skip = random_images(*x.shape) if with_skip else None
    folded = FoldedOps([nn.Conv2d(1, 1, 1)], torch.float32)
    with torch.no_grad():
        total, out = EAGER.sum_norm_relu(norm, x, skip, keep_sum)
        found = folded.sum_norm_relu(norm, x, skip, keep_sum)
    torch.testing.assert_close(found[1], out)
    if keep_sum:
        torch.testing.assert_close(found[0], total)


def test_norm_relu_with_a_large_mean():
    """The variance is not lost in the square of the mean."""
    norm = nn.BatchNorm2d(C)
    x = random_images(4, C, SIZE, SIZE, scale=0.1, shift=1000)
    expected = EAGER.norm_relu(copy.deepcopy(norm).double(), x.double())
    out = fused().norm_relu(norm, activations(x))
    torch.testing.assert_close(out.images, expected.float(), atol=1e-2, rtol=1e-2)


def test_norm_relu_keeps_nan():
    x = random_images(4, C, SIZE, SIZE)
    x[0, 0, 0, 0] = torch.nan
    out = fused().norm_relu(nn.BatchNorm2d(C), activations(x))
    assert out.images[:, 0].isnan().any()
    assert not out.images[:, 1:].isnan().any()


@torch.no_grad()
def test_a_norm_is_folded_into_its_convolution():
    conv = nn.Conv2d(C, 12, 3, 2, 1, bias=False).to(memory_format=torch.channels_last)
    shortcut = nn.Conv2d(C, 12, 1, 2, bias=False)
    norm = random_norm(12).eval()
    x = random_images(3, C, SIZE, SIZE)
    folded = FoldedOps([conv, shortcut], torch.float32)
    for _ in range(2):  # folded once, used twice
        for a, b in zip(
            folded.downsample(conv, norm, shortcut, x),
            EAGER.downsample(conv, norm, shortcut, x),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------- other layers


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_first_convolution(channels):
    conv = nn.Conv2d(channels, 5, 3, 1, 1, bias=False).to(memory_format=torch.channels_last)
    x, target = random_images(4, channels, 7, 5), random_images(2, 5, 7, 5)
    expected = EAGER.first(conv, x)
    out = fused(conv, groups=2, no_grad=1).first(conv, x)
    torch.testing.assert_close(out.images, expected)
    gradients = [
        torch.autograd.grad((y * target).sum(), conv.weight)[0]
        for y in (expected[2:], out.with_grad)
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@GROUPS
def test_first_convolution_with_its_norm(channels, groups, no_grad):
    """Same as eager layers on one group after another; the convolution itself is never stored."""
    torch.manual_seed(channels)
    conv = nn.Conv2d(channels, 20, 3, 1, 1, bias=False).to(memory_format=torch.channels_last)
    norm = random_norm(20)
    exact_conv, exact_norm = copy.deepcopy(conv).double(), copy.deepcopy(norm).double()
    x = random_images(4 * groups, channels, 7, 5, shift=0.5)
    target = random_images(4 * (groups - no_grad), 20, 7, 5)

    def results(out, conv, norm):
        inputs = [conv.weight, norm.weight, norm.bias]
        loss = (out[4 * no_grad :] * target).sum()
        gradients = torch.autograd.grad(loss, inputs) if no_grad < groups else ()
        return [out, *gradients, *norm.buffers()]

    outputs = [EAGER.first_norm_relu(exact_conv, exact_norm, g) for g in x.double().chunk(groups)]
    expected = results(torch.cat(outputs), exact_conv, exact_norm)
    out = fused(conv, groups=groups, no_grad=no_grad).first_norm_relu(conv, norm, x)
    found = results(torch.cat([out.images[: 4 * no_grad], out.with_grad]), conv, norm)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5)

    with torch.no_grad():
        out = FoldedOps([conv], torch.float32).first_norm_relu(conv, norm.eval(), x)
        expected = EAGER.first_norm_relu(conv, norm, x)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_first_convolution_with_its_norm_keeps_nan():
    conv = nn.Conv2d(3, C, 3, 1, 1, bias=False).to(memory_format=torch.channels_last)
    x = random_images(4, 3, SIZE, SIZE)
    x[0, 0, 0, 0] = torch.nan
    out = fused(conv).first_norm_relu(conv, nn.BatchNorm2d(C), x)
    assert out.images.isnan().all()


@pytest.mark.parametrize("size", [(8, 8), (7, 5)])
def test_downsample(size):
    conv = nn.Conv2d(C, 12, 3, 2, 1, bias=False)
    shortcut = nn.Conv2d(C, 12, 1, 2, bias=False)
    norm, eager_norm = nn.BatchNorm2d(12), nn.BatchNorm2d(12)
    x = activations(random_images(4, C, *size), groups=2, no_grad=1)
    weights = [conv.weight, shortcut.weight]
    ops = fused(conv, shortcut, groups=2, no_grad=1)
    out, skip = ops.downsample(conv, norm, shortcut, x)
    loss = (out.with_grad**2).sum() + (skip.with_grad**3).sum()
    found = [out.images, skip.images, *torch.autograd.grad(loss, [x.with_grad, *weights])]
    all_x = x.images.clone().requires_grad_()
    pairs = [EAGER.downsample(conv, eager_norm, shortcut, group) for group in all_x.chunk(2)]
    out, skip = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    loss = (out[2:] ** 2).sum() + (skip[2:] ** 3).sum()
    d_x, *gradients = torch.autograd.grad(loss, [all_x, *weights])
    for a, b in zip(found, [out, skip, d_x[2:], *gradients], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_skip", [False, True])
@GROUPS
def test_pool(with_skip, groups, no_grad):
    x = activations(random_images(4 * groups, C, 7, 5), groups, no_grad)
    skip = activations(random_images(*x.images.shape), groups, no_grad) if with_skip else None
    target = torch.randn(4 * (groups - no_grad), C)
    pooled = fused(groups=groups, no_grad=no_grad).pool(x, skip)
    torch.testing.assert_close(pooled, EAGER.pool(x.images, skip and skip.images))
    if no_grad == groups:
        return
    inputs = [x.with_grad, *([skip.with_grad] if skip else [])]
    expected = EAGER.pool(x.with_grad, skip and skip.with_grad)
    for a, b in zip(
        torch.autograd.grad((pooled[4 * no_grad :] * target).sum(), inputs),
        torch.autograd.grad((expected * target).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
        assert a.is_contiguous(memory_format=torch.channels_last)


def test_weights_are_cast_and_their_gradients_are_cast_back():
    weights = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    cast = cast_weights(torch.bfloat16, weights, SIDE_STREAM)
    assert all(torch.equal(cast[w], w.bfloat16()) for w in weights)
    sum((cast[w].float() ** 2).sum() for w in weights).backward()
    for w in weights:
        assert w.grad.dtype == torch.float32
        torch.testing.assert_close(w.grad, 2 * w.bfloat16().float(), rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------ whole networks


@pytest.fixture
def large_blocks(monkeypatch):
    """Larger blocks than on a GPU, so that the interpreter runs fewer programs and is 8 times as
    fast. The tests of single layers use the real sizes."""
    from pseudoloss.nn import kernels

    for name, value in {"FEW": 64, "CHANNELS": 512, "TILE": 2**15}.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_one_kernel_casts_all_gradients(name, precision, monkeypatch):
    """This needs gradients that are dense and have the layout of their weight."""
    network = build(name, channels=3, size=(16, 16), classes=4, projection=3, precision=precision)
    network.fused = True
    calls, copy_all = [], torch._foreach_copy_

    def copy(into, tensors):
        calls.append([(a.stride(), b.stride()) for a, b in zip(into, tensors, strict=True)])
        copy_all(into, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    (logits, projected), *_ = network.forward_views(torch.randn(4, 3, 16, 16))
    (logits.sum() + projected.sum()).backward()
    assert len(calls) == 2  # the weights, and their gradients
    for strides in calls:
        assert all(a == b for a, b in strides)


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize(
    ("name", "count", "no_grad", "channels", "size", "heads", "seed"),
    [
        ("small-cnn", 1, 0, 1, (8, 8), "both", 0),
        ("small-cnn", 4, 2, 3, (9, 7), "both", 0),  # as in a step of PLS
        ("small-cnn", 3, 2, 3, (8, 8), "classifier", 0),  # as without the contrastive loss
        ("small-cnn", 3, 1, 3, (8, 8), "decoder", 0),
        ("preactresnet18", 2, 1, 3, (16, 16), "both", 0),
        ("preactresnet18-stemnorm", 2, 0, 3, (16, 16), "both", 0),
        ("preactresnet18-released", 2, 1, 3, (16, 16), "both", 0),
    ],
)
def test_a_fused_network_is_the_eager_network(name, count, no_grad, channels, size, heads, seed):
    """Outputs, gradients and running statistics of all views in one pass; then evaluation.

    A rounding error can move a value across the zero of a ReLU and change gradients by 1%. So both
    networks are compared with the exact one, and the seeds are some with which no value of the
    fused network is moved.
    """
    torch.manual_seed(seed)
    assert fused_error(name, count * (4,), no_grad, channels, size, heads) <= 1


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("no_grad", [0, 1, 2, 3])
def test_views_of_different_sizes_have_statistics_of_their_own(no_grad):
    torch.manual_seed(0)
    assert fused_error("small-cnn", (4, 4, 2, 8), no_grad, 3, (8, 8), "both") <= 1


def fused_error(name, views_of, no_grad, channels, size, heads):
    """The largest error of a fused network, for views of so many images; 1 is the largest that is
    allowed."""
    decoder = heads == "decoder"
    eager = build(name, channels=channels, size=size, classes=4, projection=3, decoder=decoder)
    exact, fused = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    fused.fused = True
    views = [torch.randn(images, channels, *size) for images in views_of]

    def results(network):
        dtype = next(network.parameters()).dtype
        outputs = network.forward_views(*(view.to(dtype) for view in views), no_grad=no_grad)
        assert {len(view) for view in outputs} == {2 + decoder}
        for i, view in enumerate(outputs):
            assert {output.requires_grad for output in view} == {i >= no_grad}
        loss = sum((logits**2).sum() for logits, *_ in outputs[no_grad:])
        if heads != "classifier":
            loss = loss + sum(other.sum() for _, *others in outputs[no_grad:] for other in others)
        loss.backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        unused = [p for p in network.parameters() if p.grad is None]
        assert len(unused) == (2 if heads == "classifier" else 0)
        with torch.no_grad(), network.frozen():
            evaluated = network(views[0].to(dtype))
        in_eval_mode = network.eval().forward_views(views[0].to(dtype), no_grad=1)
        assert not in_eval_mode[0][0].requires_grad
        return [*chain(*outputs), *gradients, *network.buffers(), *evaluated, *in_eval_mode[0]]

    ratios = []
    for truth, a, b in zip(*map(results, (exact, eager, fused)), strict=True):
        truth, a, b = (x.detach().double() for x in (truth, a, b))
        allowed = 3 * (a - truth).norm() + 2e-5 * truth.norm()
        ratios.append(float((b - truth).norm() / allowed.clamp(min=1e-30)))
    return max(ratios)


@pytest.mark.slow
@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("changes", [{}, {"pseudo_label_mode": "eval"}, {"contrast": False}])
def test_a_fused_trainer_trains_like_an_eager_one(tiny_settings, changes):
    """Steps of both phases with all views in one pass, and scoring with folded norms."""
    images, labels = make_images(32)
    test_images, test_labels = make_images(16, seed=1)
    source = pl.arrays(images, labels, test_images=test_images, test_labels=test_labels)
    settings = Settings(**(tiny_settings | changes))
    eager, fused = (Trainer(source, settings, SilentReporter()) for _ in range(2))
    fused.networks["net"].fused = True
    for epoch in (0, 1):
        assert fused.train_epoch(epoch) == pytest.approx(eager.train_epoch(epoch), rel=1e-4)
        for trainer in (eager, fused):
            trainer.score(epoch)
        torch.testing.assert_close(fused.state.loss_N, eager.state.loss_N, rtol=1e-3, atol=1e-3)
        assert torch.equal(fused.state.noisy_N, eager.state.noisy_N)
    assert fused.validate() == eager.validate()
