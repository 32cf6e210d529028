"""What a shell is offered when it completes a command line."""

import os
import subprocess
import sys

import pytest

from jaxprompt.__main__ import commands
from jaxprompt.cli.completion import parser_of

pytest.importorskip("argcomplete")


def offered(line: str, tmp_path) -> list[str]:
    """Asks as a shell does. -> what it is offered"""
    out = tmp_path / "out"
    env = os.environ | {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_IFS": "\n", "COMP_TYPE": "9",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "jaxprompt"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out.read_text().split("\n")


@pytest.mark.parametrize(
    "line, some",
    [
        ("jaxprompt tr", {"train"}),
        ("jaxprompt train --config.optim.l", {"--config.optim.lr", "--config.optim.lr_head"}),
        ("jaxprompt train --config.prompt.name ", {"prefix", "none"}),
        ("jaxprompt train --config.task.name ", {"sst2", "custom"}),
    ],
)
def test_what_is_offered(line, some, tmp_path):
    assert some <= set(offered(line, tmp_path))


def test_an_open_quote_offers_nothing(tmp_path):
    assert offered('jaxprompt predict --text="a --on', tmp_path) == [""]


def test_every_command_has_a_parser():
    for name in commands():
        assert parser_of(name).description
