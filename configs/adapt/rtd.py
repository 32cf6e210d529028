"""Replaced-token detection of an ELECTRA, or of a BERT that becomes one."""

from configs import base
from configs.parts import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    c = base.get_config()
    adapting.rtd(c)
    return c
