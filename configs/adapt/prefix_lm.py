"""LM adaptation of a T5: prefix language modelling."""

from configs.base import get_config as base
from configs.parts import adapting


def get_config():
    """Returns one run; set corpus.path and backbone.path."""
    config = base()
    adapting.prefix_lm(config)
    return config
