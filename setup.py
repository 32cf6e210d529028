"""The description for the package index, where the relative links of README.md lead nowhere."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Homepage"]


def absolute_link(link: re.Match) -> str:
    """Returns the start of a link to a file, or of a picture, with the address of the file."""
    return f"{link[0]}{HOME}/{'raw' if link[1] else 'blob'}/main/"


setup(
    long_description=re.sub(
        r"(!?)\[[^\]]*\]\((?!https?:|#)", absolute_link, (ROOT / "README.md").read_text("utf-8")
    ),
    long_description_content_type="text/markdown",
)
