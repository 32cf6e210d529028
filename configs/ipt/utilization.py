"""Encoders that read 0.2% to 30% of the words of a text (section 5.6, table 6).

The argument is TASK,ENCODER,PLACE,PERCENT: `--config=configs/ipt/utilization.py:rte,lstm,prompt,5`.
"""

from configs.ipt import ENCODERS, RATES, SEEDS, read_cell, tune

PERCENTS = ("0.2", "1.3", "3", "5", "10", "21", "26", "30")  # table 6


def get_config(cell=""):
    """Returns one run."""
    *parts, percent = read_cell(
        cell, systems=ENCODERS, default=("boolq", "cnn", "prompt"), PERCENT=("26", PERCENTS)
    )
    return tune(*parts, utilization=round(float(percent) / 100, 5))


def sweep():
    """Yields the points of the curves; of each seed, the learning rate best on dev counts."""
    for encoder in ENCODERS:
        for percent in PERCENTS:
            for seed in SEEDS:
                for lr in RATES:
                    yield {
                        "config": f"boolq,{encoder},prompt,{percent}",
                        "seed": seed,
                        "data.seed": seed,
                        "optim.lr": lr,
                    }
