"""One update of the networks as a call without arguments: plain, or compiled and captured."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.engine.building import follow
from pseudoloss.engine.capture import Call, capture, compiled, first_try
from pseudoloss.engine.feed import Feed
from pseudoloss.engine.shares import gather_outputs, show_share
from pseudoloss.methods.base import Ema, Outputs, Step, ViewBatch
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import Views

Accelerate = str  # "auto", "full", "capture" or "off"


def forward(network: Network, shown: ViewBatch, no_grad_in_eval: bool = False) -> Outputs:
    """What a network makes of its views, those without gradients first."""
    count = len(shown.no_grad)
    if not no_grad_in_eval or not count:
        outputs = network.forward_views(*shown.no_grad, *shown.with_grad, no_grad=count)
        return Outputs(outputs[:count], outputs[count:])
    network.eval()
    without = network.forward_views(*shown.no_grad, no_grad=count)
    network.train()
    return Outputs(without, network.forward_views(*shown.with_grad) if shown.with_grad else [])


def make_step(
    step: Step,
    feed: Feed,
    networks: Mapping[str, Network],
    optimisers: Mapping[str, torch.optim.Optimizer],
    emas: Mapping[str, Ema],
    views: Views,
    state: Any,
    loss_sum: Tensor,
    accelerate: Accelerate,
    notice: Callable[[str], None],
    use_plain_ops: Callable[[], None],
) -> Call[None]:
    """A call that trains on the present batch of the feed, adds its loss to `loss_sum` and moves on
    to the next batch. Shapes are fixed and nothing is read back to the host.

    `notice` is told when the step cannot be compiled or captured; `use_plain_ops` then makes the
    networks use plain layers.
    """
    trained = [optimisers[role] for role in step.trains]
    several = distributed.active()
    weights = [p for optimiser in trained for p in optimiser.param_groups[0]["params"]]
    followers = {role: ema for role, ema in emas.items() if ema.of in step.trains}

    def run(show: Any, loss_of: Any) -> None:
        for optimiser in trained:
            optimiser.zero_grad(set_to_none=True)
        for part in range(feed.parts):
            batch = feed.batch(part)
            shown = show_share(step, show, views, batch) if several else show(views, batch)
            outputs = {
                role: forward(networks[role], seen, step.no_grad_in_eval)
                for role, seen in shown.items()
            }
            if several:
                outputs = {role: gather_outputs(found) for role, found in outputs.items()}
            loss = loss_of(outputs, batch, state) / feed.parts
            loss.backward()
            loss_sum.add_(loss.detach())
        if several:
            distributed.add_up_gradients(weights)
        for optimiser in trained:
            optimiser.step()
        for role, ema in followers.items():
            follow(networks[role], networks[ema.of], ema, state)
        feed.step += 1

    def failed_to_compile(reason: str) -> None:
        use_plain_ops()
        notice(f"the step could not be compiled and runs slower ({reason})")

    call: Call[None] = partial(run, step.show, step.loss)
    if accelerate in ("auto", "full"):
        fast = partial(run, compiled(step.show), compiled(step.loss))
        call = first_try(fast, call, failed_to_compile)
    if accelerate == "off":
        return call
    return capture(
        call, lambda reason: notice(f"the step could not be captured and runs slower ({reason})")
    )
