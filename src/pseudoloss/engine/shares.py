"""The share of a step that one of several processes computes.

All processes know the whole batch: its images, labels and random numbers. Each shows its networks
an equal share of the rows and gathers the outputs, so the loss is that of the whole batch, whatever
it does with the images in it: means, rankings, similarities of pairs, values to remember. Its
gradient with respect to the own rows goes back through the own network, and the gradients of the
weights are added up. So no method needs to know of this.

Shapes: B images in the batch, b of them in a process, W processes.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.errors import InputError
from pseudoloss.methods.base import Batch, Mix, Outputs, Step, ViewBatch


def check_batch(size: int, parts: int) -> None:
    """Refuse batches that cannot be divided evenly."""
    processes = distributed.size()
    if size % (parts * processes):
        each = f"the {parts} parts of " if parts > 1 else ""
        raise InputError(
            f"--batch-size: {each}batches of {size} images cannot be divided over {processes} "
            f"processes; use a multiple of {parts * processes}"
        )


def show_share(step: Step, show: Any, views: Any, batch: Batch) -> dict[str, ViewBatch]:
    """The views of the rows of this process."""
    if len(step.streams) > 1:  # views of one stream alone: their rows are known afterwards
        return _own_rows(show(views, batch))
    own, each, _ = _with_partners(batch)
    return _select(show(views, own), lambda view: view[:each])


def show_next_share(
    step: Step,
    show_next: Any,
    views: Any,
    batch: Batch,
    outputs: Mapping[str, Outputs],
    state: Any,
) -> dict[str, ViewBatch]:
    """The same of views that depend on outputs, which are those for the whole batch."""
    if len(step.streams) > 1:
        return _own_rows(show_next(views, batch, outputs, state))
    own, each, rows_X = _with_partners(batch)
    seen = {
        role: Outputs(*([tuple(t[rows_X] for t in view) for view in kind] for kind in found))
        for role, found in outputs.items()
    }
    return _select(show_next(views, own, seen, state), lambda view: view[:each])


def _own_rows(shown: dict[str, ViewBatch]) -> dict[str, ViewBatch]:
    return _select(shown, lambda view: view[distributed.own(len(view))])


def _select(shown: dict[str, ViewBatch], rows: Any) -> dict[str, ViewBatch]:
    return {
        role: ViewBatch(*([rows(view) for view in kind] for kind in found))
        for role, found in shown.items()
    }


def _with_partners(batch: Batch) -> tuple[Batch, int, Tensor]:
    """The rows of this process, then the rows that they are mixed with; how many are its own, and
    which rows of the batch these are."""
    own = distributed.own(len(batch.index_B))
    each, device = own.stop - own.start, batch.index_B.device
    rows_X = torch.cat(
        [torch.arange(own.start, own.stop, device=device)]
        + [mix.partner_B[own] for mix in batch.mixes]
    )
    everywhere_X = torch.arange(len(rows_X), device=device)
    mixes = tuple(
        Mix(torch.cat([everywhere_X[each * (i + 1) : each * (i + 2)], everywhere_X[each:]]), lam)
        for i, (_, lam) in enumerate(batch.mixes)
    )
    found = Batch(
        batch.index_B[rows_X],
        batch.images_BCHW[rows_X],
        batch.given_B[rows_X],
        mixes,
        batch.draws_BK[rows_X],
    )
    return found, each, rows_X


def gather_outputs(outputs: Outputs) -> Outputs:
    """The outputs for the whole batch, in one transfer."""
    no_grad, with_grad, in_eval = outputs
    count = len(with_grad)
    views = [*with_grad, *no_grad, *in_eval]
    wholes = iter(_Gather.apply(*(tensor for view in views for tensor in view)))  # type: ignore[no-untyped-call]
    found = [tuple(islice(wholes, len(view))) for view in views]
    free = [tuple(tensor.detach() for tensor in view) for view in found[count:]]
    return Outputs(free[: len(no_grad)], found[:count], free[len(no_grad) :])


class _Gather(torch.autograd.Function):
    """The rows (B, X) of all processes, of tensors (b, X). All processes compute the same loss of
    them, so the gradient is known without another transfer. What the loss does not use has no
    gradient: an unused head must not decay."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        flat_WL = distributed.gather(torch.cat([tensor.flatten() for tensor in tensors])[None])
        pieces = flat_WL.split([tensor.numel() for tensor in tensors], dim=1)
        pairs = zip(pieces, tensors, strict=True)
        return tuple(piece.reshape(-1, tensor.shape[1]) for piece, tensor in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if d is None else d[distributed.own(len(d))] for d in gradients)
