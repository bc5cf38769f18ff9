"""What a method is given in a step, shows the network, and is told of it."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """B images, and the random numbers of the step. All shapes are the same in every step."""

    index_B: Tensor  # places in the image set
    images_BCHW: Tensor  # uint8
    given_B: Tensor
    partner_B: Tensor  # a permutation of the batch: whom each image is mixed with
    lam: Tensor  # λ of the step, a scalar tensor
    draws_BK: Tensor  # uniform, for the views


class ViewBatch(NamedTuple):
    """The views that the network is to see, in this order."""

    no_grad: list[Tensor]  # without gradients
    with_grad: list[Tensor]


class Outputs(NamedTuple):
    """Logits and projection of each view that was shown."""

    guessed: list[tuple[Tensor, Tensor]]
    learnt: list[tuple[Tensor, Tensor]]
