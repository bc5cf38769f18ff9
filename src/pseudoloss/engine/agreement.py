"""Do fast steps train the same network as plain steps? Both run from the same weights with the same
random numbers; the distance between their weights is compared with how far the plain steps went.

`benchmarks/agreement.py` compares every variant, `pseudoloss doctor` one of them on your machine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pseudoloss.config import Settings
from pseudoloss.data import Data
from pseudoloss.engine import checkpoint
from pseudoloss.engine.capture import PLAIN_CALLS
from pseudoloss.engine.randomness import isolated_torch
from pseudoloss.engine.trainer import Trainer
from pseudoloss.progress import SilentReporter

NOISY = 0.4  # share of the images that are flagged after the warm-up


class NoticeReporter(SilentReporter):
    """Keeps the notices: there is one if a step could not be captured."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


class Phase(NamedTuple):
    """A phase: its state at the start, the weights after each number of steps, and the losses of
    all images at the end."""

    start: dict[str, Tensor]
    weights: list[Tensor]
    losses_N: Tensor


def run_phases(
    data: Data,
    settings: Settings,
    steps: Sequence[int],
    like: list[Phase] | None = None,
    nudge: bool = False,
) -> tuple[list[Phase], list[str]]:
    """Run both phases; with `like`, each from the state at which that run started it."""
    reporter = NoticeReporter()
    phases = []
    with isolated_torch():
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        trainer = Trainer(data, settings, reporter)
        state = checkpoint.checkpoint_tensors(trainer)
        for epoch in range(2):
            if like:
                for name, tensor in state.items():
                    tensor.copy_(like[epoch].start[name])
            elif epoch:
                flag_at_random(trainer)
            if nudge:
                torch._foreach_mul_(parameters(trainer), 1 + torch.finfo(torch.float32).eps)
            start = {name: tensor.clone() for name, tensor in state.items()}
            phase = Phase(start, [], torch.empty(0))
            random = torch.Generator(trainer.device).manual_seed(epoch)
            trainer.lr.fill_(settings.lr)
            trainer.method.begin_epoch(trainer.state, epoch)
            for prepared in trainer.steps[trainer.phase_of(epoch)[0]]:
                for i, _ in enumerate(trainer.run_steps(prepared, random, max(steps))):
                    if i + 1 in steps:
                        phase.weights.append(flat(parameters(trainer)))
            for _ in range(PLAIN_CALLS + 2):  # the last one is a replay
                trainer.score(epoch)
            phases.append(phase._replace(losses_N=trainer.state.loss_N.double()))
        torch.use_deterministic_algorithms(False)
    return phases, reporter.notices


def flag_at_random(trainer: Trainer) -> None:
    """Random verdicts in place of those of both stages: so early in training all pseudo-labels are
    fully trusted, and perhaps no label is flagged."""
    random = torch.Generator(trainer.device).manual_seed(2)
    state = trainer.state
    state.noisy_N.copy_(draw(state.noisy_N, random) < NOISY)
    if hasattr(state, "trust_N"):
        trust_N = draw(state.trust_N, random)
        state.trust_N.copy_(torch.where(state.noisy_N, trust_N, 1))


def draw(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=random, device=like.device)


def parameters(trainer: Trainer) -> list[Tensor]:
    return [p.detach() for role in trainer.optimisers for p in trainer.networks[role].parameters()]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def distances(plain: list[Phase], other: list[Phase]) -> dict[str, list[float]]:
    """For both phases, after each number of steps: the distance, in parts of the way that plain
    calls went. Networks that are trained in turn have a number of steps each."""
    found = {}
    for name, a, b in zip(("warm-up", "main"), plain, other, strict=True):
        momenta = [key for key in a.start if key.startswith("momentum.")]
        start = flat([a.start[key.replace("momentum.", "networks.", 1)] for key in momenta])
        found[name] = [
            ((y - x).norm() / (x - start).norm()).item()
            for x, y in zip(a.weights, b.weights, strict=True)
        ]
        tracked = (b.losses_N - a.losses_N).norm() / a.losses_N.norm()
        found[f"{name}, losses of all images"] = [tracked.item()]
    return found
