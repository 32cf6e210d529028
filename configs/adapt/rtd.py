"""Replaced-token detection of an ELECTRA (Clark et al. 2020), or of a BERT's trunk."""

from configs.parts.adapting import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    return adapting("rtd", length=128, batch=64, lr=1e-4)
