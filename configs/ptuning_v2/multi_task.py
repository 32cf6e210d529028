"""One prompt for all tasks of a kind, from which each goes on (Liu et al. 2022, appendix A).

The argument is KIND,MODEL: `--config=configs/ptuning_v2/multi_task.py:ner,bert-large`. Each task is
a JSON file in `configs/ptuning_v2/tasks`; those without a hub id are read from data/TASK. The run
exports the prompt once per task: `multi_task` of tagging.py and qa.py starts from these. Appendix A
adds propbank-release to the roles: give it as a file more in `shared.tasks`.
"""

from pathlib import Path

from configs.ptuning_v2 import MODELS, NER, QA, SRL, tune
from jaxprompt.errors import choose

KINDS = {"ner": NER, "srl": SRL, "qa": QA}
TASKS = Path(__file__).parent / "tasks"
LENGTHS = {"ner": 128, "srl": 128, "qa": 16}  # section 3.3: around 100 on tagging


def get_config(cell="ner,roberta-large"):
    """Returns one run."""
    kind, _, model = cell.partition(",")
    names = KINDS[choose("the kind", kind, KINDS)]
    model = choose("the model", model or "roberta-large", MODELS)
    c = tune(names[0], "prefix", model, length=LENGTHS[kind], epochs=10.0)
    c.shared.tasks = tuple(str(TASKS / f"{name}.json") for name in names)
    return c
