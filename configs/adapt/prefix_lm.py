"""LM adaptation of a T5: prefix language modelling (Lester et al. 2021, section 3.1)."""

from configs.parts.adapting import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    return adapting("prefix_lm", length=512, batch=32, lr=1e-3)
