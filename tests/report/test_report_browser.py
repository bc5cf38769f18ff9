"""The report in a real browser: no errors, no requests, nothing wider than the screen."""

from pathlib import Path

import pytest

from pseudoloss.report.comparing import write_comparison
from pseudoloss.report.page import write_report
from report_folders import HOSTILE, write_audit

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
BROKEN = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg.chart')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text:not([transform])')].map(
      text => [text.lastChild.textContent, text.getBoundingClientRect()]);
    texts.forEach(([name, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1) found.push(['outside', name]);
      for (const [other, b] of texts.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 &&
            b.top < a.bottom - 2) found.push([name, other]);
    });
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


def test_pages_fit_every_screen(browser, tmp_path):
    names = ("Anna_Hummingbird", "a very long name with words", "short")
    audit = write_audit(tmp_path, truth=True, n=90, classes=names, size=70)
    hostile = write_audit(tmp_path, "hostile", classes=HOSTILE)
    files = [write_report(audit), write_report(hostile)]
    files.append(write_comparison([audit, hostile], tmp_path / "compare.html"))
    for file in files:
        for width, scheme in ((390, "light"), (1200, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            problems = []
            page.on("console", lambda message, problems=problems: problems.append(message.text))
            page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
            page.on("dialog", lambda dialog, problems=problems: problems.append(dialog.message))
            addresses = []
            page.on("request", lambda request, addresses=addresses: addresses.append(request.url))
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(BROKEN) == 0
            assert page.evaluate(OVERLAPS) == []
            assert problems == []
            assert all(url.startswith(("data:", file.as_uri())) for url in addresses)
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") == (scheme == "light")
            page.close()
