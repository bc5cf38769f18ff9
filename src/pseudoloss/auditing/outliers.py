"""Images that belong to no class.

An image is one if its label is probably wrong, no other label is certain, and no class is near.
Near is measured by the Mahalanobis distance to the nearest class mean, less the distance to the
mean of all images (Ren et al. 2021), beside that of confidently labelled images.

N images, D features, P directions, C classes.
"""

import numpy as np
import torch
from torch import Tensor

from pseudoloss.auditing.neighbours import BLOCK, principal_directions, unit_rows

DIRECTIONS = 128
SHRINKAGE = 0.1  # of the covariances towards a sphere
FOLDS = 5  # an image is not measured by statistics that it is part of
MIN_WEIGHT = 1.5  # images of a class, without those that are probably wrong, that make a mean
CONFIDENT = 0.1  # up to this probability of being wrong, a label counts as right
FAR = 1.0  # standard deviations beyond the usual distance at which an image is halfway an outlier
OUTLIER = 0.5  # from this score on, an image counts as an outlier


def outlier_scores(
    features_ND: np.ndarray,
    given_N: np.ndarray,
    p_noisy_N: np.ndarray,
    trust_N: np.ndarray,
    classes: int,
    *,
    groups_N: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    seed: int = 1,
) -> np.ndarray:
    """From 0 to 1, how much an image seems to belong to no class.

    Args:
        features_ND: one row per image.
        given_N: labels, 0 to `classes` - 1.
        p_noisy_N: probability that the given label is wrong.
        trust_N: probability that the best other label is right. It is not taken at its word, since
            a classifier has no class for outliers.
        classes: number of classes.
        groups_N: images with the same value (duplicates) are measured together.
        device: of the computation.
        seed: of the folds.
    """
    far_N = class_distances(
        features_ND, given_N, 1 - p_noisy_N, classes, groups_N=groups_N, device=device, seed=seed
    )
    sure_N = p_noisy_N <= CONFIDENT
    usual = far_N[sure_N] if sure_N.sum() >= 2 * FOLDS else far_N
    centre = np.median(usual)
    spread = 1.4826 * np.median(np.abs(usual - centre))  # as the standard deviation of a Gaussian
    z_N = (far_N - centre) / max(float(spread), 1e-9)
    far_N = 1 / (1 + np.exp(-np.clip(z_N - FAR, -50, 50)))
    return np.asarray(p_noisy_N * (1 - trust_N / 2) * far_N)


def class_distances(
    features_ND: np.ndarray,
    given_N: np.ndarray,
    weight_N: np.ndarray,
    classes: int,
    *,
    groups_N: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    seed: int = 1,
) -> np.ndarray:
    """Squared Mahalanobis distance to the nearest class mean less that to the mean of all images,
    by the statistics of the other folds; images count with their weights."""
    count = len(given_N)
    rows = np.arange(count)
    basis_DP = principal_directions(features_ND, rows, DIRECTIONS, device, seed)
    x_NP = torch.cat(
        [
            unit_rows(features_ND, rows[start : start + BLOCK], device) @ basis_DP
            for start in range(0, count, BLOCK)
        ]
    )
    x_NP -= x_NP.mean(0)
    label_N = torch.from_numpy(given_N).to(device)
    weight = torch.from_numpy(np.asarray(weight_N, dtype=np.float32)).to(device)
    groups = rows if groups_N is None else np.unique(groups_N, return_inverse=True)[1]
    drawn_G = np.random.default_rng([seed, 0x0D]).permutation(int(groups.max()) + 1) % FOLDS
    fold_N = torch.from_numpy(drawn_G[groups]).to(device)
    far_N = torch.zeros(count, device=device)
    for fold in range(min(FOLDS, count)):
        inside_N = fold_N == fold
        if inside_N.any() and not inside_N.all():
            weight_other_N = weight.masked_fill(inside_N, 0)
            far_N[inside_N] = _distances(x_NP, label_N, weight_other_N, inside_N, classes)
    return far_N.cpu().double().numpy()


def _distances(
    x_NP: Tensor, label_N: Tensor, weight_N: Tensor, inside_N: Tensor, classes: int
) -> Tensor:
    """The distances of the images inside a fold; `weight_N` is 0 there."""
    directions = x_NP.shape[1]
    weight_C = torch.zeros(classes, device=x_NP.device).index_add_(0, label_N, weight_N)
    mean_CP = torch.zeros(classes, directions, device=x_NP.device)
    mean_CP.index_add_(0, label_N, x_NP * weight_N[:, None])
    mean_CP /= weight_C.clamp(min=1e-6)[:, None]
    within_PP = torch.zeros(directions, directions, device=x_NP.device)
    overall_PP = torch.zeros_like(within_PP)
    for start in range(0, len(x_NP), BLOCK):
        part = slice(start, start + BLOCK)
        rest_BP = (x_NP[part] - mean_CP[label_N[part]]) * weight_N[part, None].sqrt()
        within_PP += rest_BP.T @ rest_BP
        outside_BP = x_NP[part] * (~inside_N[part])[:, None]
        overall_PP += outside_BP.T @ outside_BP
    within_PP = _inverse(within_PP / weight_N.sum().clamp(min=1e-6))
    overall_PP = _inverse(overall_PP / (~inside_N).sum())
    known_C = weight_C >= MIN_WEIGHT
    if not known_C.any():
        return torch.zeros(int(inside_N.sum()), device=x_NP.device)
    mean_CP = mean_CP[known_C]
    mean_C = ((mean_CP @ within_PP) * mean_CP).sum(1)
    found = []
    for x_BP in x_NP[inside_N].split(BLOCK):
        scaled_BP = x_BP @ within_PP
        nearest_B = (mean_C - 2 * scaled_BP @ mean_CP.T).amin(1)
        overall_B = ((x_BP @ overall_PP) * x_BP).sum(1)
        found.append((scaled_BP * x_BP).sum(1) + nearest_B - overall_B)
    return torch.cat(found)


def _inverse(covariance_PP: Tensor) -> Tensor:
    """The inverse of a covariance that is shrunk towards a sphere."""
    double = covariance_PP.cpu().double()
    size = len(double)
    sphere = max(float(double.trace()) / size, 1e-12) * torch.eye(size, dtype=torch.float64)
    inverse: Tensor = torch.linalg.inv((1 - SHRINKAGE) * double + SHRINKAGE * sphere)
    return inverse.float().to(covariance_PP.device)
