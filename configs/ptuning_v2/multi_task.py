"""One prompt for all tasks of a kind, from which each goes on (Liu et al. 2022, appendix A).

The argument is KIND,MODEL: `--config=configs/ptuning_v2/multi_task.py:ner,bert-large`. Each task is
a JSON file in `configs/ptuning_v2/tasks`; those without a hub id are read from data/TASK. The run
exports the prompt once per task: prompt and head of `multi_task` in tagging.py and qa.py start from
these; what the paper does with the heads it does not say. Appendix A adds propbank-release to the
roles: give it as a file more in `shared.tasks`.
"""

from pathlib import Path

from configs.ptuning_v2 import MODELS, qa, tagging
from jaxprompt.errors import check_known

KINDS = {"ner": tagging.NER, "srl": tagging.SRL, "qa": qa.TASKS}
TASKS = Path(__file__).parent / "tasks"


def get_config(cell="ner,roberta-large"):
    """Returns one run."""
    kind, _, model = cell.partition(",")
    names = KINDS[check_known("the kind", kind, KINDS)]
    model = check_known("the model", model or "roberta-large", MODELS)
    recipe = qa if kind == "qa" else tagging
    c = recipe.tune(names[0], "prefix", model, length=recipe.SHARED, epochs=10.0)  # epochs: ours
    c.shared.tasks = tuple(str(TASKS / f"{name}.json") for name in names)
    return c
