"""PEFT's benchmark MetaMathQA: Llama 3.2 3B learns to calculate, and is tested on GSM8K.

The argument is a method of METHODS: `--config=configs/metamath.py:prefix_text`. The values are
those of method_comparison/MetaMathQA in PEFT's repository, commit 5d602fd: of its
default_training_params.json and of the files of each experiment. `data.source` is the folder that
launch/metamath.py writes; that script also trains. docs/language_models.md lists the differences.
"""

from functools import partial

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.errors import check_known

TEXT = (
    "You are a helpful math assistant. Solve mathematical problems by thinking step by step. "
    "First, identify what the problem is asking. Then, break down the solution into clear logical "
    "steps. Show all your work and calculations. Finally, verify that your answer makes sense."
)
# What follows the last of these words in a line. PEFT's utils.py searches for the same words, but
# takes those of a later kind only if the text has none of an earlier one.
ANSWER = r"(?:The (?:final )?answer is:? |#### )([^\n]*?)[ .!?$%]*(?:\n|$)"
QUESTION, MAX_TOKENS = 256, 768  # tokens of a question, and of a question with its response
_SOFT = partial(methods.soft, length=200, lr=1e-3)
_PREFIX = partial(methods.prefix, length=200, lr=5e-3, dropout=0.0)
# The name of PEFT's experiment, and its published accuracy on GSM8K of July 2026.
METHODS = {
    # prompt_tuning/llama-3.2-3B-lr_0.001: 0.234
    "prompt_tuning": partial(_SOFT, start="normal", scale=1.0),
    # prompt_tuning/llama-3.2-3B-sample_vocab-lr_0.001: 0.343
    "prompt_tuning_vocab": partial(_SOFT, start="vocab"),
    # ptuning/llama-3.2-3B-default: 0.350
    "p_tuning": partial(methods.p_tuning, length=20, lr=1e-4, encoder="mlp", linear=3),
    # prefixtuning/llama-3.2-3B-lr_0.001: 0.186
    "prefix": partial(_PREFIX, lr=1e-3, scale=1.0),
    # prefixtuning/llama-3.2-3B-lr_0.005_zero_init: 0.358
    "prefix_zero": partial(_PREFIX, start="zero"),
    # prefixtuning/llama-3.2-3B-tokens50-init_prefix-lr_0.005: 0.416
    "prefix_text": partial(_PREFIX, length=50, start="text", text=TEXT),
}


def get_config(method="prefix_text"):
    """Returns one run."""
    config = base()
    heads.text(config)
    METHODS[check_known("the method", method, METHODS)](config)
    config.backbone.path = "meta-llama/Llama-3.2-3B"
    config.backbone.dtype = "bfloat16"
    config.mesh.data = 1  # one device
    config.task.name = "custom"
    config.task.fields, config.task.target = ("query",), "response"
    config.task.template = r'Question: {query} Think step by step.["\nAnswer:"][mask]'
    config.task.answer_pattern = ANSWER
    config.data.source = "DATA/metamath"
    config.data.batch, config.data.eval_batch, config.data.group = 4, 50, 20
    slots = 0 if config.prompt.name == "prefix" else config.prompt.length
    config.data.max_len, config.data.max_target = slots + QUESTION + MAX_TOKENS, MAX_TOKENS
    # An experiment that names a learning rate has the weight decay of torch's AdamW.
    config.optim.weight_decay = 0.1 if method == "p_tuning" else 0.01
    config.optim.schedule = {"name": "cosine", "warmup_ratio": 0.1}
    config.train.total_steps, config.train.total_epochs = 5000, 0.0
    config.train.eval_steps, config.train.save_steps = 5000, 250  # the last step is tested
    config.generate.max_new_tokens = 300
    return config


def sweep():
    """Yields each method."""
    for method in METHODS:
        yield {"config": method}
