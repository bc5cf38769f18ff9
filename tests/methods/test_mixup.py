import pytest
import torch
import torch.nn.functional as F
from fakes import SWAP, make_batch, outputs_of, slow_cross_entropy
from hypothesis import given, settings
from hypothesis import strategies as st

from pseudoloss.config import Settings
from pseudoloss.methods import build, mixup
from pseudoloss.methods.base import NET, Mix, beta, fold, no_mixing, uniform
from pseudoloss.nn.views import WEAK_DRAWS, Views

N, B, C = 20, 6, 4
GIVEN = torch.arange(N) % C
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rules_for_lambda():
    u = torch.linspace(0, 1, 11)
    assert torch.equal(fold(u), torch.maximum(u, 1 - u))
    assert torch.equal(uniform(u), u)
    assert torch.equal(no_mixing(u), torch.ones(11))


def test_alpha_gives_lambda_a_folded_beta_distribution():
    """α = 1 is uniform, and the same bits as before there was an α."""
    u = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    for alpha in (1, 4, 32):
        made = build(Settings(method="mixup", mixup_alpha=alpha), GIVEN, C, False)
        for phase in made.phases():
            (rule,) = phase.steps[0].lambdas
            torch.testing.assert_close(rule(u), beta(alpha, folded=True)(u), atol=1e-6, rtol=0)
    plain = build(Settings(method="mixup"), GIVEN, C, False)
    assert plain.phases()[1].steps[0].lambdas == (fold,)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), lam=st.floats(0, 1))
def test_mixing_is_a_convex_combination_of_an_image_and_its_partner(seed, lam):
    random = torch.Generator().manual_seed(seed)
    x, partner = torch.rand(B, 3, generator=random), torch.randperm(B, generator=random)
    mixed = Mix(partner, torch.tensor(lam)).of(x)
    for i in range(B):
        torch.testing.assert_close(mixed[i], lam * x[i] + (1 - lam) * x[partner[i]])


def test_the_loss_equals_a_slow_form_with_mixed_labels():
    logits = random_logits(B, C)
    batch = make_batch(INDEX, GIVEN)
    target = []
    for i, j in enumerate(SWAP.tolist()):
        row = [0.0] * C
        row[GIVEN[INDEX[i]]] += 0.7
        row[GIVEN[INDEX[j]]] += 0.3
        target.append(row)
    wanted = sum(slow_cross_entropy(logits.tolist(), target)) / B
    assert mixup.loss(outputs_of(logits), batch, None).item() == pytest.approx(wanted, rel=1e-5)


def test_at_lambda_1_the_loss_is_cross_entropy():
    logits = random_logits(B, C)
    batch = make_batch(INDEX, GIVEN, mixes=[(SWAP, 1.0)])
    wanted = F.cross_entropy(logits, GIVEN[INDEX])
    torch.testing.assert_close(mixup.loss(outputs_of(logits), batch, None), wanted)
    ce = build(Settings(method="ce"), GIVEN, C, False)
    torch.testing.assert_close(ce.loss(outputs_of(logits), batch, None), wanted)


def test_the_network_sees_one_mixed_weak_view():
    images = torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8)
    views = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
    batch = make_batch(INDEX, GIVEN, images)
    weak = views.weak(images, batch.draws_BK[:, :WEAK_DRAWS])
    shown = mixup.show(views, batch)
    assert list(shown) == [NET]
    assert shown[NET].no_grad == []
    torch.testing.assert_close(shown[NET].with_grad, [0.7 * weak + 0.3 * weak[SWAP]])


def test_the_warm_up_of_pls_is_mixup_on_the_given_labels():
    pls = build(Settings(), GIVEN, C, False)
    (step,) = pls.phases()[0].steps
    assert (step.show, step.loss, step.lambdas) == (mixup.show, mixup.loss, (fold,))
    unmixed = build(Settings(mixup=False), GIVEN, C, False)
    assert unmixed.phases()[0].steps[0].lambdas == (no_mixing,)
