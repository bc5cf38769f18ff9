"""What the tests of the methods share: a stand-in for the engine's scorer, batches, slow forms."""

import math

import torch

from pseudoloss.methods.base import NET, Batch, Mix, Outputs

SWAP = torch.tensor([2, 0, 5, 1, 3, 4])  # partners of a batch of six


class FakeScorer:
    """Answers a method with logits that were prepared, seven images at a time."""

    chunk = 7

    def __init__(
        self,
        given_N,
        plain_NC,
        weak=(),
        roles=None,
        projections_ND=None,
        weak_is_plain=False,
        predicts=(),
    ):
        self.given_N, self.classes = given_N, plain_NC.shape[1]
        self.plain_NC, self.weak, self.roles = plain_NC, list(weak), roles or {}
        self.projections_ND = projections_ND
        self.weak_is_plain = weak_is_plain
        self.predicts = predicts
        self.asked = []

    def logits(self, *, plain=True, weak=0, role=None):
        self.asked.append((plain, weak, role))
        views = [self.plain_NC if role is None else self.roles[role]] if plain else []
        assert weak <= len(self.weak), "more weak views than the method declared"
        views += self.weak[:weak]
        yield from self._chunks(views)

    def members(self):
        yield from self._chunks([self.roles[role] for role in self.predicts])

    def _chunks(self, views):
        N = len(self.given_N)
        for start in range(0, N, self.chunk):
            rows = slice(start, min(start + self.chunk, N))
            yield rows, [view_NC[rows] for view_NC in views]

    def projections(self, *, role=None):
        assert self.projections_ND is not None
        return self.projections_ND


def make_batch(index_B, given_N, images_BCHW=None, mixes=((SWAP, 0.7),), draws=36):
    """A batch of some images; `mixes` are pairs of partners and λ."""
    B = len(index_B)
    if images_BCHW is None:
        images_BCHW = torch.zeros(B, 1, 8, 8, dtype=torch.uint8)
    return Batch(
        index_B=index_B,
        images_BCHW=images_BCHW,
        given_B=given_N[index_B],
        mixes=tuple(Mix(partner_B, torch.tensor(lam)) for partner_B, lam in mixes),
        draws_BK=torch.rand(B, draws, generator=torch.Generator().manual_seed(1)),
    )


def outputs_of(*with_grad, no_grad=(), role=NET):
    """Outputs of one network from logits alone; the projections are zeros."""

    def with_projection(logits_BC):
        return logits_BC, torch.zeros(len(logits_BC), 3)

    return {
        role: Outputs(
            [with_projection(logits) for logits in no_grad],
            [with_projection(logits) for logits in with_grad],
        )
    }


def softmax(row):
    powers = [math.exp(v - max(row)) for v in row]
    return [p / sum(powers) for p in powers]


def slow_cross_entropy(logits, target):
    """Of each row, in loops."""
    losses = []
    for row, wanted in zip(logits, target, strict=True):
        p = softmax(row)
        losses.append(-sum(t * math.log(q) for t, q in zip(wanted, p, strict=True) if t))
    return losses
