"""A tiny BERT, loaded once, and rows that it can learn."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from tiny_run import make_backbone, sentences  # noqa: E402

import jaxprompt as jp  # noqa: E402


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A BERT folder with pooler and MLM head."""
    return make_backbone(tmp_path_factory.mktemp("backbone") / "bert")


@pytest.fixture(scope="session")
def backbone(folder):
    return jp.load_backbone(str(folder))


@pytest.fixture(scope="session")
def rows():
    """Rows of three topics: train, dev."""
    return sentences(0, 48), sentences(1, 30)


@pytest.fixture(scope="session")
def texts(rows):
    """The texts of the dev rows."""
    return [row["text"] for row in rows[1]]


@pytest.fixture(scope="session")
def small():
    """The fields of a run of seconds."""
    return {"max_len": 24, "multiple": 24, "batch": 16, "epochs": 0, "steps": 3}


@pytest.fixture(scope="session")
def trained(backbone, rows, small):
    """A prefix that was trained for three steps."""
    return jp.train(backbone, *rows, method=jp.prefix(4), **small)
