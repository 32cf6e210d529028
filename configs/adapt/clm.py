"""Causal language modelling of a GPT-2."""

from configs.base import get_config as base
from configs.parts import adapting


def get_config():
    """Returns one run; set corpus.path and backbone.path."""
    config = base()
    adapting.clm(config)
    return config
