"""DART on relations between entities (Zhang et al. 2022, tables 2 and 3, figure 2, appendix A).

The argument is TASK,K or TASK,K,METHOD: `--config=dart/relations:sem_eval_2010_task_8,8`,
`--config=dart/relations:wiki80,full,fine_tuning`. K is the number of training examples per class,
or full. The methods gpt2 and gpt2_fine_tuning are those of figure 2 (b), on GPT-2-medium. The rows
around the entities start from @ and #, the others from the words of the template, and label rows
from the names of the relations. Most tasks have no public files: give data.source.
"""

from typing import NamedTuple

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError, check_known

SEEDS = (13, 21, 42, 87, 100)  # section 5.2: the splits of LM-BFF
SHOTS = ("8", "16", "32", "full")  # table 2
FEWER = {"event_arguments": "4"}  # figure 2 (a) has this K besides
MARKERS = "@ @ # #"
TEXT = "is the of"  # appendix A.2: entity1 is the [mask] of entity2
# Tables 2 and 3. lm_bff: the same words, none of them trained. frozen (not in the paper): the rows
# and a bias alone.
METHODS = (
    "dart", "no_fluency", "fixed_template", "fixed_labels", "frozen", "fine_tuning", "lm_bff",
    "gpt2", "gpt2_fine_tuning",
)  # fmt: skip
# Figure 2 (b). What a left-to-right model answers stands last, which the paper's template has not.
GPT2, CAUSAL = "openai-community/gpt2-medium", "The relation of to is"


class Recipe(NamedTuple):
    """What appendix A.1 says of a task; of its grids the first value.

    It gives batch size and accumulation apart. As in most trainers the batch size is taken as that
    of one forward pass, so that `batch` times `passes` examples make a step.
    """

    backbone: str = "google-bert/bert-large-uncased"  # section 5.2
    rates: tuple[float, ...] = (3e-5, 5e-5, 1e-5, 5e-6)
    epochs: float = 20.0
    batch: int = 48  # of a forward pass
    passes: int = 2  # that a step accumulates
    max_len: int = 128
    decay: float = 0.01  # appendix A
    dev: int = 0  # training examples that become dev, where the task has none of its own
    metric: str = ""  # that table 2 reports, which also selects; "" = the task's own


_SCIENCE = Recipe("allenai/scibert_scivocab_uncased", passes=4, max_len=256)
TASKS = {
    "sem_eval_2010_task_8": Recipe(dev=1_493, metric="micro_f1"),
    "tacred_revisited": Recipe(),
    "wiki80": Recipe(),
    "chemprot": _SCIENCE,
    # The paper has no table of these: tacred and scierc as their kin, the others in figure 2 (a)
    # and appendix A.
    "tacred": Recipe(),
    "scierc": _SCIENCE,
    "event_arguments": Recipe(),
    "dialog_re": Recipe(rates=(1e-5, 5e-5, 1e-4, 2e-4), batch=4, passes=1, max_len=256, decay=0.0),
}
TABLES = ("sem_eval_2010_task_8", "tacred_revisited", "wiki80", "chemprot")


def get_config(name="sem_eval_2010_task_8,8"):
    """Returns one run."""
    task_name, shots, method = read_name(name)
    recipe, task = TASKS[task_name], get_task(task_name)
    c = base()
    c.backbone.path, c.task.name, c.task.metric = recipe.backbone, task_name, recipe.metric
    if method.startswith("gpt2"):
        c.backbone.path = GPT2
    if method in ("fine_tuning", "gpt2_fine_tuning", "lm_bff"):  # words mark (section 5.2)
        methods.full(c, lr=recipe.rates[0])
        if method == "lm_bff":
            heads.verbalizer(c)
            c.trainable = (r"backbone/.*",)
    elif method == "gpt2":
        methods.dart(c, length=9, text=f"{MARKERS} {CAUSAL}", fluency=0.0, lr=recipe.rates[0])
        c.task.template = with_causal_rows(task.causal)
    else:
        methods.dart(c, length=7, text=f"{MARKERS} {TEXT}", lr=recipe.rates[0])
        c.task.template = with_rows(task.template)
    if method == "no_fluency":
        c.prompt.fluency = 0.0
    elif method == "fixed_template":
        c.trainable = (r"prompt/rows", r"head/.*", r"backbone/.*")
    elif method == "frozen":
        c.trainable, c.optim.lr = (r"prompt/.*", r"head/.*"), 3e-2
    elif method == "fixed_labels":
        heads.verbalizer(c)
        c.prompt.labels = False
        c.trainable = (r"prompt/.*", r"backbone/.*")
    if shots != "full":
        c.data.protocol = {"name": "kshot", "k": int(shots), "on_shortage": "use_fewer"}
    elif recipe.dev:
        c.data.protocol = {"name": "holdout", "size": recipe.dev}
    c.data.max_len, c.optim.accumulate = recipe.max_len, recipe.passes
    c.data.batch = recipe.batch * recipe.passes
    c.optim.schedule = {"name": "warmup_linear", "warmup_ratio": 0.1}
    c.optim.weight_decay = recipe.decay
    c.train.total_epochs = recipe.epochs
    return c


def read_name(name):
    """Returns task, K and method."""
    if name.count(",") > 2:
        raise InputError(f"{name!r} has more than three parts; give TASK,K,METHOD")
    task_name, shots, method = [*name.split(","), "", ""][:3]
    check_known("the task", task_name, TASKS)
    shown = [FEWER[task_name]] if task_name in FEWER else []
    check_known("the number of examples per class", shots or "8", [*shown, *SHOTS])
    return task_name, shots or "8", check_known("the method", method or "dart", METHODS)


def with_rows(template):
    """Puts trained rows in the place of the markers and the words of a template."""
    template = template.replace("|marked}", "|soft}")
    return template.replace(" is the ", " [soft*2] ").replace(" of ", " [soft*1] ")


def with_causal_rows(template):
    """Does the same with the template of a left-to-right model."""
    for words, count in ((" The relation of ", 3), (" to ", 1), (" is ", 1)):
        template = template.replace(words, f" [soft*{count}] ")
    return template.replace("|marked}", "|soft}")


def sweep():
    """Yields every run of table 2; of each split the learning rate that is best on dev counts."""
    for task in TABLES:
        for shots in SHOTS:
            for method in ("dart", "fine_tuning"):
                for seed in SEEDS if shots != "full" else SEEDS[:1]:
                    for lr in TASKS[task].rates:
                        recipe = {"data.seed": seed, "optim.lr": lr}
                        yield {"config": f"{task},{shots},{method}"} | recipe
