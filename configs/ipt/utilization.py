"""How much of a text its encoder reads: 0.2% to 30% of the words (section 5.6, table 6).

The argument is TASK,ENCODER,PLACE,PERCENT, as in `configs/ipt/utilization.py:boolq,lstm,prompt,5`.
"""

from configs.ipt import ENCODERS, RATES, SEEDS, read_cell, tune
from jaxprompt.errors import check_known

PERCENTS = ("0.2", "1.3", "3", "5", "10", "21", "26", "30")  # table 6


def get_config(cell="boolq,cnn,prompt,26"):
    """Returns one run."""
    *parts, percent = read_cell(cell, ("PERCENT", "26"))
    check_known("the encoder", parts[1], ENCODERS)
    share = round(float(check_known("the percentage", percent, PERCENTS)) / 100, 5)
    return tune(*parts, utilization=share)


def sweep():
    """Yields the points of the curves; of each seed the learning rate best on dev counts."""
    for encoder in ENCODERS:
        for percent in PERCENTS:
            for seed in SEEDS:
                for lr in RATES:
                    yield {
                        "config": f"boolq,{encoder},prompt,{percent}", "seed": seed,
                        "data.seed": seed, "optim.lr": lr,
                    }  # fmt: skip
