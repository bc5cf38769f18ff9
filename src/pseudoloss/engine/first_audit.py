"""What the audit of a head start says about the training labels.

Fine-tuning soon learns wrong labels by heart, and frozen features have seen none. So the label
table of the run has the scores of this audit, if it knows the noise rate. It is part of every
checkpoint.

Shapes: N images.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pseudoloss.auditing.scoring import LabelScores as AuditScores
from pseudoloss.labels.table import LabelScores


class FirstAudit(NamedTuple):
    p_noisy_N: Tensor  # float32, as the next two
    trust_N: Tensor
    label_score_N: Tensor
    candidate_N: Tensor  # int64
    noise: Tensor  # float32: rate, low, high, and 1 if these are known

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "FirstAudit":
        """Not made yet."""
        zeros = partial(torch.zeros, device=device)
        return cls(
            zeros(count), zeros(count), zeros(count), zeros(count, dtype=torch.int64), zeros(4)
        )

    def fill(self, found: AuditScores) -> None:
        for name in ("p_noisy_N", "trust_N", "label_score_N", "candidate_N"):
            getattr(self, name).copy_(torch.from_numpy(getattr(found, name)))
        noise = found.noise
        values = [noise.rate, noise.low, noise.high, float(noise.known)]
        self.noise.copy_(torch.tensor(values))

    @property
    def known(self) -> bool:
        return bool(self.noise[3])

    @property
    def rates(self) -> tuple[float, float, float]:
        """The noise rate, and the ends of its interval."""
        rate, low, high, _ = self.noise.tolist()
        return rate, low, high

    def scores(self, predicted_N: np.ndarray) -> LabelScores:
        """For the label table; the classes are predicted by the trained network."""
        candidate_N, label_score_N, p_noisy_N, trust_N = (
            tensor.cpu().numpy().astype(np.int64 if tensor is self.candidate_N else np.float64)
            for tensor in (self.candidate_N, self.label_score_N, self.p_noisy_N, self.trust_N)
        )
        return LabelScores(predicted_N, candidate_N, label_score_N, p_noisy_N, trust_N)
