"""Write label tables for other programs: spreadsheets, Label Studio, FiftyOne, Hugging Face.

`write_table` writes files of rows. The other formats are folders, since they need images or a
second file; each was checked against its library (docs/labels.md).
"""

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import pandas as pd
from PIL import Image

from pseudoloss.data.decoding import Item, UnreadableError, header
from pseudoloss.errors import InputError, cannot_write
from pseudoloss.files import new_folder, refuse_existing, to_json, write_atomically, write_json
from pseudoloss.labels.images import SPLIT_OF, RunImages, media_type
from pseudoloss.labels.opening import LabelSet
from pseudoloss.version import __version__

TableFormat = Literal["csv", "parquet", "json", "jsonl"]
FolderFormat = Literal["label-studio", "fiftyone", "hf"]
TABLES: tuple[str, ...] = get_args(TableFormat)
FOLDERS: tuple[str, ...] = get_args(FolderFormat)

LOCAL_FILES = "/data/local-files/?d="  # Label Studio's address of files below its document root


# ------------------------------------------------------------------------------------ rows


def as_text(table: pd.DataFrame, form: TableFormat = "csv") -> str:
    """The table as CSV, as a JSON list, or as one line of JSON per row."""
    if form == "csv":
        return str(table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    rows = [to_json(row) for row in records(table)]
    if form == "jsonl":
        return "".join(f"{row}\n" for row in rows)
    return "[\n" + ",\n".join(rows) + "\n]\n"


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain Python values; None where a value is missing."""
    plain = table.astype(object).where(table.notna(), None)
    return [
        {str(name): _six_digits(value) for name, value in row.items()}
        for row in plain.to_dict("records")
    ]


def _six_digits(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_table(table: pd.DataFrame, out: Path, form: TableFormat) -> None:
    """Write the rows to a new file."""

    def write(draft: Path) -> None:
        try:
            if form == "parquet":
                table.to_parquet(draft, index=False)
            else:
                draft.write_text(as_text(table, form), encoding="utf-8", newline="")
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    refuse_existing(out)
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: no such folder: {out.parent}")
    try:
        write_atomically(out, write)
    except ImportError:
        raise InputError(
            f"--out {out}: writing Parquet needs pyarrow: pip install 'pseudoloss[parquet]'"
        ) from None
    except UnicodeEncodeError:
        raise InputError(f"--out {out}: a name in the table is not valid Unicode") from None
    except OSError as error:
        raise cannot_write("--out", out, error) from None


# --------------------------------------------------------------------------------- folders


def write_folder(labels: LabelSet, table: pd.DataFrame, out: Path, form: FolderFormat) -> list[str]:
    """Write rows of the table of `labels` to a new folder. Returns a notice for every image that
    could not be read and is left out."""
    if not len(table):
        raise InputError("no label is left to export; change --class, --action or --threshold")
    if not RunImages(labels).available:
        raise InputError(
            f"--format {form}: {labels.path} is of data that were passed in Python, so its images "
            "cannot be found; csv, parquet, json and jsonl need no images"
        )
    with new_folder(out) as draft:
        if form == "label-studio":
            return label_studio(labels, table, draft, out)
        return (fiftyone if form == "fiftyone" else huggingface)(labels, table, draft)


def best_label(row: dict[str, Any]) -> tuple[str, float | None]:
    """The label to propose for a row, and the probability that it is right: the candidate of an
    issue, otherwise the given label."""
    if row["is_label_issue"] and row["candidate_label"] is not None:
        return row["candidate_label"], row["trust"]
    return row["given_label"], None if row["p_noisy"] is None else 1 - row["p_noisy"]


def label_studio(labels: LabelSet, table: pd.DataFrame, folder: Path, out: Path) -> list[str]:
    """`tasks.json`, tasks with pre-annotations; `labeling.xml`, the labelling interface; and
    `images/` if the images are not files. The folder will be renamed to `out`.

    Label Studio serves files below its document root that are in a local storage of the project,
    which must be a folder inside the document root. So the root is the parent of the images.
    """
    images = RunImages(labels)
    tasks: list[dict[str, Any]] = []
    notices = []
    storage = _folder_of_files(images, table) or out.absolute() / "images"
    root = storage.parent
    for position, row in zip(table.index, records(table), strict=True):
        path = images.path(int(position))
        if path is not None:
            address = LOCAL_FILES + quote(os.fsencode(os.path.relpath(path, root)))
        else:
            try:
                key = f"{row['part']}-{row['index']:07}"
                name = _save_image(images, int(position), folder / "images", key)
            except UnreadableError as error:
                notices.append(f"{_name(row)}: left out ({error})")
                continue
            address = LOCAL_FILES + quote(f"images/{name}")
        choice, score = best_label(row)
        tasks.append(
            {
                "data": {"image": address, **row},
                "predictions": [
                    {
                        "model_version": f"pseudoloss {__version__}",
                        **({} if score is None else {"score": score}),
                        "result": [
                            {
                                "id": f"{row['part']}-{row['index']}",
                                "from_name": "label",
                                "to_name": "image",
                                "type": "choices",
                                "value": {"choices": [choice]},
                            }
                        ],
                    }
                ],
            }
        )
    (folder / "tasks.json").write_text(to_json(tasks, indent=1) + "\n", encoding="utf-8")
    (folder / "labeling.xml").write_text(labeling_config(labels.classes), encoding="utf-8")
    notices.append(
        "start Label Studio with LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true and "
        f"LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={root}, and add the local storage {storage}"
    )
    return notices


def _folder_of_files(images: RunImages, table: pd.DataFrame) -> Path | None:
    """The folder that all files are in: that of the source, or one above; None without files."""
    if images.root is None:
        return None
    paths = [images.path(int(position)) for position in table.index]
    if all(path is None or path.is_relative_to(images.root) for path in paths):
        return images.root
    return Path(os.path.commonpath([images.root, *(path for path in paths if path is not None)]))


def labeling_config(classes: tuple[str, ...]) -> str:
    """Label Studio's labelling interface: one choice of all classes for an image."""
    for name in classes:
        if any(c < " " and c not in "\t\n\r" for c in name):
            raise InputError(f"--format label-studio: class {name!r} has a control character")
    choices = "\n".join(f"    <Choice value={quoteattr(name)}/>" for name in classes)
    return (
        "<View>\n"
        '  <Header value="Given label: $given_label"/>\n'
        '  <Image name="image" value="$image"/>\n'
        '  <Choices name="label" toName="image" choice="single" showInLine="true">\n'
        f"{choices}\n"
        "  </Choices>\n"
        "</View>\n"
    )


def fiftyone(labels: LabelSet, table: pd.DataFrame, folder: Path) -> list[str]:
    """A `FiftyOneImageClassificationDataset`: `labels.json`, the given labels with the scores as
    attributes; `candidates.json`, the candidates in the same form; and `data.json`, which says
    where the images are (in `data/` if they are not files)."""
    images = RunImages(labels)
    files: dict[str, str] = {}
    given: dict[str, Any] = {}
    candidates: dict[str, Any] = {}
    number = {name: i for i, name in enumerate(labels.classes)}
    notices = []
    for position, row in zip(table.index, records(table), strict=True):
        key = f"{row['part']}-{row['index']:07}"
        path = images.path(int(position))
        if path is not None:
            files[key] = str(path)
        else:
            try:
                files[key] = f"data/{_save_image(images, int(position), folder / 'data', key)}"
            except UnreadableError as error:
                notices.append(f"{_name(row)}: left out ({error})")
                continue
        scores = {name: row[name] for name in ("action", "p_noisy", "trust", "label_score")}
        attributes = scores | {name: row[name] for name in ("candidate_label", "index", "part")}
        given[key] = {"label": number[row["given_label"]], "attributes": _present(attributes)}
        if row["candidate_label"] in number:
            candidate = {"label": number[row["candidate_label"]], "confidence": row["trust"]}
            candidates[key] = _present(candidate)
    classes = list(labels.classes)
    write_json(folder / "labels.json", {"classes": classes, "labels": given})
    write_json(folder / "candidates.json", {"classes": classes, "labels": candidates})
    write_json(folder / "data.json", files)
    return notices


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def huggingface(labels: LabelSet, table: pd.DataFrame, folder: Path) -> list[str]:
    """A `Dataset` for `load_from_disk`, or a `DatasetDict` if the source has splits. `label` is the
    label after the action: the candidate (`relabel`), otherwise the given label."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            "--format hf needs Hugging Face's datasets: pip install 'pseudoloss[hf]'"
        ) from None
    classes = datasets.ClassLabel(names=list(labels.classes))
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": classes,
            "given_label": classes,
            "candidate_label": datasets.Value("string"),
            "action": datasets.Value("string"),
            "label_score": datasets.Value("float64"),
            "p_noisy": datasets.Value("float64"),
            "trust": datasets.Value("float64"),
            "index": datasets.Value("int64"),
            "path": datasets.Value("string"),
            "part": datasets.Value("string"),
        }
    )
    images = RunImages(labels)
    notices: list[str] = []

    def rows(split: pd.DataFrame) -> Iterator[dict[str, Any]]:
        for position, row in zip(split.index, records(split), strict=True):
            try:
                content = images.content(int(position))
                if isinstance(content, bytes):  # the table may name any file
                    header(Item(partial(bytes, content)), images.limits)
            except UnreadableError as error:
                notices.append(f"{_name(row)}: left out ({error})")
                continue
            image = (
                content if isinstance(content, Image.Image) else {"bytes": content, "path": None}
            )
            label = row["suggested_label"] if row["action"] == "relabel" else row["given_label"]
            yield {name: row.get(name) for name in features} | {"image": image, "label": label}

    splits = table["part"].map(SPLIT_OF)
    silent = datasets.utils.logging
    shown, bars = silent.get_verbosity(), datasets.are_progress_bars_disabled()
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        silent.set_verbosity_error()
        datasets.disable_progress_bars()
        try:
            found = {
                split: datasets.Dataset.from_generator(
                    lambda split=split: rows(table[splits == split]),
                    features=features,
                    cache_dir=cache,
                    fingerprint=os.urandom(8).hex(),
                )
                for split in splits.unique()
            }
            data = found["train"] if set(found) == {"train"} else datasets.DatasetDict(found)
            data.save_to_disk(folder)
        finally:
            silent.set_verbosity(shown)
            if not bars:
                datasets.enable_progress_bars()
    return notices


def _save_image(images: RunImages, position: int, folder: Path, key: str) -> str:
    """Write an image that is not a file; the name of the new file."""
    content = images.full(position)
    folder.mkdir(exist_ok=True)
    name = f"{key}.{media_type(content).removeprefix('image/')}"
    (folder / name).write_bytes(content)
    return name


def _name(row: dict[str, Any]) -> str:
    return str(row["path"] or f"{row['part']} image {row['index']}")
