"""The page in a real browser, with a real server."""

import os
import shutil
import signal

import pandas as pd
import pytest

from processes import wait_for_address
from pseudoloss.cli import main
from review_runs import ATTACK, lines_of, write_review

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
ORDER = list(range(58, -1, -2))  # positions of the issues, the most doubtful first


@pytest.fixture(scope="module")
def browser():
    if not os.path.exists(CHROMIUM):  # noqa: PTH110
        if os.environ.get("CI"):
            pytest.fail("Chromium is not installed; .ci/run installs it")
        pytest.skip("Chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser):
    context = browser.new_context(viewport={"width": 1300, "height": 800})
    context.set_default_timeout(30_000)
    yield context
    context.close()


class Servers:
    """Starts and kills servers."""

    def __init__(self, commands):
        self.commands, self.running = commands, []

    def __call__(self, review_audit, port=0):
        """The address of a new server."""
        process = self.commands.start("review", review_audit, "--no-browser", "--port", port)
        self.running.append(process)
        return wait_for_address(process)

    def kill(self):
        for process in self.running:
            if process.wait(block=False) is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        self.running = []


@pytest.fixture
def start(commands):
    servers = Servers(commands)
    yield servers
    servers.kill()


class Tab:
    """A page with the grid, and what went wrong in it."""

    def __init__(self, context, address):
        self.page = context.new_page()
        self.errors, self.requests = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.errors.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.card(0)

    def card(self, i):
        """The card of the i-th most doubtful row, or of a position, once it is there."""
        found = self.page.locator(f".card[data-position='{ORDER[i]}']")
        found.wait_for()
        return found

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def wait_decided(self, i, decision):
        selector = f".card[data-position='{ORDER[i]}'][data-decision='{decision}']"
        self.page.wait_for_selector(selector)

    def wait_current(self, i):
        self.page.wait_for_selector(f".card.current[data-position='{ORDER[i]}']")

    def wait_text(self, selector, text):
        self.page.locator(selector, has_text=text).first.wait_for()

    def choose(self, text):
        """Choose a class in the open dialog."""
        self.page.wait_for_selector("#chooser[open]")
        self.page.keyboard.type(text)
        self.page.wait_for_selector(f"#chooser-list[data-search='{text}']")
        self.press("Enter")


def saved(review_audit):
    return [(line["index"], line["decision"], line["label"]) for line in lines_of(review_audit)]


def test_from_a_run_to_a_corrected_table_by_keyboard(review_audit, start, context, tmp_path):
    address = start(review_audit)
    tab = Tab(context, address)
    assert "token" not in tab.page.url
    table = pd.read_csv(review_audit / "labels.csv")
    candidate = table["candidate_label"]

    tab.wait_current(0)
    tab.press("a")
    tab.wait_decided(0, "relabel")
    assert saved(review_audit) == [
        (58, "relabel", candidate[58])
    ]  # on disk when it is shown as done
    tab.wait_current(1)
    tab.press("k", "j")
    tab.wait_decided(2, "junk")
    tab.press("c")
    tab.choose("ant")
    tab.wait_decided(3, "relabel")
    expected = [(58, "relabel", candidate[58]), (56, "keep", None), (54, "junk", None)]
    expected.append((52, "relabel", "ant"))
    assert saved(review_audit) == expected

    tab.page.reload()
    tab.card(4)
    assert tab.page.locator(".card").first.get_attribute("data-position") == str(ORDER[4])
    tab.wait_text("#progress-text", "26 left of 30")
    tab.press("u")  # of before the reload
    tab.page.wait_for_selector(f".card.current[data-position='{ORDER[3]}'][data-decision='']")
    assert saved(review_audit) == [*expected, (52, "undo", None)]
    tab.press("s")
    tab.wait_decided(3, "skip")
    tab.press("Enter")  # full size
    tab.page.wait_for_selector(f"#viewer[open][data-position='{ORDER[4]}']")
    tab.page.wait_for_function("() => document.getElementById('full').naturalHeight === 90")
    stage, full = (tab.page.locator(one).bounding_box() for one in (".stage", "#full"))
    assert full["height"] <= stage["height"]  # the whole image is visible
    assert full["width"] <= stage["width"]
    tab.press("k")
    tab.page.wait_for_selector(f"#viewer[open][data-position='{ORDER[5]}']")
    tab.wait_decided(4, "keep")
    tab.press("Enter")
    tab.page.wait_for_selector("#viewer:not([open])", state="attached")
    assert saved(review_audit)[-2:] == [(52, "skip", None), (50, "keep", None)]
    tab.press("?")
    tab.page.wait_for_selector("#help[open]")
    tab.press("k")  # types a name, decides nothing
    tab.press("Escape")
    assert len(saved(review_audit)) == 7
    assert tab.errors == []

    fixed = tmp_path / "fixed.csv"
    assert main(["apply", str(review_audit), "--reviewed-only", "--out", str(fixed)]) == 0
    labels = pd.read_csv(fixed, index_col="path")["label"]
    wanted = pd.Series(table["given_label"].to_numpy(), index=table["path"]).drop(table["path"][54])
    wanted[table["path"][58]] = candidate[58]
    by_name = {os.path.basename(path): label for path, label in labels.items()}  # noqa: PTH119
    assert by_name == wanted.to_dict()


def test_several_at_once_filters_and_pages(review_audit, start, context):
    address = start(review_audit)
    tab = Tab(context, address)
    tab.press("Shift+ArrowRight", "Shift+ArrowRight")
    tab.wait_text("#selected-count", "3 selected")
    tab.press("k")
    for i in range(3):
        tab.wait_decided(i, "keep")
    tab.press("u")
    tab.wait_decided(2, "")
    assert [one[1] for one in saved(review_audit)] == ["keep"] * 3 + ["undo"] * 3
    tab.press("Control+a")
    tab.wait_text("#selected-count", "24 selected")
    tab.press("j")
    tab.page.wait_for_selector(f".card.current[data-position='{ORDER[24]}']")  # the next page
    assert [one[1] for one in saved(review_audit)[6:]] == ["junk"] * 24
    tab.wait_text("#count", "6 of 30 to do")

    tab.page.select_option("#state", "junk")
    tab.card(0)
    tab.wait_text("#place", "1–24 of 24")
    tab.page.select_option("#state", "open")
    tab.page.click("#actions button[data-action=keep]")
    tab.wait_text("#count", "30 of 30 to do")
    tab.press("n")
    tab.wait_text("#place", "25–30 of 30")
    tab.press("p")
    tab.wait_text("#place", "1–24 of 30")
    tab.press("/")
    tab.choose("ant")
    tab.wait_text("#count", "8 of 8 to do")
    tab.page.click("#pairs-button")
    tab.page.locator("#pairs-list button").first.click()
    tab.wait_text("#given-filter.set", "ant")
    tab.wait_text("#suggested-filter.set", "bee")
    tab.wait_text("#count", "2 of 8 to do")
    assert tab.errors == []


def test_two_tabs(review_audit, start, context, browser):
    address = start(review_audit)
    ann, bob = Tab(context, address), Tab(browser.new_context(), address)
    ann.press("k")
    ann.wait_decided(0, "keep")
    bob.wait_decided(0, "keep")  # learns it by itself

    # Bob decides before he learns of it.
    bob.page.route("**/api/changes*", lambda route: None)
    bob.page.wait_for_event("request", lambda request: "/api/changes" in request.url)
    bob.press("ArrowRight")
    bob.wait_current(1)
    ann.press("j")
    ann.wait_decided(1, "junk")
    bob.press("k")
    bob.wait_decided(1, "keep")
    bob.wait_text(".toast", "another tab decided junk meanwhile. Your decision counts now.")
    ann.wait_decided(1, "keep")
    assert [one[1] for one in saved(review_audit)] == ["keep", "junk", "keep"]
    ann.press("u")  # does not take back what Bob did
    ann.wait_text(".toast", "1 changed elsewhere meanwhile: left as decided there")
    assert len(saved(review_audit)) == 3
    bob.page.locator(".toast button", has_text="Use that one").click()
    bob.wait_decided(1, "junk")
    ann.wait_decided(1, "junk")
    assert [one[1] for one in saved(review_audit)] == ["keep", "junk", "keep", "junk"]
    assert ann.errors == bob.errors == []
    bob.page.context.close()


def test_a_killed_server_loses_nothing(review_audit, start, context, tmp_path):
    address = start(review_audit)
    port = address.partition("/?")[0].rpartition(":")[2]
    tab = Tab(context, address)
    tab.press("k")
    tab.wait_decided(0, "keep")
    start.kill()
    with (review_audit / "decisions.jsonl").open("a") as file:
        file.write('{"index": 56, "part": "tr')  # a line cut by the kill
    tab.press("j")
    tab.wait_text("#banner", "The server does not answer")
    assert tab.card(1).get_attribute("data-decision") == ""  # not shown as done
    assert "saving" in tab.card(1).get_attribute("class")

    again = start(review_audit, port)
    assert again != address  # another token
    context.new_page().goto(again)
    tab.wait_decided(1, "junk")
    tab.page.wait_for_selector("#banner", state="hidden")
    lines = (review_audit / "decisions.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert lines[1] == '{"index": 56, "part": "tr'
    assert '"decision": "junk"' in lines[2]
    assert tab.errors == []


def test_another_run_at_the_same_address_gets_no_decisions(review_audit, start, context, tmp_path):
    address = start(review_audit)
    port = address.partition("/?")[0].rpartition(":")[2]
    tab = Tab(context, address)
    start.kill()
    other = write_review(tmp_path / "other")
    again = start(other, port)
    context.new_page().goto(again)
    tab.press("j")
    tab.wait_text(".toast, #banner", "another run")
    assert lines_of(other) == []


def test_hostile_names_are_text(review_audit, start, context):
    address = start(review_audit)
    tab = Tab(context, address)
    page = tab.page
    given = page.locator(f".card[data-position='{ORDER[2]}'] .given .name")
    row = pd.read_csv(review_audit / "labels.csv").loc[ORDER[2]]
    assert given.inner_text() == row["given_label"]
    attacked = page.locator(".name", has_text=ATTACK)
    assert attacked.count() > 3
    assert page.locator(".card .path").first.inner_text() == "058 <b onclick=alert(1)>.png"
    tab.press("?")
    page.fill("#by", ATTACK)
    tab.press("Escape")
    tab.press("c")
    tab.choose("<img")
    tab.wait_decided(0, "relabel")
    assert ATTACK in page.locator(f".card[data-position='{ORDER[0]}'] .stamp").inner_text()
    tab.press("Enter")
    page.wait_for_selector("#viewer[open]")
    tab.press("Enter")
    page.click("#pairs-button")
    page.locator("#pairs-list li", has_text=ATTACK).first.click()
    tab.wait_text("#count", "of")
    page.click("#suggested-filter")
    tab.choose("<img")
    tab.wait_text("#suggested-filter.set", ATTACK)
    assert saved(review_audit) == [(58, "relabel", ATTACK)]
    assert lines_of(review_audit)[0]["by"] == ATTACK

    assert page.locator("img[src='x'], main b, dialog b, script:not([src])").count() == 0
    assert "attacked" not in page.title()
    assert tab.errors == []
    server = address.partition("/?")[0]
    assert {url for url in tab.requests if not url.startswith(f"{server}/")} == set()
