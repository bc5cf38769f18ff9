"""Writes docs/settings.md from the settings themselves: python docs/make_settings.py"""

from pathlib import Path

from pseudoloss.config import PRESETS, Settings, as_flag, as_text, describe_settings, flag

HEAD = """# Settings

Every setting is a flag of `pseudoloss train`, a keyword of `pl.train` and a parameter of `pl.PLS`
(there with underscores). Values come from the preset (`--preset NAME`, or what fits the source),
then from a file (`--config FILE.toml`, with lines such as `epochs = 100`), then from flags. An
unknown name is an error. `pseudoloss train --preset NAME --help` shows the values of a preset.

This page is written by `python docs/make_settings.py`.
"""


def page() -> str:
    """The whole page."""
    lines, current = [HEAD], ""
    for name, (group, text) in describe_settings().items():
        if group != current:
            lines.append(f"## {group}\n\n| flag | default | meaning |\n|---|---|---|")
            current = group
        shown = as_text(getattr(Settings(), name))
        last = _is_last(name, group)
        lines.append(f"| `{flag(name)}` | {shown} | {text} |" + ("\n" if last else ""))
    lines.append("## Presets\n\n| preset | changes |\n|---|---|")
    for name, changes in PRESETS.items():
        text = " ".join(f"`{as_flag(key, value)}`" for key, value in changes.items())
        lines.append(f"| `{name}` | {text or 'nothing'} |")
    return "\n".join(lines) + "\n"


def _is_last(name: str, group: str) -> bool:
    names = [other for other, (its_group, _) in describe_settings().items() if its_group == group]
    return name == names[-1]


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page(), encoding="utf-8")
