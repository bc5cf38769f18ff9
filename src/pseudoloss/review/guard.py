"""Who may talk to the server: holders of the token, from this page, with small requests.

The address that is printed has the token; the page then holds it in a cookie. Requests whose Host
or Origin is not the server's own are refused, so that other web sites cannot use the page, not even
through a name that they point to this machine.
"""

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 1 << 20  # bytes
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Access:
    """What a request must have.

    Attributes:
        token: the secret.
        hosts: names under which the server may be addressed.
        port: its port.
        any_address: also accept every IP address as host; the server listens on all of them.
    """

    token: str
    hosts: frozenset[str]
    port: int
    any_address: bool = False

    @property
    def cookie(self) -> str:
        """Browsers share cookies between ports, so every port has its own name."""
        return f"pseudoloss_review_{self.port}"

    def knows_host(self, netloc: str) -> bool:
        """Whether HOST:PORT, as in a Host header, is this server."""
        host, colon, port = netloc.rpartition(":")
        if not colon or port.endswith("]"):  # the default port is left out
            host, port = netloc, "80"
        host = host.strip("[]").lower()
        if port != str(self.port):
            return False
        return host in self.hosts or (self.any_address and _is_address(host))

    def knows_token(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self.token.encode())


def access_for(token: str, host: str, port: int) -> Access:
    """Access to a server that listens on this host and port."""
    if host in LOOPBACK:
        return Access(token, frozenset(LOOPBACK), port)
    names: Iterable[str] = (*LOOPBACK, host.lower(), socket.gethostname().lower())
    everywhere = _is_address(host) and ipaddress.ip_address(host).is_unspecified
    return Access(token, frozenset(names), port, any_address=everywhere)


class Guard:
    """The application behind these checks."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page uses no web sockets
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
                if token_in_address:
                    headers.append(
                        "Set-Cookie",
                        f"{self.access.cookie}={self.access.token}; "
                        "Path=/; HttpOnly; SameSite=Strict",
                    )
            await send(message)

        headers = Headers(scope=scope)
        token_in_address = self._has_token(scope)
        refusal = self._refusal(scope, headers, token_in_address)
        if refusal is not None:
            token_in_address = False
            await refusal(scope, receive, send_with_headers)
            return
        if scope["method"] == "POST":
            body = await _body(receive)
            if body is None:
                await _too_large()(scope, receive, send_with_headers)
                return
            receive = _once(body, receive)
        await self.app(scope, receive, send_with_headers)

    def _refusal(
        self, scope: Scope, headers: Headers, token_in_address: bool
    ) -> PlainTextResponse | None:
        """The answer to a request that is not allowed; None if it is."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.access.knows_host(hosts[0]):
            return PlainTextResponse("This server has another address.", 403)
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            return PlainTextResponse("Other sites may not use this page.", 403)
        from_outside = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        # Following a link to the page is fine; it needs the token.
        is_link = token_in_address and headers.get("sec-fetch-mode") == "navigate"
        if from_outside and not is_link:
            return PlainTextResponse("Other sites may not use this page.", 403)
        if not token_in_address and not self.access.knows_token(self._cookie(headers)):
            return PlainTextResponse(
                "This address is not complete. Open the one that pseudoloss review printed: it "
                "ends with a token.",
                403,
            )
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("No such method.", 405)
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return PlainTextResponse("Content-Type must be application/json.", 415)
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > MAX_BODY:
                return _too_large()
        return None

    def _has_token(self, scope: Scope) -> bool:
        """Whether the token is in the address; only the page itself may be opened with it."""
        if scope["path"] != "/" or scope["method"] != "GET":
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=10)
        return self.access.knows_token(query.get("token", [None])[0])

    def _cookie(self, headers: Headers) -> str | None:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return None
        found = cookies.get(self.access.cookie)
        return found.value if found is not None else None


def _too_large() -> PlainTextResponse:
    return PlainTextResponse(f"The request is larger than {MAX_BODY} bytes.", 413)


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too large, whatever its headers say."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # the client has gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _once(body: bytes, receive: Receive) -> Receive:
    """Hand on a body that was read already."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
