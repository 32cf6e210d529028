"""DART on relations between entities (Zhang et al. 2022, tables 2 and 3, figure 2, appendix A).

The argument is TASK,K,METHOD: `--config=dart/relations:sem_eval_2010_task_8,8`,
`--config=dart/relations:wiki80,full,fine_tuning`. K is the number of training examples per class,
or `full`. The methods gpt2 and gpt2_fine_tuning are those of figure 2 (b), on GPT-2-medium. The
embeddings around the entities are initialised from @ and #, the others from the words of the
template, and the label embeddings from the names of the relations. Most tasks have no public files:
set data.source.
"""

from typing import NamedTuple

from configs.base import paper as base
from configs.parts import heads, methods
from jaxprompt.config.load import read_argument
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import check_known

SEEDS = (13, 21, 42, 87, 100)  # section 5.2: the splits of LM-BFF
SHOTS = ("8", "16", "32", "full")  # table 2
FEWER = {"event_arguments": "4"}  # a further K of figure 2 (a)
MARKERS = "@ @ # #"
TEXT = "is the of"  # appendix A.2: ENTITY1 is the [mask] of ENTITY2
# Tables 2 and 3. lm_bff: the same words, none of them trained. frozen (not in the paper): only the
# embeddings and a bias are trained.
METHODS = (
    "dart", "no_fluency", "fixed_template", "fixed_labels", "frozen", "fine_tuning", "lm_bff",
    "gpt2", "gpt2_fine_tuning",
)  # fmt: skip
# Figure 2 (b). A left-to-right model answers at the end; the paper shows no template for it.
GPT2, CAUSAL = "openai-community/gpt2-medium", "The relation of to is"


class Recipe(NamedTuple):
    """Values of a task (appendix A.1); of a grid, the first value.

    The paper lists batch size and accumulation. Here the batch size is that of one forward pass, as
    in most trainers: a step has `batch` times `passes` examples.
    """

    backbone: str = "google-bert/bert-large-uncased"  # section 5.2
    rates: tuple[float, ...] = (3e-5, 5e-5, 1e-5, 5e-6)
    epochs: float = 20.0
    batch: int = 48  # per forward pass
    passes: int = 2  # forward passes per step
    max_len: int = 128
    decay: float = 0.01  # appendix A
    dev: int = 0  # number of training examples held out as dev, if the task has no dev split
    metric: str = ""  # reported in table 2, and used to select; "" = the task's default


_SCIENCE = Recipe("allenai/scibert_scivocab_uncased", passes=4, max_len=256)
TASKS = {
    "sem_eval_2010_task_8": Recipe(dev=1_493, metric="micro_f1"),
    "tacred_revisited": Recipe(),
    "wiki80": Recipe(),
    "chemprot": _SCIENCE,
    # Not in a table of the paper: tacred and scierc have the values of similar tasks, the others
    # are in figure 2 (a) and appendix A.
    "tacred": Recipe(),
    "scierc": _SCIENCE,
    "event_arguments": Recipe(),
    "dialog_re": Recipe(rates=(1e-5, 5e-5, 1e-4, 2e-4), batch=4, passes=1, max_len=256, decay=0.0),
}
TABLES = ("sem_eval_2010_task_8", "tacred_revisited", "wiki80", "chemprot")


def get_config(argument=""):
    """Returns one run."""
    task_name, shots, method = read_name(argument)
    recipe, task = TASKS[task_name], get_task(task_name)
    config = base()
    config.backbone.path = GPT2 if method.startswith("gpt2") else recipe.backbone
    config.task.name, config.task.metric = task_name, recipe.metric
    # Words mark the entities in fine-tuning (section 5.2).
    if method in ("fine_tuning", "gpt2_fine_tuning", "lm_bff"):
        methods.full(config, lr=recipe.rates[0])
        if method == "lm_bff":
            heads.verbalizer(config)
            config.trainable = (r"backbone/.*",)
    elif method == "gpt2":
        methods.dart(config, length=9, text=f"{MARKERS} {CAUSAL}", fluency=0.0, lr=recipe.rates[0])
        config.task.template = with_causal_rows(task.causal)
    else:
        methods.dart(config, length=7, text=f"{MARKERS} {TEXT}", lr=recipe.rates[0])
        config.task.template = with_rows(task.template)
    if method == "no_fluency":
        config.prompt.fluency = 0.0
    elif method == "fixed_template":
        config.trainable = (r"prompt/rows", r"head/.*", r"backbone/.*")
    elif method == "frozen":
        config.trainable, config.optim.lr = (r"prompt/.*", r"head/.*"), 3e-2
    elif method == "fixed_labels":
        heads.verbalizer(config)
        config.prompt.labels = False
        config.trainable = (r"prompt/.*", r"backbone/.*")
    if shots != "full":
        config.data.protocol = {"name": "kshot", "k": int(shots), "on_shortage": "use_fewer"}
    elif recipe.dev:
        config.data.protocol = {"name": "holdout", "size": recipe.dev}
    config.data.max_len, config.optim.accumulate = recipe.max_len, recipe.passes
    config.data.batch = recipe.batch * recipe.passes
    config.optim.schedule = {"name": "warmup_linear", "warmup_ratio": 0.1}
    config.optim.weight_decay = recipe.decay
    config.train.total_epochs = recipe.epochs
    return config


def read_name(name):
    """Returns task, K and method."""
    task_name, shots, method = read_argument(
        name,
        TASK=("sem_eval_2010_task_8", TASKS),
        K=("8", (*FEWER.values(), *SHOTS)),
        METHOD=("dart", METHODS),
    )
    if shots != FEWER.get(task_name):
        check_known(f"K of {task_name}", shots, SHOTS)
    return task_name, shots, method


def with_rows(template):
    """Replaces the markers and the words of a template by trained embeddings."""
    template = template.replace("|marked}", "|soft}")
    return template.replace(" is the ", " [soft*2] ").replace(" of ", " [soft*1] ")


def with_causal_rows(template):
    """Does the same for the template of a left-to-right model."""
    for words, count in ((" The relation of ", 3), (" to ", 1), (" is ", 1)):
        template = template.replace(words, f" [soft*{count}] ")
    return template.replace("|marked}", "|soft}")


def sweep():
    """Yields every run of table 2; of each split, the learning rate that is best on dev counts."""
    for task in TABLES:
        for shots in SHOTS:
            for method in ("dart", "fine_tuning"):
                for seed in SEEDS if shots != "full" else SEEDS[:1]:
                    for lr in TASKS[task].rates:
                        recipe = {"data.seed": seed, "optim.lr": lr}
                        yield {"config": f"{task},{shots},{method}"} | recipe
