"""One prompt for all tasks of a kind, from which each goes on (Liu et al. 2022, appendix A).

The argument is KIND,MODEL: `--config=configs/ptuning_v2/multi_task.py:ner,bert-large`. Each task is
a JSON file in `configs/ptuning_v2/tasks`; those without a hub id are read from data/TASK. The run
exports the prompt once per task: prompt and head of `multi_task` in tagging.py and qa.py start from
these; what the paper does with the heads it does not say. Appendix A adds propbank-release to the
roles: give it as a file more in `shared.tasks`.
"""

from pathlib import Path

from configs.ptuning_v2 import MODELS, NER, QA, SHARED, SRL, tune
from jaxprompt.errors import check_known

KINDS = {"ner": NER, "srl": SRL, "qa": QA}
TASKS = Path(__file__).parent / "tasks"


def get_config(cell="ner,roberta-large"):
    """Returns one run."""
    kind, _, model = cell.partition(",")
    names = KINDS[check_known("the kind", kind, KINDS)]
    model = check_known("the model", model or "roberta-large", MODELS)
    c = tune(names[0], "prefix", model, length=SHARED[names[0]], epochs=10.0)
    c.shared.tasks = tuple(str(TASKS / f"{name}.json") for name in names)
    return c
