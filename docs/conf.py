"""Settings of the documentation site, which `bash launch/docs.sh` builds."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import jaxprompt  # noqa: E402
from jaxprompt import Choice  # noqa: E402

REPOSITORY = "https://github.com/jaxprompt/jaxprompt"

project = html_title = "jaxprompt"
author = copyright = "The jaxprompt authors"
release = jaxprompt.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["**/.ipynb_checkpoints"]
highlight_language = "none"  # of blocks that name none: outputs
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
nb_execution_mode = "off"
smartquotes_action = "D"  # dashes; docstrings quote code
default_role = "literal"  # as docstrings use backticks
python_maximum_signature_line_length = 88
# A link without a target is a warning, unless it leads to a type that has no page here.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!jaxprompt\.(\w+|(prompts|heads|backbones|types)\.\w+)$).*")]


def link_repository(app, page, source):
    """Replaces links to folders, and to files outside docs/, by links to the repository."""

    def replace(match):
        path = (DOCS / page).parent.joinpath(match[1]).resolve()
        if path.exists() and (path.is_dir() or not path.is_relative_to(DOCS)):
            return f"]({REPOSITORY}/blob/main/{path.relative_to(DOCS.parent)}"
        return match[0]

    source[0] = re.sub(r"\]\(([^)#:\s]+)", replace, source[0])


def skip_field(app, kind, name, value, skip, options):
    """Skips the fields of a NamedTuple, which have no docstrings."""
    return True if "Alias for field number" in str(value.__doc__) else None


def shorten_signature(app, kind, name, value, options, signature, returns):
    """Removes the arguments that flax adds to the constructor of a module."""
    return signature and re.sub(r"(, )?parent: .*\)$", ")", signature), returns


def drop_signature(app, kind, name, value, options, lines):
    """Removes the signature that the docstring of a method or head begins with, for `help`."""
    if isinstance(value, Choice) and lines and lines[0].startswith("jp."):
        del lines[: lines.index("") + 1]


def setup(app):
    """Connects the functions above, and names public classes as users import them."""
    app.connect("source-read", link_repository)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", drop_signature, priority=400)  # before napoleon
    for name in jaxprompt.__all__:
        getattr(jaxprompt, name).__module__ = "jaxprompt"
