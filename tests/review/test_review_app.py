"""The server as a browser, and as an attacker, sees it."""

import errno
import io
import json
import os
import re

import pytest
from PIL import Image
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from pseudoloss.labels.images import RunImages
from pseudoloss.labels.opening import open_labels
from pseudoloss.review.app import FILES, STATIC, create_app
from pseudoloss.review.guard import HEADERS, MAX_BODY, access_for
from review_runs import lines_of

TOKEN, ADDRESS = "secret-token", "http://127.0.0.1:8765"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def app(review_audit, opened_review):
    images = RunImages(open_labels(review_audit))
    about = {"name": "audit", "file": "decisions.jsonl", "notice": None}
    return create_app(opened_review, images, access_for(TOKEN, "127.0.0.1", 8765), about)


@pytest.fixture
def stranger(app):
    return TestClient(app, base_url=ADDRESS)


@pytest.fixture
def client(stranger):
    """A browser that has opened the address with the token."""
    assert stranger.get(f"/?token={TOKEN}").status_code == 200
    return stranger


@pytest.fixture
def body(opened_review):
    row = {"position": 2, "index": 2, "part": "train", "known": 0, "decision": "keep"}
    return {"id": opened_review.id, "decisions": [row]}


ROUTES = [*FILES, "/api/start", "/api/rows", "/api/changes?since=0", "/api/classes", "/api/pairs"]


def test_the_page_and_its_files(client):
    for address, (name, kind) in FILES.items():
        answer = client.get(address)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert answer.content == (STATIC / name).read_bytes()
    assert {name for name, _ in FILES.values()} == {path.name for path in STATIC.iterdir()}


def test_rows_decisions_and_changes(client, review_audit, body):
    rows = client.get("/api/rows?limit=3").json()["rows"]
    assert [row["position"] for row in rows] == [58, 56, 54]
    answer = client.post("/api/decisions", json=body | {"by": "Ann"}).json()
    assert answer["rows"][0]["decision"]["decision"] == "keep"
    assert answer["progress"]["keep"] == 1
    assert [line["by"] for line in lines_of(review_audit)] == ["Ann"]
    changes = client.get("/api/changes?since=0").json()
    assert [row["position"] for row in changes["rows"]] == [2]
    assert client.get("/api/start").json()["name"] == "audit"
    assert client.get("/api/classes?search=bee").json()["classes"][0]["name"] == "bee"
    assert len(client.get("/api/pairs").json()["pairs"]) == 4


def test_images_are_served_by_position(client, opened_review):
    for size, wanted in (("small", (60, 90)), ("medium", (60, 90)), ("full", (60, 90))):
        answer = client.get(f"/images/{opened_review.id}/7/{size}")
        assert answer.headers["content-type"] == "image/jpeg"
        assert answer.headers["cache-control"].startswith("private")
        image = Image.open(io.BytesIO(answer.content))
        assert image.size == wanted
        assert abs(image.getpixel((5, 5))[0] - 28) < 5


@pytest.mark.parametrize(
    "address",
    [
        *("/images/ID/60/small", "/images/ID/-1/small", "/images/other/7/small"),
        *("/images/ID/7/huge", "/images/ID/photo.png/small", "/images/ID/..%2f..%2fx/small"),
        *("/images/", "/images", "/static/", "/static/review.js", "/app.py", "/..%2fapp.py"),
        *("/../app.py", "/docs", "/openapi.json", "/decisions.jsonl", "/api/", "/favicon.ico"),
    ],
)
def test_nothing_else_is_served(client, opened_review, address):
    answer = client.get(address.replace("ID", opened_review.id))
    assert answer.status_code in (404, 422)
    assert b"import" not in answer.content


def test_an_image_that_cannot_be_read(client, review_audit, opened_review):
    source = review_audit.parent / "photos"
    for i, path in enumerate(sorted(source.glob("*.png"))[:2]):
        path.write_bytes(b"no image") if i else path.unlink()
    for position in (0, 1):
        answer = client.get(f"/images/{opened_review.id}/{position}/small")
        assert answer.status_code == 404
        assert "cannot be read" in answer.json()["error"]
        assert str(source) not in answer.text


# ------------------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("address", [*ROUTES, "/images/ID/7/small", "/nothing"])
def test_nothing_without_the_token(stranger, opened_review, address):
    address = address.replace("ID", opened_review.id)
    for cookie in (None, "wrong", TOKEN[:-1], ""):
        headers = {} if cookie is None else {"Cookie": f"pseudoloss_review_8765={cookie}"}
        assert stranger.get(address, headers=headers).status_code == 403
    join = "&" if "?" in address else "?"
    assert stranger.get(f"{address}{join}token=wrong").status_code == 403
    assert "set-cookie" not in stranger.get("/?token=wrong").headers
    if address != "/":  # the token in the address opens the page and nothing else
        assert stranger.get(f"{address}{join}token={TOKEN}").status_code == 403


def test_no_decision_without_the_token(stranger, review_audit, body):
    for address in ("/api/decisions", f"/api/decisions?token={TOKEN}", f"/?token={TOKEN}"):
        assert stranger.post(address, json=body).status_code == 403
    assert lines_of(review_audit) == []


def test_the_cookie(stranger):
    cookie = stranger.get(f"/?token={TOKEN}").headers["set-cookie"]
    assert cookie == f"pseudoloss_review_8765={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert "set-cookie" not in stranger.get("/").headers
    broken = {"Cookie": "pseudoloss_review_8765=\x7f; =;;"}
    assert stranger.get("/api/start", headers=broken).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a name that points to this machine (DNS rebinding)
        {"Host": "evil.example:8765"},
        {"Host": "127.0.0.1:8766"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1.evil.example:8765"},
        {"Host": "192.168.0.7:8765"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "https://127.0.0.1:8765"},
        {"Origin": "http://localhost:8765"},  # not the host of this request
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_sites_are_refused_even_with_the_cookie(
    client, review_audit, opened_review, body, headers
):
    for address in ("/api/rows", "/", f"/?token={TOKEN}", f"/images/{opened_review.id}/7/small"):
        answer = client.get(address, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
    assert client.post("/api/decisions", json=body, headers=headers).status_code == 403
    assert lines_of(review_audit) == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "localhost:8765", "[::1]:8765", "LOCALHOST:8765"]
)
def test_own_names_are_accepted(client, body, host):
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    cookie = {"Cookie": f"pseudoloss_review_8765={TOKEN}"}
    assert client.get("/api/start", headers=headers | cookie).status_code == 200
    assert client.post("/api/decisions", json=body, headers=headers | cookie).status_code == 200


def test_a_link_to_the_page_may_be_followed(stranger):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert stranger.get(f"/?token={TOKEN}", headers=link).status_code == 200
    assert stranger.get("/", headers=link).status_code == 403


def test_hosts_of_a_server_on_all_addresses():
    access = access_for(TOKEN, "0.0.0.0", 8765)
    for host in ("10.0.0.3:8765", "127.0.0.1:8765", "[fe80::1]:8765", "localhost:8765"):
        assert access.knows_host(host)
    for host in ("evil.example:8765", "10.0.0.3", "10.0.0.3:80", "10.0.0.3.evil.example:8765"):
        assert not access.knows_host(host)
    one = access_for(TOKEN, "10.0.0.3", 80)
    assert one.knows_host("10.0.0.3")
    assert one.knows_host("10.0.0.3:80")
    assert not one.knows_host("10.0.0.4")


def test_every_answer_has_the_security_headers(client, opened_review):
    for address in (*ROUTES, "/nothing", f"/images/{opened_review.id}/99/small"):
        assert (
            client.get(address).headers.items()
            >= {k.lower(): v for k, v in HEADERS.items()}.items()
        )
    refused = client.get("/", headers={"Host": "evil.example"})
    policy = refused.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert refused.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"]
)
def test_only_json_changes_anything(client, review_audit, body, kind):

    answer = client.post("/api/decisions", content=json.dumps(body), headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert lines_of(review_audit) == []


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(client, method):
    assert client.request(method, "/api/decisions").status_code == 405


def test_large_requests_are_refused(client, review_audit):
    large = b" " * (MAX_BODY + 1)
    assert client.post("/api/decisions", content=large, headers=JSON).status_code == 413
    # Without a length that says so.
    parts = (b" " * 65536 for _ in range(17))
    assert client.post("/api/decisions", content=parts, headers=JSON).status_code == 413
    odd = JSON | {"Content-Length": "-1"}
    assert client.post("/api/decisions", content=b"{}", headers=odd).status_code == 413
    assert lines_of(review_audit) == []


@pytest.mark.parametrize(
    "change",
    [
        *({"position": "2"}, {"position": 2.5}, {"decision": "burn"}, {"known": None}, {"x": 1}),
        *({"label": 3}, {"label": "x" * 1001}, {"part": None}),
    ],
)
def test_malformed_decisions_are_refused(client, review_audit, body, change):
    row = body["decisions"][0]
    answer = client.post("/api/decisions", json=body | {"decisions": [row | change]})
    assert answer.status_code == 422
    assert lines_of(review_audit) == []


def test_wrong_decisions_are_refused_with_a_reason(client, review_audit, body):
    row = body["decisions"][0]
    for change, reason in (
        ({"index": 3}, "position 2: is another image"),
        ({"decision": "relabel", "label": "wasp"}, "label wasp: no such class"),
    ):
        answer = client.post("/api/decisions", json=body | {"decisions": [row | change]})
        assert (answer.status_code, answer.json()["error"]) == (400, reason)
    for change in ({"decisions": []}, {"decisions": [row] * 1001}, {"by": "x" * 101}):
        assert client.post("/api/decisions", json=body | change).status_code == 422
    assert client.post("/api/decisions", content=b"{", headers=JSON).status_code == 422
    other = client.post("/api/decisions", json=body | {"id": "another run"})
    assert (other.status_code, "another run" in other.json()["error"]) == (409, True)
    assert client.get("/api/rows?given=wasp").status_code == 400
    for query in ("limit=0", "limit=201", "after=-1", "before=x", f"after={2**70}"):
        assert client.get(f"/api/rows?{query}").status_code == 422
    assert lines_of(review_audit) == []


def test_a_full_disk_is_told(client, review_audit, body, monkeypatch):
    def fail(file, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    answer = client.post("/api/decisions", json=body)
    assert answer.status_code == 507
    assert "No space left on device" in answer.json()["error"]
    monkeypatch.undo()
    assert client.get("/api/rows?state=decided").json()["rows"] == []
    assert client.post("/api/decisions", json=body).status_code == 200


def test_web_sockets_are_refused(stranger):
    with pytest.raises(WebSocketDisconnect), stranger.websocket_connect("/"):
        pass


def test_the_page_sets_no_html_and_asks_nobody_else():
    for path in STATIC.iterdir():
        text = path.read_text()
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert banned not in text, path.name
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", html)
