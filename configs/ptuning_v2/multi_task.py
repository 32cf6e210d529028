"""One prompt for all tasks of a kind, from which each task continues (Liu et al. 2022, appendix A).

The argument is KIND,MODEL: `--config=configs/ptuning_v2/multi_task.py:ner,bert-large`. Each task is
a JSON file in `configs/ptuning_v2/tasks`; those without a hub id are read from data/TASK. The run
exports the prompt once per task; the system `multi_task` of tagging.py and qa.py starts from these
exports. The paper does not say what happens to the heads. Appendix A adds propbank-release to the
semantic roles: add its file to `shared.tasks`.
"""

from pathlib import Path

from configs.ptuning_v2 import MODELS, qa, tagging
from jaxprompt.config.load import read_argument

KINDS = {"ner": tagging.NER, "srl": tagging.SRL, "qa": qa.TASKS}
TASKS = Path(__file__).parent / "tasks"


def get_config(cell=""):
    """Returns one run."""
    kind, model = read_argument(cell, KIND=("ner", KINDS), MODEL=("roberta-large", MODELS))
    names, recipe = KINDS[kind], qa if kind == "qa" else tagging
    config = recipe.tune(
        names[0], "prefix", model, length=recipe.SHARED, epochs=10.0
    )  # epochs: ours
    config.shared.tasks = tuple(str(TASKS / f"{name}.json") for name in names)
    return config
