"""Muon against an SVD and plain SGD."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pseudoloss.engine.muon import A, B, C, Muon, orthogonalise


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(2, 8, 20), (3, 20, 8), (1, 12, 12)])
def test_the_update_has_the_singular_vectors_of_the_matrix(shape):
    """And singular values to which the polynomial was applied five times."""
    x = normal(*shape)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    torch.testing.assert_close(orthogonalise(x), u @ torch.diag_embed(s) @ vt, atol=1e-4, rtol=1e-4)
    assert s.min() > 0.6
    assert s.max() < 1.2


@settings(max_examples=30, deadline=None)
@given(start=st.floats(0.004, 1))
def test_singular_values_come_close_to_one(start):
    for _ in range(5):
        start = A * start + B * start**3 + C * start**5
    assert 0.68 < start < 1.21


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_extreme_matrices_are_finite(scale):
    assert orthogonalise(scale * normal(2, 4, 6)).isfinite().all()


def test_the_size_of_a_gradient_does_not_matter():
    x = normal(2, 8, 20)
    torch.testing.assert_close(orthogonalise(1000 * x), orthogonalise(x), atol=1e-4, rtol=1e-4)


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.Conv2d(4, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def polar(x):
    """U Vᵀ, with the singular values that five steps leave."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ vt


def test_the_steps_of_a_network():
    network, plain = small(), small()
    optimiser = Muon(network.parameters(), torch.tensor(0.02), 0.9, 0.01, fused=True)
    rest = [p for p in plain.parameters() if p.dim() != 4]
    sgd = torch.optim.SGD(rest, lr=0.02, momentum=0.9, weight_decay=0.01)
    memory = {}
    for step in range(3):
        for net in (network, plain):
            net.zero_grad()
            net(normal(6, 3, 8, 8, seed=step)).square().sum().backward()
        optimiser.step()
        sgd.step()
        for p in plain.parameters():
            if p.dim() == 4:
                memory[p] = 0.9 * memory.get(p, 0) + p.grad
                ahead = (p.grad + 0.9 * memory[p]).reshape(len(p), -1)
                rows, columns = ahead.shape
                change = max(1, rows / columns) ** 0.5 * polar(ahead).view_as(p)
                p.data = (1 - 0.02 * 0.01) * p - 0.02 * change
    for a, b in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_the_order_of_the_channels_in_memory_makes_no_difference():
    """Rows and columns of a matrix are those of the convolution, in either order."""
    trained = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        network = small().to(memory_format=memory_format)
        optimiser = Muon(network.parameters(), torch.tensor(0.02), 0.9, 0.01, fused=True)
        for step in range(2):
            for i, p in enumerate(network.parameters()):
                grad = normal(*p.shape, seed=10 * step + i)
                p.grad = grad.to(memory_format=memory_format) if p.dim() == 4 else grad
            optimiser.step()
        assert network[0].weight.is_contiguous(memory_format=memory_format)
        trained.append(list(network.parameters()))
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_step_that_is_not_finite_changes_nothing():
    network = small()
    optimiser = Muon(network.parameters(), torch.tensor(0.02), 0.9, 0.01, fused=True)
    before = [p.detach().clone() for p in network.parameters()]
    for p in network.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimiser.found_inf = torch.ones(())
    optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert not any(values["momentum_buffer"].any() for values in optimiser.state.values())
    for p in network.parameters():
        p.grad = normal(*p.shape)
    optimiser.found_inf = torch.zeros(())
    optimiser.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_parameters_without_a_gradient_stay():
    network = small()
    optimiser = Muon(network.parameters(), torch.tensor(0.02), 0.9, 0.01, fused=True)
    before = [p.detach().clone() for p in network.parameters()]
    network[0].weight.grad = normal(4, 3, 3, 3)
    optimiser.step()
    same = [torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
    assert same == [False] + [True] * (len(before) - 1)


def test_nothing_is_read_back_from_a_gpu():
    """Fake tensors have a shape and no values: reading one back is an error."""
    with FakeTensorMode():
        weights = [torch.empty(8, 4, 3, 3, device="cuda", requires_grad=True) for _ in range(2)]
        lr = torch.empty((), device="cuda")
        optimiser = Muon(weights, lr, 0.9, 0.01, fused=True)
        optimiser.found_inf = torch.empty((), device="cuda")
        for p in weights:
            p.grad = torch.empty_like(p)
        optimiser.step()
