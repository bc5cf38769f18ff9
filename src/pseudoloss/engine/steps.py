"""One update of the networks as a call without arguments: plain, or compiled and captured."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.engine.building import follow
from pseudoloss.engine.capture import Call, capture, compiled, first_try
from pseudoloss.engine.feed import Feed
from pseudoloss.engine.shares import gather_outputs, show_next_share, show_share
from pseudoloss.methods.base import Batch, Ema, Outputs, Step, ViewBatch, joined
from pseudoloss.nn.networks import Network
from pseudoloss.nn.views import Views

Accelerate = str  # "auto", "full", "capture" or "off"


class Tally(NamedTuple):
    """What the steps of an epoch add up, on the device."""

    loss_sum: Tensor  # of the steps that were not skipped
    skipped: Tensor  # number of steps without an update, because something was not finite
    bad: Tensor  # 1 if the present step is one of them, else 0
    idle: Tensor  # number of steps that train nothing, so that their loss does not count

    @staticmethod
    def on(device: torch.device) -> "Tally":
        shapes = ((), (), (1,), ())
        return Tally(*(torch.zeros(shape, device=device) for shape in shapes))


def forward(network: Network, shown: ViewBatch) -> Outputs:
    """What a network makes of its views: those in evaluation mode first, then those without
    gradients."""
    in_eval = []
    if shown.in_eval:
        with torch.no_grad(), network.frozen():
            in_eval = network.forward_views(*shown.in_eval)
        network.train()
    count, views = len(shown.no_grad), [*shown.no_grad, *shown.with_grad]
    outputs = network.forward_views(*views, no_grad=count) if views else []
    return Outputs(outputs[:count], outputs[count:], in_eval)


def make_step(
    step: Step,
    feed: Feed,
    networks: Mapping[str, Network],
    optimisers: Mapping[str, torch.optim.Optimizer],
    emas: Mapping[str, Ema],
    views: Views,
    state: Any,
    tally: Tally,
    accelerate: Accelerate,
    notice: Callable[[str], None],
    use_plain_ops: Callable[[], None],
) -> Call[None]:
    """A call that trains on the present batch of the feed, adds its loss to the tally and moves on
    to the next batch. Shapes are fixed and nothing is read back to the host.

    If an output, the loss or a gradient is not finite, the step is counted and changes neither
    weights nor momentum nor running statistics.

    `notice` is told when the step cannot be compiled or captured; `use_plain_ops` then makes the
    networks use plain layers.
    """
    trained = [optimisers[role] for role in step.trains]
    several = distributed.active()
    weights = [p for optimiser in trained for p in optimiser.param_groups[0]["params"]]
    followers = {role: ema for role, ema in emas.items() if ema.of in step.trains}
    follow_views = {*step.trains, *step.moves_norms}
    moving = [s for role in networks if role in follow_views for s in norms_of(networks[role])]
    resting = [s for role in networks if role not in follow_views for s in norms_of(networks[role])]
    one = torch.ones_like(tally.bad)
    found_inf = tally.bad.view(())  # the shape that torch's optimisers expect
    can_skip = tally.bad.device.type != "mps"  # torch has no fused SGD there

    def outputs_of(shown: dict[str, ViewBatch]) -> dict[str, Outputs]:
        outputs = {role: forward(networks[role], seen) for role, seen in shown.items()}
        if several:
            outputs = {role: gather_outputs(found) for role, found in outputs.items()}
        return outputs

    def run(show: Any, show_next: Any, loss_of: Any) -> None:
        before = torch.cat(moving) if moving else None
        at_rest = torch.cat(resting) if resting else None
        for optimiser in trained:
            optimiser.zero_grad(set_to_none=True)
        losses, raw = [], []
        for part in range(feed.parts):
            batch = feed.batch(part)
            if step.mixes_within is not None:
                batch = batch.mixed_within(step.mixes_within(state))
            shown = show_share(step, show, views, batch) if several else show(views, batch)
            outputs = outputs_of(shown)
            if show_next is not None:
                seen = (batch, outputs, state)
                if several:
                    shown = show_next_share(step, show_next, views, *seen)
                else:
                    shown = show_next(views, *seen)
                outputs = joined(outputs, outputs_of(shown))
            loss = loss_of(outputs, batch, state) / feed.parts
            if trained:
                loss.backward()
            losses.append(loss.detach())
            raw += [t.detach() for found in outputs.values() for t in tensors_in(found)]
        if several and trained:
            distributed.add_up_gradients(weights)
        tally.bad.zero_()
        grads = [p.grad for p in weights if p.grad is not None]
        if can_skip:  # sets `bad` to 1 if anything is not finite, and multiplies all by one
            every = [*grads, *losses, *raw]
            torch._amp_foreach_non_finite_check_and_unscale_(every, tally.bad, one)
        is_bad = tally.bad[0] > 0
        if not trained:
            tally.idle.add_(~is_bad)
        for loss in losses if trained else ():
            tally.loss_sum.add_(torch.where(is_bad, 0, loss))
        tally.skipped.add_(is_bad)
        for optimiser in trained:
            if can_skip:
                optimiser.found_inf = found_inf  # type: ignore[attr-defined]  # 1: no update
            optimiser.step()
        if before is not None:
            kept = torch.where(is_bad, before, torch.cat(moving))
            torch._foreach_copy_(moving, kept.split([len(s) for s in moving]))
        if at_rest is not None:
            torch._foreach_copy_(resting, at_rest.split([len(s) for s in resting]))
        for role, ema in followers.items():
            follow(networks[role], networks[ema.of], ema, state, is_bad)
        feed.step += 1

    def loss_of_finite(outputs: dict[str, Outputs], batch: Batch, state: Any) -> Tensor:
        """With zeros in place of what is not finite: a loss may write to the state of the images,
        and a step that is skipped must not leave NaN there."""
        return step.loss({role: finite(found) for role, found in outputs.items()}, batch, state)

    def failed_to_compile(reason: str) -> None:
        use_plain_ops()
        notice(f"the step could not be compiled and runs slower ({reason})")

    call: Call[None] = partial(run, step.show, step.show_next, loss_of_finite)
    if accelerate in ("auto", "full"):
        show_next = None if step.show_next is None else compiled(step.show_next)
        fast = partial(run, compiled(step.show), show_next, compiled(loss_of_finite))
        call = first_try(fast, call, failed_to_compile)
    if accelerate == "off":
        return call
    return capture(
        call, lambda reason: notice(f"the step could not be captured and runs slower ({reason})")
    )


def finite(outputs: Outputs) -> Outputs:
    """The outputs, with 0 in place of NaN and infinity."""

    def cleaned(t: Tensor) -> Tensor:
        return torch.nan_to_num(t, 0.0, 0.0, 0.0)

    return Outputs(*([tuple(map(cleaned, view)) for view in kind] for kind in outputs))


def tensors_in(outputs: Outputs) -> list[Tensor]:
    return [t for kind in outputs for view in kind for t in view]


def parameters_of(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimiser.param_groups for p in group["params"]]


def norms_of(network: Network) -> list[Tensor]:
    """The means and variances that the norms of a network keep, which a forward pass changes."""
    found = [
        getattr(module, name, None)
        for module in network.modules()
        for name in ("running_mean", "running_var")
    ]
    return [values for values in found if isinstance(values, Tensor)]
