"""Span corruption of a T5."""

from configs.base import get_config as base
from configs.parts import adapting


def get_config():
    """Returns one run; set corpus.path and backbone.path."""
    config = base()
    adapting.span_corruption(config)
    return config
