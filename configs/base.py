"""The defaults of all fields, which docs/config.md lists. Other configs start from here.

The argument is a method of configs/parts/methods.py: `--config=configs/base.py:soft`.
"""

from ml_collections import ConfigDict

from configs.parts import heads
from configs.parts.methods import METHODS, prefix
from jaxprompt.config.load import make_defaults
from jaxprompt.errors import check_known


def get_config(method: str = "") -> ConfigDict:
    """Returns the defaults: P-tuning v2 with a linear head on the backbone's pooler."""
    config = make_defaults()
    heads.linear(config)
    METHODS[check_known("the method", method, METHODS)](config) if method else prefix(config)
    return config


def paper() -> ConfigDict:
    """Returns the defaults with the examples in random order, as in the code of the papers."""
    config = get_config()
    config.data.group = 1
    return config
