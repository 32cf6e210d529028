"""P-tuning v2 on the six-topic set, with a small BERT that pip can fetch. Minutes on two cores."""

from configs.base import get_config as base
from configs.parts import backbones, methods, tasks


def get_config():
    """Returns the quickstart's run."""
    c = base()
    backbones.minilm(c)
    tasks.topics(c)
    methods.prefix(c, length=16, lr=1e-2)
    c.data.batch = 16
    c.train.total_epochs = 30.0
    return c


def sweep():
    """Yields the comparison: four methods, three seeds each."""
    for seed in (0, 1, 2):
        for method in ("prefix", "soft", "head_only", "full"):
            yield {"method": method, "seed": seed}
