"""The web application: the page, its rows and images, and the decisions.

Images are named by the position of their row, never by a path.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

from pseudoloss.data.decoding import UnreadableError
from pseudoloss.errors import InputError, reason
from pseudoloss.review.guard import Access, Guard
from pseudoloss.review.session import MAX_DECISIONS, MAX_ROWS, Filter, Review, Wish

STATIC = Path(__file__).with_name("static")
FILES = {  # all files that are served
    "/": ("index.html", "text/html; charset=utf-8"),
    "/review.css": ("review.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("review", "server", "cards", "chooser", "viewer")
    },
}
SIZES = {"small": 128, "medium": 448}  # pixels: examples, and the images in the grid
A_DAY = "private, max-age=86400"

Name = Annotated[str, Field(max_length=1000)]


class Images(Protocol):
    """Where the images come from (see labels/images.py)."""

    def thumbnail(self, position: int, size: int) -> bytes: ...

    def full(self, position: int) -> bytes: ...


class OneDecision(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    position: int
    index: int
    part: Name
    known: int
    decision: Literal["keep", "relabel", "junk", "skip", "undo"]
    label: Name | None = None


class Decisions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: Name
    by: Annotated[str, Field(max_length=100)] | None = None
    strict: bool = False
    decisions: Annotated[list[OneDecision], Field(min_length=1, max_length=MAX_DECISIONS)]


def create_app(review: Review, images: Images, access: Access, about: dict[str, Any]) -> ASGIApp:
    """The application.

    Args:
        review: the state.
        images: the images, by position.
        access: who may use it.
        about: what the page shows about the run: `name`, `decisions` (the file), `notice`.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(InputError)
    async def wrong_input(request: Request, error: InputError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    def serve(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (STATIC / name).read_bytes()

        async def answer() -> Response:
            return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

        return answer

    for address, (name, kind) in FILES.items():
        app.get(address)(serve(name, kind))

    @app.get("/api/start")
    def start() -> dict[str, Any]:
        return review.start() | about

    @app.get("/api/rows")
    def rows(
        action: str = "issues",
        state: str = "open",
        given: str | None = None,
        suggested: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 24,
        after: Annotated[int | None, Query(ge=0, le=2**31)] = None,
        before: Annotated[int | None, Query(ge=0, le=2**31)] = None,
    ) -> dict[str, Any]:
        return review.page(Filter(action, given, suggested, state), limit, after, before)

    @app.get("/api/changes")
    def changes(since: Annotated[int, Query(ge=0, le=2**53)]) -> dict[str, Any]:
        return review.changes(since) | {"id": review.id}

    @app.get("/api/classes")
    def classes(
        search: Annotated[str, Query(max_length=200)] = "", position: int | None = None
    ) -> dict[str, Any]:
        return {"classes": review.search_classes(search, position)}

    @app.get("/api/pairs")
    def pairs() -> dict[str, Any]:
        return {"pairs": review.pairs()}

    @app.post("/api/decisions")
    def decide(asked: Decisions) -> Any:
        if asked.id != review.id:
            return JSONResponse({"error": "The server now serves another run."}, 409)
        wishes = [Wish(**one.model_dump()) for one in asked.decisions]
        try:
            answers = review.decide(wishes, asked.by or None, asked.strict)
        except OSError as error:
            text = f"{review.log.path.name} cannot be written ({reason(error)}). Nothing was saved."
            return JSONResponse({"error": text}, 507)
        return {"rows": answers, "progress": review.progress()}

    @app.get("/images/{run}/{position}/{size}")
    def image(run: str, position: int, size: Literal["small", "medium", "full"]) -> Response:
        if run != review.id or not 0 <= position < len(review.table):
            return JSONResponse({"error": "no such image"}, 404)
        try:
            full = size == "full"
            content = images.full(position) if full else images.thumbnail(position, SIZES[size])
        except (UnreadableError, ValueError, OSError) as error:
            return JSONResponse({"error": f"The image cannot be read ({reason(error)})."}, 404)
        kind = "image/png" if content.startswith(b"\x89PNG") else "image/jpeg"
        return Response(content, media_type=kind, headers={"Cache-Control": A_DAY})

    return Guard(app, access)
