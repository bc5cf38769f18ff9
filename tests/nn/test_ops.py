"""Fused layers against plain ones, on the CPU: Triton's interpreter runs the very kernels."""

import copy
from itertools import chain

import pytest
import torch
from torch import nn

from pseudoloss.config import OWN, Settings
from pseudoloss.engine.trainer import Trainer
from pseudoloss.nn.networks import build
from pseudoloss.nn.ops import Beside, Flow, Folded, Fused, Plain, weights_in
from pseudoloss.progress import SilentReporter

pytest.importorskip("triton")

C, SIZE = 8, 6
BESIDE = Beside(torch.device("cpu"))


def image(*shape, scale=1.0, shift=0.0):
    x = torch.randn(*shape) * scale + shift
    return x.contiguous(memory_format=torch.channels_last)


def flow(x, groups=1, free=0):
    """All images, and those with a gradient."""
    graded = x[len(x) // groups * free :].clone(memory_format=torch.channels_last)
    return Flow(x, graded.requires_grad_())


def fused(*convolutions, groups=1, free=0):
    return Fused({conv.weight: conv.weight for conv in convolutions}, groups, free, BESIDE)


def norm_of(channels):
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var)
    return norm


@pytest.mark.parametrize(("groups", "free"), [(1, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("channels", [8, 72])
def test_norm_relu(groups, free, with_skip, channels):
    """As plain layers on one group after another."""
    torch.manual_seed(groups)
    norm, plain_norm = [copy.deepcopy(norm) for norm in [norm_of(channels)] * 2]
    x = flow(image(groups * 4, channels, SIZE, SIZE, scale=2, shift=3), groups, free)
    skip = flow(image(*x.images.shape), groups, free) if with_skip else None
    towards = [image(*x.graded.shape) for _ in range(2)]

    total, out = fused(groups=groups, free=free).sum_norm_relu(norm, x, skip, True)
    inputs = [x.graded, norm.weight, norm.bias] + ([skip.graded] if skip else [])
    loss = (total.graded * towards[0]).sum() + (out.graded * towards[1]).sum()
    found = [*total, *out, *torch.autograd.grad(loss, inputs)]

    wide, wide_skip = (v and v.images.clone().requires_grad_() for v in (x, skip))
    parts = [
        Plain().sum_norm_relu(
            plain_norm,
            wide.chunk(groups)[g],
            None if skip is None else wide_skip.chunk(groups)[g],
            True,
        )
        for g in range(groups)
    ]
    total, out = (torch.cat(part) for part in zip(*parts, strict=True))
    at = free * 4
    loss = (total[at:] * towards[0]).sum() + (out[at:] * towards[1]).sum()
    inputs = [wide, plain_norm.weight, plain_norm.bias] + ([wide_skip] if skip else [])
    gradients = list(torch.autograd.grad(loss, inputs))
    for i in (0, 3) if skip else (0,):
        gradients[i] = gradients[i][at:]
    expected = [total, total[at:], out, out[at:], *gradients]

    for a, b in zip(
        found + list(norm.buffers()), expected + list(plain_norm.buffers()), strict=True
    ):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_norm_relu_by_running_statistics(with_skip, keep):
    norm = norm_of(C).eval()
    x = image(3, C, SIZE, SIZE)
    skip = image(*x.shape) if with_skip else None
    with torch.no_grad():
        total, out = Plain().sum_norm_relu(norm, x, skip, keep)
        found = Folded([nn.Conv2d(1, 1, 1)], torch.float32).sum_norm_relu(norm, x, skip, keep)
    torch.testing.assert_close(found[1], out)
    if keep:
        torch.testing.assert_close(found[0], total)


@torch.no_grad()
def test_a_norm_folded_into_its_convolution():
    conv = nn.Conv2d(C, 12, 3, 2, 1, bias=False).to(memory_format=torch.channels_last)
    shortcut = nn.Conv2d(C, 12, 1, 2, bias=False)
    norm = norm_of(12).eval()
    x = image(3, C, SIZE, SIZE)
    folded = Folded([conv, shortcut], torch.float32)
    for _ in range(2):  # folded once, used twice
        for a, b in zip(
            folded.downsample(conv, norm, shortcut, x),
            Plain().downsample(conv, norm, shortcut, x),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_norm_relu_when_the_mean_is_large():
    """The variance is not lost in the square of the mean."""
    norm = nn.BatchNorm2d(C)
    x = image(4, C, SIZE, SIZE, scale=0.1, shift=1000)
    plain = Plain().norm_relu(copy.deepcopy(norm).double(), x.double())
    out = fused().norm_relu(norm, flow(x))
    torch.testing.assert_close(out.images, plain.float(), atol=1e-2, rtol=1e-2)


def test_norm_relu_keeps_nan():
    x = image(4, C, SIZE, SIZE)
    x[0, 0, 0, 0] = torch.nan
    out = fused().norm_relu(nn.BatchNorm2d(C), flow(x))
    assert out.images[:, 0].isnan().any()
    assert not out.images[:, 1:].isnan().any()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_first_convolution(channels):
    conv = nn.Conv2d(channels, 5, 3, 1, 1, bias=False).to(memory_format=torch.channels_last)
    x, towards = image(4, channels, 7, 5), image(2, 5, 7, 5)
    plain = Plain().first(conv, x)
    out = fused(conv, groups=2, free=1).first(conv, x)
    torch.testing.assert_close(out.images, plain)
    gradients = [
        torch.autograd.grad((y * towards).sum(), conv.weight)[0] for y in (plain[2:], out.graded)
    ]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(("groups", "free"), [(1, 0), (3, 1), (2, 2)])
def test_first_convolution_with_its_norm(channels, groups, free):
    """As plain layers on one group after another, though the convolution is never written."""
    torch.manual_seed(channels)
    conv = nn.Conv2d(channels, 20, 3, 1, 1, bias=False).to(memory_format=torch.channels_last)
    norm = norm_of(20)
    exact_conv, exact_norm = copy.deepcopy(conv).double(), copy.deepcopy(norm).double()
    x = image(4 * groups, channels, 7, 5, shift=0.5)
    towards = image(4 * (groups - free), 20, 7, 5)

    def results(out, conv, norm):
        inputs = [conv.weight, norm.weight, norm.bias]
        loss = (out[4 * free :] * towards).sum()
        gradients = torch.autograd.grad(loss, inputs) if free < groups else ()
        return [out, *gradients, *norm.buffers()]

    parts = [Plain().first_norm_relu(exact_conv, exact_norm, g) for g in x.double().chunk(groups)]
    expected = results(torch.cat(parts), exact_conv, exact_norm)
    flow = fused(conv, groups=groups, free=free).first_norm_relu(conv, norm, x)
    found = results(torch.cat([flow.images[: 4 * free], flow.graded]), conv, norm)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=2e-5)

    with torch.no_grad():
        out = Folded([conv], torch.float32).first_norm_relu(conv, norm.eval(), x)
        plain = Plain().first_norm_relu(conv, norm, x)
    torch.testing.assert_close(out, plain, atol=2e-5, rtol=2e-5)


def test_first_convolution_with_its_norm_keeps_nan():
    conv = nn.Conv2d(3, C, 3, 1, 1, bias=False).to(memory_format=torch.channels_last)
    x = image(4, 3, SIZE, SIZE)
    x[0, 0, 0, 0] = torch.nan
    out = fused(conv).first_norm_relu(conv, nn.BatchNorm2d(C), x)
    assert out.images.isnan().all()


@pytest.mark.parametrize("size", [(8, 8), (7, 5)])
def test_downsample(size):
    conv = nn.Conv2d(C, 12, 3, 2, 1, bias=False)
    shortcut = nn.Conv2d(C, 12, 1, 2, bias=False)
    norm, plain_norm = nn.BatchNorm2d(12), nn.BatchNorm2d(12)
    x = flow(image(4, C, *size), groups=2, free=1)
    weights = [conv.weight, shortcut.weight]
    ops = fused(conv, shortcut, groups=2, free=1)
    out, skip = ops.downsample(conv, norm, shortcut, x)
    loss = (out.graded**2).sum() + (skip.graded**3).sum()
    found = [out.images, skip.images, *torch.autograd.grad(loss, [x.graded, *weights])]
    wide = x.images.clone().requires_grad_()
    parts = [Plain().downsample(conv, plain_norm, shortcut, part) for part in wide.chunk(2)]
    out, skip = (torch.cat(part) for part in zip(*parts, strict=True))
    loss = (out[2:] ** 2).sum() + (skip[2:] ** 3).sum()
    d_x, *gradients = torch.autograd.grad(loss, [wide, *weights])
    for a, b in zip(found, [out, skip, d_x[2:], *gradients], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize(("groups", "free"), [(1, 0), (3, 1), (2, 2)])
def test_pool(with_skip, groups, free):
    x = flow(image(4 * groups, C, 7, 5), groups, free)
    skip = flow(image(*x.images.shape), groups, free) if with_skip else None
    towards = torch.randn(4 * (groups - free), C)
    pooled = fused(groups=groups, free=free).pool(x, skip)
    expected = Plain().pool(x.images, skip and skip.images)
    torch.testing.assert_close(pooled, expected)
    if free == groups:
        return
    inputs = [x.graded, *([skip.graded] if skip else [])]
    plain = Plain().pool(x.graded, skip and skip.graded)
    for a, b in zip(
        torch.autograd.grad((pooled[4 * free :] * towards).sum(), inputs),
        torch.autograd.grad((plain * towards).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
        assert a.is_contiguous(memory_format=torch.channels_last)


def test_weights_in_another_type():
    weights = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    cast = weights_in(torch.bfloat16, weights, BESIDE)
    assert all(torch.equal(cast[w], w.bfloat16()) for w in weights)
    sum((cast[w].float() ** 2).sum() for w in weights).backward()
    for w in weights:
        assert w.grad.dtype == torch.float32
        torch.testing.assert_close(w.grad, 2 * w.bfloat16().float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_all_gradients_are_cast_by_one_kernel(name, precision, monkeypatch):
    """That is possible where each is dense, and lies as its weight does."""
    network = build(name, channels=3, size=(16, 16), classes=4, projection=3, precision=precision)
    network.fused = True
    lists, copy_all = [], torch._foreach_copy_

    def copy(into, tensors):
        lists.append([(a.stride(), b.stride()) for a, b in zip(into, tensors, strict=True)])
        copy_all(into, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    (logits, projected), *_ = network.forward_views(torch.randn(4, 3, 16, 16))
    (logits.sum() + projected.sum()).backward()
    assert len(lists) == 2  # there and back
    for strides in lists:
        assert all(a == b for a, b in strides)


@pytest.mark.parametrize(
    ("name", "count", "free", "channels", "size"),
    [
        ("small-cnn", 1, 0, 1, (8, 8)),
        ("small-cnn", 4, 2, 3, (9, 7)),  # as a step of PLS
        ("preactresnet18", 2, 1, 3, (16, 16)),
        ("preactresnet18-stemnorm", 2, 0, 3, (16, 16)),
        ("preactresnet18-released", 2, 1, 3, (16, 16)),
    ],
)
def test_views_together_are_views_one_by_one(name, count, free, channels, size):
    """The whole network: outputs, gradients, running statistics, and evaluation."""
    torch.manual_seed(1)
    plain = build(name, channels=channels, size=size, classes=4, projection=3)
    exact, other = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    other.fused = True
    views = [torch.randn(4, channels, *size) for _ in range(count)]

    def everything(network):
        dtype = next(network.parameters()).dtype
        outputs = network.forward_views(*(view.to(dtype) for view in views), free=free)
        assert [part.requires_grad for part, _ in outputs] == [i >= free for i in range(count)]
        loss = sum((logits**2).sum() + projected.sum() for logits, projected in outputs[free:])
        loss.backward()
        gradients = [p.grad for p in network.parameters()]
        with torch.no_grad(), network.frozen():
            tested = network(views[0].to(dtype))
        return [*chain(*outputs), *gradients, *network.buffers(), *tested]

    # A rounding error can push a value through a ReLU. So the two may differ from the truth alike.
    for truth, a, b in zip(*map(everything, (exact, plain, other)), strict=True):
        error, ours = ((x.double() - truth.double()).norm() for x in (a, b))
        assert ours <= 3 * error + 2e-5 * truth.double().norm()


@pytest.mark.parametrize("changes", [{}, {"guess_mode": "eval"}, {"contrast": False}])
def test_a_fused_session_trains_as_a_plain_one(tiny_source, tiny_settings, changes):
    """Steps of both phases with all views in one pass, and a tracking pass by folded norms."""
    plain, fused = (
        Trainer(tiny_source, Settings(**(tiny_settings | changes)), SilentReporter())
        for _ in range(2)
    )
    fused.network.fused = True
    for epoch in (0, 1):
        assert fused.train_epoch(epoch) == pytest.approx(plain.train_epoch(epoch), rel=1e-4)
        for trainer in (plain, fused):
            trainer.track(epoch)
        torch.testing.assert_close(fused.memory.loss_N, plain.memory.loss_N, rtol=1e-3, atol=1e-3)
        assert torch.equal(fused.memory.noisy_N, plain.memory.noisy_N)
    assert fused.validate() == plain.validate()
