import pytest
import torch
from fakes import make_batch, outputs_of, slow_cross_entropy

from pseudoloss.config import Settings
from pseudoloss.methods import build
from pseudoloss.methods.base import NET
from pseudoloss.nn.views import WEAK_DRAWS, Views

GIVEN = torch.arange(20) % 4
INDEX = torch.tensor([4, 1, 10, 7, 18, 3])


def test_the_loss_equals_a_slow_form():
    method = build(Settings(method="ce"), GIVEN, 4, False)
    logits = 3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    one_hot = [[float(c == GIVEN[i]) for c in range(4)] for i in INDEX]
    wanted = sum(slow_cross_entropy(logits.tolist(), one_hot)) / 6
    loss = method.loss(outputs_of(logits), make_batch(INDEX, GIVEN), None)
    assert loss.item() == pytest.approx(wanted, rel=1e-5)


def test_the_network_sees_one_weak_view():
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    views = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)
    batch = make_batch(INDEX, GIVEN, images)
    method = build(Settings(method="ce"), GIVEN, 4, False)
    shown = method.show(views, batch)[NET]
    assert shown.no_grad == []
    torch.testing.assert_close(
        shown.with_grad, [views.weak(images, batch.draws_BK[:, :WEAK_DRAWS])]
    )


def test_nothing_is_suggested():
    method = build(Settings(method="ce"), GIVEN, 4, False)
    verdict = method.verdict(method.start(GIVEN, 4), 199)
    assert (verdict.suggested_N, verdict.trust_N) == (None, None)
