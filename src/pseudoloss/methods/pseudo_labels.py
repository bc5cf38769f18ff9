"""The state of PLS, with the last pseudo-label of every image.

Pseudo-labels are kept whole where there is room for N×C numbers. In larger datasets only the most
likely classes of each are kept, and the rest counts as spread evenly over the other classes.

Shapes: N images, B of them in a batch, C classes, K of them kept.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pseudoloss.methods.base import LabelState

WHOLE = 2**30  # bytes: up to here pseudo-labels are kept whole
KEPT = 10  # classes kept of each beyond that
KEPT_OF_MANY = 8  # ... where a class number needs four bytes


@dataclass(frozen=True)
class PLSState(LabelState):
    """What PLS knows about every image."""

    pseudo_loss_N: Tensor  # cross-entropy of the plain view and the pseudo-label (Eq. 2)
    trust_N: Tensor  # w: P(low mode) of the pseudo-loss; 1 where the label is not noisy
    trust_fitted: Tensor  # bool, scalar: the pseudo-losses have two modes
    share_NK: Tensor  # pseudo-labels: the share of each class, or of the K most likely classes
    class_NK: Tensor  # int16 or int32: which classes these are; no columns where all are kept
    rest_N: Tensor  # share of all other classes together; no columns where all are kept
    classes: int

    @classmethod
    def begin(cls, given_N: Tensor, classes: int, whole: float = WHOLE, **more: Tensor) -> Self:
        """Before training, the pseudo-label of an image is its given label.

        Pseudo-labels are kept whole where they take at most `whole` bytes. `more`: what a state
        that extends this one has on top.
        """
        N, device = len(given_N), given_N.device
        few = classes < 2**15
        kind = torch.int16 if few else torch.int32
        zero_N = torch.zeros(N, device=device)
        if 4 * N * classes <= whole or classes <= KEPT:
            share_NK = torch.zeros(N, classes, device=device)
            share_NK.scatter_(1, given_N[:, None], 1)
            class_NK, rest_N = torch.empty(N, 0, dtype=kind, device=device), zero_N[:, None][:, :0]
        else:
            K = min(classes, KEPT if few else KEPT_OF_MANY)
            share_NK = torch.zeros(N, K, device=device)
            share_NK[:, 0] = 1
            class_NK = torch.empty(N, K, dtype=kind, device=device)
            for k in range(K):
                class_NK[:, k] = (given_N + k) % classes
            rest_N = zero_N.clone()
        return cls(
            **LabelState.start(given_N, classes),
            pseudo_loss_N=zero_N.clone(),
            trust_N=torch.ones(N, device=device),
            trust_fitted=torch.zeros((), dtype=torch.bool, device=device),
            share_NK=share_NK,
            class_NK=class_NK,
            rest_N=rest_N,
            classes=classes,
            **more,
        )

    @property
    def is_whole(self) -> bool:
        return self.class_NK.shape[1] == 0

    @property
    def pseudo_class_N(self) -> Tensor:
        """The most likely class of each pseudo-label."""
        return self.share_NK.argmax(1) if self.is_whole else self.class_NK[:, 0].long()

    def store(self, index_B: Tensor, pseudo_BC: Tensor) -> None:
        """Replace the pseudo-labels of some images; they need not sum to one."""
        if self.is_whole:
            self.share_NK[index_B] = pseudo_BC
            return
        share_BK, class_BK = pseudo_BC.topk(self.class_NK.shape[1], dim=1)
        self.class_NK[index_B] = class_BK.to(self.class_NK.dtype)
        self.share_NK[index_B] = share_BK
        self.rest_N[index_B] = pseudo_BC.scatter(1, class_BK, 0).sum(1)

    def pseudo_labels(self, rows: slice | Tensor) -> Tensor:
        """The pseudo-labels of some images: (B,C)."""
        if self.is_whole:
            return self.share_NK[rows]
        class_BK, share_BK = self.class_NK[rows].long(), self.share_NK[rows]
        others = max(self.classes - class_BK.shape[1], 1)
        even_B1 = self.rest_N[rows, None] / others
        return even_B1.repeat(1, self.classes).scatter_(1, class_BK, share_BK)
