"""How time and memory grow with the number of images, of classes, and of pixels.

    python benchmarks/growth.py [--out FILE.json] [--plot FILE.svg] [--quick]

On the CPU and, if there is one, on the GPU:

- the state that PLS keeps per image (`methods/pseudo_labels.py`): bytes per image, including its
  given label;
- the mixtures of both stages, the first over all images, the second over half of them: seconds, and
  peak memory including the results;
- the views of a step, two weak and one strong: milliseconds per image;
- pseudo-labels: storing a batch and computing its pseudo-loss, milliseconds per batch.

The state has two forms, and both are measured: "whole" keeps the pseudo-label of every class, and
"bounded" only those of the most likely classes. A run uses the whole form up to a size limit.

Times are medians over several calls. Peak memory on the CPU is the growth of the resident set, in a
separate process that returns freed memory at once.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import machine
from pseudoloss.experiments.drawing import (
    BLACK,
    BLUE,
    GREY,
    STYLE,
    VERMILION,
    WIDTH,
    EndLabel,
    label_ends,
    save,
)
from pseudoloss.methods.base import tensors_of
from pseudoloss.methods.mixture import fit_two_modes
from pseudoloss.methods.pls import pseudo_loss
from pseudoloss.methods.pseudo_labels import PLSState
from pseudoloss.nn.views import STRONG_DRAWS, WEAK_DRAWS, Views

IMAGES = (10**4, 10**5, 10**6, 10**7)
CLASSES = (10, 100, 10**3, 10**4)
SIZES = (32, 64, 128, 224)
QUICK = ((10**3, 10**4), (10, 20), (8, 16))
BATCH = {"cpu": 32, "cuda": 256}  # images per batch, for the views
PSEUDO_LABELS = 256  # per batch
SECONDS = 2.0  # per measurement, and at least three calls
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

FORMS = {"bounded": 0, "whole": 2**62}  # bytes up to which pseudo-labels are kept whole
RENAMED_KEYS = {  # of old files
    "guesses": "pseudo_labels",
    "bytes_an_image": "bytes_per_image",
    "remember_ms": "store_ms",
}

Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file (.json)")
    parser.add_argument("--plot", type=Path, help="draw a plot (.svg, .png; needs matplotlib)")
    parser.add_argument("--read", type=Path, help="measure nothing, plot this result file")
    parser.add_argument("--quick", action="store_true", help="tiny ranges, to see that it runs")
    parser.add_argument("--resident", type=int, help=argparse.SUPPRESS)  # see resident_growth
    args = parser.parse_args()
    if args.resident:
        print(resident_growth(args.resident))
        return
    if args.read:
        if not args.plot:
            parser.error("--read needs --plot")
        plot(read_result(args.read), args.plot)
        return
    images, classes, sizes = QUICK if args.quick else (IMAGES, CLASSES, SIZES)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    result = {
        "threads": torch.get_num_threads(),
        "memory": memory_rows(images, classes),
        "mixtures": [mixture_row(n, device) for device in devices for n in images],
        "views": [view_row(size, device) for device in devices for size in sizes],
        "pseudo_labels": [
            pseudo_label_row(c, device, form)
            for device in devices
            for form in FORMS
            for c in classes
        ],
    }
    machine.write(args.out, result, {str(args.plot): f"docs/{Path(args.plot or '').name}"})
    if args.plot:
        plot(result, args.plot)


def show(row: dict[str, Any], text: str) -> dict[str, Any]:
    print(text, flush=True)
    return row


# ------------------------------------------------------------------------------- the measurements


def memory_rows(images: Sequence[int], classes: Sequence[int]) -> Rows:
    rows = []
    for n in images:
        for c in classes:
            for form, whole in FORMS.items():
                given_N = torch.arange(n, device="meta") % c  # sizes alone: nothing is allocated
                tensors = [given_N, *tensors_of(PLSState.begin(given_N, c, whole)).values()]
                size = sum(tensor.nbytes for tensor in tensors) / n
                row = {"form": form, "images": n, "classes": c, "bytes_per_image": size}
                text = f"state     {n:>10,} images {c:>7,} classes  {form:7}  {size:,.0f} bytes"
                rows.append(show(row, text))
    return rows


def mixture_row(n: int, device: str) -> dict[str, Any]:
    values_N, noisy_N = losses(n, device)
    both_stages(values_N, noisy_N)
    peak = resident_growth_in_process(n) if device == "cpu" else cuda_growth(values_N, noisy_N)
    seconds = clock(lambda: both_stages(values_N, noisy_N), device)
    row = {"device": device, "images": n, "seconds": seconds, "peak_bytes": peak}
    held = "unknown" if peak is None else f"{peak / 1e6:.1f} MB"
    return show(row, f"mixtures  {n:>10,} images on {device:4}  {seconds:8.4f} s  {held}")


def view_row(size: int, device: str) -> dict[str, Any]:
    B = BATCH[device]
    random = torch.Generator(device).manual_seed(0)
    images_BCHW = torch.randint(
        0, 256, (B, 3, size, size), dtype=torch.uint8, generator=random, device=device
    )
    draws_BK = torch.rand(B, 2 * WEAK_DRAWS + STRONG_DRAWS, generator=random, device=device)
    first, second, strong = draws_BK.split([WEAK_DRAWS, WEAK_DRAWS, STRONG_DRAWS], dim=1)
    mean_C, std_C = (torch.full((3,), value, device=device) for value in (0.5, 0.25))
    views = Views(mean_C, std_C, (size, size), size // 8, True)

    def two_weak_views() -> None:
        views.weak(images_BCHW, first)
        views.weak(images_BCHW, second)

    weak = 1e3 * clock(two_weak_views, device) / B
    strong_view = 1e3 * clock(lambda: views.strong(images_BCHW, strong), device) / B
    row = {"device": device, "size": size, "batch": B, "weak_ms": weak, "strong_ms": strong_view}
    return show(
        row,
        f"views     {size:>10} pixels on {device:4}  weak ×2 {weak:.4f} ms  "
        f"strong {strong_view:.4f} ms  per image",
    )


def pseudo_label_row(c: int, device: str, form: str) -> dict[str, Any]:
    random = torch.Generator(device).manual_seed(0)
    n = 100 * PSEUDO_LABELS
    state = PLSState.begin(torch.arange(n, device=device) % c, c, FORMS[form])
    index_B = torch.randperm(n, generator=random, device=device)[:PSEUDO_LABELS]
    logits_BC = 3 * torch.randn(PSEUDO_LABELS, c, generator=random, device=device)
    pseudo_BC = logits_BC.softmax(1)
    batch = slice(0, PSEUDO_LABELS)
    store = 1e3 * clock(lambda: state.store(index_B, pseudo_BC), device)
    compute = 1e3 * clock(lambda: pseudo_loss(state.pseudo_labels(batch), logits_BC), device)
    row = {
        "device": device,
        "form": form,
        "classes": c,
        "batch": PSEUDO_LABELS,
        "store_ms": store,
        "pseudo_loss_ms": compute,
    }
    return show(
        row,
        f"pseudo-labels {c:>6,} classes on {device:4}  {form:7}  storing {store:.3f} ms  "
        f"pseudo-loss {compute:.3f} ms  per batch of {PSEUDO_LABELS}",
    )


# ------------------------------------------------------------------------------------------- tools


def losses(n: int, device: str) -> tuple[Tensor, Tensor]:
    """Values like the losses of clean and noisy images, and a random half of the images."""
    random = torch.Generator(device).manual_seed(0)
    values_N = torch.randn(n, generator=random, device=device)
    random_N = torch.rand(n, generator=random, device=device)
    values_N.mul_(0.5).add_(random_N < 0.4, alpha=4).abs_()
    return values_N, random_N.uniform_(generator=random) < 0.5


def both_stages(values_N: Tensor, noisy_N: Tensor) -> None:
    fit_two_modes(values_N)
    fit_two_modes(values_N, noisy_N)


def clock(call: Callable[[], object], device: str) -> float:
    """Seconds per call, the median of several calls."""
    call()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < SECONDS and len(seconds) < 100):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cuda_growth(values_N: Tensor, noisy_N: Tensor) -> int:
    """Peak memory of both stages, in bytes."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both_stages(values_N, noisy_N)
    return torch.cuda.max_memory_allocated() - before


def resident_growth_in_process(n: int) -> int | None:
    """`resident_growth` in a separate process; None if the system does not report it."""
    if not CLEAR.exists():
        return None
    # Otherwise the allocator keeps freed memory, and using it again is not seen as growth.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--resident", str(n)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
    return int(done.stdout)


def resident_growth(n: int) -> int:
    values_N, noisy_N = losses(n, "cpu")
    both_stages(values_N[:1000], noisy_N[:1000])  # loads libraries
    before = resident("VmRSS")
    CLEAR.write_text("5")  # resets the peak
    both_stages(values_N, noisy_N)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A field of the status of the process, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


# ---------------------------------------------------------------------------------------- the plot

DEVICES = {"cpu": ("CPU", VERMILION), "cuda": ("GPU", BLUE)}
STYLES = ("-", "--")  # of the first and the second quantity in a panel


def read_result(file: Path) -> dict[str, Any]:
    """A result file; older versions measured only the bounded form, and had other keys."""
    text = file.read_text()
    for old, new in RENAMED_KEYS.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    result: dict[str, Any] = json.loads(text)
    for row in (*result["memory"], *result["pseudo_labels"]):
        row.setdefault("form", "bounded")
    return result


def rows_of(rows: Rows, form: str) -> Rows:
    return [row for row in rows if row["form"] == form]


def plot(result: dict[str, Any], path: Path) -> None:
    """Six panels with logarithmic axes. All but the first show the bounded form."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        ends = []
        for axis, draw in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
            axis.set(xscale="log", yscale="log")
            axis.minorticks_off()
            axis.margins(y=0.12)
            labels = draw(axis, result)
            label_log_axis(axis)
            ends.append((axis, labels))
        label_ends(figure, ends, fontsize=7.5)
        save(figure, path)


def label_log_axis(axis: Any) -> None:
    """Ticks at 1, 2 and 5 on a y axis of less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def line(axis: Any, xs: Sequence[float], ys: Sequence[float], text: str, **style: Any) -> EndLabel:
    style = {"marker": "o", "markersize": 3, "color": BLACK} | style
    axis.plot(xs, ys, **style)
    return EndLabel(xs[-1], ys[-1], text, style["color"])


def device_lines(
    axis: Any, rows: Rows, x: str, quantities: dict[str, str], unit: float = 1
) -> list[EndLabel]:
    """One line per device and quantity; quantities that are 0 or unknown are left out."""
    labels = []
    for device, (name, colour) in DEVICES.items():
        for (key, quantity), style in zip(quantities.items(), STYLES, strict=False):
            found = [row for row in rows if row["device"] == device and row[key]]
            if found:
                xs, ys = [row[x] for row in found], [row[key] * unit for row in found]
                text = f"{quantity}, {name}" if quantity else name
                labels.append(line(axis, xs, ys, text, color=colour, linestyle=style))
    return labels


def memory_per_image(axis: Any, result: dict[str, Any]) -> list[EndLabel]:
    most = max(row["images"] for row in result["memory"])
    rows = [row for row in result["memory"] if row["images"] == most]
    bounded, whole = rows_of(rows, "bounded"), rows_of(rows, "whole")
    classes = [row["classes"] for row in bounded]
    stored = [row["bytes_per_image"] for row in bounded]
    dotted = {"color": GREY, "linestyle": ":"}
    axis.set(title="State of one image", xlabel="classes", ylabel="bytes")
    if whole:
        all_stored = [row["bytes_per_image"] for row in whole]
        return [
            line(axis, classes, stored, "bounded"),
            line(axis, classes, all_stored, "whole", **dotted),
        ]
    return [
        line(axis, classes, stored, "stored"),
        line(axis, classes, [4 * c for c in classes], "one float\nper class", **dotted),
    ]


def memory_of_all_images(axis: Any, result: dict[str, Any]) -> list[EndLabel]:
    most = max(row["classes"] for row in result["memory"])
    rows = [row for row in rows_of(result["memory"], "bounded") if row["classes"] == most]
    total = [row["bytes_per_image"] * row["images"] / 1e6 for row in rows]
    axis.set(title="State of all images", xlabel="images", ylabel="MB")
    return [line(axis, [row["images"] for row in rows], total, f"{most:,}\nclasses")]


def pseudo_label_times(axis: Any, result: dict[str, Any]) -> list[EndLabel]:
    axis.set(title=f"{PSEUDO_LABELS} pseudo-labels", xlabel="classes", ylabel="ms")
    quantities = {"store_ms": "storing", "pseudo_loss_ms": "pseudo-loss"}
    return device_lines(axis, rows_of(result["pseudo_labels"], "bounded"), "classes", quantities)


def mixture_times(axis: Any, result: dict[str, Any]) -> list[EndLabel]:
    axis.set(title="Both mixtures: time", xlabel="images", ylabel="seconds")
    return device_lines(axis, result["mixtures"], "images", {"seconds": ""})


def mixture_memory(axis: Any, result: dict[str, Any]) -> list[EndLabel]:
    axis.set(title="Both mixtures: peak memory", xlabel="images", ylabel="MB")
    return device_lines(axis, result["mixtures"], "images", {"peak_bytes": ""}, unit=1e-6)


def view_times(axis: Any, result: dict[str, Any]) -> list[EndLabel]:
    axis.set(title="Views of one image", xlabel="image size (pixels)", ylabel="ms")
    sizes = sorted({row["size"] for row in result["views"]})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    quantities = {"strong_ms": "strong", "weak_ms": "two weak"}
    return device_lines(axis, result["views"], "size", quantities)


PANELS = (
    memory_per_image,
    memory_of_all_images,
    pseudo_label_times,
    mixture_times,
    mixture_memory,
    view_times,
)


if __name__ == "__main__":
    main()
