"""Start the review page of a run."""

import os
import secrets
import socket
import sys
import threading
import webbrowser
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from pseudoloss.errors import InputError, reason
from pseudoloss.files import as_path, open_npy
from pseudoloss.labels.images import RunImages
from pseudoloss.labels.opening import LabelSet, open_labels
from pseudoloss.review.app import create_app
from pseudoloss.review.examples import Examples
from pseudoloss.review.guard import LOOPBACK, access_for
from pseudoloss.review.log import DecisionLog
from pseudoloss.review.session import Review
from pseudoloss.review.table import read_quickly, review_table
from pseudoloss.terminal import show

PORT = 8765  # tried first, so that an open page finds a restarted server again


@dataclass(frozen=True)
class Served:
    """A review that has ended.

    Attributes:
        decisions: the decisions file.
        progress: numbers of decisions, and of what is left.
        are_files: whether the images are files, so that a table can list them.
        source: what the labels are of; empty if the data were passed in Python.
    """

    decisions: Path
    progress: dict[str, int]
    are_files: bool
    source: str


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    decisions: str | Path | None = None,
    browser: bool = True,
) -> Served:
    """Serve the review page of a run until the process is interrupted.

    Args:
        run: the folder of a run or an audit.
        host: address to listen on.
        port: port to listen on; 0: any free one; None: 8765, or a free one if that is in use.
        decisions: file for the decisions, instead of decisions.jsonl in the folder.
        browser: open the page.
    """
    labels = open_labels(run, read_quickly)
    with closing(listen(host, port)) as listener, closing(open_log(labels, decisions)) as log:
        review = open_review(labels, log)
        token = secrets.token_urlsafe(24)
        port = int(listener.getsockname()[1])
        images = RunImages(labels)
        about = {
            "name": labels.path.resolve().name,
            "file": log.path.name,
            "notice": _notice(labels, images),
        }
        app = create_app(review, images, access_for(token, host, port), about)
        address = f"http://{_shown_host(host)}:{port}/?token={token}"
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=2,
        )
        with suppress(KeyboardInterrupt):  # Ctrl-C is how a review ends
            _say(review, labels, address, host)
            threading.Thread(target=_warm_up, args=(review, images), daemon=True).start()
            if browser and _has_display():
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
            uvicorn.Server(config).run(sockets=[listener])
        source = images.labels.source or ""
        return Served(log.path, review.progress(), images.root is not None, source)


def open_review(labels: LabelSet, log: DecisionLog) -> Review:
    """The state of the review of a label table."""
    table = review_table(labels.table, labels.classes)
    return Review(
        table,
        log,
        Examples(table, labels.path / "examples.npz"),
        name=str(labels.path.resolve()),
        probabilities_NC=_probabilities(labels),
    )


def open_log(labels: LabelSet, decisions: str | Path | None = None) -> DecisionLog:
    if decisions is None:
        return DecisionLog(labels.path / "decisions.jsonl")
    path = as_path(decisions, "--decisions")
    if not path.parent.is_dir():
        raise InputError(f"--decisions {path}: there is no folder {path.parent}")
    return DecisionLog(path, "--decisions")


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens there."""
    if port is not None and not 0 <= port < 2**16:
        raise InputError(f"--port must be from 0 to 65535, not {port}")
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host {host}: no such address ({reason(error)})") from None
    last: OSError | None = None
    for wanted in (PORT, 0) if port is None else (port,):
        # With its protocol: without, asyncio leaves Nagle's algorithm on, and every answer takes
        # 40 ms longer.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # a restarted server gets its port back at once
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, wanted))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            last = error
    flag = f"--host {host}" if port is None else f"--port {port}"
    raise InputError(f"{flag}: cannot be used ({reason(last or OSError())})")


def _probabilities(labels: LabelSet) -> np.ndarray | None:
    """The predictions of an audit, left on disk; None where there are none for this table."""
    try:
        found: Any = open_npy(labels.path / "pred_probs.npy")
    except (OSError, ValueError):
        return None
    return found if found.shape == (len(labels.table), len(labels.classes)) else None


def _warm_up(review: Review, images: RunImages) -> None:
    """Open the source before the page asks for its first image."""
    with suppress(Exception):  # the page shows what cannot be read
        images.thumbnail(int(review.table.position_R[0]), 64)


def _notice(labels: LabelSet, images: RunImages) -> str | None:
    if labels.state:
        epoch = "" if labels.epoch is None else f" The labels are as of epoch {labels.epoch}."
        return f"The run is not finished.{epoch}"
    if not images.available:
        return "The images were passed in Python and cannot be shown."
    return None


def _say(review: Review, labels: LabelSet, address: str, host: str) -> None:
    progress = review.progress()
    if labels.state:
        show(labels.state)
    show(f"{progress['left']:,} of {progress['issues']:,} doubtful labels left to review")
    for number, what in (
        (review.log.damaged, "damaged lines were ignored"),
        (review.unmatched, "decisions about other images or labels were ignored"),
    ):
        if number:
            show(f"{review.log.path}: {number:,} {what}")
    if host not in LOOPBACK:
        show(
            f"warning: --host {host}: everyone who can reach this machine and has the address can "
            "see the images and decide; the connection is not encrypted",
            file=sys.stderr,
        )
    show(f"Review at {address}\nEvery decision is written to {review.log.path}. Ctrl-C ends.")
    sys.stdout.flush()


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _has_display() -> bool:
    """Whether a browser can open a window; without one, a text browser might take the terminal."""
    if sys.platform.startswith("linux"):
        return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return True
