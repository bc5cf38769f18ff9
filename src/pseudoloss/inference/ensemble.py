"""Several networks that predict together."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from pseudoloss.nn.networks import Network


class Ensemble(nn.Module):
    """The mean of the members' logits, and the projection of the first one."""

    def __init__(self, members: Sequence[Network]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x_BChw: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [member(x_BChw) for member in self.members]
        logits_BC = torch.stack([logits for logits, _ in outputs]).mean(0)
        return logits_BC, outputs[0][1]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.frozen())  # type: ignore[operator]
            yield
