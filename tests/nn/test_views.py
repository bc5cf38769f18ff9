"""Views against torchvision: operations with the same parameters, and random parameters."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as T
from scipy.stats import ks_2samp
from torchvision.transforms import ColorJitter, RandomResizedCrop

from pseudoloss.nn import views as V
from pseudoloss.nn.views import Views

SHAPES = [(3, 32, 32), (1, 8, 8), (3, 40, 24), (3, 24, 40), (1, 28, 28)]


def images(channels=3, height=32, width=32, n=24, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, height, width), generator=random, dtype=torch.uint8)


def draws(n, k, seed=1):
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed))


def views(channels=3, size=(32, 32), pad=4, flip=True):
    mean, std = torch.linspace(0.4, 0.5, channels), torch.linspace(0.2, 0.3, channels)
    return Views(mean, std, size, pad, flip)


def raw(view, normalised):
    """A view before normalisation."""
    return normalised * view.std_C[:, None, None] + view.mean_C[:, None, None]


# -------------------------------------------------------------------- operations, one by one


@pytest.mark.parametrize(("channels", "height", "width"), SHAPES)
def test_plain_view_equals_torchvision(channels, height, width):
    x, view = images(channels, height, width), views(channels, (height, width))
    wanted = T.normalize(x / 255, view.mean_C.tolist(), view.std_C.tolist())
    torch.testing.assert_close(view.plain(x), wanted)


def test_make_views():
    view = V.make_views((0.4, 0.5), (0.2, 0.3), (8, 6), pad=2, flip=True)
    assert (view.size, view.pad, view.flip) == ((8, 6), 2, True)
    torch.testing.assert_close(view.mean_C, torch.tensor([0.4, 0.5]))
    torch.testing.assert_close(view.std_C, torch.tensor([0.2, 0.3]))


def test_plain_view_is_the_centre_of_a_larger_image():
    x, view = images(height=40, width=36), views(size=(32, 32))
    torch.testing.assert_close(raw(view, view.plain(x)), T.center_crop(x, [32, 32]) / 255)


@pytest.mark.parametrize(("channels", "height", "width"), SHAPES)
def test_weak_view_is_pad_crop_flip(channels, height, width):
    x, view = images(channels, height, width), views(channels, (height, width), pad=3)
    d = draws(len(x), V.WEAK_DRAWS)
    ours = raw(view, view.weak(x, d))
    for i in range(len(x)):
        top, left = int(d[i, 0] * 7), int(d[i, 1] * 7)
        wanted = T.crop(T.pad(x[i], [3, 3, 3, 3]), top, left, height, width) / 255
        wanted = T.hflip(wanted) if d[i, 2] < 0.5 else wanted
        torch.testing.assert_close(ours[i], wanted)


def test_weak_view_crops_larger_images_without_padding():
    x, view = images(height=40, width=36), views(size=(32, 32), pad=4, flip=False)
    d = draws(len(x), V.WEAK_DRAWS)
    ours = raw(view, view.weak(x, d))
    for i in range(len(x)):
        top, left = int(d[i, 0] * 9), int(d[i, 1] * 5)
        torch.testing.assert_close(ours[i], T.crop(x[i], top, left, 32, 32) / 255)


def test_nothing_is_mirrored_without_flip():
    x, view = images(), views(pad=0, flip=False)
    torch.testing.assert_close(view.weak(x, draws(len(x), V.WEAK_DRAWS)), view.plain(x))


@pytest.mark.parametrize("seen", [(32, 32), (20, 28), (48, 40)])
@pytest.mark.parametrize("stored", [(32, 32), (40, 30), (64, 64)])
def test_resized_crop(stored, seen):
    """Enlarged and reduced, both antialiased; clipped to 0..1, like 8-bit images."""
    x = images(3, *stored) / 255
    top, left, height, width = V.random_crop(draws(len(x), 22), *stored)
    mirror = draws(len(x), 1)[:, 0] < 0.5
    ours = V.resized_crop(x, top, left, height, width, mirror, seen)
    for i in range(len(x)):
        wanted = T.resized_crop(
            x[i],
            *(int(v[i]) for v in (top, left, height, width)),
            list(seen),
            T.InterpolationMode.BICUBIC,
            antialias=True,
        ).clamp(0, 1)
        wanted = T.hflip(wanted) if mirror[i] else wanted
        torch.testing.assert_close(ours[i], wanted, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
def test_blends(factor):
    x = images() / 255
    grey = V.to_grey(x)
    f = torch.tensor(factor)
    mean = grey.mean((1, 2, 3), keepdim=True)
    for ours, wanted in [
        (V.blend(x, torch.zeros_like(x), f), T.adjust_brightness(x, factor)),
        (V.blend(x, mean, f), T.adjust_contrast(x, factor)),
        (V.blend(x, grey, f), T.adjust_saturation(x, factor)),
        (grey, T.rgb_to_grayscale(x)),
    ]:
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.0, 0.03, 0.1, 0.5])
def test_hue(turn):
    x = images() / 255
    x[0] = 0.3  # a grey image has no hue
    x[1] = torch.tensor([1.0, 1.0, 0.0])[:, None, None]  # two channels are largest
    ours = V.shift_hue(x, torch.full((len(x),), turn))
    torch.testing.assert_close(ours, T.adjust_hue(x, turn), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_in_random_order_per_image(channels):
    x = images(channels, n=200) / 255
    factors, order, before_hue = V.jitter_parameters(draws(len(x), 6))
    ours = V.jitter(x, factors, order, before_hue)
    operations = [T.adjust_brightness, T.adjust_contrast, T.adjust_saturation, T.adjust_hue]
    for i in range(len(x)):
        sequence = order[i].tolist()
        sequence.insert(int(before_hue[i]), 3)
        wanted = x[i]
        for k in sequence:
            wanted = operations[k](wanted, float(factors[i, k]))
        torch.testing.assert_close(ours[i], wanted, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("channels", "height", "width"), SHAPES)
def test_strong_view_is_crop_flip_jitter_grey(channels, height, width):
    x, view = images(channels, height, width, n=100), views(channels, (height, width))
    d = draws(len(x), V.STRONG_DRAWS)
    ours = raw(view, view.strong(x, d))
    top, left, h, w = V.random_crop(d[:, :22], height, width)
    step = V.resized_crop(x / 255, top, left, h, w, d[:, 22] < 0.5, (height, width))
    step = V.jitter(step, *V.jitter_parameters(d[:, 23:29]))
    for i in range(len(x)):
        wanted = step[i]
        if d[i, 29] < 0.2:
            wanted = T.rgb_to_grayscale(wanted, num_output_channels=channels)
        torch.testing.assert_close(ours[i], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_channels_last_and_finite(channels):
    x, view = images(channels), views(channels)
    for out in (
        view.plain(x),
        view.weak(x, draws(len(x), V.WEAK_DRAWS)),
        view.strong(x, draws(len(x), V.STRONG_DRAWS)),
    ):
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert out.dtype == torch.float32
        assert out.isfinite().all()


def test_each_image_has_its_own_view():
    x, view = images(n=1).expand(64, -1, -1, -1), views()
    for out in (
        view.weak(x, draws(64, V.WEAK_DRAWS)),
        view.strong(x, draws(64, V.STRONG_DRAWS)),
    ):
        assert len(out.flatten(1).unique(dim=0)) > 50


def test_views_do_not_depend_on_the_rest_of_the_batch():
    x, view = images(), views()
    d = draws(len(x), V.STRONG_DRAWS)
    alone = torch.cat([view.strong(x[i : i + 1], d[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(view.strong(x, d), alone, atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------- random parameters

N = 4000


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (64, 20), (20, 64)])
def test_crops_have_the_distribution_of_torchvision(height, width):
    """In narrow images some of torchvision's ten tries fail, or all."""
    torch.manual_seed(0)
    blank = torch.zeros(1, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(N)]
    )
    ours = torch.stack(V.random_crop(draws(N, 22, seed=2), height, width), 1).numpy()
    for k in range(4):
        assert ks_2samp(theirs[:, k], ours[:, k]).pvalue > 1e-3
    areas = theirs[:, 2] * theirs[:, 3], ours[:, 2] * ours[:, 3]
    assert ks_2samp(*areas).pvalue > 1e-3
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    assert (ours[:, 2:] > 0).all()


def test_crop_falls_back_to_the_centre_when_no_try_fits():
    whole = torch.full((1, 22), 0.999999)  # the whole area at ratio 4/3 never fits
    assert [int(v) for v in V.random_crop(whole, 32, 32)] == [0, 0, 32, 32]
    narrow = [int(v) for v in V.random_crop(whole, 64, 20)]
    assert narrow == [(64 - 27) // 2, 0, 27, 20]  # 20 / (3/4) = 26.67


def test_jitter_has_the_distribution_of_torchvision():
    torch.manual_seed(0)
    theirs = [
        ColorJitter.get_params([0.6, 1.4], [0.6, 1.4], [0.6, 1.4], [-0.1, 0.1]) for _ in range(N)
    ]
    factors, order, before_hue = V.jitter_parameters(draws(N, 6, seed=3))
    on = (factors != torch.tensor([1.0, 1, 1, 0])).any(1)
    assert on.float().mean().item() == pytest.approx(0.8, abs=0.02)
    for k in range(4):
        wanted = np.array([float(params[k + 1]) for params in theirs])
        assert ks_2samp(wanted, factors[on, k].numpy()).pvalue > 1e-3
    sequences = []
    for blends, slot in zip(order.tolist(), before_hue.tolist(), strict=True):
        sequences.append((*blends[:slot], 3, *blends[slot:]))
    counts = Counter(sequences)
    assert len(counts) == math.factorial(4)
    expected = N / 24
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 50  # χ², 23 d.o.f.


def test_distribution_of_shifts_mirrors_and_grey():
    shift = V.random_integer(draws(9000, 1)[:, 0], 9)
    counts = torch.bincount(shift, minlength=9)
    assert len(counts) == 9
    assert ((counts - 1000).abs() < 120).all()
    x, view = images(n=1).expand(2000, -1, -1, -1), views(pad=0)
    mirrored = (view.weak(x, draws(2000, 3)) == view.plain(x)).flatten(1).all(1)
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.05)
    grey = raw(view, view.strong(x, draws(2000, V.STRONG_DRAWS)))
    is_grey = (grey.amax(1) - grey.amin(1)).flatten(1).amax(1) < 1e-5
    assert is_grey.float().mean().item() == pytest.approx(0.2, abs=0.04)


def test_random_numbers_close_to_one_stay_in_range():
    largest = torch.tensor([1 - 2**-24])
    for choices in (1, 9, 449, 10**6):
        assert V.random_integer(largest, choices).item() == choices - 1
        assert V.random_integer(torch.zeros(1), choices).item() == 0
