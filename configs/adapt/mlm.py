"""Masked language modelling of a BERT or RoBERTa."""

from configs import base
from configs.parts import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    c = base.get_config()
    adapting.mlm(c)
    return c
