"""The classifier whose labels `annotate` gives to a corpus, for cls (Gu et al. 2022).

A RoBERTa base, fine-tuned as in the released code, on YELP-5, or on SST-5 with
`--config=configs/ppt/annotator.py:sst5`; take a data set that no downstream task is scored on.
"""

from configs.base import get_config as base
from configs.parts import backbones, methods
from jaxprompt.errors import check_known

_HELD_OUT = 5_000  # examples of YELP-5, which has no dev split
_EXAMPLES = {"yelp": 650_000 - _HELD_OUT, "sst5": 8_544}
_BATCH, _EPOCHS = 16, 10


def get_config(task="yelp"):
    """Returns one run; give corpus.path."""
    check_known("the data set", task, _EXAMPLES)
    c = base()
    backbones.roberta_base(c)
    if task == "yelp":
        c.task.name, c.task.fields = "custom", ("text",)
        c.task.labels = ("1 star", "2 star", "3 stars", "4 stars", "5 stars")
        c.data.source = "hub:Yelp/yelp_review_full"
        c.data.protocol = {"name": "holdout", "size": _HELD_OUT}
    else:
        c.task.name = task
    methods.full(c, lr=1e-4)
    c.head.pooler = "trained"
    c.data.batch, c.data.eval_batch = _BATCH, 256
    c.data.max_len, c.data.multiple = 511, 32
    c.data.group = 8
    warmup = _EPOCHS * -(-_EXAMPLES[task] // _BATCH) // 100
    c.optim.schedule = {"name": "warmup_linear", "warmup_steps": warmup}
    c.train.total_epochs = float(_EPOCHS)
    return c
