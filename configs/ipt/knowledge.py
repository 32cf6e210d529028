"""Knowledge of topics in IPT on prefix tuning: as words or as pre-trained embeddings (table 5).

The argument is TASK,SYSTEM,PLACE,WORDS; WORDS is `hard` for the name of the topic before the text
(section 5.5): `--config=configs/ipt/knowledge.py:imdb,random,prefix,hard`.
"""

from configs.ipt import RATES, SEEDS, read_cell, tune

# Section 5.5.
TEMPLATES = {
    "ag_news": "Human Activities {text}",
    "sst2": "Culture and the Arts {sentence}",
    "imdb": "Culture and the Arts {text}",
}
ROWS = ("random,prefix,", "random,prefix,hard", "pretrained,prefix,")


def get_config(cell=""):
    """Returns one run."""
    task, *parts, words = read_cell(
        cell, tasks=TEMPLATES, default=("sst2", "random", "prefix"), WORDS=("", ("", "hard"))
    )
    config = tune(task, *parts)
    if words == "hard":
        config.task.template = TEMPLATES[task]
    return config


def sweep():
    """Yields the rows; of each seed, the learning rate that is best on dev counts."""
    for task in TEMPLATES:
        for row in ROWS:
            for seed in SEEDS:
                for lr in RATES:
                    yield {
                        "config": f"{task},{row}",
                        "seed": seed,
                        "data.seed": seed,
                        "optim.lr": lr,
                    }
