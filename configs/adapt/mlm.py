"""Masked language modelling of a BERT or RoBERTa (Devlin et al. 2019, section 3.1)."""

from configs.parts.adapting import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    return adapting("mlm", length=128, batch=64, lr=1e-4)
