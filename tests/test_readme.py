"""The README's Python blocks run as they stand, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ot_newton.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^ot-newton (\S+) (.*)$", README, flags=re.MULTILINE)


def test_the_readme_has_an_example():
    assert len(BLOCKS) >= 1
    assert 10 <= len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(block):
    names = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    assert len(names) > 2, "the block defines nothing"


def test_readme_commands_and_options_exist():
    assert COMMANDS
    for command, rest in COMMANDS:
        help_text = CliRunner().invoke(main, [command, "--help"]).output
        for option in re.findall(r"--[\w-]+", rest.partition("#")[0]):
            assert option in help_text, f"{command} {option}"


def test_make_targets_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
