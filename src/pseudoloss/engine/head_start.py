"""A head start for pretrained networks: a linear head on their frozen features.

The features of the training images are audited (auditing/scoring.py), and the head is fitted to the
labels as the audit corrects them. It replaces the new classifier, whose random weights would first
have to be trained on the given labels, and would spoil the backbone meanwhile.

Shapes: N images, D features, C classes.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.auditing.heads import fit_head
from pseudoloss.auditing.scoring import LabelScores, score_labels
from pseudoloss.engine.randomness import stream_seed
from pseudoloss.engine.trainer import Trainer
from pseudoloss.inference.passes import images_at_once
from pseudoloss.methods.base import Method


def head_start(trainer: Trainer) -> None:
    """Replace the classifier of every network. Networks with peers learn from other samples of the
    images, so that they differ."""
    if trainer.classes < 2:
        return
    roles, report = source_roles(trainer.method), trainer.reporter
    features_ND = frozen_features(trainer)
    device = trainer.device if trainer.device.type == "cuda" else torch.device("cpu")
    scores = score_labels(
        features_ND,
        trainer.given_N.cpu().numpy(),
        trainer.classes,
        seed=trainer.settings.seed,
        device=device,
        progress=report.progress,
    )
    targets_NC = corrected_labels(scores, trainer.given_N.cpu().numpy(), trainer.classes)
    for number, role in enumerate(trainer.method.networks):
        rows_M = _sample(len(features_ND), number, trainer.settings.seed)
        weight_CD, bias_C = fit_head(
            features_ND[rows_M], targets_NC[rows_M], scores.details["l2"], device
        )
        for name in (name for name, source in roles.items() if source == role):
            with torch.no_grad():
                trainer.networks[name].classifier.weight.copy_(weight_CD)
                trainer.networks[name].classifier.bias.copy_(bias_C)
    wrong = f"about {scores.noise.rate:.1%} of the labels look wrong"
    report.say(f"Head start: a linear head on frozen features, fitted to corrected labels; {wrong}")


def source_roles(method: Method) -> dict[str, str]:
    """The trained network that each network is, or follows."""
    own = {role: role for role in method.networks}
    return own | {role: ema.of for role, ema in method.ema.items()}


@torch.no_grad()
def frozen_features(trainer: Trainer) -> np.ndarray:
    """What the backbone makes of the plain views: float32 (N,D). All backbones are the same before
    the first step."""
    network = trainer.networks[trainer.method.networks[0]]
    found, done = [], 0
    with network.frozen():
        for images_BCHW in trainer.images.parts(images_at_once(trainer.views)):
            features_BD = network.backbone(trainer.views.plain(images_BCHW))
            found.append(features_BD.float().cpu().numpy())
            done += len(images_BCHW)
            trainer.reporter.progress("features", done, len(trainer.images))
    return np.concatenate(found)


def corrected_labels(scores: LabelScores, given_N: np.ndarray, classes: int) -> Tensor:
    """The given label and the candidate, each with its probability of being right. The sum of a row
    is the weight of its image: it is small if neither is trusted."""
    right_N, trust_N = (
        torch.from_numpy(values).float() for values in (1 - scores.p_noisy_N, scores.trust_N)
    )
    given_NC, candidate_NC = (
        F.one_hot(torch.from_numpy(labels_N), classes).float()
        for labels_N in (given_N, scores.candidate_N)
    )
    return right_N[:, None] * given_NC + trust_N[:, None] * candidate_NC


def _sample(count: int, number: int, seed: int) -> np.ndarray:
    """All images for the first network, a sample with replacement for its peers."""
    if number == 0:
        return np.arange(count)
    random = np.random.default_rng(stream_seed(seed, f"head start {number + 1}"))
    return np.sort(random.integers(count, size=count))
