"""Read a report as a browser would."""

import itertools
from html.parser import HTMLParser

VOID = {"meta", "img", "wbr"}


class Page(HTMLParser):
    """The elements and the text of a page. Unbalanced tags are an error."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.html, self.elements, self.open, self.texts = html, [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def with_class(self, name):
        return [tag for tag, found in self.elements if name in (found.get("class") or "").split()]

    @property
    def sections(self):
        return [found["id"] for found in self.all("section")]


def assert_self_contained(page):
    """Nothing is loaded from outside and nothing is executed."""
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "audio"}
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/", "#")), (tag, name, value)
    style = page.html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def assert_accessible(page):
    """Images and charts have a description, links lead to sections, headings are in order."""
    assert all((image.get("alt") or "").strip() for image in page.all("img"))
    for svg in page.all("svg"):
        assert svg.get("aria-label") or svg.get("aria-hidden") == "true"
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"].removeprefix("#") for link in page.all("a")} <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.elements if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
