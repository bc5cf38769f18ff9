"""Options for reading a source."""

import subprocess
import sys
from dataclasses import fields

import pytest

from pseudoloss.cli.inspect import run as inspect_command
from pseudoloss.cli.train import train_parser
from pseudoloss.data import ReadOptions as exported
from pseudoloss.errors import InputError
from pseudoloss.reading import READ_OPTIONS, ReadOptions


def test_every_field_is_described():
    assert list(READ_OPTIONS) == [field.name for field in fields(ReadOptions)]
    assert all(option.help and option.help[0].islower() for option in READ_OPTIONS.values())


def test_every_field_is_an_option_of_train_and_inspect(capsys):
    with pytest.raises(SystemExit):
        inspect_command(["--help"])
    texts = (train_parser().format_help(), capsys.readouterr().out)
    for name in READ_OPTIONS:
        assert all(f"--{name.replace('_', '-')}" in text for text in texts)


def test_there_is_one_class_of_options():
    assert exported is ReadOptions
    assert ReadOptions.path_column == "path"


def test_importing_the_options_does_not_import_torch():
    program = "import sys, pseudoloss.reading; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hold_out": 1}, "--hold-out must be a number from 0 to below 1, not 1"),
        ({"hold_out": "many"}, "--hold-out must be a number"),
        ({"strict": "yes"}, "--strict must be True or False"),
        ({"test": 5}, "--test must be text, not 5"),
        ({"label_column": None}, "--label-column must be text, not None"),
        ({"fit": "pad"}, "--fit must be crop or stretch, not pad"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ReadOptions(**options)
