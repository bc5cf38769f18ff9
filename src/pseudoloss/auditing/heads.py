"""Cross-validated softmax regressions on frozen features, all folds and repeats at once.

N images, D features, C classes, R repeats, K folds. There is one head per repeat and fold, H = R·K
heads in all, trained on the images outside its fold. The heads are the columns of one matrix, so a
gradient is two matrix products per chunk of images. Several processes have all images and compute
the gradient of a part of them each.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.data.loops import Progress, no_progress
from pseudoloss.errors import InputError
from pseudoloss.nn.devices import cpu_threads

STEPS = 60  # L-BFGS iterations
HISTORY = 10  # ... and the gradients it remembers
CHUNK_VALUES = 2**23  # logits computed at a time
LARGE = 10**8  # multiplications in a matrix product that is worth more than one CPU thread
LEAST_SPREAD = 0.1  # standard deviation that a feature of a head start counts with, relative


class Standardised(NamedTuple):
    """Features (x - mean) · scale, with mean 0 and standard deviation 1/√D."""

    x_ND: Tensor  # float32
    mean_D: Tensor  # float64, as the scale
    scale_D: Tensor


def normalise(features_ND: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """Features with mean 0 and standard deviation 1/√D, as float32 on the device.

    Raises:
        InputError: not a matrix, or a value is NaN or infinite.
    """
    return standardise(features_ND, device).x_ND


def standardise(
    features_ND: np.ndarray, device: torch.device | str = "cpu", least: float = 0.0
) -> Standardised:
    """`normalise`, with what was subtracted and multiplied by. Standard deviations
    below `least` times their root mean square count as if they were that large."""
    if features_ND.ndim != 2 or 0 in features_ND.shape:
        raise InputError(f"features: expected N × D values, not the shape {features_ND.shape}")
    N, D = features_ND.shape
    out_ND = torch.empty(N, D, device=device)
    for rows in _chunks(N, D):
        out_ND[rows] = torch.from_numpy(np.array(features_ND[rows], dtype=np.float32)).to(device)
        bad_N = ~out_ND[rows].isfinite().all(1)
        if bad_N.any():
            row = rows.start + int(bad_N.nonzero()[0, 0])
            raise InputError(f"features: row {row} has a value that is NaN or infinite")
    mean_D = out_ND.mean(0, dtype=torch.float64)
    square_D = torch.zeros_like(mean_D)
    for rows in _chunks(N, D):
        square_D += ((out_ND[rows].double() - mean_D) ** 2).sum(0)
    spread_D = (square_D / N).sqrt()
    floor = least * float(spread_D.square().mean().sqrt())
    scale_D = 1 / ((spread_D.clamp(min=floor) + 1e-6) * D**0.5)
    out_ND.sub_(mean_D.float()).mul_(scale_D.float())
    return Standardised(out_ND, mean_D, scale_D)


def assign_folds(
    given_N: np.ndarray, folds: int, repeats: int, seed: int, groups_N: np.ndarray | None = None
) -> np.ndarray:
    """(R, N): the fold of each image in each repeat.

    Every class is spread over the folds as evenly as possible. Images with the same value in
    `groups_N` (duplicates) are in one fold.
    """
    N = len(given_N)
    if groups_N is None:
        first_G, group_N = np.arange(N), np.arange(N)
    else:
        _, first_G, group_N = np.unique(groups_N, return_index=True, return_inverse=True)
    random = np.random.default_rng([seed, 1])
    fold_RN = np.empty((repeats, N), dtype=np.int64)
    for fold_N in fold_RN:
        order_G = random.permutation(len(first_G))
        order_G = order_G[np.argsort(given_N[first_G[order_G]], kind="stable")]
        fold_G = np.empty(len(first_G), dtype=np.int64)
        fold_G[order_G] = (np.arange(len(order_G)) + random.integers(folds)) % folds
        fold_N[:] = fold_G[group_N]
    return fold_RN


def out_of_fold(
    features_ND: Tensor,
    targets: Tensor,
    fold_RN: Tensor,
    classes: int,
    l2: float,
    *,
    weights_N: Tensor | None = None,
    what: str = "heads",
    progress: Progress = no_progress,
) -> Tensor:
    """(N, C): the mean over repeats of the predictions for each image by the heads whose training
    images do not include it.

    Args:
        features_ND: normalised features.
        targets: (N,) labels, or (N, C) probabilities.
        fold_RN: the fold of each image in each repeat.
        classes: number of classes.
        l2: weight of the squared norm of each head beside its mean loss.
        weights_N: of the images in the loss; None: 1 for each.
        what: named to `progress`.
        progress: is told of the iterations.
    """
    N, D = features_ND.shape
    R, K = len(fold_RN), int(fold_RN.max()) + 1
    H, C = R * K, classes
    device = features_ND.device
    head_of_NR = fold_RN.T + torch.arange(R, device=device) * K
    weight_N = torch.ones(N, device=device) if weights_N is None else weights_N
    out_H = torch.zeros(H, device=device)
    for r in range(R):
        out_H.index_add_(0, head_of_NR[:, r], weight_N)
    scale_H = 1 / (weight_N.sum() - out_H).clamp(min=1e-12)
    parameters = torch.zeros(D + 1, H * C, device=device, requires_grad=True)
    parameters.grad = torch.zeros_like(parameters)
    optimiser = torch.optim.LBFGS(
        [parameters], max_iter=STEPS, history_size=HISTORY, line_search_fn="strong_wolfe"
    )
    evaluations = 0
    own = distributed.part(N)
    threads = _threads_for((own.stop - own.start) * D * H * C)

    def keep(rows: slice) -> Tensor:  # n, H: weight of each image in the loss of each head
        weight_NH = weight_N[rows, None] * scale_H
        return weight_NH.scatter(1, head_of_NR[rows], 0.0)

    @torch.no_grad()
    def closure() -> float:
        nonlocal evaluations
        evaluations += 1
        progress(what, min(evaluations, STEPS), STEPS)
        with cpu_threads(threads):
            return evaluate()

    def evaluate() -> float:
        W, b = parameters[:D], parameters[D]
        grad = cast(Tensor, parameters.grad)
        torch.mul(W, 2 * l2, out=grad[:D])
        grad[D] = 0
        loss = l2 * (W**2).sum(dtype=torch.float64)
        if not distributed.is_main():  # added up below
            grad.zero_()
            loss.zero_()
        for rows in _chunks(N, H * C, own):
            x_ND = features_ND[rows]
            n = len(x_ND)
            logp_NHC = torch.addmm(b, x_ND, W).view(n, H, C).log_softmax(2)
            keep_NH = keep(rows)
            delta_NHC = logp_NHC.exp()
            if targets.ndim == 1:
                label_NH1 = targets[rows, None, None].expand(n, H, 1)
                own_NH = logp_NHC.gather(2, label_NH1)[:, :, 0]
                delta_NHC.scatter_add_(2, label_NH1, torch.full_like(own_NH, -1.0)[..., None])
            else:
                own_NH = torch.einsum("nhc,nc->nh", logp_NHC, targets[rows])
                delta_NHC -= targets[rows, None]
            loss -= (own_NH * keep_NH).sum(dtype=torch.float64)
            delta = delta_NHC.mul_(keep_NH[..., None]).view(n, H * C)
            grad[:D].addmm_(x_ND.T, delta)
            grad[D] += delta.sum(0)
        distributed.add_up(grad)
        distributed.add_up(loss)
        return float(loss)

    with cpu_threads(1):  # between two evaluations there are many small operations
        optimiser.step(closure)
    with torch.no_grad(), cpu_threads(threads):
        W, b = parameters[:D], parameters[D]
        prob_NC = torch.zeros(N, C, device=device)
        for rows in _chunks(N, H * C, own):
            n = len(prob_NC[rows])
            prob_NHC = torch.addmm(b, features_ND[rows], W).view(n, H, C).softmax(2)
            own_NR1 = head_of_NR[rows, :, None].expand(n, R, C)
            prob_NC[rows] = prob_NHC.gather(1, own_NR1).mean(1)
        distributed.exchange_parts(prob_NC)
    progress(what, STEPS, STEPS)
    return prob_NC


@torch.enable_grad()
def fit_head(
    features_ND: np.ndarray, targets_NC: Tensor, l2: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """One softmax regression on all images: its weights (C,D) and bias (C), for features that are
    not normalised. The sum of a row of `targets_NC` is the weight of the image.

    Features that hardly vary get no large weights: with those, the first steps of training would
    spoil a network.
    """
    x_ND, mean_D, scale_D = standardise(features_ND, device, LEAST_SPREAD)
    targets_NC = targets_NC.to(device)
    (N, D), C = x_ND.shape, targets_NC.shape[1]
    scale = 1 / float(targets_NC.sum().clamp(min=1e-12))
    parameters = torch.zeros(D + 1, C, device=device, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [parameters], max_iter=STEPS, history_size=HISTORY, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimiser.zero_grad()
        W, b = parameters[:D], parameters[D]
        loss = l2 * (W**2).sum()
        loss.backward()
        total = float(loss.detach())
        with cpu_threads(threads):
            for rows in _chunks(N, C):
                log_NC = torch.addmm(b, x_ND[rows], W).log_softmax(1)
                loss = -(targets_NC[rows] * log_NC).sum() * scale
                loss.backward()
                total += float(loss.detach())
                W, b = parameters[:D], parameters[D]
        return total

    threads = _threads_for(N * D * C)
    with cpu_threads(1):
        optimiser.step(closure)
    W_DC = parameters[:D].detach().double() * scale_D[:, None]
    bias_C = parameters[D].detach().double() - mean_D @ W_DC
    return W_DC.T.float(), bias_C.float()


def _threads_for(multiplications: int) -> int:
    """CPU threads for a matrix product."""
    return torch.get_num_threads() if multiplications >= LARGE else 1


def _chunks(rows: int, values_per_row: int, own: slice | None = None) -> list[slice]:
    """Of all rows, or of the `own` ones."""
    size = max(1, CHUNK_VALUES // values_per_row)
    first, last = (0, rows) if own is None else (own.start, own.stop)
    return [slice(start, min(start + size, last)) for start in range(first, last, size)]
