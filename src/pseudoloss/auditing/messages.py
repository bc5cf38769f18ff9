"""What an audit says on the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pseudoloss.auditing.features import is_file
from pseudoloss.auditing.images import AuditImages
from pseudoloss.data import Skipped
from pseudoloss.labels.truth import truth_lines
from pseudoloss.version import __version__

SHOWN = 3  # pairs and classes that are named


def introduction(images: AuditImages, settings: dict[str, Any], device: str) -> str:
    parts = images.parts
    splits = "" if len(parts) == 1 else f" ({', '.join(f'{parts[p]:,} {p}' for p in parts)})"
    what, features = "images", str(settings["features"])
    if features == "array" or is_file(features):
        what = "rows"
    elif images.entries and isinstance(images.entries[0], Path):
        what = "image files"  # not read yet: some may be skipped
    return (
        f"pseudoloss {__version__}: audit of {images.name}, method {settings['method']}, "
        f"seed {settings['seed']}, {device}\n"
        f"  {len(images):,} {what}{splits}, {len(images.classes):,} classes"
    )


def skipped_files(skipped: Sequence[Skipped], left: int, table: Path | None) -> str:
    """Files that are not used, and how many images are left; `table` lists the former."""
    files = "1 file is" if len(skipped) == 1 else f"{len(skipped):,} files are"
    listed = "" if table is None else f"; {table} lists all"
    first = f"(the first: {skipped[0].path}, {skipped[0].reason})"
    return f"{files} skipped {first}, {_count(left, 'image')} left{listed}"


def conclusion(summary: dict[str, Any], path: Path | None) -> str:
    """The results, in a few lines."""
    timing, features = summary["timing"], summary["features"]
    cached = ", from the cache" if features["from_cache"] else ""
    lines = [
        "",
        f"Done in {_seconds(summary['seconds'])} (features {features['name']}: "
        f"{_seconds(timing['features'])}{cached}).",
    ]
    lines += _noise(summary["estimated_noise"])
    actions = summary["actions"]
    lines.append(
        f"  labels      {actions['keep']:,} to keep, {actions['relabel']:,} to relabel, "
        f"{actions['review']:,} to review"
    )
    pairs = summary["confused_pairs"]
    if pairs:
        shown = [f"{p['given']} → {p['candidate']} ({p['images']:,})" for p in pairs[:SHOWN]]
        lines.append(f"  confused    {', '.join(shown)}")
    similar = summary["similar_classes"]
    if similar:
        shown = [f"{p['classes'][0]} / {p['classes'][1]} ({p['share']:.0%})" for p in similar]
        lines.append(f"  alike       classes rarely told apart: {_first(shown)}")
    duplicates = summary["duplicates"]
    if duplicates["groups"]:
        lines.append(
            f"  duplicates  {_count(duplicates['groups'], 'group')} of "
            f"{_count(duplicates['images'], 'image')}: {duplicates['contradicting']:,} with "
            f"different labels, {duplicates['across_parts']:,} across splits"
        )
    if summary["outliers"]["images"]:
        number = _count(summary["outliers"]["images"], "image")
        verb = "seems" if summary["outliers"]["images"] == 1 else "seem"
        lines.append(f"  outliers    {number} {verb} to belong to no class")
    small = summary["small_classes"]
    if small:
        lines.append(
            f"  small       {_count(len(small), 'class', 'classes')} with too few images to judge: "
            f"{_first([f'{name} ({count})' for name, count in small.items()])}"
        )
    for name, line in zip(("truth", ""), truth_lines(summary["truth"]), strict=False):
        lines.append(f"  {name:11} {line}")
    if path is not None:
        lines.append(f"  written     {path}/: labels.csv, pred_probs.npy, summary.json, …")
    return "\n".join(lines)


def _noise(noise: dict[str, Any]) -> list[str]:
    text = f"{noise['rate']:.1%} of the labels ({noise['low']:.1%} to {noise['high']:.1%})"
    lines = [f"  noise       about {text} are wrong"]
    if not noise["known"]:
        lines = [f"  noise       not known; at a guess {text} are wrong"]
    return lines + [f"              {reason}" for reason in noise["reasons"]]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
