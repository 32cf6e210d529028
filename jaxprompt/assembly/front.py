"""Lets a left-to-right model run what all rows begin with once, and not for each row."""

import dataclasses
from typing import Any

from jaxprompt.assembly.pipeline import Scorer


def share_front(c: Any, scorer: Scorer) -> Scorer:
    """Does so where a config asks for it."""
    # States that are kept are of whole rows.
    return with_front(scorer) if c.backbone.once and not c.cache.where else scorer


def with_front(scorer: Scorer) -> Scorer:
    """Takes from the template what all rows begin with: soft tokens, words, special tokens.

    The scorer stays as it is where rows do not see such a front alone (encoders), where a method
    computes its tokens from the row, and where the head reads all positions.
    """
    model = scorer.model
    reads_all = any(head.reads_all for head in model.heads.values())
    if not getattr(model.backbone, "shares_front", False) or model.prompt.reads or reads_all:
        return scorer
    front = scorer.encoder.shared_front()
    layout = dataclasses.replace(scorer.layout, front=front)
    return scorer._replace(layout=layout, model=dataclasses.replace(model, front=front))
