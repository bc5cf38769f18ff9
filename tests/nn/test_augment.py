"""AugMix, RandAugment, TrivialAugment and Cutout against torchvision and slow forms."""

import math

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as T
from torchvision.transforms import InterpolationMode, RandAugment, TrivialAugmentWide
from torchvision.transforms.autoaugment import _apply_op

from pseudoloss.nn import augment as A
from pseudoloss.nn.views import WEAK_DRAWS, Views

SHAPES = [(3, 32, 32), (1, 8, 8), (3, 40, 24), (3, 24, 41)]
MODES = {"nearest": InterpolationMode.NEAREST, "bilinear": InterpolationMode.BILINEAR}


def images(channels=3, height=32, width=32, n=12, seed=0):
    """Noise, smooth images, one that is flat, and one with two values."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, channels, height, width), generator=random)
    wave = torch.linspace(0, 7, height)[:, None].sin() * torch.linspace(0, 4, width).cos()
    x[: n // 2] = (60 * wave + 110 + 12 * torch.rand(n // 2, 1, 1, 1, generator=random)).long()
    x[0] = 77
    x[1] = torch.where(x[1] > 128, 200, 30)
    return x.to(torch.uint8)


def draws(n, k, seed=1):
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed))


def views(channels=3, size=(32, 32), pad=4, flip=True):
    mean, std = torch.linspace(0.4, 0.5, channels), torch.linspace(0.2, 0.3, channels)
    return Views(mean, std, size, pad, flip)


def raw(view, normalised):
    """A view before normalisation, 0 to 255."""
    return 255 * (normalised * view.std_C[:, None, None] + view.mean_C[:, None, None])


def assert_almost_all_equal(ours, wanted, share=0.001, atol=0):
    """Sums in another order round a few pixels differently."""
    ours, wanted = ours.double(), wanted.double()
    assert ((ours - wanted).abs() > atol).double().mean() <= share


# ------------------------------------------------------------------------ operations, one by one

BLENDS = {
    "brightness": (A.brightness, T.adjust_brightness),
    "color": (A.color, T.adjust_saturation),
    "contrast": (A.contrast, T.adjust_contrast),
    "sharpness": (A.sharpness, T.adjust_sharpness),
}


@pytest.mark.parametrize("change", [-1.0, -0.75, 0.0, 0.5, 0.875])
@pytest.mark.parametrize("name", BLENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_blends(shape, name, change):
    x, (ours, theirs) = images(*shape), BLENDS[name]
    found = ours(x.float(), torch.full((len(x), 1, 1, 1), change))
    wanted = torch.stack([theirs(image, 1 + change) for image in x])
    assert_almost_all_equal(found, wanted)
    assert_almost_all_equal(found, wanted, share=0, atol=1)


@pytest.mark.parametrize("shape", [(3, 2, 9), (1, 9, 2)])
def test_tiny_images_are_not_sharpened(shape):
    x = images(*shape)
    torch.testing.assert_close(A.sharpness(x.float(), torch.full((12, 1, 1, 1), 0.5)), x.float())


@pytest.mark.parametrize("shape", SHAPES)
def test_operations_on_values(shape):
    x = images(*shape)
    for bits in range(1, 9):
        found = A.posterize(x.float(), torch.full((len(x), 1, 1, 1), float(bits)))
        assert torch.equal(found, T.posterize(x, bits).float())
    for threshold in (0.0, 100.0, 127.5, 255.0):
        found = A.solarize(x.float(), torch.full((len(x), 1, 1, 1), threshold))
        assert torch.equal(found, T.solarize(x, threshold).float())
    none = torch.zeros(len(x), 1, 1, 1)
    assert torch.equal(A.equalize(x.float(), none), T.equalize(x).float())
    assert torch.equal(A.autocontrast(x.float(), none), T.autocontrast(x).float())
    assert torch.equal(A.unchanged(x.float(), none), x.float())


MATRICES = {
    "ShearX": (A.shear_x, [0.0, 0.07, -0.3, 0.99]),
    "ShearY": (A.shear_y, [0.0, 0.07, -0.3, 0.99]),
    "TranslateX": (A.translate_x, [0.0, 3.0, -5.0, 40.0]),
    "TranslateY": (A.translate_y, [0.0, 3.0, -5.0, 40.0]),
    "Rotate": (A.rotate, [0.0, 7.0, -30.0, 135.0]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_operations_on_places(shape, name, mode):
    x, (matrix, values) = images(*shape), MATRICES[name]
    value_B = torch.tensor(values).repeat(3)
    found = A.warp(x.float(), matrix(value_B, *shape[1:]), mode)
    wanted = torch.stack(
        [
            _apply_op(image, name, v, MODES[mode], None)
            for image, v in zip(x, value_B.tolist(), strict=True)
        ]
    )
    assert_almost_all_equal(found, wanted, share=0.005)
    if mode == "bilinear":
        assert_almost_all_equal(found, wanted, share=0, atol=1)


# ---------------------------------------------------------------------------- sets of operations

NAMES = {
    A.unchanged: "Identity",
    A.brightness: "Brightness",
    A.color: "Color",
    A.contrast: "Contrast",
    A.sharpness: "Sharpness",
    A.posterize: "Posterize",
    A.solarize: "Solarize",
    A.autocontrast: "AutoContrast",
    A.equalize: "Equalize",
} | {matrix: name for name, (matrix, _) in MATRICES.items()}


def name_of(operation):
    return NAMES[operation.matrix if isinstance(operation, A.Geometry) else operation.apply]


@pytest.mark.parametrize("size", [(32, 32), (48, 20)])
@pytest.mark.parametrize("trivial", [False, True])
def test_sets_of_operations_are_those_of_torchvision(trivial, size):
    ours = A.trivial_operations() if trivial else A.randaugment_operations(*size)
    space = (TrivialAugmentWide if trivial else RandAugment)()._augmentation_space
    theirs = space(A.BINS) if trivial else space(A.BINS, size)
    assert [name_of(operation) for operation in ours] == list(theirs)
    level = torch.arange(A.BINS) / (A.BINS - 1)
    for operation, (wanted, signed) in zip(ours, theirs.values(), strict=True):
        assert operation.signed == signed
        if name_of(operation).startswith("Translate"):
            # As torchvision applies it; a rounding error below a whole number is none.
            wanted = (wanted + 1e-4).trunc()
        found = operation.parameter(level)
        torch.testing.assert_close(found, wanted.float().expand_as(found), atol=1e-4, rtol=1e-5)


def test_operations_of_augmix_are_those_of_its_paper():
    level = torch.tensor([0.01, 0.0999, 0.15, 0.26, 0.3])
    found = {
        name_of(o): (o.parameter(level).tolist(), o.signed) for o in A.augmix_operations(32, 64)
    }
    assert list(found) == [
        *("AutoContrast", "Equalize", "Posterize", "Rotate", "Solarize"),
        *("ShearX", "ShearY", "TranslateX", "TranslateY"),
    ]
    assert found["Posterize"] == ([4, 4, 4, 3, 3], False)
    assert found["Rotate"] == ([0, 2, 4, 7, 9], True)
    assert found["Solarize"] == ([254, 231, 218, 190, 180], False)
    assert found["ShearX"][0] == pytest.approx([0.003, 0.02997, 0.045, 0.078, 0.09])
    assert found["TranslateX"] == ([0, 2, 3, 5, 6], True)
    assert found["TranslateY"] == ([0, 1, 1, 2, 3], True)


# ------------------------------------------------------------------------- from random numbers


def slow_apply(image, operations, choice, level, sign, mode):
    """One operation for one 8-bit image, by torchvision."""
    operation = operations[min(int(choice * len(operations)), len(operations) - 1)]
    value = float(operation.parameter(torch.tensor([level]))[0])
    value = -value if operation.signed and sign < 0.5 else value
    if name_of(operation) == "Posterize":
        value = int(value)
    return _apply_op(image, name_of(operation), value, MODES[mode], None)


@pytest.mark.parametrize("magnitude", [0, 9, 30])
@pytest.mark.parametrize("shape", SHAPES)
def test_randaugment(shape, magnitude):
    x = images(*shape, n=60)
    d = draws(60, 2 * A.OPERATIONS)
    found = A.randaugment(x.float(), d, magnitude)
    operations, wanted = A.randaugment_operations(*shape[1:]), []
    for image, row in zip(x, d.tolist(), strict=True):
        for choice, sign in (row[:2], row[2:]):
            image = slow_apply(image, operations, choice, magnitude / 30, sign, "nearest")
        wanted.append(image)
    assert_almost_all_equal(found, torch.stack(wanted), share=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_trivial_augment(shape):
    x = images(*shape, n=60)
    d = draws(60, 3)
    found = A.trivial_augment(x.float(), d)
    wanted = [
        slow_apply(image, A.trivial_operations(), choice, int(level * 31) / 30, sign, "nearest")
        for image, (choice, level, sign) in zip(x, d.tolist(), strict=True)
    ]
    assert_almost_all_equal(found, torch.stack(wanted), share=0.01)


def slow_augmix(image, row, one_chain):
    """AugMix of one 8-bit image: a loop over chains and their operations."""
    operations = A.augmix_operations(*image.shape[1:])
    chains = [row[10 * i : 10 * i + 10] for i in range(3)]
    exponential = [-math.log(1 - u) for u in row[30:33]]
    weights = [e / sum(exponential) for e in exponential]
    total = torch.zeros(image.shape, dtype=torch.float64)
    for i, (depth, *numbers) in enumerate(chains):
        if one_chain and i < 2:
            continue
        changed = image
        for place in range(1 + int(3 * depth)):
            choice, level, sign = numbers[3 * place : 3 * place + 3]
            level = (0.1 + 2.9 * level) / 10
            changed = slow_apply(changed, operations, choice, level, sign, "bilinear")
        total += weights[i] * changed
    return (1 - row[33]) * image + row[33] * total


@pytest.mark.parametrize("one_chain", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_augmix(shape, one_chain):
    x = images(*shape, n=40)
    d = draws(40, A.MIX_DRAWS)
    found = A.augmix(x.float(), d, one_chain)
    wanted = [slow_augmix(image, row, one_chain) for image, row in zip(x, d.tolist(), strict=True)]
    assert_almost_all_equal(found, torch.stack(wanted), share=0.01, atol=1e-3)


def test_augmix_keeps_the_range_and_one_chain_is_darker():
    x, d = images(n=300).float(), draws(300, A.MIX_DRAWS)
    mixed, dark = A.augmix(x, d), A.augmix(x, d, one_chain=True)
    assert mixed.min() >= 0
    assert mixed.max() <= 255 + 1e-3
    # The last chain has a third of the weight, and m is 1/2, on average.
    assert (dark.mean() / mixed.mean()).item() == pytest.approx(2 / 3, abs=0.05)


def test_weights_of_chains_are_uniform_on_the_simplex():
    d = draws(4000, A.MIX_DRAWS)
    d[:, :30] = 0.05  # autocontrast, which leaves a flat image as it is
    x = torch.full((4000, 1, 4, 4), 100.0)
    torch.testing.assert_close(A.augmix(x, d), x, atol=1e-3, rtol=1e-5)
    weight_m = 1 - A.augmix(x, d, one_chain=True)[:, 0, 0, 0] / 100  # m·(1 - w₃)
    assert weight_m.mean().item() == pytest.approx(1 / 3, abs=0.01)
    assert (weight_m**2).mean().item() == pytest.approx(1 / 3 * 1 / 2, abs=0.01)


# ------------------------------------------------------------------------------------------ views

ALL = [
    (A.augmix_view, A.AUGMIX_DRAWS),
    (A.randaugment_view, A.RANDAUGMENT_DRAWS),
    (A.trivial_augment_view, A.TRIVIAL_DRAWS),
]


@pytest.mark.parametrize(("make", "k"), ALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_channels_last_finite_and_each_has_its_own(channels, make, k):
    x, view = images(channels)[-1:].expand(64, -1, -1, -1), views(channels)
    out = make(view, x, draws(64, k))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.dtype == torch.float32
    assert out.isfinite().all()
    assert len(out.flatten(1).unique(dim=0)) > 50


@pytest.mark.parametrize(("make", "k"), ALL)
def test_views_do_not_depend_on_the_rest_of_the_batch_nor_on_more_draws(make, k):
    x, view, d = images(), views(), draws(12, k + 4)
    alone = torch.cat([make(view, x[i : i + 1], d[i : i + 1, :k]) for i in range(len(x))])
    torch.testing.assert_close(make(view, x, d), alone, atol=1e-5, rtol=1e-4)


def test_views_are_those_of_cropped_and_mirrored_images():
    """Larger images are cropped first."""
    x, view = images(height=40, width=36), views(size=(32, 32))
    d = draws(12, A.AUGMIX_DRAWS)
    weak = raw(view, view.weak(x, d[:, :WEAK_DRAWS])).round()
    wanted = A.augmix(weak, d[:, WEAK_DRAWS:])
    assert_almost_all_equal(raw(view, A.augmix_view(view, x, d)), wanted, atol=0.01)
    wanted = A.randaugment(weak, d[:, WEAK_DRAWS : A.RANDAUGMENT_DRAWS])
    assert_almost_all_equal(raw(view, A.randaugment_view(view, x, d)), wanted, atol=0.01)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("size", [(32, 32), (8, 12)])
def test_cutout(size, share):
    x, d = torch.ones(50, 3, *size), draws(50, A.CUTOUT_DRAWS)
    found = A.cutout(x, d, share)
    side = round(share * min(size))
    for image, (down, across) in zip(found, d.tolist(), strict=True):
        wanted = torch.ones(3, *size)
        top, left = (int(u * n) - side // 2 for u, n in zip((down, across), size, strict=True))
        wanted[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
        assert torch.equal(image, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("make", "k"), [*ALL, (lambda view, x, d: A.cutout(view.plain(x), d), 2)])
def test_views_can_be_compiled_as_one_graph(make, k):
    x, view, d = images(n=6), views(), draws(6, k)
    torch.compiler.reset()
    compiled = torch.compile(make, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(view, x, d), make(view, x, d))


def test_extreme_random_numbers():
    x = images()
    for value in (0.0, 1 - 2**-24):
        for function, k in ((A.augmix, A.MIX_DRAWS), (A.randaugment, 4), (A.trivial_augment, 3)):
            out = function(x.float(), torch.full((12, k), value))
            assert out.isfinite().all()
            assert np.all((np.asarray(out) >= 0) & (np.asarray(out) <= 255))
