"""Encoders of several sizes; not the paper's, which says 0.5% of the backbone of each (A.3).

The argument is TASK,ENCODER,PLACE,HIDDEN, as in `configs/ipt/encoder_sizes.py:rte,mlp,prompt,128`.
The rows of words are fixed and random: an encoder that was trained on topics has one size.
"""

from configs.ipt import ENCODERS, RATES, SEEDS, read_cell, tune
from jaxprompt.errors import InputError, check_known

# Channels of a convolution, LSTM units of a direction, width of a linear layer; prompt.hidden=0
# stands for the third of each.
SIZES = {"cnn": (12, 24, 48, 96), "lstm": (12, 24, 48, 96), "mlp": (64, 128, 256, 512)}


def get_config(cell="rte,cnn,prompt,48"):
    """Returns one run."""
    *parts, hidden = read_cell(cell, ("HIDDEN", "48"))
    check_known("the encoder", parts[1], ENCODERS)
    if not hidden.isdigit():
        raise InputError(f"the size of an encoder is a whole number, as 48; not {hidden!r}")
    c = tune(*parts, hidden=int(hidden))
    c.prompt.pretrained = ""
    return c


def sweep():
    """Yields the sizes on RTE; of each seed the learning rate that is best on dev counts."""
    for encoder, sizes in SIZES.items():
        for hidden in sizes:
            for seed in SEEDS:
                for lr in RATES:
                    yield {
                        "config": f"rte,{encoder},prompt,{hidden}", "seed": seed,
                        "data.seed": seed, "optim.lr": lr,
                    }  # fmt: skip
