"""What is remembered of every image: a few device tensors as long as the image set.

The one mutable thing in the middle of a run. A method reads and writes it, the tracking pass
fills it, and checkpoints and the label table are views of it.

Its size does not grow with the number of classes: of a guess only the most likely classes are kept,
and what is left counts as spread evenly over the others.

Shapes: N images, B of them in a batch, C classes, K of them kept of a guess.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

KEPT = 10  # classes kept of a guess: with so many classes or fewer, it is kept whole
KEPT_OF_MANY = 8  # ... where a class needs four bytes


@dataclass(frozen=True)
class Memory:
    """N images long. The tensors are filled in place and never replaced, so a captured step
    keeps seeing them."""

    loss_N: Tensor  # cross-entropy of the plain view and the given label
    predicted_N: Tensor  # int32: class of the plain view
    p_noisy_N: Tensor  # stage 1: P(high mode) of the loss
    noisy_N: Tensor  # stage 1: the given label is taken for wrong
    guess_class_NK: Tensor  # int16 or int32: the most likely classes of the last guess, in order
    guess_share_NK: Tensor  # ... and what each has in it
    guess_rest_N: Tensor  # what all other classes have together
    pseudo_loss_N: Tensor  # cross-entropy of the plain view and the guess
    trust_N: Tensor  # stage 2: w, P(low mode) of the pseudo-loss; 1 where not noisy
    classes: int

    @classmethod
    def of(cls, given_N: Tensor, classes: int) -> "Memory":
        """Before anything is known: no image is noisy, and its guess is its given label."""
        N, device = len(given_N), given_N.device
        few = classes < 2**15
        K = min(classes, KEPT if few else KEPT_OF_MANY)
        class_NK = torch.empty(N, K, dtype=torch.int16 if few else torch.int32, device=device)
        for k in range(K):
            class_NK[:, k] = (given_N + k) % classes
        share_NK = torch.zeros(N, K, device=device)
        share_NK[:, 0] = 1
        zero = torch.zeros(N, device=device)
        return cls(
            loss_N=zero,
            predicted_N=given_N.int(),
            p_noisy_N=zero.clone(),
            noisy_N=torch.zeros(N, dtype=torch.bool, device=device),
            guess_class_NK=class_NK,
            guess_share_NK=share_NK,
            guess_rest_N=zero.clone(),
            pseudo_loss_N=zero.clone(),
            trust_N=torch.ones(N, device=device),
            classes=classes,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    def followed_by(self, others: "Memory") -> "Memory":
        """A copy, with what is remembered of other images behind it."""
        behind = others.tensors()
        both = {name: torch.cat([own, behind[name]]) for name, own in self.tensors().items()}
        return Memory(classes=self.classes, **both)

    def part(self, part: slice) -> "Memory":
        """What is remembered of some of the images."""
        some = {name: tensor[part] for name, tensor in self.tensors().items()}
        return Memory(classes=self.classes, **some)

    @property
    def guess_N(self) -> Tensor:
        """The most likely class of each guess."""
        return self.guess_class_NK[:, 0].long()

    def remember_guesses(self, index_B: Tensor, guess_BC: Tensor) -> None:
        """Put guesses in the place of the ones before; they need not sum to one."""
        share_BK, class_BK = guess_BC.topk(self.guess_class_NK.shape[1], dim=1)
        self.guess_class_NK[index_B] = class_BK.to(self.guess_class_NK.dtype)
        self.guess_share_NK[index_B] = share_BK
        self.guess_rest_N[index_B] = guess_BC.scatter(1, class_BK, 0).sum(1)

    def guesses(self, part: slice | Tensor) -> Tensor:
        """The guesses of some images, a number a class: (B, C)."""
        class_BK, share_BK = self.guess_class_NK[part].long(), self.guess_share_NK[part]
        others = max(self.classes - class_BK.shape[1], 1)
        even_B1 = self.guess_rest_N[part, None] / others
        return even_B1.repeat(1, self.classes).scatter_(1, class_BK, share_BK)
