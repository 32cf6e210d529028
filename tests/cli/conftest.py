"""One tiny backbone and one tiny task for all tests of the command line."""

import jax
import pytest
from tiny_run import make_backbone, make_data


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
    """A folder where compiled programs are kept: many runs here are of the same program."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    folder = tmp_path_factory.mktemp("compiled")
    for name, value in zip(names, (str(folder), 0.2), strict=True):
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """A BERT folder with pooler and MLM head."""
    return make_backbone(tmp_path_factory.mktemp("backbone") / "bert")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of train, dev and test rows."""
    return make_data(tmp_path_factory.mktemp("data"))
