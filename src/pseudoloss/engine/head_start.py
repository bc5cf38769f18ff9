"""A head start for pretrained networks: a linear head on their frozen features.

The features of the training images are audited (self_audit.py), and the head is fitted to the
labels as the audit corrects them. It replaces the new classifier, whose random weights would first
have to be trained on the given labels, and would spoil the backbone meanwhile.

Shapes: N images, M of them in a sample, C classes, D features.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.auditing.heads import fit_head
from pseudoloss.auditing.scoring import LabelScores
from pseudoloss.engine.randomness import stream_seed
from pseudoloss.engine.self_audit import audit_device, self_audit, training_features
from pseudoloss.engine.trainer import Trainer


@torch.no_grad()
def head_start(trainer: Trainer) -> None:
    """Replace the classifier of every network. Networks with peers learn from other samples of the
    images, so that they differ. The backbones are still the same."""
    features_ND = training_features(trainer)
    scores = self_audit(trainer, features_ND)
    if trainer.first_audit is not None:
        trainer.first_audit.fill(scores)
    targets_NC = corrected_labels(scores, trainer.given_N.cpu(), trainer.classes)
    for number, role in enumerate(trainer.method.networks):
        rows_M = sample_of(len(features_ND), number, trainer.settings.seed)
        weight_CD, bias_C = fit_head(
            features_ND[rows_M], targets_NC[rows_M], scores.details["l2"], audit_device(trainer)
        )
        followers = [name for name, ema in trainer.method.ema.items() if ema.of == role]
        for name in (role, *followers):
            trainer.networks[name].classifier.weight.copy_(weight_CD)
            trainer.networks[name].classifier.bias.copy_(bias_C)
    trainer.reporter.say(
        "Head start: a linear head on frozen features, fitted to corrected labels; about "
        f"{scores.noise.rate:.1%} of the given labels look wrong"
    )


def corrected_labels(scores: LabelScores, given_N: Tensor, classes: int) -> Tensor:
    """(N,C): the given label and the candidate, each with its probability of being right. The sum
    of a row is the weight of its image: it is small if neither is trusted."""
    found_NC = torch.zeros(len(given_N), classes)
    for label_N, right_N in (
        (given_N, 1 - scores.p_noisy_N),
        (torch.from_numpy(scores.candidate_N), scores.trust_N),
    ):
        found_NC += F.one_hot(label_N, classes) * torch.from_numpy(right_N).float()[:, None]
    return found_NC


def sample_of(count: int, number: int, seed: int) -> np.ndarray:
    """All images for the first network, a sample with replacement for its peers."""
    if number == 0:
        return np.arange(count)
    random = np.random.default_rng(stream_seed(seed, f"head start {number + 1}"))
    return np.sort(random.integers(count, size=count))
