"""A toy method in which everything is unusual, to test the contract of methods/base.py.

Two networks that are trained in turn, each followed by a moving average; one of the averages
predicts. Two phases with other batch sizes; the second one starts with a new head and without
momentum, and has a learning rate of its own. Streams from masks, of which one is empty in the first
epoch. State of many shapes and types.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.methods import build_detector
from pseudoloss.methods.base import (
    Ema,
    LabelState,
    Method,
    Phase,
    Scoring,
    Step,
    Stream,
    Verdict,
    ViewBatch,
    fold,
    no_mixing,
    uniform,
)
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS

FIRST = 2  # epochs of the first phase
DECAY = 0.9


@dataclass(frozen=True)
class ToyState(LabelState):
    hard_N: Tensor  # bool
    visits_N: Tensor  # int32
    average_NC: Tensor
    confidence_N: Tensor  # bfloat16
    decay: Tensor  # scalar
    confusion_CC: Tensor  # float64
    queue_LD: Tensor
    position: Tensor  # int64, scalar
    none_X: Tensor  # empty
    name: str  # not a tensor


def hard(state):
    return state.hard_N


def easy(state):
    return ~state.hard_N


class Toy(Method):
    networks = ("student", "peer")
    ema = {  # noqa: RUF012
        "teacher": Ema("student", DECAY),
        "slow peer": Ema("peer", lambda state: state.decay, copy_buffers=False),
    }
    predicts = ("teacher",)

    def __init__(self, settings):
        super().__init__(build_detector(settings.method_settings), settings.warmup_epochs)
        self.epochs = settings.epochs
        self.log = []  # what every step saw

    def phases(self):
        first = Step(
            self.show_student,
            self.loss_of_student,
            draws=WEAK_DRAWS,
            lambdas=(uniform,),
            trains=("student",),
            streams=(Stream(easy), Stream(hard, size=4)),
            mixes_within=hard,
        )
        second = Step(
            self.show_both,
            self.loss_of_peer,
            draws=WEAK_DRAWS + STRONG_DRAWS,
            lambdas=(fold, no_mixing),
            trains=("peer",),
            streams=(Stream(hard), Stream()),
            moves_norms=("slow peer",),
        )
        return (
            Phase("first", FIRST, (first,), batch_size=8),
            Phase(
                "second",
                self.epochs - FIRST,
                (replace(first, streams=(Stream(easy, size=6),), lr=self.falling_lr), second),
                batch_size=10,
                reset_optimiser=True,
                reset_head=True,
            ),
        )

    def falling_lr(self, epoch):
        return 0.01 / (1 + epoch)

    def start(self, given_N, classes):
        N = len(given_N)
        return ToyState(
            **LabelState.start(given_N, classes),
            hard_N=torch.zeros(N, dtype=torch.bool),
            visits_N=torch.zeros(N, dtype=torch.int32),
            average_NC=torch.zeros(N, classes),
            confidence_N=torch.zeros(N, dtype=torch.bfloat16),
            decay=torch.ones(()),
            confusion_CC=torch.zeros(classes, classes, dtype=torch.float64),
            queue_LD=torch.zeros(7, 3),
            position=torch.zeros((), dtype=torch.int64),
            none_X=torch.zeros(0),
            name="toy",
        )

    def begin_epoch(self, state, epoch):
        state.decay.fill_(0.5 + 0.1 * epoch)

    def scores_after(self, epoch):
        return True

    # ------------------------------------------------------------------------------- the steps

    def show_student(self, views, batch):
        view = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        return {"student": ViewBatch([], [batch.mixes[0].of(view)])}

    def loss_of_student(self, outputs, batch, state):
        ((logits_BC, projection_BD),) = outputs["student"].with_grad
        self._write(logits_BC, projection_BD, batch, state)
        self.log.append(("student", batch, state.hard_N.clone()))
        return F.cross_entropy(logits_BC, batch.given_B)

    def show_both(self, views, batch):
        """The peer learns from strong views and from what the teacher makes of weak ones."""
        weak = views.weak(batch.images_BCHW, batch.draws_BK[:, :WEAK_DRAWS])
        strong = views.strong(batch.images_BCHW, batch.draws_BK[:, WEAK_DRAWS:])
        return {
            "teacher": ViewBatch([weak], []),
            "slow peer": ViewBatch([weak], []),
            "student": ViewBatch([], [weak]),
            "peer": ViewBatch([], [batch.mixes[0].of(strong)], in_eval=[weak]),
        }

    def loss_of_peer(self, outputs, batch, state):
        target_BC = outputs["teacher"].no_grad[0][0].softmax(1)
        (logits_BC, _), (unused_BC, _) = (
            outputs["peer"].with_grad[0],
            outputs["student"].with_grad[0],
        )
        state.average_NC[batch.index_B] = 0.5 * state.average_NC[batch.index_B] + 0.5 * target_BC
        self.log.append(("peer", batch, state.hard_N.clone()))
        given = F.cross_entropy(logits_BC, batch.given_B)
        return given + F.cross_entropy(logits_BC, target_BC) + 0.1 * unused_BC.square().mean()

    def _write(self, logits_BC, projection_BD, batch, state):
        ones_B = torch.ones_like(batch.index_B, dtype=torch.int32)
        state.visits_N.index_add_(0, batch.index_B, ones_B)
        predicted_B = logits_BC.detach().argmax(1)
        cells = (batch.given_B, predicted_B)
        state.confusion_CC.index_put_(cells, ones_B.double(), accumulate=True)
        state.queue_LD[state.position % 7] = projection_BD.detach()[0, :3]
        state.position.add_(1)

    # ------------------------------------------------------------------------ the end of an epoch

    def scoring(self, epoch):
        return Scoring(self.score_all, weak_views=2 if epoch == 0 else 1, fixed_shapes=False)

    def score_all(self, scorer, state):
        self.score_and_flag(scorer, state)
        for rows, (plain_BC, *weak) in scorer.logits(weak=1, role="peer"):
            both_B = (plain_BC.softmax(1) + weak[0].softmax(1)).amax(1) / 2
            state.confidence_N[rows] = both_B.to(torch.bfloat16)
        centre_D = scorer.projections().mean(0)
        near_N = scorer.projections() @ centre_D
        state.hard_N.copy_(near_N + state.loss_N > (near_N + state.loss_N).quantile(0.6))

    def verdict(self, state, epoch):
        known = Verdict(state.noisy_N, state.p_noisy_N, state.loss_N, state.predicted_N)
        return known._replace(
            suggested_N=state.average_NC.argmax(1), trust_N=state.confidence_N.float()
        )
