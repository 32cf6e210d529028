"""LM adaptation of a T5: prefix language modelling."""

from configs import base
from configs.parts import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    c = base.get_config()
    adapting.prefix_lm(c)
    return c
