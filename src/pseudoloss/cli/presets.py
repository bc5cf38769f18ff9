"""`pseudoloss presets`."""

from typing import Any

from pseudoloss.cli.parser import Parser
from pseudoloss.config import Settings, as_flag, as_json, as_text, flag
from pseudoloss.errors import InputError, did_you_mean
from pseudoloss.presets import NEEDS, PRESETS
from pseudoloss.terminal import show


def run(arguments: list[str]) -> None:
    """List the presets and the settings that each changes; with NAME, all settings of a preset."""
    parser = Parser("presets", run)
    parser.usage = "pseudoloss presets [NAME]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a preset")
    name = parser.parse(arguments).name
    if name is not None:
        _print_preset(name)
        return
    others = {name: changes for name, changes in PRESETS.items() if "method" in changes}
    _list({name: changes for name, changes in PRESETS.items() if name not in others})
    show("\nPresets of other methods:")
    _list(others)


def _list(presets: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, presets))
    for name, changes in presets.items():
        text = "  ".join(as_flag(key, value) for key, value in changes.items())
        text = text or "(all defaults: see pseudoloss presets default)"
        show(f"{name:{width}}  {text}{_needs(name)}")


def _print_preset(name: str) -> None:
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or " (see pseudoloss presets)"
        raise InputError(f"{name}: no such preset{hint}")
    show(f"{name}{_needs(name)}")
    settings = Settings(**PRESETS[name])
    defaults = as_json(Settings(method=settings.method))
    for key, value in as_json(settings).items():
        mark = " " if value == defaults[key] else "*"
        show(f"{mark} {flag(key):26} {as_text(value)}")
    command = f"pseudoloss train --method {settings.method} --help"
    show(f"* differs from the default; {command} explains the settings")


def _needs(preset: str) -> str:
    return f"  (needs {NEEDS[preset]})" if preset in NEEDS else ""
