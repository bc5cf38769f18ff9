"""Triton kernels for the layers between the convolutions.

Batch normalisation in training reads its input twice and writes it once. With the residual sum
before it, the ReLU after it and their gradients, separate torch calls read and write the same
memory many more times. Here there are two passes forward and two backward.

Tensors are channels-last, so they are read as tables of M rows (image, row, column) by C channels.
The images can be G groups of one size, each normalised by its own statistics, as if it had passed
through the network alone. Sums are computed in a fixed order from P partial sums, so results are
repeatable.

On GPUs that support it (Hopper and later), the small kernel between two passes and the second pass
are launched AHEAD: they start while the kernel before them still runs, and wait for its results
only where they need them.

Shapes: G groups, M rows of a group, C channels, P partial sums of a group.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

TILE = 4096  # values in the tile of a program
CHANNELS = 64  # channels in the tile
PROGRAMS = 132 * 2  # programs for sums: enough to keep a large GPU busy
WARPS = 8
STAGES = 4
FEW = 8  # channels whose partial sums a program adds up
ROWS = 64  # rows of patches that a program multiplies at a time
PARTS = 512  # largest number of partial sums; one tile size for all, as each size is compiled anew


# ------------------------------------------------------------------------------------ kernels


@triton.jit
def _means(sum_GPC, g, c, G, C, parts, rows, BP: tl.constexpr):
    """The sum of the partial sums of each group, divided by its rows: (G, C)."""
    p = tl.arange(0, BP)
    total = tl.zeros([g.shape[0], BP, c.shape[0]], tl.float32)
    for start in range(0, parts, BP):
        row = (g * parts)[:, None] + (start + p)[None, :]
        inside = (g < G)[:, None] & (start + p < parts)[None, :]
        at = row[:, :, None] * C + c[None, None, :]
        total += tl.load(sum_GPC + at, inside[:, :, None] & (c < C)[None, None, :], 0.0)
    return tl.sum(total, 1) / rows


@triton.jit
def _sums(
    x, skip, total, sum_GPC, square_GPC, rows, C, parts,
    HAS_SKIP: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Partial sums of x and x², both relative to the first row of the group, so that the variance
    is not lost in the square of a large mean. With a skip: of x + skip, which is stored."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    part, g = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = g.to(tl.int64) * rows
    origin = tl.load(x + first * C + c, c < C, 0.0)
    if HAS_SKIP:
        origin_skip = tl.load(skip + first * C + c, c < C, 0.0)
        origin = (origin.to(tl.float32) + origin_skip.to(tl.float32)).to(x.dtype.element_ty)
    origin = origin.to(tl.float32)
    sums = tl.zeros([R, BC], tl.float32)
    squares = tl.zeros([R, BC], tl.float32)
    for start in tl.range(part * R, rows, parts * R, num_stages=STAGES):
        r = start + tl.arange(0, R)
        inside = (r < rows)[:, None] & (c < C)[None, :]
        at = (first + r)[:, None] * C + c[None, :]
        value = tl.load(x + at, inside, 0.0)
        if HAS_SKIP:
            there = tl.load(skip + at, inside, 0.0)
            value = (value.to(tl.float32) + there.to(tl.float32)).to(x.dtype.element_ty)
            tl.store(total + at, value, inside)
        value = tl.where(inside, value.to(tl.float32) - origin[None, :], 0.0)
        sums += value
        squares += value * value
    mine = (g * parts + part) * C + c
    tl.store(sum_GPC + mine, tl.sum(sums, 0), c < C)
    tl.store(square_GPC + mine, tl.sum(squares, 0), c < C)


@triton.jit
def _moments(
    total, sum_GPC, square_GPC, mean_GC, rstd_GC, running_mean, running_var, batches,
    rows, C, parts, momentum, eps,
    G: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Mean and 1/σ of each group; and the running statistics, updated group by group."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    g = tl.arange(0, BG)
    inside = (g < G)[:, None] & (c < C)[None, :]
    at = g[:, None] * C + c[None, :]
    offset = _means(sum_GPC, g, c, G, C, parts, rows, BP)
    variance = _means(square_GPC, g, c, G, C, parts, rows, BP) - offset * offset
    variance = tl.where(variance < 0, 0.0, variance)  # keeps NaN
    first = (g.to(tl.int64) * rows)[:, None] * C + c[None, :]
    mean = tl.load(total + first, inside, 0.0).to(tl.float32) + offset
    tl.store(mean_GC + at, mean, inside)
    tl.store(rstd_GC + at, 1 / tl.sqrt(variance + eps), inside)

    # The weight of the last group is `momentum`, that of the group before 1 - momentum times it...
    kept = tl.exp2((G - g) * tl.log2(1 - momentum))
    weight = tl.where(g < G, momentum * tl.exp2((G - 1 - g) * tl.log2(1 - momentum)), 0.0)[:, None]
    before = tl.sum(tl.where(g == 0, kept, 0.0), 0)
    average = before * tl.load(running_mean + c, c < C, 0.0) + tl.sum(weight * mean, 0)
    spread = tl.sum(weight * variance, 0) * (rows / (rows - 1.0))
    spread += before * tl.load(running_var + c, c < C, 0.0)
    tl.store(running_mean + c, average, c < C)
    tl.store(running_var + c, spread, c < C)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + G)


@triton.jit
def _apply(
    x, skip, total, out, mean_GC, scale_GC, weight, bias, rows, C, eps,
    HAS_SKIP: tl.constexpr, KEEP: tl.constexpr, RUNNING: tl.constexpr,
    R: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """ReLU of the normalised values. `scale_GC` holds 1/σ or, if RUNNING, variances that are the
    same for all groups. With a skip, x + skip is normalised, and stored if KEEP."""
    g = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    # In reverse order: what the kernel before has read last is still in the cache.
    r = (tl.num_programs(0) - 1 - tl.program_id(0)) * R + tl.arange(0, R)
    inside = (r < rows)[:, None] & (c < C)[None, :]
    at = (g.to(tl.int64) * rows + r)[:, None] * C + c[None, :]
    statistics = c if RUNNING else g * C + c
    if AHEAD:
        tl.extra.cuda.gdc_wait()
    mean = tl.load(mean_GC + statistics, c < C, 0.0)
    rstd = tl.load(scale_GC + statistics, c < C, 1.0)
    if RUNNING:
        rstd = 1 / tl.sqrt(rstd + eps)
    scale = rstd * tl.load(weight + c, c < C, 0.0)
    shift = tl.load(bias + c, c < C, 0.0)
    value = tl.load(x + at, inside, 0.0)
    if HAS_SKIP:
        there = tl.load(skip + at, inside, 0.0)
        value = (value.to(tl.float32) + there.to(tl.float32)).to(x.dtype.element_ty)
        if KEEP:
            tl.store(total + at, value, inside)
    y = (value.to(tl.float32) - mean[None, :]) * scale[None, :] + shift[None, :]
    tl.store(out + at, tl.where(y < 0, 0.0, y).to(x.dtype.element_ty), inside)  # keeps NaN


@triton.jit
def _gradient_sums(
    d_out, total, mean_GC, rstd_GC, weight, bias, sum_GPC, product_GPC, rows, C, parts,
    R: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradient of the ReLU's input, and of its product with normalised x."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    part, g = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = g.to(tl.int64) * rows
    mean = tl.load(mean_GC + g * C + c, c < C, 0.0)[None, :]
    rstd = tl.load(rstd_GC + g * C + c, c < C, 0.0)[None, :]
    scale = rstd * tl.load(weight + c, c < C, 0.0)[None, :]
    shift = tl.load(bias + c, c < C, 0.0)[None, :]
    sums = tl.zeros([R, BC], tl.float32)
    products = tl.zeros([R, BC], tl.float32)
    for start in tl.range(part * R, rows, parts * R, num_stages=STAGES):
        r = start + tl.arange(0, R)
        inside = (r < rows)[:, None] & (c < C)[None, :]
        at = (first + r)[:, None] * C + c[None, :]
        centred = tl.load(total + at, inside, 0.0).to(tl.float32) - mean
        grad = tl.load(d_out + at, inside, 0.0).to(tl.float32)
        grad = tl.where(centred * scale + shift <= 0, 0.0, grad)
        sums += grad
        products += grad * (centred * rstd)
    mine = (g * parts + part) * C + c
    tl.store(sum_GPC + mine, tl.sum(sums, 0), c < C)
    tl.store(product_GPC + mine, tl.sum(products, 0), c < C)


@triton.jit
def _gradient_moments(
    sum_GPC, product_GPC, sum_GC, product_GC, d_weight, d_bias, rows, C, parts,
    G: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The means of both for each group, and the gradients of weight and bias."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    g = tl.arange(0, BG)
    inside = (g < G)[:, None] & (c < C)[None, :]
    at = g[:, None] * C + c[None, :]
    summed = _means(sum_GPC, g, c, G, C, parts, rows, BP)
    multiplied = _means(product_GPC, g, c, G, C, parts, rows, BP)
    tl.store(sum_GC + at, summed, inside)
    tl.store(product_GC + at, multiplied, inside)
    tl.store(d_weight + c, tl.sum(multiplied, 0) * rows, c < C)
    tl.store(d_bias + c, tl.sum(summed, 0) * rows, c < C)


@triton.jit
def _gradient(
    d_out, d_total, total, d_x, mean_GC, rstd_GC, sum_GC, product_GC, weight, bias, rows, C,
    HAS_TOTAL: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The gradient of x and of the skip: through the ReLU and, if x + skip is used elsewhere too,
    from there."""
    g = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    # In reverse order: what the kernel before has read last is still in the cache.
    r = (tl.num_programs(0) - 1 - tl.program_id(0)) * R + tl.arange(0, R)
    inside = (r < rows)[:, None] & (c < C)[None, :]
    at = (g.to(tl.int64) * rows + r)[:, None] * C + c[None, :]
    mean = tl.load(mean_GC + g * C + c, c < C, 0.0)[None, :]
    rstd = tl.load(rstd_GC + g * C + c, c < C, 0.0)[None, :]
    scale = rstd * tl.load(weight + c, c < C, 0.0)[None, :]
    shift = tl.load(bias + c, c < C, 0.0)[None, :]
    centred = tl.load(total + at, inside, 0.0).to(tl.float32) - mean
    grad = tl.load(d_out + at, inside, 0.0).to(tl.float32)
    grad = tl.where(centred * scale + shift <= 0, 0.0, grad)
    if HAS_TOTAL:
        elsewhere = tl.load(d_total + at, inside, 0.0).to(tl.float32)
    if AHEAD:  # everything above was ready before the sums started, which are not launched ahead
        tl.extra.cuda.gdc_wait()
    summed = tl.load(sum_GC + g * C + c, c < C, 0.0)[None, :]
    multiplied = tl.load(product_GC + g * C + c, c < C, 0.0)[None, :]
    grad = scale * (grad - summed - centred * rstd * multiplied)
    if HAS_TOTAL:
        grad += elsewhere
    tl.store(d_x + at, grad.to(d_x.dtype.element_ty), inside)


@triton.jit
def _every_second(
    x, small, rows, height, width, small_height, small_width, C,
    ADD: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Copy every second pixel of every second row of x to a small image or, if ADD, add the small
    image to these pixels."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < rows)[:, None] & (c < C)[None, :]
    image, y = r // (small_width * small_height), (r // small_width) % small_height
    there = (image * height + 2 * y) * width + 2 * (r % small_width)
    at = there[:, None] * C + c[None, :]
    small_at = r[:, None] * C + c[None, :]
    if ADD:
        value = tl.load(small + small_at, inside, 0.0).to(tl.float32)
        value += tl.load(x + at, inside, 0.0).to(tl.float32)
        tl.store(x + at, value.to(x.dtype.element_ty), inside)
    else:
        tl.store(small + small_at, tl.load(x + at, inside, 0.0), inside)


@triton.jit
def _patches(
    x, out, pixels, height, width,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The 3×3 neighbourhood of each pixel as a row of 9·C values, followed by a one and by zeros up
    to K."""
    pixel = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    k = tl.arange(0, K)
    row, column = (pixel // width) % height, pixel % width
    down, across = k // (3 * C) - 1, (k // C) % 3 - 1
    y, x_ = row[:, None] + down[None, :], column[:, None] + across[None, :]
    inside = (y >= 0) & (y < height) & (x_ >= 0) & (x_ < width) & (k < 9 * C)[None, :]
    inside &= (pixel < pixels)[:, None]
    there = (pixel[:, None] + (down * width + across)[None, :]) * C + (k % C)[None, :]
    value = tl.load(x + there, inside, 0.0)
    value = tl.where((k == 9 * C)[None, :], 1.0, value)
    tl.store(
        out + pixel[:, None] * K + k[None, :],
        value.to(out.dtype.element_ty),
        (pixel < pixels)[:, None],
    )


@triton.jit
def _pool(x, skip, out, C, pixels, HAS_SKIP: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """The mean of x + skip over the pixels of an image."""
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([R, BC], tl.float32)
    for start in range(0, pixels, R):
        r = start + tl.arange(0, R)
        inside = (r < pixels)[:, None] & (c < C)[None, :]
        at = (image * pixels + r)[:, None] * C + c[None, :]
        total += tl.load(x + at, inside, 0.0).to(tl.float32)
        if HAS_SKIP:
            total += tl.load(skip + at, inside, 0.0).to(tl.float32)
    mean = tl.sum(total, 0) / pixels
    tl.store(out + image * C + c, mean.to(out.dtype.element_ty), c < C)


@triton.jit
def _products(
    a, b, out, product_GPAK, rows, A, parts,
    RELU: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums over the rows of the products of a (A columns) and b (K columns). RELU: a counts
    only where `out` is not zero."""
    part, g = tl.program_id(0), tl.program_id(2)
    i = tl.program_id(1) * BA + tl.arange(0, BA)
    k = tl.arange(0, K)
    first = g.to(tl.int64) * rows
    total = tl.zeros([BA, K], tl.float32)
    for start in tl.range(part * R, rows, parts * R, num_stages=STAGES):
        r = start + tl.arange(0, R)
        at = (first + r)[:, None] * A + i[None, :]
        inside = (r < rows)[:, None] & (i < A)[None, :]
        left = tl.load(a + at, inside, 0.0)
        if RELU:
            left = tl.where(tl.load(out + at, inside, 0.0) == 0, 0.0, left)  # keeps NaN
        right = tl.load(b + (first + r)[:, None] * K + k[None, :], (r < rows)[:, None], 0.0)
        total = tl.dot(tl.trans(left.to(b.dtype.element_ty)), right, total, input_precision="ieee")
    mine = ((g * parts + part) * A + i)[:, None] * K + k[None, :]
    tl.store(product_GPAK + mine, total, (i < A)[:, None])


@triton.jit
def _add_parts(part_GPA, sum_GA, A, parts, BP: tl.constexpr, BA: tl.constexpr):
    """The sum of the partial sums of each group."""
    g = tl.program_id(1)
    a = tl.program_id(0) * BA + tl.arange(0, BA)
    p = tl.arange(0, BP)
    total = tl.zeros([BP, BA], tl.float32)
    for start in range(0, parts, BP):
        at = (g * parts + start + p)[:, None] * A + a[None, :]
        inside = (start + p < parts)[:, None] & (a < A)[None, :]
        total += tl.load(part_GPA + at, inside, 0.0)
    tl.store(sum_GA + g * A + a, tl.sum(total, 0), a < A)


@triton.jit
def _linear_moments(square_GKK, weight_CK, g, rows, ONE: tl.constexpr, K: tl.constexpr):
    """The mean of the patches of a group; and of the convolution of the patches: the mean, the
    covariance with the patches, and the variance.

    The convolution is linear, so all of this follows from the sums of the products of the patches.
    These contain the sums of the patches too, because every patch has a one.
    """
    k = tl.arange(0, K)
    at = square_GKK + g * K * K + k * K
    mean_K = tl.load(at + ONE) / rows
    covariance_KK = tl.load(at[:, None] + k[None, :]) / rows - mean_K[:, None] * mean_K[None, :]
    mean = tl.sum(weight_CK * mean_K[None, :], 1)
    with_K = tl.sum(weight_CK[:, :, None] * covariance_KK[None, :, :], 1)
    variance = tl.sum(weight_CK * with_K, 1)
    return mean_K, mean, with_K, tl.where(variance < 0, 0.0, variance)  # keeps NaN


@triton.jit
def _first_moments(
    square_GKK, weight_CK, norm_weight, norm_bias, scale_GC, shift_GC,
    running_mean, running_var, batches, rows, C, momentum, eps,
    G: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The scale and shift of the norm after the first convolution, for each group; and the running
    statistics, updated group by group."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, K)
    weight = tl.load(weight_CK + c[:, None] * K + k[None, :], (c < C)[:, None], 0.0)
    weight = weight.to(tl.float32)
    gamma = tl.load(norm_weight + c, c < C, 0.0)
    beta = tl.load(norm_bias + c, c < C, 0.0)
    average = tl.load(running_mean + c, c < C, 0.0)
    spread = tl.load(running_var + c, c < C, 0.0)
    for g in range(G):
        _, mean, _, variance = _linear_moments(square_GKK, weight, g, rows, ONE, K)
        scale = gamma / tl.sqrt(variance + eps)
        tl.store(scale_GC + g * C + c, scale, c < C)
        tl.store(shift_GC + g * C + c, beta - mean * scale, c < C)
        average += momentum * (mean - average)
        spread += momentum * (variance * (rows / (rows - 1.0)) - spread)
    tl.store(running_mean + c, average, c < C)
    tl.store(running_var + c, spread, c < C)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + G)


@triton.jit
def _first_apply(
    patches, weight_CK, scale_GC, shift_GC, out, rows, C,
    K: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """ReLU of the normalised convolution."""
    g = tl.program_id(2)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    k = tl.arange(0, K)
    r = tl.program_id(0) * R + tl.arange(0, R)
    at = g.to(tl.int64) * rows + r
    pixels = tl.load(patches + at[:, None] * K + k[None, :], (r < rows)[:, None], 0.0)
    weight = tl.load(weight_CK + c[None, :] * K + k[:, None], (c < C)[None, :], 0.0)
    scale = tl.load(scale_GC + g * C + c, c < C, 0.0)[None, :]
    shift = tl.load(shift_GC + g * C + c, c < C, 0.0)[None, :]
    y = tl.dot(pixels, weight, input_precision="ieee") * scale + shift
    tl.store(
        out + at[:, None] * C + c[None, :],
        tl.where(y < 0, 0.0, y).to(out.dtype.element_ty),  # keeps NaN
        (r < rows)[:, None] & (c < C)[None, :],
    )


@triton.jit
def _first_gradient(
    square_GKK, product_GCK, weight_CK, norm_weight, d_weight_CK, d_norm_weight, d_norm_bias,
    rows, C, eps,
    G: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights of the convolution and of the norm, from the sums of the
    products of the patches with the gradient of the ReLU's input."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    k = tl.arange(0, K)
    inside = (c < C)[:, None]
    weight = tl.load(weight_CK + c[:, None] * K + k[None, :], inside, 0.0).to(tl.float32)
    gamma = tl.load(norm_weight + c, c < C, 0.0)
    d_weight = tl.zeros([BC, K], tl.float32)
    d_gamma = tl.zeros([BC], tl.float32)
    d_beta = tl.zeros([BC], tl.float32)
    for g in range(G):
        mean_K, mean, with_K, variance = _linear_moments(square_GKK, weight, g, rows, ONE, K)
        rstd = 1 / tl.sqrt(variance + eps)
        at = product_GCK + (g * C + c) * K
        product = tl.load(at[:, None] + k[None, :], inside, 0.0)
        total = tl.load(at + ONE, c < C, 0.0)
        slope = (tl.sum(weight * product, 1) - mean * total) * rstd
        d_y = product - total[:, None] * mean_K[None, :] - (slope * rstd)[:, None] * with_K
        d_weight += (gamma * rstd)[:, None] * d_y
        d_gamma += slope
        d_beta += total
    tl.store(d_weight_CK + c[:, None] * K + k[None, :], d_weight, inside)
    tl.store(d_norm_weight + c, d_gamma, c < C)
    tl.store(d_norm_bias + c, d_beta, c < C)


# ------------------------------------------------------------------------------------ calls


def norm_relu(
    norm: nn.BatchNorm2d, x: Tensor, skip: Tensor | None, groups: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In training: x + skip, ReLU(norm(x + skip)), and mean and 1/σ of each group."""
    x = x.contiguous(memory_format=torch.channels_last)
    skip = skip if skip is None else skip.contiguous(memory_format=torch.channels_last)
    G, M, C = _table(x, groups)
    R, BC = _tile(C)
    blocks = triton.cdiv(C, BC)
    P = _parts(G, M, C)
    total = x if skip is None else torch.empty_like(x)
    out = torch.empty_like(x)
    sums, squares = x.new_empty((2, G, P, C), dtype=torch.float32)
    mean, rstd = x.new_empty((2, G, C), dtype=torch.float32)
    ahead = can_launch_ahead(x.device)
    early = _launched(ahead)
    _sums[(P, blocks, G)](
        x, skip, total, sums, squares, M, C, P, skip is not None, R, BC, STAGES, ahead,
        num_warps=WARPS,
    )  # fmt: skip
    _moments[(triton.cdiv(C, FEW),)](
        total, sums, squares, mean, rstd, norm.running_mean, norm.running_var,
        norm.num_batches_tracked, M, C, P, norm.momentum, norm.eps, *_few(G), ahead, **early,
    )  # fmt: skip
    _apply[(triton.cdiv(M, R), blocks, G)](
        total, None, None, out, mean, rstd, norm.weight, norm.bias, M, C, norm.eps,
        False, False, False, R, BC, ahead, num_warps=WARPS, **early,
    )  # fmt: skip
    return total, out, mean, rstd


def norm_relu_running(
    norm: nn.BatchNorm2d, x: Tensor, skip: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """x + skip (valid only with `keep`) and ReLU(norm(x + skip)), with the running statistics."""
    G, M, C = _table(x, 1)
    R, BC = _tile(C)
    x = x.contiguous(memory_format=torch.channels_last)
    skip = skip if skip is None else skip.contiguous(memory_format=torch.channels_last)
    total = torch.empty_like(x) if keep and skip is not None else x
    out = torch.empty_like(x)
    _apply[(triton.cdiv(M, R), triton.cdiv(C, BC), G)](
        x, skip, total, out, norm.running_mean, norm.running_var, norm.weight, norm.bias,
        M, C, norm.eps, skip is not None, total is not x, True, R, BC, False, num_warps=WARPS,
    )  # fmt: skip
    return total, out


def norm_relu_gradient(
    norm: nn.BatchNorm2d,
    d_out: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    mean_GC: Tensor,
    rstd_GC: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (the same as of the skip), weight and bias."""
    G, M, C = _table(total, len(mean_GC))
    R, BC = _tile(C)
    blocks = triton.cdiv(C, BC)
    P = _parts(G, M, C)
    sums, products = total.new_empty((2, G, P, C), dtype=torch.float32)
    summed, multiplied = total.new_empty((2, G, C), dtype=torch.float32)
    d_weight, d_bias = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
    d_x = torch.empty_like(total)
    ahead = can_launch_ahead(total.device)
    early = _launched(ahead)
    _gradient_sums[(P, blocks, G)](
        d_out, total, mean_GC, rstd_GC, norm.weight, norm.bias, sums, products, M, C, P,
        R, BC, STAGES, ahead, num_warps=WARPS,
    )  # fmt: skip
    _gradient_moments[(triton.cdiv(C, FEW),)](
        sums, products, summed, multiplied, d_weight, d_bias, M, C, P, *_few(G), ahead, **early
    )
    _gradient[(triton.cdiv(M, R), blocks, G)](
        d_out, d_total, total, d_x, mean_GC, rstd_GC, summed, multiplied, norm.weight, norm.bias,
        M, C, d_total is not None, R, BC, ahead, num_warps=WARPS, **early,
    )  # fmt: skip
    return d_x, d_weight, d_bias


def every_second(x: Tensor) -> Tensor:
    """A copy of x[:, :, ::2, ::2]."""
    x = x.contiguous(memory_format=torch.channels_last)
    B, C, height, width = x.shape
    shape = (B, C, (height + 1) // 2, (width + 1) // 2)
    small = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _for_every_second(x, small, add=False)
    return small


def add_to_every_second(x: Tensor, small: Tensor) -> None:
    """x[:, :, ::2, ::2] += small."""
    _for_every_second(x, small, add=True)


def _for_every_second(x: Tensor, small: Tensor, add: bool) -> None:
    B, C, height, width = small.shape
    R, BC = _tile(C)
    rows = B * height * width
    _every_second[(triton.cdiv(rows, R), triton.cdiv(C, BC))](
        x, small, rows, *x.shape[2:], height, width, C, add, R, BC, num_warps=WARPS
    )


def patch_width(channels: int) -> int:
    """The width of the rows of `patches`."""
    width: int = triton.next_power_of_2(9 * channels + 1)
    return width


def patches(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The 3×3 neighbourhood of every pixel: (pixels, K), ordered by row, column and channel, then a
    one, then zeros."""
    B, C, height, width = x.shape
    pixels = B * height * width
    K = patch_width(C)
    out = x.new_empty((pixels, K), dtype=dtype)
    R = TILE // K
    _patches[(triton.cdiv(pixels, R),)](x, out, pixels, height, width, C, K, R)
    return out


def pool(x: Tensor, skip: Tensor | None) -> Tensor:
    """The mean of x + skip over the pixels of each image: (B, C)."""
    x = x.contiguous(memory_format=torch.channels_last)
    skip = skip if skip is None else skip.contiguous(memory_format=torch.channels_last)
    B, C, height, width = x.shape
    BC = min(256, triton.next_power_of_2(C))
    out = x.new_empty((B, C))
    _pool[(B, triton.cdiv(C, BC))](x, skip, out, C, height * width, skip is not None, 16, BC)
    return out


def squares(patches: Tensor, groups: int) -> Tensor:
    """For each group the sums of the products of the patches with each other: (G, K, K)."""
    return _multiplied(patches, patches, None, groups)


def first_norm_relu(
    norm: nn.BatchNorm2d, patches: Tensor, square_GKK: Tensor, weight_CK: Tensor, ones: int
) -> Tensor:
    """In training: ReLU(norm(convolution)), (pixels, C). The statistics are computed from the
    `squares` of the patches, and the convolution itself is never stored.

    `ones` is the column of the patches that holds the ones.
    """
    (C, K), groups = weight_CK.shape, len(square_GKK)
    M = len(patches) // groups
    scale, shift = patches.new_empty((2, groups, C), dtype=torch.float32)
    _first_moments[(triton.cdiv(C, FEW),)](
        square_GKK, weight_CK, norm.weight, norm.bias, scale, shift, norm.running_mean,
        norm.running_var, norm.num_batches_tracked, M, C, norm.momentum, norm.eps,
        groups, ones, K, FEW,
    )  # fmt: skip
    return _apply_first(patches, weight_CK, scale, shift)


def first_norm_relu_running(norm: nn.BatchNorm2d, patches: Tensor, weight_CK: Tensor) -> Tensor:
    """ReLU(norm(convolution)), with the running statistics."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    shift = norm.bias - norm.running_mean * scale
    return _apply_first(patches, weight_CK, scale[None], shift[None])


def first_norm_relu_gradient(
    norm: nn.BatchNorm2d,
    d_out: Tensor,
    out: Tensor,
    patches: Tensor,
    weight_CK: Tensor,
    ones: int,
    square_GKK: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the convolution's weight and of the norm's weight and bias."""
    (C, K), G = weight_CK.shape, len(square_GKK)
    product_GCK = _multiplied(d_out, patches, out, G)
    d_weight = torch.empty_like(weight_CK, dtype=torch.float32)
    d_norm = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
    _first_gradient[(triton.cdiv(C, FEW),)](
        square_GKK, product_GCK, weight_CK, norm.weight, d_weight, *d_norm,
        len(patches) // G, C, norm.eps, G, ones, K, FEW,
    )  # fmt: skip
    return d_weight, *d_norm


def _multiplied(a: Tensor, b: Tensor, out: Tensor | None, groups: int) -> Tensor:
    """aᵀb of each group, in float32. With `out`, a counts only where `out` is not zero."""
    (_, A), (rows, K) = a.shape, b.shape
    M, BA = rows // groups, max(16, min(CHANNELS, triton.next_power_of_2(A)))
    blocks = triton.cdiv(A, BA)
    P = max(1, min(triton.cdiv(M, ROWS), PARTS // (groups * blocks)))
    parts = a.new_empty((groups, P, A, K), dtype=torch.float32)
    total = a.new_empty((groups, A, K), dtype=torch.float32)
    _products[(P, blocks, groups)](
        a, b, out, parts, M, A, P, out is not None, K, ROWS, BA, 2, num_warps=4
    )
    _add_parts[(triton.cdiv(A * K, FEW), groups)](parts, total, A * K, P, PARTS, FEW)
    return total


def _apply_first(patches: Tensor, weight_CK: Tensor, scale_GC: Tensor, shift_GC: Tensor) -> Tensor:
    G, C = scale_GC.shape
    M = len(patches) // G
    BC = max(16, min(CHANNELS, triton.next_power_of_2(C)))
    out = patches.new_empty((len(patches), C))
    _first_apply[(triton.cdiv(M, ROWS), triton.cdiv(C, BC), G)](
        patches, weight_CK, scale_GC, shift_GC, out, M, C, patches.shape[1], ROWS, BC, num_warps=4
    )
    return out


@cache
def can_launch_ahead(device: torch.device) -> bool:
    """Whether a kernel can be launched before the previous one has ended."""
    able = hasattr(tl.extra.cuda, "gdc_wait") and not triton.knobs.runtime.interpret  # Triton 3.4
    return able and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _launched(ahead: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if ahead else {}


def _few(G: int) -> tuple[int, int, int, int]:
    """The number of groups, and the sizes of the tile that adds up partial sums."""
    groups: int = triton.next_power_of_2(G)
    return G, groups, max(16, PARTS // groups), FEW


def _table(x: Tensor, groups: int) -> tuple[int, int, int]:
    B, C, height, width = x.shape
    return groups, B // groups * height * width, C


def _tile(C: int) -> tuple[int, int]:
    channels: int = min(CHANNELS, triton.next_power_of_2(C))
    rows: int = TILE // channels
    return rows, channels


def _parts(G: int, M: int, C: int) -> int:
    """The number of partial sums of a group."""
    R, BC = _tile(C)
    most: int = PROGRAMS // (G * triton.cdiv(C, BC))
    parts: int = max(1, min(triton.cdiv(M, R), most))
    return parts
