"""Write the report of one run: from the record to the HTML file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pseudoloss.errors import InputError, cannot_write
from pseudoloss.files import open_regular, refuse_special, write_bytes
from pseudoloss.labels.images import RunImages
from pseudoloss.report import views
from pseudoloss.report.findings import Card
from pseudoloss.report.reading import Record, read_record
from pseudoloss.report.svg import clean, percent, shorten
from pseudoloss.report.thumbnails import Thumbnails, TooLargeError
from pseudoloss.spreadsheets import safe_text
from pseudoloss.version import __version__

TOP = 24  # images in a gallery
MAX_TOP = 500
MAX_BYTES = 8_000_000  # of the file
MAX_IMAGES = 5_500_000  # of them, for thumbnails
SIZES = (128, 96, 64)  # pixels: the longest side of a thumbnail; smaller if they do not fit
NAME = "report.html"
SIGN = b'<meta name="generator" content="pseudoloss report">'
TEMPLATES = Path(__file__).parent / "templates"
LONG = 2000  # characters of one text in the page


def write_report(folder: str | Path, out: str | Path | None = None, top: int = TOP) -> Path:
    """Write the report of a run or an audit: one HTML file that refers to nothing outside of it.

    Args:
        folder: the folder of the run (finished, or with a label table already) or audit.
        out: the file to write; report.html in the folder if None. An existing file is replaced
            only if it is a report.
        top: images in each gallery.

    Returns:
        The path of the file.
    """
    path = Path(folder) / NAME if out is None else Path(out)
    check_output(path, top)
    return write_page(path, report_html(read_record(folder), top))


def report_html(record: Record, top: int = TOP) -> str:
    """The report as HTML, smaller than `MAX_BYTES`."""
    images = RunImages(record.labels)
    while True:
        page = _fitting(record, images, top)
        if len(page.encode()) < MAX_BYTES or top == 1:
            return page
        top = max(1, top // 2)


def _fitting(record: Record, images: RunImages, top: int) -> str:
    """The page with the largest thumbnails that fit."""
    values = views.report(record, top)

    def draw(thumbnails: Thumbnails | None, notice: str = "") -> str:
        return render("report.html", **values, **views.pictures(record, thumbnails, notice))

    if not images.available:
        return draw(None)
    page, thumbnails = with_largest(images, draw)
    if thumbnails.missing or thumbnails.left_out:  # known only now: once more, and say so
        again = thumbnails.again() if thumbnails.shown else None
        return draw(again, views.missing_notice(thumbnails))
    return page


def with_largest(images: RunImages, draw: Callable[[Thumbnails], str]) -> tuple[str, Thumbnails]:
    """Draw a page with the largest thumbnails that fit; if none do, with some left out."""
    for size in SIZES[:-1]:
        thumbnails = Thumbnails(images, size, MAX_IMAGES, strict=True)
        try:
            return draw(thumbnails), thumbnails
        except TooLargeError:
            continue
    thumbnails = Thumbnails(images, SIZES[-1], MAX_IMAGES)
    return draw(thumbnails), thumbnails


# ------------------------------------------------------------------------------------------ files


def check_output(path: Path, top: int) -> None:
    """Refuse a file that exists and is not a report, and a wrong number of images."""
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"--top must be from 1 to {MAX_TOP}, not {top}")
    try:
        refuse_special(path)
        if path.exists():
            with open_regular(path) as file:
                if SIGN not in file.read(2000):
                    raise InputError(
                        f"--out {path}: exists and is not a report; choose another name"
                    )
    except OSError as error:
        raise cannot_write("--out", path, error) from None


def write_page(path: Path, page: str) -> Path:
    try:
        write_bytes(path, page.encode())
    except OSError as error:
        raise cannot_write("--out", path, error) from None
    return path


# -------------------------------------------------------------------------------------- templates


def render(template: str, **values: Any) -> str:
    """Fill a template. All text is escaped, and cleaned of control characters."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "percent": percent,
        "likely": likely,
        "name": breakable_name,
        "tail": file_tail,
        "describe": describe,
        "options": unbroken_options,
    }
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))  # noqa: S704
    return environment.get_template(template).render(style=style, version=__version__, **values)


def _finalize(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return clean(value, LONG)
    return value


def likely(probability: float) -> str:
    """A probability in whole percent, never as certain: >99%, <1%."""
    if probability != probability:
        return "–"
    if probability > 0.99:
        return ">99%"
    return "<1%" if probability < 0.01 else f"{probability:.0%}"


def breakable_name(name: str) -> Markup:
    """A name, shortened if very long, that can be broken after _ - / and full stops. Copied into a
    spreadsheet, it is no formula."""
    return Markup(re.sub(r"([_/.-]+)", r"\1<wbr>", str(escape(safe_text(clean(name))))))  # noqa: S704


def unbroken_options(command: str) -> Markup:
    """A command whose lines are not broken inside the name of an option."""
    text = str(escape(clean(command, LONG)))
    return Markup(re.sub(r"(?<=\s)(--[a-z-]+)", r'<span class="option">\1</span>', text))  # noqa: S704


def file_tail(path: str) -> str:
    """The end of a path, which tells images apart."""
    return shorten(path.replace("\\", "/").rpartition("/")[2] or path, 60)


def describe(card: Card) -> str:
    """The alternative text of an image."""
    given = f"given label {clean(card.given)}"
    if card.action == "relabel":
        return f"Image with the {given}, suggested label {clean(card.candidate or '')}"
    return f"Image with the {given}" + (" to review" if card.action == "review" else "")
