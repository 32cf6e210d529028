"""The classifier with which `annotate` labels a corpus for cls.py (Gu et al. 2022).

RoBERTa-base, fine-tuned as in the released code on YELP-5, or on SST-5 with
`--config=configs/ppt/annotator.py:sst5`. Use a data set that is not one of your downstream tasks.
"""

from configs.base import get_config as base
from configs.parts import backbones, methods
from jaxprompt.errors import check_known

_HELD_OUT = 5_000  # examples of YELP-5, which has no dev split
_EXAMPLES = {"yelp": 650_000 - _HELD_OUT, "sst5": 8_544}
_BATCH, _EPOCHS = 16, 10


def get_config(task="yelp"):
    """Returns one run; `annotate` also needs corpus.path."""
    check_known("the data set", task, _EXAMPLES)
    config = base()
    backbones.roberta_base(config)
    if task == "yelp":
        config.task.name, config.task.fields = "custom", ("text",)
        config.task.labels = ("1 star", "2 star", "3 stars", "4 stars", "5 stars")
        config.data.source = "hub:Yelp/yelp_review_full"
        config.data.protocol = {"name": "holdout", "size": _HELD_OUT}
    else:
        config.task.name = task
    methods.full(config, lr=1e-4)
    config.head.pooler = "trained"
    config.data.batch, config.data.eval_batch = _BATCH, 256
    config.data.max_len, config.data.multiple = 511, 32
    warmup = _EPOCHS * -(-_EXAMPLES[task] // _BATCH) // 100
    config.optim.schedule = {"name": "warmup_linear", "warmup_steps": warmup}
    config.train.total_epochs = float(_EPOCHS)
    return config
