"""One tiny backbone and one tiny task for all tests of the command line."""

import pytest
from tiny_run import make_backbone, make_data


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """A BERT folder with pooler and MLM head."""
    return make_backbone(tmp_path_factory.mktemp("backbone") / "bert")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of train, dev and test rows."""
    return make_data(tmp_path_factory.mktemp("data"))
