"""The text of `pseudoloss inspect`."""

from pseudoloss.cli.inspection import Duplicates, Inspection, Range, Timing
from pseudoloss.terminal import visible

SHOWN_CLASSES = 12  # with more classes, their counts are not listed

Rows = list[tuple[str, str]]  # title and text


def report(found: Inspection) -> str:
    """The inspection as text."""
    images = _count(found.train + found.test, "image")
    classes = _count(len(found.classes), "class", "classes")
    lines = [f"{_one_line(found.source)}: {images}, {classes}"]
    rows = [*_image_rows(found), *_file_rows(found)]
    if found.duplicates is not None:
        rows += _duplicate_rows(found.duplicates)
    lines += [f"  {title:11}{text}" for title, text in rows]
    lines += ["", "Training would use"]
    lines += [f"  {title:11}{text}" for title, text in _plan_rows(found)]
    if found.timing is not None:
        lines += ["", f"Time on this machine, {found.timing.device}"]
        lines += [f"  {title:11}{text}" for title, text in _timing_rows(found, found.timing)]
    lines.append("")
    lines += [f"Training would refuse this: {_one_line(problem)}" for problem in found.problems]
    audit = found.plan.audit_command
    if found.problems and audit and sum(count > 0 for count in found.classes.values()) > 1:
        lines.append(f"Next: repair this, or audit the images as they are: {audit}")
    if not found.problems:
        commands = [audit, found.plan.command]
        following = [command for command in commands if command is not None]
        lines += [f"Next: {following[0]}", *(f"  or: {command}" for command in following[1:])]
    return "\n".join(lines)


def _image_rows(found: Inspection) -> Rows:
    test = "no test images"
    if found.test:
        origin = "held-out images" if found.held_out else found.test_name
        test = f"{found.test:,} for testing ({origin})"
    rows = [("images", f"{found.train:,} for training, {test}")]
    counts = found.classes
    if counts:
        least, most = (choose(counts, key=counts.__getitem__) for choose in (min, max))
        text = f"{_count(counts[least], 'image')} per class"
        if counts[least] < counts[most]:
            few = f"{_count(counts[least], 'image')} ({_one_line(least)})"
            text = f"from {few} to {counts[most]:,} ({_one_line(most)})"
            if counts[least]:
                text += f", a ratio of {counts[most] / counts[least]:.1f}"
        rows.append(("classes", text))
        if len(counts) <= SHOWN_CLASSES:
            rows.append(("", ", ".join(f"{_one_line(name)} {n:,}" for name, n in counts.items())))
    if found.width and found.height and found.aspect:
        w, h, a = found.width, found.height, found.aspect
        text = f"all {w.min:g}×{h.min:g} pixels"
        if (w.min, h.min) != (w.max, h.max):
            text = f"width {_range(w)}, height {_range(h)} pixels; width/height {_range(a)}"
        rows.append(("size", text))
    rows.append(("modes", _counts(found.modes)))
    return rows


def _file_rows(found: Inspection) -> Rows:
    rows = []
    if found.formats:
        rows.append(("formats", _counts(found.formats)))
    if found.bytes is not None:
        rows.append(("on disk", _bytes(found.bytes)))
    if found.unreadable:
        count = sum(group.count for group in found.unreadable)
        rows.append(("skipped", f"{_count(count, 'file')} that training cannot use"))
        for group in found.unreadable:
            files = [_one_line(name) for name in group.files]
            more = ", …" if group.count > len(files) else ""
            listed = f": {', '.join(files)}{more}" if files else ""
            rows.append(("", f"{group.count:,} × {group.reason}{listed}"))
    if not found.decoded:
        rows.append(
            ("not done", "only file headers were read: no search for truncated files or duplicates")
        )
    return rows


def _duplicate_rows(found: Duplicates) -> Rows:
    if not found.same_bytes + found.same_pixels + found.near.pictures:
        return [("duplicates", "none")]
    copies = _count(found.same_bytes, "copy", "copies")
    text = f"{copies} with the same bytes, {found.same_pixels:,} with the same pixels only"
    if not found.same_bytes + found.same_pixels:
        text = "no exact copies"
    rows = [("duplicates", text)]
    order = "; different labels first" if found.near.pictures > 1 else ""
    kinds = (
        (found.across_classes, "with different labels: at least one label is wrong"),
        (found.across_parts, "both for training and for testing: accuracy would be too high"),
        (found.within_class, "more than once in one class"),
        (found.near, f"in nearly the same form more than once{order}"),
    )
    for kind, problem in kinds:
        if kind.pictures:
            rows.append(("", f"{_count(kind.pictures, 'picture')} {problem}"))
            rows += [("", f"  {' = '.join(map(_example, group))}") for group in kind.examples]
    return rows


def _plan_rows(found: Inspection) -> Rows:
    plan = found.plan
    start = {
        None: "from scratch",
        "embedded": "with embedded weights (ImageNet)",
        "pretrained": "with pretrained weights, which timm downloads",
    }.get(plan.weights, f"with the weights {plan.weights}")
    colours = "grey" if plan.channels == 1 else "RGB"
    stored = f"{plan.stored[0]}×{plan.stored[1]} {colours}"
    crops = "" if plan.stored == plan.size else f", cropped to {plan.size[0]}×{plan.size[1]}"
    uneven = "; class balance as in the given labels" if plan.balance_prior == "given" else ""
    where = {
        "device": "in memory" if plan.device == "cpu" else "in GPU memory",
        "host": "in host memory, copied batch by batch",
        "files": "not kept in memory: files are decoded in every epoch",
    }[plan.images]
    epochs = _count(plan.epochs, "epoch")
    steps = f"{epochs}, batch size {plan.batch_size}, learning rate {plan.lr:g}"
    return [
        ("preset", plan.preset),
        ("network", f"{plan.network} {start}"),
        ("pixels", f"{stored}{crops}"),
        ("training", f"{steps}{uneven}"),
        ("memory", f"{_bytes(plan.memory)} of images, {where}"),
    ]


def _timing_rows(found: Inspection, timing: Timing) -> Rows:
    rows = [("audit", _about(timing.audit))]
    if not found.problems:
        epochs = _count(found.plan.epochs, "epoch")
        rows.append(("training", f"{_about(timing.training)} ({epochs})"))
    return rows


def _about(seconds: float | None) -> str:
    if seconds is None:
        return "could not be estimated"
    for unit, size in (("days", 2 * 86400), ("h", 5400), ("min", 90)):
        if seconds >= size:
            number = seconds / {"days": 86400, "h": 3600, "min": 60}[unit]
            return f"about {float(f'{number:.2g}'):g} {unit}"
    return f"about {max(float(f'{seconds:.1g}'), 1):g} s"


def _example(image: dict[str, str]) -> str:
    part = f", {image['part']}" if image["part"] != "train" else ""
    return f"{_one_line(image['image'])} ({_one_line(image['label'])}{part})"


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _range(found: Range) -> str:
    return f"{found.min:.3g} to {found.max:.4g} (median {found.median:.3g})"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return _count(count, "byte")


def _one_line(name: str) -> str:
    return visible(" ".join(name.split()))
