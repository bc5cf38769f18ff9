"""The style sheet: text can be read in both modes (WCAG contrast of at least 4.5 to 1)."""

import re

import pytest

from pseudoloss.report.page import TEMPLATES

STYLE = (TEMPLATES / "style.css").read_text()
TEXT = ("ink", "muted", "blue", "orange", "green", "amber")


def colours(block):
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def luminance(colour):
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


LIGHT = colours(STYLE.partition("@media")[0])
DARK = colours(STYLE.partition("prefers-color-scheme: dark")[2].partition("\n}\n")[0])


@pytest.mark.parametrize("mode", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_contrast(mode):
    for name in TEXT:
        for background in ("page", "panel"):
            assert contrast(mode[name], mode[background]) >= 4.5, (name, background)
    for level in "123":
        assert contrast(mode["ink"], mode[f"level-{level}"]) >= 4.5, level
    for level in "45":
        assert contrast(mode["on-strong"], mode[f"level-{level}"]) >= 4.0, level
    for number in "123456":
        assert contrast(mode[f"line-{number}"], mode["page"]) >= 3, number


def test_both_modes_have_all_colours():
    assert LIGHT.keys() == DARK.keys()
    used = set(re.findall(r"var\(--([\w-]+)\)", STYLE))
    assert used == LIGHT.keys()
