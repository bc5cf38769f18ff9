"""`audit`: from a source of labelled images to scores of all labels.

Read from the top: `audit` checks what was asked for, `_examine` computes features and scores,
`_conclude` makes the table and the summary. The scores themselves are in scoring.py.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pseudoloss import distributed
from pseudoloss.auditing import messages
from pseudoloss.auditing.features import (
    Features,
    extract_arrays,
    extract_files,
    given_features,
    is_file,
    load_features,
)
from pseudoloss.auditing.folder import DUPLICATE_COLUMNS, KIND, Audit, AuditFolder
from pseudoloss.auditing.images import (
    PARTS,
    UNKNOWN,
    AuditImages,
    check_classes,
    labelled_rows,
    open_images,
    with_noise,
)
from pseudoloss.auditing.neighbours import Duplicates, find_duplicates, nearest_examples
from pseudoloss.auditing.outliers import outlier_scores
from pseudoloss.auditing.scoring import LabelScores, score_labels
from pseudoloss.auditing.summary import summarise
from pseudoloss.data.images import refuse_masked
from pseudoloss.data.scanning import limits_of, refuse_unreadable
from pseudoloss.data.sources import FILE_OPTIONS, Source, absolute, refuse_inside
from pseudoloss.errors import InputError, TrainingError
from pseudoloss.files import as_path, at_home
from pseudoloss.labels.decisions import MIN_TRUST, THRESHOLD, decide
from pseudoloss.labels.table import score_rows
from pseudoloss.nn.devices import choose_device, device_name, using
from pseudoloss.progress import Reporter, SilentReporter, TerminalReporter
from pseudoloss.reading import ReadOptions
from pseudoloss.version import __version__

Method = Literal["latent", "two-mixtures"]
MAX_FOLDS = 50
METHODS: tuple[str, ...] = get_args(Method)
# The options for reading that audits have.
READING = ("path_column", "label_column", "split_column", *FILE_OPTIONS)
CONFIDENT = 0.1  # up to this probability of being wrong, an image is an example of its class


def audit(
    source: Source | None = None,
    labels: Any = None,
    *,
    features: Any = None,
    out: str | Path | None = None,
    method: Method = "latent",
    folds: int = 5,
    seed: int = 1,
    device: str = "auto",
    threshold: float | None = None,
    min_trust: float = MIN_TRUST,
    corrupt: str | None = None,
    cache: bool = True,
    quiet: bool = False,
    **reading: Any,
) -> Audit:
    """Find wrong labels, without training a network.

    All splits of a source (train, val, test) are audited together.

    Args:
        source: images with labels: a folder with one folder per class, a table, arrays or a
            dataset, as for `train`; or images, and `labels` beside them. None: only features.
        labels: one label per image or row of features, whole numbers or text, if `source` has none.
        features: None for the embedded network; the name of a timm model; "run:RUN" for the network
            of a run; a path "FILE.npy" or an array with one row per image.
        out: the folder to write, which must be new (or hold the same audit, unfinished). None: keep
            everything in memory.
        method: "latent", the latent-label model; or "two-mixtures", as pseudo-loss selection.
        folds: of the cross-validation.
        seed: of the folds and of `corrupt`.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        threshold: a label is flagged if its probability of being wrong is at least this. None: the
            one with the highest expected F1, from 0.25 to 0.5.
        min_trust: a suggestion becomes a new label from this probability of being right on, if it
            is more probable than the given label.
        corrupt: label noise for experiments, such as "symmetric:0.2", in the training split.
        cache: look up and keep features in the cache.
        quiet: print nothing.
        reading: `path_column`, `label_column`, `split_column`, `strict`: how `source` is read.

    Returns:
        The audit: its label table, summary, predictions and duplicates.

    Example:
        >>> found = audit("photos/")
        >>> found.labels[found.labels.is_label_issue]
        >>> audit(features=embeddings, labels=y).summary["estimated_noise"]
    """
    started = time.monotonic()
    settings = {
        "features": None if features is None else str(features) if _is_text(features) else "array",
        "method": method,
        "folds": folds,
        "seed": seed,
        "threshold": THRESHOLD if threshold is None and method == "two-mixtures" else threshold,
        "min_trust": min_trust,
        "corrupt": corrupt,
    }
    _check(settings, reading)
    options = ReadOptions(**reading)
    folder = None if out is None else AuditFolder(as_path(out, "--out"))
    named = isinstance(source, str | Path)
    begun = {
        "pseudoloss": __version__,
        "kind": KIND,
        "source": absolute(str(source)) if named else _name(source),
        "from_python": not named,
        "reading": asdict(options),
        "settings": settings,
    }
    if folder:
        folder.refuse_if_taken(begun)
        if named:
            refuse_inside(folder.path, source)
    silent = quiet or not distributed.is_main()
    reporter: Reporter = SilentReporter() if silent else TerminalReporter()
    with distributed.session(device), reporter, using(choose_device(device)), _memory_errors():
        place = choose_device(device)
        images = _open(source, labels, features, options, reporter)
        if corrupt is not None:
            images = with_noise(images, corrupt, seed)
            check_classes(images)
        if distributed.active():
            distributed.check_same({"images": len(images), "audit": begun}, images.name)
        if folder is None or not distributed.is_main():  # only the first process writes
            distributed.wait_for_all()  # for the first process
            return _examine(images, features, options, begun, place, cache, reporter, None, started)
        with folder.lock():
            folder.refuse_if_taken(begun)  # again: another process may have been faster
            distributed.wait_for_all()
            return _examine(
                images, features, options, begun, place, cache, reporter, folder, started
            )


# ---------------------------------------------------------------------------------- what is asked


def _check(settings: dict[str, Any], reading: dict[str, Any]) -> None:
    if settings["method"] not in METHODS:
        raise InputError(f"--method {settings['method']}: must be {' or '.join(METHODS)}")
    for name, least in (("folds", 2), ("seed", 0)):
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InputError(f"--{name} must be a whole number from {least} on, not {value!r}")
    if settings["folds"] > MAX_FOLDS:
        raise InputError(f"--folds must be at most {MAX_FOLDS}, not {settings['folds']}")
    for name in ("threshold", "min_trust"):
        value = settings[name]
        if value is None and name == "threshold":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"--{name.replace('_', '-')} must be from 0 to 1, not {value!r}")
    for name in reading:
        if name not in READING:
            raise TypeError(f"audit() has no argument {name!r}")


def _name(source: Source | None) -> str:
    """What data that were passed in Python are called."""
    return "features" if source is None else "arrays"


def _is_text(features: Any) -> bool:
    return isinstance(features, str | Path)


def _open(
    source: Source | None, labels: Any, features: Any, options: ReadOptions, reporter: Reporter
) -> AuditImages:
    """The images or rows to audit, with their labels."""
    if source is None:
        if features is None:
            raise InputError("SOURCE is missing: name what to audit, such as a folder of images")
        if labels is None:
            raise InputError("labels are missing: pass one label per row of features")
        rows = len(labels) if _is_text(features) else len(features)
        if _is_text(features) and not is_file(str(features)):
            raise InputError(f"--features {features}: a network needs images; pass SOURCE too")
        return labelled_rows(rows, labels)
    if labels is not None:
        if isinstance(source, str | Path):
            raise InputError(f"labels: {source} has its own labels; pass only one of them")
        source = (source, labels)
    return open_images(source, options, reporter.progress)


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the GPU ran out of memory; try --device cpu, or features with fewer dimensions"
        ) from None


# ------------------------------------------------------------------------------------- the work


def _examine(
    images: AuditImages,
    features: Any,
    options: ReadOptions,
    begun: dict[str, Any],
    device: torch.device,
    cache: bool,
    reporter: Reporter,
    folder: AuditFolder | None,
    started: float,
) -> Audit:
    """Compute features and scores, and write the results."""
    settings, clock = begun["settings"], _Clock()
    reporter.say(messages.introduction(images, settings, device_name(device)))
    found = _features(images, features, options, str(device), cache, reporter)
    skipped = (*images.skipped, *found.skipped)
    if found.skipped and options.strict:
        refuse_unreadable(found.skipped[0], images.name)
    values_ND = found.values_ND if found.kept_N.all() else found.values_ND[found.kept_N]
    images = images.select(found.kept_N)
    check_classes(images)
    notices = [{"kind": "cache", "text": text} for text in found.notices]
    if skipped:
        listed = folder.file("skipped.csv") if folder else None
        text = messages.skipped_files(skipped, len(images), listed)
        notices.append({"kind": "skipped", "text": text})
    for notice in notices:
        reporter.notice(notice["text"])
    clock.lap("features")
    duplicates = find_duplicates(
        values_ND, device=device, seed=settings["seed"], progress=reporter.progress
    )
    clock.lap("duplicates")
    scores = score_labels(
        values_ND,
        images.given_N,
        len(images.classes),
        method=settings["method"],
        folds=settings["folds"],
        seed=settings["seed"],
        device=device,
        groups_N=duplicates.folds_N if (duplicates.group_N >= 0).any() else None,
        progress=reporter.progress,
    )
    clock.lap("scores")
    outlier_N = outlier_scores(
        values_ND,
        images.given_N,
        scores.p_noisy_N,
        scores.trust_N,
        len(images.classes),
        groups_N=duplicates.folds_N,
        device=device,
        seed=settings["seed"],
    )
    table = _table(images, scores, duplicates, outlier_N)
    table = decide(table, settings["threshold"], settings["min_trust"])
    examples = _examples(values_ND, table, images, scores, device)
    clock.lap("outliers and examples")
    summary = summarise(images, table, scores, duplicates, settings)
    summary |= {
        "notices": notices,
        "skipped": len(skipped),
        "features": {
            "name": found.name,
            "dimensions": values_ND.shape[1],
            "from_cache": found.cached,
        },
        "device": device_name(device),
        "torch": torch.__version__,
        "seconds": time.monotonic() - started,
        "timing": clock.seconds,
    }
    result = Audit(
        labels=table,
        summary=summary,
        pred_probs=scores.pred_probs_NC,
        classes=images.classes,
        duplicates=_duplicate_table(table, duplicates),
        examples=examples,
        path=folder.path if folder else None,
    )
    if folder:
        config = begun | {
            "classes": list(images.classes),
            "images": len(images),
            "parts": images.parts,
            "features": {"name": found.name, "key": found.key, "dimensions": values_ND.shape[1]},
        }
        folder.write(result, config, skipped)
    reporter.say(messages.conclusion(summary, result.path))
    return result


class _Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self.last = now - self.last, now


def _features(
    images: AuditImages,
    features: Any,
    options: ReadOptions,
    device: str,
    cache: bool,
    reporter: Reporter,
) -> Features:
    if features is not None and not _is_text(features):
        return given_features(_as_array(features), len(images), "features")
    spec = None if features is None else str(features)
    if is_file(spec):
        return load_features(at_home(str(spec)), len(images))
    if images.entries is not None and images.paths is not None:
        return extract_files(
            images.entries,
            images.paths,
            spec,
            device=device,
            cache=cache,
            progress=reporter.progress,
            limits=limits_of(options),
        )
    assert images.images_NCHW is not None
    return extract_arrays(
        images.images_NCHW, spec, device=device, cache=cache, progress=reporter.progress
    )


def _as_array(features: Any) -> np.ndarray:
    """Features of any kind as an array of floats; whole numbers are converted."""
    refuse_masked(features, "features")
    if isinstance(features, Tensor):
        features = features.detach().cpu()
        features = features.float() if features.dtype == torch.bfloat16 else features
    try:
        array = np.asarray(features)
    except (TypeError, ValueError):  # for example rows of different lengths
        raise InputError("features: must be one array with one row per image") from None
    return array.astype(np.float32) if array.dtype.kind in "iub" else array


# ----------------------------------------------------------------------------------- the results


def _table(
    images: AuditImages, scores: LabelScores, duplicates: Duplicates, outlier_N: np.ndarray
) -> pd.DataFrame:
    true_N = images.true_N
    unknown_N = np.zeros(len(images), bool) if true_N is None else true_N == UNKNOWN
    if unknown_N.all():
        true_N = None
    table = score_rows(
        "",
        images.classes,
        index=images.index_N,
        paths=images.paths,
        given=images.given_N,
        predicted=scores.predicted_N,
        candidate=scores.candidate_N,
        label_score=scores.label_score_N,
        p_noisy=scores.p_noisy_N,
        trust=scores.trust_N,
        true=None if true_N is None else np.where(unknown_N, 0, true_N),
    )
    table["part"] = np.array(PARTS, dtype=object)[images.part_N]
    if images.paths is not None:
        table["path"] = table["path"].replace("", np.nan)
    in_group = duplicates.group_N >= 0
    group = pd.Series(duplicates.group_N, dtype="Int64").where(pd.Series(in_group))
    at = list(table.columns).index("action") + 1
    table.insert(at, "outlier_score", outlier_N)
    table.insert(at + 1, "duplicate_group", group)
    if true_N is not None:
        table.loc[unknown_N, ["true_label", "truth"]] = np.nan
    return table


def _duplicate_table(table: pd.DataFrame, duplicates: Duplicates) -> pd.DataFrame:
    """One row per image in a group, group by group."""
    rows = np.flatnonzero(duplicates.group_N >= 0)
    rows = rows[np.argsort(duplicates.group_N[rows], kind="stable")]
    chosen = table.iloc[rows]
    return chosen.assign(
        group=duplicates.group_N[rows], similarity=duplicates.similarity_N[rows]
    ).reset_index(drop=True)[DUPLICATE_COLUMNS]


def _examples(
    values_ND: np.ndarray,
    table: pd.DataFrame,
    images: AuditImages,
    scores: LabelScores,
    device: torch.device,
) -> dict[str, np.ndarray]:
    """The nearest confidently labelled images of the given and of the candidate class, for every
    flagged label."""
    rows_M = np.flatnonzero(table["is_label_issue"].to_numpy())
    pool_N = scores.p_noisy_N <= CONFIDENT
    pool_N[rows_M] = False
    wanted: Sequence[tuple[str, np.ndarray]] = [
        ("given_MK", images.given_N[rows_M]),
        ("candidate_MK", scores.candidate_N[rows_M]),
    ]
    found = {
        name: nearest_examples(values_ND, rows_M, class_M, pool_N, images.given_N, device=device)
        for name, class_M in wanted
    }
    return {"row_M": rows_M.astype(np.int64)} | found
