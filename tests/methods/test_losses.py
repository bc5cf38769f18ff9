import math

import pytest
import torch
from fakes import slow_cross_entropy

from pseudoloss.methods import losses

B, C = 6, 4


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_cross_entropy_equals_a_slow_form():
    logits, target = random_logits(B, C), random_logits(B, C, seed=1).softmax(1)
    wanted = slow_cross_entropy(logits.tolist(), target.tolist())
    torch.testing.assert_close(losses.cross_entropy(logits, target), torch.tensor(wanted))


def test_cross_entropy_is_computed_in_float32():
    """Row 10: a probability that underflows in bfloat16 gives no infinite loss."""
    logits = torch.tensor([[200.0, -200.0]], dtype=torch.bfloat16)
    loss = losses.cross_entropy(logits, torch.tensor([[0.5, 0.5]]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(200)


@pytest.mark.parametrize("chosen", [[], [2], [0, 3, 4], range(B)], ids=str)
def test_the_mean_over_some_images_equals_a_slow_form(chosen):
    loss = random_logits(B).requires_grad_()
    chosen_B = torch.tensor([i in chosen for i in range(B)])
    mean = losses.mean_over(loss, chosen_B)
    wanted = sum(loss[i].item() for i in chosen) / max(len(chosen), 1)
    assert mean.item() == pytest.approx(wanted)
    mean.backward()
    assert torch.equal(loss.grad != 0, chosen_B)


def test_images_that_are_not_chosen_may_have_any_loss():
    loss = torch.tensor([1.0, math.nan, math.inf, 3.0])
    chosen_B = torch.tensor([True, False, False, True])
    assert losses.mean_over(loss, chosen_B).item() == 2
