"""Networks, optimisers and moving averages, built from settings."""

from types import SimpleNamespace

import pytest
import torch

from conftest import make_source
from pseudoloss.config import Settings
from pseudoloss.engine.building import build_networks, follow, reset_head
from pseudoloss.methods.base import Ema
from pseudoloss.nn.networks import build

CPU = torch.device("cpu")
GO, SKIP = torch.tensor(False), torch.tensor(True)


def small_network(seed=0):
    torch.manual_seed(seed)
    return build("small-cnn", channels=1, size=(8, 8), classes=4, projection=4)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# ---------------------------------------------------------------------------- networks by role


def networks_of(networks, ema, **settings):
    method = SimpleNamespace(networks=networks, ema=ema, decoder=False)
    settings = Settings(network="small-cnn", **settings)
    return build_networks(method, make_source(), settings, CPU, resumed=False)


def test_peers_differ_and_a_moving_average_starts_as_the_network_it_follows():
    ema = {"slow second": Ema("second", 0.9), "slow first": Ema("first", 0.9)}
    built = networks_of(("first", "second"), ema)
    assert list(built) == ["first", "second", "slow second", "slow first"]
    assert not equal(built["first"], built["second"])
    assert equal(built["slow first"], built["first"])
    assert equal(built["slow second"], built["second"])
    for role, network in built.items():
        assert all(p.requires_grad == (role not in ema) for p in network.parameters())


def test_the_first_network_does_not_depend_on_the_others():
    """So methods with one and with two networks start alike, and a seed gives one start."""
    alone = networks_of(("net",), {})["net"]
    assert equal(alone, networks_of(("first", "second"), {})["first"])
    assert not equal(alone, networks_of(("net",), {}, seed=2)["net"])


# -------------------------------------------------------------------------------- moving averages


@pytest.mark.parametrize("decay", [0.75, lambda state: state.decay], ids=["float", "tensor"])
def test_a_moving_average_moves_towards_the_network(decay):
    slow, fast = small_network(1), small_network(2)
    fast.backbone.norms[0].running_mean.fill_(5)
    wanted = [
        0.75 * a.detach() + 0.25 * b.detach()
        for a, b in zip(slow.parameters(), fast.parameters(), strict=True)
    ]
    before = [p.detach().clone() for p in fast.parameters()]
    follow(slow, fast, Ema("net", decay), SimpleNamespace(decay=torch.tensor(0.75)), GO)
    torch.testing.assert_close([p.detach() for p in slow.parameters()], wanted)
    assert all(torch.equal(p, old) for p, old in zip(fast.parameters(), before, strict=True))
    assert (slow.backbone.norms[0].running_mean == 5).all()


def test_a_moving_average_stays_in_a_step_that_is_skipped():
    slow, fast = small_network(1), small_network(2)
    follow(slow, fast, Ema("net", 0.75), None, SKIP)
    assert equal(slow, small_network(1))


def test_batch_norm_statistics_are_copied_only_if_asked_for():
    slow, fast = small_network(1), small_network(2)
    fast.backbone.norms[0].running_mean.fill_(5)
    follow(slow, fast, Ema("net", 0.5, copy_buffers=False), None, GO)
    assert (slow.backbone.norms[0].running_mean == 0).all()


# ------------------------------------------------------------------------------------ a new head


def test_a_new_head_depends_on_its_seed_alone():
    a, b = small_network(1), small_network(1)
    old, backbone = a.classifier.weight.detach().clone(), a.backbone.convs[0].weight.clone()
    parameter = a.classifier.weight
    reset_head(a, seed=3)
    torch.manual_seed(99)
    expected = torch.rand(1)
    torch.manual_seed(99)
    reset_head(b, seed=3)
    assert torch.equal(torch.rand(1), expected)  # the global random state is left alone
    assert a.classifier.weight is parameter  # in place: the optimiser keeps its parameter
    assert equal(a, b)
    assert not torch.equal(a.classifier.weight, old)
    assert torch.equal(a.backbone.convs[0].weight, backbone)
    reset_head(b, seed=4)
    assert not equal(a, b)
    assert b.classifier.weight.abs().max() <= 128**-0.5  # as nn.Linear starts
