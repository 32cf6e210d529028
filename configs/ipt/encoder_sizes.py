"""IPT with encoders of several sizes; the paper has one size, 0.5% of the backbone (A.3).

The argument is TASK,ENCODER,PLACE,HIDDEN, e.g. `configs/ipt/encoder_sizes.py:rte,mlp,prompt,64`.
The word embeddings are random and fixed, because the encoders trained on topics have one size each.
"""

from configs.ipt import ENCODERS, RATES, SEEDS, read_cell, tune

# Channels of a convolution, units per direction of an LSTM, width of a linear layer; the third of
# each is the default (prompt.hidden=0).
SIZES = {"cnn": (12, 24, 48, 96), "lstm": (12, 24, 48, 96), "mlp": (64, 128, 256, 512)}


def get_config(cell=""):
    """Returns one run."""
    sizes = sorted({str(size) for values in SIZES.values() for size in values}, key=int)
    *parts, hidden = read_cell(
        cell, systems=ENCODERS, default=("rte", "cnn", "prompt"), HIDDEN=("48", sizes)
    )
    config = tune(*parts, hidden=int(hidden))
    config.prompt.pretrained = ""
    return config


def sweep():
    """Yields the sizes on RTE; of each seed, the learning rate that is best on dev counts."""
    for encoder, sizes in SIZES.items():
        for hidden in sizes:
            for seed in SEEDS:
                for lr in RATES:
                    yield {
                        "config": f"rte,{encoder},prompt,{hidden}",
                        "seed": seed,
                        "data.seed": seed,
                        "optim.lr": lr,
                    }
