"""Span corruption of a T5."""

from configs import base
from configs.parts import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    c = base.get_config()
    adapting.span_corruption(c)
    return c
