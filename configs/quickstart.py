"""Six topics with a small BERT that pip can install: minutes on two cores.

The argument is a method of configs/parts/methods.py that needs no LM head, which this BERT lacks:
`--config=configs/quickstart.py:soft`.
"""

from configs.base import get_config as base
from configs.parts import backbones, tasks
from configs.parts.methods import METHODS
from jaxprompt.errors import check_known

EPOCHS = {"prefix": 30.0, "soft": 30.0, "head_only": 30.0, "full": 10.0}


def get_config(method="prefix"):
    """Returns one run; P-tuning v2 by default."""
    config = base()
    backbones.minilm(config)
    tasks.topics(config)
    METHODS[check_known("the method", method, METHODS)](config)
    if method in ("prefix", "soft"):
        config.prompt.length = 16
    if method == "prefix":
        config.optim.lr = 2e-2
        config.prompt.dropout = 0.0
    config.data.batch = 16
    config.train.total_steps = config.train.total_examples = 0  # `lester` sets them
    config.train.total_epochs = EPOCHS.get(method, 30.0)
    return config


def sweep():
    """Yields the comparison: four methods, three seeds each."""
    for method in EPOCHS:
        for seed in (0, 1, 2):
            yield {"config": method, "seed": seed}
