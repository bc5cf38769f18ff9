"""Stronger augmentations: AugMix, RandAugment, TrivialAugment and Cutout, batched on the device.

As in views.py, all of them are functions of images and of uniform random numbers from 0 to 1, so
they can be compiled and captured. Images hold whole numbers from 0 to 255, as float32. Every
operation gives what torchvision's function gives for 8-bit images and the same parameter.

Each image has its own operations: every kind is computed for the whole batch, and an image takes
the one that it asked for.

Shapes: B images with C channels, H×W pixels as stored, h×w as the network sees them; K random
numbers per image, V channels and images together.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pseudoloss.nn.views import WEAK_DRAWS, Views, random_integer, scale_to, to_grey

Interpolation = Literal["nearest", "bilinear"]

CHAINS, DEPTH = 3, 3  # of AugMix: chains per image, and the most operations in a chain
SEVERITY = 3  # of AugMix: the level of an operation is from 0.1 to SEVERITY, in tenths
OPERATIONS, MAGNITUDE = 2, 9  # of RandAugment: operations per image, and their level
BINS = 31  # levels of RandAugment and TrivialAugment

MIX_DRAWS = CHAINS * (3 * DEPTH + 2) + 1
AUGMIX_DRAWS = WEAK_DRAWS + MIX_DRAWS  # random numbers per image for a view
RANDAUGMENT_DRAWS = WEAK_DRAWS + 2 * OPERATIONS
TRIVIAL_DRAWS = WEAK_DRAWS + 3
CUTOUT_DRAWS = 2

# ------------------------------------------------------------------------------------------ views


def augmix_view(
    views: Views, images_BCHW: Tensor, draws_BK: Tensor, one_chain: bool = False
) -> Tensor:
    """A weak view with AugMix. `one_chain`: as `augmix` says."""
    weak, rest = draws_BK[:, :WEAK_DRAWS], draws_BK[:, WEAK_DRAWS:AUGMIX_DRAWS]
    return views.normalise(augmix(views.cropped(images_BCHW, weak).float(), rest, one_chain) / 255)


def randaugment_view(
    views: Views, images_BCHW: Tensor, draws_BK: Tensor, magnitude: int = MAGNITUDE
) -> Tensor:
    """A weak view with RandAugment."""
    weak, rest = draws_BK[:, :WEAK_DRAWS], draws_BK[:, WEAK_DRAWS:RANDAUGMENT_DRAWS]
    x = randaugment(views.cropped(images_BCHW, weak).float(), rest, magnitude)
    return views.normalise(x / 255)


def trivial_augment_view(views: Views, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
    """A weak view with TrivialAugment."""
    weak, rest = draws_BK[:, :WEAK_DRAWS], draws_BK[:, WEAK_DRAWS:TRIVIAL_DRAWS]
    return views.normalise(trivial_augment(views.cropped(images_BCHW, weak).float(), rest) / 255)


def cutout(view_BChw: Tensor, draws_BK: Tensor, share: float = 0.5) -> Tensor:
    """A normalised view with a square set to the mean colour (DeVries & Taylor, 2017).

    Its side is this share of the shorter side of the image. Its centre is anywhere in the image, so
    part of the square may be outside.
    """
    height, width = view_BChw.shape[2:]
    side = round(share * min(height, width))
    inside = None
    for draw_B, length, axis in ((draws_BK[:, 0], height, 2), (draws_BK[:, 1], width, 3)):
        start_B = random_integer(draw_B, length) - side // 2
        distance_BL = torch.arange(length, device=draw_B.device) - start_B[:, None]
        within_BL = (distance_BL >= 0) & (distance_BL < side)
        shape = (-1, 1, length, 1) if axis == 2 else (-1, 1, 1, length)
        within = within_BL.view(shape)
        inside = within if inside is None else inside & within
    assert inside is not None
    return view_BChw.masked_fill(inside, 0).contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------- from random numbers


def augmix(x_BChw: Tensor, draws_BK: Tensor, one_chain: bool = False) -> Tensor:
    """AugMix (Hendrycks et al., ICLR 2020): (1-m)·x + m·Σ w·chain(x), with m uniform and the
    weights w of the chains uniform on the simplex. A chain is one to three random operations.

    `one_chain` leaves out all chains but the last, and not their weights, so most images become
    darker: what the released program of RRL computes.
    """
    B, chains = len(x_BChw), 1 if one_chain else CHAINS
    operations = augmix_operations(*x_BChw.shape[2:])
    each = draws_BK[:, : CHAINS * (3 * DEPTH + 1)].unflatten(1, (CHAINS, -1))[:, -chains:]
    each = each.flatten(0, 1)  # all chains of an image in a row
    depth = 1 + random_integer(each[:, 0], DEPTH)
    chain = x_BChw[:, None].expand(-1, chains, -1, -1, -1).flatten(0, 1)
    for place in range(DEPTH):
        draws = each[:, 1 + 3 * place : 4 + 3 * place]
        level = scale_to(draws[:, 1], 0.1, SEVERITY) / 10
        changed = apply_one(chain, operations, draws[:, 0], level, draws[:, 2], "bilinear")
        chain = torch.where((place < depth)[:, None, None, None], changed, chain)
    # Exponential random numbers, divided by their sum, are uniform on the simplex.
    exponential = -(1 - draws_BK[:, -CHAINS - 1 : -1]).log()
    weight = exponential / exponential.sum(1, keepdim=True).clamp(
        min=torch.finfo(x_BChw.dtype).tiny
    )
    mixed: Tensor = (weight[:, -chains:, None, None, None] * chain.unflatten(0, (B, chains))).sum(1)
    m = draws_BK[:, -1, None, None, None]
    return (1 - m) * x_BChw + m * mixed


def randaugment(x_BChw: Tensor, draws_BK: Tensor, magnitude: int = MAGNITUDE) -> Tensor:
    """RandAugment (Cubuk et al., 2020): two random operations of a given level."""
    operations = randaugment_operations(*x_BChw.shape[2:])
    level_B = torch.full_like(draws_BK[:, 0], magnitude / (BINS - 1))
    for choice_B, sign_B in (draws_BK[:, 2 * i : 2 * i + 2].unbind(1) for i in range(OPERATIONS)):
        x_BChw = apply_one(x_BChw, operations, choice_B, level_B, sign_B, "nearest")
    return x_BChw


def trivial_augment(x_BChw: Tensor, draws_BK: Tensor) -> Tensor:
    """TrivialAugment (Müller & Hutter, 2021): one random operation of a random level."""
    level_B = random_integer(draws_BK[:, 1], BINS) / (BINS - 1)
    choice_B, sign_B = draws_BK[:, 0], draws_BK[:, 2]
    return apply_one(x_BChw, trivial_operations(), choice_B, level_B, sign_B, "nearest")


# --------------------------------------------------------------------------- sets of operations


class Colour(NamedTuple):
    """An operation that changes the values of pixels."""

    apply: Callable[[Tensor, Tensor], Tensor]  # images and their parameters (B,1,1,1)
    parameter: Callable[[Tensor], Tensor] = torch.zeros_like  # of the level, 0 to 1
    signed: bool = False  # the parameter is negative for half of the images


class Geometry(NamedTuple):
    """An operation that moves pixels."""

    matrix: Callable[[Tensor, int, int], Tensor]  # of parameters (B), height and width; see `warp`
    parameter: Callable[[Tensor], Tensor]
    signed: bool = True


Operations = tuple[Colour | Geometry, ...]


def augmix_operations(height: int, width: int) -> Operations:
    """The nine of AugMix. Parameters of all but the shears are whole numbers, as in its paper."""
    return (
        Colour(autocontrast),
        Colour(equalize),
        Colour(posterize, lambda level: 4 - (4 * level).floor()),
        Geometry(rotate, lambda level: (30 * level).floor()),
        Colour(solarize, lambda level: 256 - (256 * level).floor()),
        Geometry(shear_x, lambda level: 0.3 * level),
        Geometry(shear_y, lambda level: 0.3 * level),
        Geometry(translate_x, lambda level: (width / 3 * level).floor()),
        Geometry(translate_y, lambda level: (height / 3 * level).floor()),
    )


def randaugment_operations(height: int, width: int) -> Operations:
    """The fourteen of torchvision's RandAugment."""
    return _fourteen(0.3, (150 / 331 * height, 150 / 331 * width), 30, 0.9, 4)


def trivial_operations() -> Operations:
    """The fourteen of torchvision's TrivialAugmentWide."""
    return _fourteen(0.99, (32, 32), 135, 0.99, 6)


def _fourteen(
    shear: float, shift: tuple[float, float], degrees: float, change: float, bits: int
) -> Operations:
    """With the largest parameters of each; `bits` are dropped by posterising, of eight."""
    return (
        Colour(unchanged),
        Geometry(shear_x, lambda level: shear * level),
        Geometry(shear_y, lambda level: shear * level),
        Geometry(translate_x, lambda level: (shift[1] * level).floor()),
        Geometry(translate_y, lambda level: (shift[0] * level).floor()),
        Geometry(rotate, lambda level: degrees * level),
        Colour(brightness, lambda level: change * level, signed=True),
        Colour(color, lambda level: change * level, signed=True),
        Colour(contrast, lambda level: change * level, signed=True),
        Colour(sharpness, lambda level: change * level, signed=True),
        Colour(posterize, lambda level: 8 - (bits * level).round()),
        Colour(solarize, lambda level: 255 - 255 * level),
        Colour(autocontrast),
        Colour(equalize),
    )


def apply_one(
    x_BChw: Tensor,
    operations: Operations,
    choice_B: Tensor,
    level_B: Tensor,
    sign_B: Tensor,
    interpolation: Interpolation,
) -> Tensor:
    """One of the operations for each image, chosen by a uniform random number, as is the sign."""
    height, width = x_BChw.shape[2:]
    number_B = random_integer(choice_B, len(operations))
    moved_B = torch.zeros_like(number_B, dtype=torch.bool)
    out, matrix_B6 = x_BChw, translate_x(torch.zeros_like(level_B), height, width)
    for i, operation in enumerate(operations):
        now_B = number_B == i
        value_B = operation.parameter(level_B)
        if operation.signed:
            value_B = torch.where(sign_B < 0.5, -value_B, value_B)
        if isinstance(operation, Geometry):
            found_B6 = operation.matrix(value_B, height, width)
            matrix_B6 = torch.where(now_B[:, None], found_B6, matrix_B6)
            moved_B = moved_B | now_B
        else:
            found = operation.apply(x_BChw, value_B[:, None, None, None])
            out = torch.where(now_B[:, None, None, None], found, out)
    moved = warp(x_BChw, matrix_B6, interpolation)
    return torch.where(moved_B[:, None, None, None], moved, out)


# ----------------------------------------------------------------------------- colour operations


def unchanged(x: Tensor, _: Tensor) -> Tensor:
    return x


def brightness(x: Tensor, change: Tensor) -> Tensor:
    """Brighter by this share, or darker."""
    return _blend(x, torch.zeros_like(x), change)


def color(x: Tensor, change: Tensor) -> Tensor:
    """More saturated by this share, or less."""
    return x if x.shape[1] == 1 else _blend(x, to_grey(x).floor(), change)


def contrast(x: Tensor, change: Tensor) -> Tensor:
    grey = to_grey(x)
    mean = (grey.floor() if x.shape[1] > 1 else grey).mean((1, 2, 3), keepdim=True)
    return _blend(x, mean, change)


def sharpness(x: Tensor, change: Tensor) -> Tensor:
    """Sharper by this share, or blurred. The border stays as it is."""
    height, width = x.shape[2:]
    if height <= 2 or width <= 2:
        return x
    total = 4 * x[:, :, 1:-1, 1:-1]  # the centre counts five times
    for top in range(3):
        for left in range(3):
            total = total + x[:, :, top : top + height - 2, left : left + width - 2]
    blurred = F.pad((total / 13).round(), (1, 1, 1, 1))
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)
    inside = (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)
    return _blend(x, torch.where(inside, blurred, x), change)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    """Keep only the highest bits, of eight."""
    step = torch.exp2(8 - bits)
    return (x / step).floor() * step


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels from a threshold on."""
    return torch.where(x >= threshold, 255 - x, x)


def autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to 0..255."""
    lowest, highest = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    flat = lowest == highest
    scale = torch.where(flat, 1, 255 / (highest - lowest).masked_fill(flat, 1))
    return ((x - lowest.masked_fill(flat, 0)) * scale).clamp(0, 255).floor()


def equalize(x: Tensor, _: Tensor) -> Tensor:
    """Flatten the histogram of each channel."""
    pixels = x.shape[2] * x.shape[3]
    value_VP = x.reshape(-1, pixels).long()
    count_V256 = value_VP.new_zeros(len(value_VP), 256)
    count_V256 = count_V256.scatter_add(1, value_VP, torch.ones_like(value_VP))
    of_highest_V1 = count_V256.gather(1, value_VP.amax(1, keepdim=True))
    step_V1 = (pixels - of_highest_V1) // 255
    # The new value of a pixel is the rounded rank of the values below it.
    below_V256 = count_V256.cumsum(1) - count_V256
    new_V256 = (below_V256 + step_V1 // 2) // step_V1.clamp(min=1)
    new_VP = torch.where(step_V1 == 0, value_VP, new_V256.clamp(0, 255).gather(1, value_VP))
    return new_VP.view(x.shape).to(x.dtype)


def _blend(x: Tensor, other: Tensor, change: Tensor) -> Tensor:
    """x, moved away from the other image by this share, or towards it; as 8-bit values."""
    factor = 1 + change
    return (factor * x + (1 - factor) * other).clamp(0, 255).floor()


# -------------------------------------------------------------------------- geometric operations


def shear_x(value_B: Tensor, height: int, width: int) -> Tensor:
    """Each row is shifted by its distance from the top, times the parameter."""
    one, zero = torch.ones_like(value_B), torch.zeros_like(value_B)
    return torch.stack([one, value_B, value_B * height / 2, zero, one, zero], 1)


def shear_y(value_B: Tensor, height: int, width: int) -> Tensor:
    """Each column is shifted by its distance from the left, times the parameter."""
    one, zero = torch.ones_like(value_B), torch.zeros_like(value_B)
    return torch.stack([one, zero, zero, value_B, one, value_B * width / 2], 1)


def translate_x(value_B: Tensor, height: int, width: int) -> Tensor:
    one, zero = torch.ones_like(value_B), torch.zeros_like(value_B)
    return torch.stack([one, zero, -value_B, zero, one, zero], 1)


def translate_y(value_B: Tensor, height: int, width: int) -> Tensor:
    one, zero = torch.ones_like(value_B), torch.zeros_like(value_B)
    return torch.stack([one, zero, zero, zero, one, -value_B], 1)


def rotate(value_B: Tensor, height: int, width: int) -> Tensor:
    """By so many degrees, counter-clockwise, about the centre."""
    angle = value_B * (math.pi / 180)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return torch.stack([cos, -sin, zero, sin, cos, zero], 1)


def warp(x_BChw: Tensor, matrix_B6: Tensor, interpolation: Interpolation) -> Tensor:
    """Where each pixel comes from: a matrix (two rows of three) times its place (x, y, 1), counted
    from the centre of the image. Black outside."""
    height, width = x_BChw.shape[2:]
    x_w = torch.arange(width, device=x_BChw.device) + (0.5 - width / 2)
    y_h1 = torch.arange(height, device=x_BChw.device)[:, None] + (0.5 - height / 2)
    a, b, c, d, e, f = (matrix_B6[:, i, None, None] for i in range(6))
    from_x, from_y = a * x_w + b * y_h1 + c, d * x_w + e * y_h1 + f
    grid_Bhw2 = torch.stack([from_x / (width / 2), from_y / (height / 2)], 3)
    found = F.grid_sample(x_BChw, grid_Bhw2, interpolation, "zeros", align_corners=False)
    return found.round()
