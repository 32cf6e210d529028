"""Lets a left-to-right model run what all rows begin with once, and not for each row."""

from typing import Any

from jaxprompt.models.scorer import Scorer, with_front


def share_front(c: Any, scorer: Scorer) -> Scorer:
    """Does so where a config asks for it."""
    # States that are kept are of whole rows.
    return with_front(scorer) if c.backbone.once and not c.cache.where else scorer
