"""The description for the package index, where the relative links of README.md lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "jaxprompt/jaxprompt"
PAGES = f"](https://github.com/{REPOSITORY}/blob/main/"
PICTURES = f"](https://raw.githubusercontent.com/{REPOSITORY}/main/"


def absolute_links(match: re.Match) -> str:
    """Returns the start of a link, or of a picture, with the address of its repository."""
    return match[1] + (PICTURES if match[1].startswith("!") else PAGES)


text = Path(__file__).with_name("README.md").read_text("utf-8")
setup(
    long_description=re.sub(r"(!?\[[^\]]*)\]\((?!https?:|#)", absolute_links, text),
    long_description_content_type="text/markdown",
)
