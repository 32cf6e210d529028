"""IPT, prompt tuning, prefix tuning and fine-tuning on all examples (section 5.2, table 2).

The argument is TASK,SYSTEM,PLACE: `--config=configs/ipt/end_to_end.py:boolq,cnn,prompt`.
"""

from configs.ipt import RATES, SEEDS, SUPERGLUE, SYSTEMS, read_cell, tune


def get_config(cell=""):
    """Returns one run."""
    return tune(*read_cell(cell))


def sweep():
    """Yields the rows with prompts; of each seed, the learning rate that is best on dev counts."""
    for task in SUPERGLUE:
        for place in ("prompt", "prefix"):
            for system in SYSTEMS:
                if system in ("ppt", "full"):
                    continue
                for seed in SEEDS:
                    for lr in RATES:
                        yield {
                            "config": f"{task},{system},{place}",
                            "seed": seed,
                            "data.seed": seed,
                            "optim.lr": lr,
                        }
