"""The six-topic set on a small BERT that pip can fetch: minutes on two cores.

The argument is a method of configs/parts/methods.py that reads no LM head, which this BERT lacks:
`--config=configs/quickstart.py:soft`.
"""

from configs.base import get_config as base
from configs.parts import backbones, tasks
from configs.parts.methods import METHODS
from jaxprompt.errors import check_known

EPOCHS = {"prefix": 30.0, "soft": 30.0, "head_only": 30.0, "full": 10.0}


def get_config(method="prefix"):
    """Returns one run; P-tuning v2 by default."""
    c = base()
    backbones.minilm(c)
    tasks.topics(c)
    METHODS[check_known("the method", method, METHODS)](c)
    if method in ("prefix", "soft"):
        c.prompt.length = 16
    if method == "prefix":
        c.optim.lr = 2e-2
        c.prompt.dropout = 0.0
    c.data.batch = 16
    c.train.total_steps = c.train.total_examples = 0  # of a method whose part sets its own
    c.train.total_epochs = EPOCHS.get(method, 30.0)
    return c


def sweep():
    """Yields the comparison: four methods, three seeds each."""
    for method in EPOCHS:
        for seed in (0, 1, 2):
            yield {"config": method, "seed": seed}
