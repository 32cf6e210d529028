"""Causal language modelling of a GPT-2."""

from configs.parts.adapting import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    return adapting("clm", length=512, batch=16, lr=1e-4)
