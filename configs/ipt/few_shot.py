"""IPT on prefix tuning with 32 examples per class (section 5.2, table 3).

The argument is TASK,SYSTEM,PLACE,FOLD. Without FOLD it trains on K examples per class and keeps
the step that is best on K more. With it, 0 to 3, a fold of these 2K examples is dev: `sweep
--table` shows the learning rate whose mean over the folds is best.
"""

from configs.ipt import RATES, SEEDS, SUPERGLUE, cross_validation, few_shot, read_cell, tune
from jaxprompt.config.load import apply_overrides
from jaxprompt.errors import check_known

FOLDS = ("0", "1", "2", "3")


def get_config(cell="rte,random,prefix"):
    """Returns one run."""
    *parts, fold = read_cell(cell, ("FOLD", ""))
    c = tune(*parts)
    few_shot(c)
    if fold:
        check_known("the fold", fold, FOLDS)
        apply_overrides(c, list((cross_validation() | {"data.protocol.fold": int(fold)}).items()))
    return c


def sweep():
    """Yields the runs of the cross-validation."""
    for task in SUPERGLUE:
        for system in ("task", "random"):
            for seed in SEEDS:
                for lr in RATES:
                    for fold in map(int, FOLDS):
                        yield {
                            "config": f"{task},{system},prefix,0", "data.protocol.fold": fold,
                            "data.seed": seed, "seed": seed, "optim.lr": lr,
                        }  # fmt: skip
