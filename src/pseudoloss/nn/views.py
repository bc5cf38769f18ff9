"""Views (augmentations) of images: batched, on the device, different for each image.

A view is a pure function of uint8 images and of uniform random numbers from 0 to 1 (`draws`), which
the caller generates. So a step is repeatable, and can be compiled or captured. Each operation gives
the same result as torchvision's function for the same parameters.

Shapes: B images with C channels, H×W pixels as stored, h×w as the network sees them; K random
numbers per image.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CROP_TRIES = 10
WEAK_DRAWS = 3  # random numbers per image for a weak view
STRONG_DRAWS = 2 * CROP_TRIES + 10  # random numbers per image for a strong view

CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
JITTER = 0.4  # brightness, contrast and saturation are scaled by 1 ± this
HUE = 0.1  # hue is shifted by up to ± this, as a share of the whole circle
JITTER_PROBABILITY = 0.8
GREY_PROBABILITY = 0.2
GREY = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class Views:
    """The three views of an image: plain, weak and strong (rows 21 and 22).

    Images larger than `size` are cropped to it, at a random place or in the centre. Images of
    exactly that size are padded with `pad` black pixels before the random crop.
    """

    mean_C: Tensor
    std_C: Tensor
    size: tuple[int, int]
    pad: int
    flip: bool

    def plain(self, images_BCHW: Tensor) -> Tensor:
        """The image without augmentation (its centre, if it is larger than `size`)."""
        height, width = self.size
        top = (images_BCHW.shape[2] - height) // 2
        left = (images_BCHW.shape[3] - width) // 2
        return self.normalise(images_BCHW[:, :, top : top + height, left : left + width] / 255)

    def weak(self, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
        """Padded, randomly cropped and randomly mirrored."""
        return self.normalise(self.cropped(images_BCHW, draws_BK) / 255)

    def cropped(self, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
        """A weak view before it is normalised: uint8."""
        H, W = (
            stored + 2 * self._padding(stored, seen)
            for stored, seen in zip(images_BCHW.shape[2:], self.size, strict=True)
        )
        height, width = self.size
        top_B = random_integer(draws_BK[:, 0], H - height + 1)
        left_B = random_integer(draws_BK[:, 1], W - width + 1)
        mirror_B = (draws_BK[:, 2] < 0.5) & self.flip
        pad_y, pad_x = (H - images_BCHW.shape[2]) // 2, (W - images_BCHW.shape[3]) // 2
        padded = F.pad(images_BCHW, (pad_x, pad_x, pad_y, pad_y))
        return crop(padded, top_B, left_B, mirror_B, self.size)

    def weak_is_plain(self, stored: Sequence[int]) -> bool:
        """Whether the weak view of images of this size is always the plain view."""
        return tuple(stored) == tuple(self.size) and self.pad == 0 and not self.flip

    def strong(self, images_BCHW: Tensor, draws_BK: Tensor) -> Tensor:
        """Randomly cropped and resized, mirrored, colour-jittered and turned to grey."""
        H, W = images_BCHW.shape[2:]
        k = 2 * CROP_TRIES
        top_B, left_B, height_B, width_B = random_crop(draws_BK[:, : k + 2], H, W)
        mirror_B = (draws_BK[:, k + 2] < 0.5) & self.flip
        x = resized_crop(images_BCHW / 255, top_B, left_B, height_B, width_B, mirror_B, self.size)
        x = jitter(x, *jitter_parameters(draws_BK[:, k + 3 : k + 9]))
        grey_B = draws_BK[:, k + 9] < GREY_PROBABILITY
        x = torch.where(grey_B[:, None, None, None], to_grey(x).expand_as(x), x)
        return self.normalise(x)

    def _padding(self, stored: int, seen: int) -> int:
        return self.pad if stored == seen else 0

    def normalise(self, x_BChw: Tensor) -> Tensor:
        """Images from 0 to 1, as the network sees them."""
        x = (x_BChw - self.mean_C[:, None, None]) / self.std_C[:, None, None]
        return x.contiguous(memory_format=torch.channels_last)


def make_views(
    mean: Sequence[float],
    std: Sequence[float],
    size: tuple[int, int],
    pad: int = 0,
    flip: bool = False,
    device: str | torch.device = "cpu",
) -> Views:
    """Views that normalise by the mean and standard deviation of each channel."""
    return Views(
        torch.tensor(mean, device=device), torch.tensor(std, device=device), size, pad, flip
    )


def random_integer(draw_B: Tensor, choices: Tensor | int) -> Tensor:
    """A uniform random number from 0 to 1 as an integer from 0 to choices-1."""
    number = (draw_B * choices).long()
    return number - (number >= choices).long()  # a number close to 1 can round up to `choices`


def crop(
    x_BCHW: Tensor, top_B: Tensor, left_B: Tensor, mirror_B: Tensor, size: tuple[int, int]
) -> Tensor:
    """A window of each image, mirrored where `mirror_B`."""
    height, width = size
    device = x_BCHW.device
    rows_Bh = top_B[:, None] + torch.arange(height, device=device)
    across = torch.arange(width, device=device)
    columns_Bw = left_B[:, None] + torch.where(mirror_B[:, None], width - 1 - across, across)
    image_B = torch.arange(len(x_BCHW), device=device)
    picked = x_BCHW[image_B[:, None, None], :, rows_Bh[:, :, None], columns_Bw[:, None, :]]
    return picked.permute(0, 3, 1, 2)


def random_crop(draws_BK: Tensor, H: int, W: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of a random crop with random area and aspect ratio.

    Same as torchvision's RandomResizedCrop: the first of ten tries that fits into the image, or
    else the largest centred crop with an allowed ratio.
    """
    area_BT = H * W * scale_to(draws_BK[:, :CROP_TRIES], *CROP_AREA)
    log_ratio = [math.log(ratio) for ratio in CROP_RATIO]
    ratio_BT = scale_to(draws_BK[:, CROP_TRIES : 2 * CROP_TRIES], *log_ratio).exp()
    width_BT = (area_BT * ratio_BT).sqrt().round().long()
    height_BT = (area_BT / ratio_BT).sqrt().round().long()
    fits_BT = (width_BT > 0) & (width_BT <= W) & (height_BT > 0) & (height_BT <= H)
    first_BT = fits_BT & (fits_BT.cumsum(1) == 1)
    any_B = fits_BT.any(1)

    lowest, highest = CROP_RATIO
    widest = min(W, round(H * highest))
    tallest = min(H, round(W / lowest))
    height_B = (height_BT * first_BT).sum(1).masked_fill(~any_B, tallest)
    width_B = (width_BT * first_BT).sum(1).masked_fill(~any_B, widest)
    top_B = random_integer(draws_BK[:, 2 * CROP_TRIES], H - height_B + 1)
    left_B = random_integer(draws_BK[:, 2 * CROP_TRIES + 1], W - width_B + 1)
    top_B = top_B.masked_fill(~any_B, (H - tallest) // 2)
    left_B = left_B.masked_fill(~any_B, (W - widest) // 2)
    return top_B, left_B, height_B, width_B


def resized_crop(
    x_BCHW: Tensor,
    top_B: Tensor,
    left_B: Tensor,
    height_B: Tensor,
    width_B: Tensor,
    mirror_B: Tensor,
    size: tuple[int, int],
) -> Tensor:
    """A window of each image, resized (bicubic, antialiased) and clipped to 0..1.

    Resizing is linear in the pixels, so cropping, resizing and mirroring are two matrix products.
    """
    H, W = x_BCHW.shape[2:]
    never_B = torch.zeros_like(mirror_B)
    vertical_BhH = resize_weights(top_B, height_B, never_B, H, size[0])
    horizontal_BwW = resize_weights(left_B, width_B, mirror_B, W, size[1])
    x = vertical_BhH[:, None] @ x_BCHW @ horizontal_BwW[:, None].transpose(-1, -2)
    return x.clamp(0, 1)


def resize_weights(
    start_B: Tensor, length_B: Tensor, mirror_B: Tensor, stored: int, seen: int
) -> Tensor:
    """The weight of each stored pixel in each pixel of a resized window: (B, seen, stored)."""
    device = start_B.device
    scale_B = length_B / seen
    widened_B = scale_B.clamp(min=1)  # antialiasing: the kernel covers all pixels that are merged
    across = torch.arange(seen, device=device)
    across_Bs = torch.where(mirror_B[:, None], seen - 1 - across, across)
    centre_Bs = scale_B[:, None] * (across_Bs + 0.5)
    place_BS = torch.arange(stored, device=device) - start_B[:, None] + 0.5
    distance = (place_BS[:, None, :] - centre_Bs[:, :, None]) / widened_B[:, None, None]
    inside_BS = (place_BS > 0) & (place_BS < length_B[:, None])
    weights = cubic(distance) * inside_BS[:, None, :]
    return weights / weights.sum(-1, keepdim=True)


def cubic(distance: Tensor, a: float = -0.5) -> Tensor:
    """Keys' cubic kernel. Antialiased resizing uses a = -0.5."""
    d = distance.abs()
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((d - 5) * d + 8) * d * a - 4 * a
    return torch.where(d < 1, near, far.masked_fill(d >= 2, 0))


def jitter_parameters(draws_B6: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of brightness, contrast and saturation and the shift of the hue; the order of the
    first three; and how many of them come before the hue.

    With probability 1 - JITTER_PROBABILITY the factors change nothing.
    """
    off_B1 = draws_B6[:, :1] >= JITTER_PROBABILITY
    scale_B3 = scale_to(draws_B6[:, 1:4], 1 - JITTER, 1 + JITTER).masked_fill(off_B1, 1)
    shift_B1 = scale_to(draws_B6[:, 4:5], -HUE, HUE).masked_fill(off_B1, 0)
    # One of 24 orders: a position of the hue, and one of the 6 orders of the three blends.
    number_B = random_integer(draws_B6[:, 5], 24)
    before_hue_B, blends_B = number_B // 6, number_B % 6
    first_B = blends_B // 2
    rest_B2 = torch.stack([(first_B == 0).long(), 2 - (first_B == 2).long()], 1)
    second_B = rest_B2.gather(1, blends_B[:, None] % 2)[:, 0]
    order_B3 = torch.stack([first_B, second_B, 3 - first_B - second_B], 1)
    return torch.cat([scale_B3, shift_B1], 1), order_B3, before_hue_B


BRIGHTNESS, CONTRAST, SATURATION = range(3)


def jitter(x_BChw: Tensor, factors_B4: Tensor, order_B3: Tensor, before_hue_B: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, each image in its own order (see
    `jitter_parameters`).

    The first three are blends and cheap; the hue is expensive. So the hue is changed once, for all
    images together, after the blends that come before it and before the others.
    """
    kinds = [order_B3[:, place] for place in range(3)]
    factors = [factors_B4.gather(1, kind_B[:, None])[:, 0] for kind_B in kinds]
    for place, (kind_B, factor_B) in enumerate(zip(kinds, factors, strict=True)):
        x_BChw = _blend_some(x_BChw, kind_B, factor_B, place < before_hue_B)
    if x_BChw.shape[1] == 3:
        x_BChw = shift_hue(x_BChw, factors_B4[:, 3])
    for place, (kind_B, factor_B) in enumerate(zip(kinds, factors, strict=True)):
        x_BChw = _blend_some(x_BChw, kind_B, factor_B, place >= before_hue_B)
    return x_BChw


def _blend_some(x: Tensor, kind_B: Tensor, factor_B: Tensor, now_B: Tensor) -> Tensor:
    """Apply the kind of blend of each image, where `now_B`."""
    kind = kind_B[:, None, None, None]
    grey = to_grey(x)
    mean = grey.mean((1, 2, 3), keepdim=True)
    # Brightness blends with black, contrast with the mean grey, saturation with the grey image.
    other = torch.where(kind == SATURATION, grey, mean).masked_fill(kind == BRIGHTNESS, 0)
    return blend(x, other, factor_B.masked_fill(~now_B, 1)[:, None, None, None])


def blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """factor·x + (1 - factor)·other, clipped to 0..1."""
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def to_grey(x_BChw: Tensor) -> Tensor:
    """The grey image, with one channel."""
    if x_BChw.shape[1] == 1:
        return x_BChw
    red, green, blue = (x_BChw[:, k : k + 1] for k in range(3))
    return GREY[0] * red + GREY[1] * green + GREY[2] * blue


def shift_hue(x_B3hw: Tensor, shift_B: Tensor) -> Tensor:
    """Shift the hue by a share of the whole circle, in the HSV colour space."""
    red, green, blue = x_B3hw.unbind(1)
    value, smallest = x_B3hw.amax(1), x_B3hw.amin(1)
    chroma = value - smallest
    divisor = chroma.masked_fill(chroma == 0, 1)  # grey has no hue
    # The hue in sixths of the circle, from the largest channel.
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths = 6 * torch.remainder(sixths / 6 + shift_B[:, None, None], 1.0)

    def channel(shift: float) -> Tensor:
        k = torch.remainder(sixths + shift, 6.0)
        return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5.0), channel(3.0), channel(1.0)], dim=1)


def scale_to(draws: Tensor, low: float, high: float) -> Tensor:
    """Uniform random numbers from 0..1, scaled to low..high."""
    return low + draws * (high - low)
