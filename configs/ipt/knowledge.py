"""What the topics of a text add: IPT on prefix tuning with their words, or rows (table 5).

The argument is TASK,SYSTEM,PLACE,WORDS, the last "hard" for the topic's name in front of the text
(section 5.5): `--config=configs/ipt/knowledge.py:imdb,random,prefix,hard`.
"""

from configs.ipt import RATES, SEEDS, read_cell, tune
from jaxprompt.errors import check_known

# Section 5.5.
TEMPLATES = {
    "ag_news": "Human Activities {text}",
    "sst2": "Culture and the Arts {sentence}",
    "imdb": "Culture and the Arts {text}",
}
ROWS = ("random,prefix,", "random,prefix,hard", "pretrained,prefix,")


def get_config(cell="sst2,random,prefix"):
    """Returns one run."""
    task, *parts, words = read_cell(cell, ("WORDS", ""))
    c = tune(check_known("the task", task, TEMPLATES), *parts)
    if check_known("the words", words, ("", "hard")):
        c.task.template = TEMPLATES[task]
    return c


def sweep():
    """Yields the rows; of each seed the learning rate that is best on dev counts."""
    for task in TEMPLATES:
        for row in ROWS:
            for seed in SEEDS:
                for lr in RATES:
                    yield {
                        "config": f"{task},{row}", "seed": seed, "data.seed": seed, "optim.lr": lr
                    }  # fmt: skip
