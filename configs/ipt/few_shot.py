"""IPT on prefix tuning with 32 examples per class (section 5.2, table 3).

The argument is TASK,SYSTEM,PLACE,FOLD. Without FOLD, the run trains on K examples per class and
keeps the step that is best on K more. With FOLD, 0 to 3, one fold of these 2K examples is dev:
`sweep --table` shows the learning rate with the best mean over the folds.
"""

from configs.ipt import RATES, SEEDS, SUPERGLUE, cross_validation, few_shot, read_cell, tune
from jaxprompt.config.load import apply_overrides

FOLDS = ("0", "1", "2", "3")


def get_config(cell=""):
    """Returns one run."""
    *parts, fold = read_cell(cell, default=("rte", "random", "prefix"), FOLD=("", ("", *FOLDS)))
    config = tune(*parts)
    few_shot(config)
    if fold:
        apply_overrides(
            config, list((cross_validation() | {"data.protocol.fold": int(fold)}).items())
        )
    return config


def sweep():
    """Yields the runs of the cross-validation."""
    for task in SUPERGLUE:
        for system in ("task", "random"):
            for seed in SEEDS:
                for lr in RATES:
                    for fold in map(int, FOLDS):
                        yield {
                            "config": f"{task},{system},prefix,0",
                            "data.protocol.fold": fold,
                            "data.seed": seed,
                            "seed": seed,
                            "optim.lr": lr,
                        }
