"""Span corruption of a T5 (Raffel et al. 2020, section 3.1.4)."""

from configs.parts.adapting import adapting


def get_config():
    """Returns one run; give corpus.path and backbone.path."""
    return adapting("span_corruption", length=512, batch=32, lr=1e-3)
