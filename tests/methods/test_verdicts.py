"""What every method says about labels makes sense, whatever its networks predict: probabilities
are between 0 and 1, classes exist, and flagged labels are those that are most probably wrong."""

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeScorer, make_batch
from test_contract import (
    DRAWS,
    INDEX,
    MIXES,
    VARIANTS,
    W,
    images,
    outputs_for,
)

from pseudoloss.config import Settings
from pseudoloss.methods import build
from pseudoloss.methods.base import joined
from pseudoloss.nn.views import Views

N, D = 48, 5
VIEWS = Views(torch.full((3,), 0.5), torch.full((3,), 0.25), (8, 8), 1, True)


def random(*shape, scale=1.0, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_hot(classes_N, C, scale=8.0):
    return scale * F.one_hot(classes_N, C).float()


# Logits that the networks give, from the given labels and the number of classes.
PREDICTED = {
    "as labelled": lambda given, C: one_hot(given, C) + random(N, C),
    "never as labelled": lambda given, C: one_hot((given + 1) % C, C) + random(N, C),
    "one class never as labelled": lambda given, C: (
        one_hot(torch.where(given == 0, 1, given), C) + random(N, C)
    ),
    "always the same class": lambda given, C: one_hot(torch.zeros_like(given), C),
    "at random": lambda given, C: random(N, C, scale=3),
    "uniform": lambda given, C: torch.zeros(N, C),
    "extreme": lambda given, C: random(N, C, scale=1e4),
    "never as labelled, for certain": lambda given, C: one_hot((given + 1) % C, C, 1e4),
}
GIVEN = {  # labels, and how many classes there are
    "4 classes": (torch.arange(N) % 4, 4),
    "2 classes": (torch.arange(N) % 2, 2),
    "a rare class": (torch.arange(N).clamp(max=2), 3),
    "a class without images": (torch.arange(N) % 3 + 1, 5),
}


def verdicts(variant, given, C, predicted):
    """After the warm-up, and after every epoch that follows; and whether a class was protected."""
    values = {"epochs": W + 3, "warmup": W, "projection": D, "batch_size": 6} | VARIANTS[variant]
    method = build(Settings(**values), given, C, False)
    state = method.start(given, C)
    plain = predicted(given, C)
    roles = dict.fromkeys((*method.networks, *method.ema), plain)
    z_ND = F.normalize(random(N, D))
    scorer = FakeScorer(given, plain, [plain, plain], roles, z_ND, predicts=method.predicts)
    for epoch in range(W - 1, W + 3):
        method.begin_epoch(state, epoch)
        if epoch >= W:
            train(method, given, C, plain, state, epoch)
        method.scoring(epoch).run(scorer, state)
        yield method.verdict(state, epoch), bool(state.protected_C.any())


def train(method, given, C, plain, state, epoch):
    """A step with each of the last phase's losses, on what the networks give."""
    for step in method.phases()[-1].steps:
        batch = make_batch((INDEX + 6 * epoch) % N, given, images(), MIXES, DRAWS)
        shown = step.show(VIEWS, batch)
        outputs = answers(method, shown, batch, plain)
        if step.show_next is not None:
            more = step.show_next(VIEWS, batch, outputs, state)
            outputs = joined(outputs, answers(method, more, batch, plain))
        assert step.loss(outputs, batch, state).isfinite()


def answers(method, shown, batch, plain):
    """Outputs whose logits are those of the images, in views of any number of rows."""

    def of(view):
        logits, *rest = view
        rows = batch.index_B.repeat(-(-len(logits) // len(batch.index_B)))[: len(logits)]
        return plain[rows], *rest

    found = outputs_for(method, shown)
    return {
        role: each._make([[of(view) for view in kind] for kind in each])
        for role, each in found.items()
    }


@pytest.mark.parametrize("labels", GIVEN)
@pytest.mark.parametrize("predicted", PREDICTED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_verdict_makes_sense(variant, predicted, labels):
    given, C = GIVEN[labels]
    for verdict, protected in verdicts(variant, given, C, PREDICTED[predicted]):
        p_noisy, noisy = verdict.p_noisy_N, verdict.noisy_N
        assert noisy.dtype == torch.bool
        assert ((p_noisy >= 0) & (p_noisy <= 1)).all()
        if noisy.any() and not noisy.all() and not protected:
            assert p_noisy[noisy].min() >= p_noisy[~noisy].max()
        assert (verdict.loss_N >= 0).all()
        for classes_N in (verdict.predicted_N, verdict.suggested_N):
            if classes_N is not None:
                assert ((classes_N >= 0) & (classes_N < C)).all()
        if verdict.trust_N is not None:
            assert ((verdict.trust_N >= 0) & (verdict.trust_N <= 1)).all()
