"""Replaced-token detection of an ELECTRA, or of a BERT that becomes one."""

from configs.base import get_config as base
from configs.parts import adapting


def get_config():
    """Returns one run; set corpus.path and backbone.path."""
    config = base()
    adapting.rtd(config)
    return config
