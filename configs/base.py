"""Every field of a run at its default: docs/config.md lists them. Other configs start from here.

The argument is a method of configs/parts/methods.py, with its learning rate and what it trains:
`--config=configs/base.py:soft`, or `:zero_shot`.
"""

from ml_collections import ConfigDict

from configs.parts import heads
from configs.parts.methods import METHODS, prefix
from jaxprompt.config.load import make_defaults
from jaxprompt.errors import check_known


def get_config(method: str = "") -> ConfigDict:
    """Returns the defaults: P-tuning v2 with a linear head on the backbone's pooler."""
    c = make_defaults()
    heads.linear(c)
    METHODS[check_known("the method", method, METHODS)](c) if method else prefix(c)
    return c
