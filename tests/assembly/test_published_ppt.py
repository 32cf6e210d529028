"""The settings of PPT (Gu et al. 2022) that are published, each beside the place that says so.

Sections, tables and appendices are the paper's; "code" is the released repository, thu-coai/PPT at
dad6f2d, whose scripts and loaders fix what the paper leaves out.
"""

import pytest

from configs.parts import ppt
from jaxprompt.assembly.examples import in_form, read_task
from jaxprompt.assembly.load_config import load_config
from jaxprompt.corpus.ppt import get_pattern
from jaxprompt.data.tasks import get_task
from jaxprompt.training.optim import make_schedule

# Format of each task (table 3) and which prompt it starts from (sections 3.1 and 3.2).
PAIRS = ("boolq", "rte", "cb", "lcqmc", "cmnli", "ocnli")
CHOICES = ("race_middle", "race_high", "ccpm", "c3")
SINGLES = ("sst2", "sst5", "chnsenticorp")
GROUPS = {"nsp": PAIRS, "nss": CHOICES, "cls": SINGLES}
TASKS = [(task, group) for group, tasks in GROUPS.items() for task in tasks]

# Words of each class by its name: section 3.2.1 for pairs ("no" stands for texts that do not go
# together, "yes" for those that do), section 3.2.3 for single texts, appendix B in Chinese. Names
# of the classes are those of the data sets.
WORDS = {
    "boolq": {"false": "no", "true": "yes"},
    "rte": {"not_entailment": "no", "entailment": "yes"},
    "cb": {"contradiction": "no", "neutral": "maybe", "entailment": "yes"},
    "sst2": {"negative": "bad", "positive": "good"},  # table 1
    "sst5": {
        "very negative": "terrible", "negative": "bad", "neutral": "maybe", "positive": "good",
        "very positive": "great",
    },
}  # fmt: skip

# Code, scripts/PT, scripts/PPT and scripts/Unified, few-shot.
RATES = {
    "pt": {"sst2": 1e-2, "sst5": 1e-2, "race_middle": 1e-2, "race_high": 1e-2, "boolq": 5e-3,
           "rte": 5e-3, "cb": 5e-2},
    "ppt": {"sst2": 1e-2, "sst5": 1e-2, "race_middle": 1e-2, "race_high": 1e-2, "boolq": 5e-2,
            "rte": 5e-2, "cb": 5e-2},
    "unified_ppt": {"sst2": 1e-2, "sst5": 1e-2, "race_middle": 1e-2, "race_high": 1e-2,
                    "boolq": 1e-2, "rte": 5e-3, "cb": 1e-2},
}  # fmt: skip

# Code: length of the input, and the step whose prompt was released (scripts/tools/get_prompt_*.sh).
PRETRAINING = {"nsp": (512, 8_000), "nss": (1024, 8_000), "unified": (768, 16_000),
               "cls": (368, 22_000)}  # fmt: skip


def cell(task, method):
    return load_config(f"ppt/t5_xxl:{task},{method}")


@pytest.mark.parametrize("task, group", TASKS)
def test_the_prompt_that_a_task_starts_from(task, group):
    for method in ("ppt", "hybrid_ppt"):
        assert cell(task, method).prompt.init == f"prompts/{group}"
    assert cell(task, "unified_ppt").prompt.init == "prompts/unified"  # section 3.3
    for method in ("pt", "hybrid_pt", "lm_adapt", "multiple_choice"):
        assert cell(task, method).prompt.init == ""  # section 4.2
        assert cell(task, method).prompt.start == "normal"


@pytest.mark.parametrize("task", WORDS)
def test_the_word_of_each_class(task):
    labels = get_task(task).labels
    for method in ("pt", "ppt", "unified_ppt"):
        words = cell(task, method).task.words
        assert dict(zip(labels, words, strict=True)) == WORDS[task]


def test_the_words_of_pre_training():
    words = {task: get_pattern(task).words for task in ("nsp", "nss", "unified", "cls")}
    assert words["nsp"] == ("no", "maybe", "yes")  # equation 3
    assert words["nss"] == tuple("ABCDEF")  # equation 4
    assert words["unified"] == tuple("ABCDEFGHIJKLMNOP")  # section 3.3: up to 16 options
    assert words["cls"] == ("terrible", "bad", "maybe", "good", "great")  # equation 5


@pytest.mark.parametrize(
    "task, template",
    [
        ("sst2", " {sentence} [mask]"),
        ("rte", " {premise} [mask] {hypothesis}"),
        ("cb", " {hypothesis} [mask] {premise}"),  # the hypothesis comes first here alone
        ("boolq", " {question} [mask] {passage}"),
    ],
)
def test_how_a_task_is_asked(task, template):
    """Code, data_utils/downstream; no soft token is placed: all stand in front (section 3.1)."""
    for method in ("pt", "ppt"):
        c = cell(task, method)
        assert in_form(c, read_task(c.task)).template == template


@pytest.mark.parametrize("method", RATES)
def test_learning_rates_of_tuning(method):
    found = {task: cell(task, method).optim.lr for task in RATES[method]}
    assert found == RATES[method]
    assert ppt.RATES[method] == (5e-3, 1e-2, 2e-2, 5e-2)  # appendix C.2


@pytest.mark.parametrize("method", ["pt", "hybrid_pt", "ppt", "hybrid_ppt", "unified_ppt"])
@pytest.mark.parametrize("task", ["sst2", "rte", "race_high"])
def test_tuning(task, method):
    c = cell(task, method)
    assert (c.prompt.name, c.prompt.length, c.prompt.decoder) == ("soft", 100, 0)  # section 4.1
    assert tuple(c.trainable) == ()  # section 3.1: the model is fixed
    assert (c.data.protocol, c.data.n) == ("balanced", 32)  # section 4.1
    assert c.data.batch == 16  # appendix C.2
    assert (c.train.total_epochs, c.train.total_steps, c.train.eval_steps) == (50, 0, 6)  # C.2
    assert (c.optim.name, c.optim.schedule, c.optim.warmup_steps) == ("adamw", "constant", 0)
    assert (c.optim.weight_decay, c.optim.clip) == (1e-2, 1.0)  # code, scripts and ds_fp16.json
    assert (c.optim.b1, c.optim.b2, c.optim.eps) == (0.9, 0.999, 1e-8)  # code, FusedAdam
    assert c.backbone.rescale == 100.0 and c.backbone.dropout == 0.0  # code, tools/transform.py
    assert (c.head.scores, c.head.span, c.task.eos) == ("full", "target", False)  # code, train.py
    group = next(name for name, tasks in GROUPS.items() if task in tasks)
    assert c.task.form == ("unified" if method == "unified_ppt" else group)
    assert c.ppt.hard == ("hybrid" in method)  # appendix D


def test_many_classes_take_eight_examples_each():
    c = cell("yahoo_answers_topics", "pt")
    assert (c.data.protocol, c.data.k, c.data.dev_k) == ("kshot", 8, 0)  # section 4.1
    assert len(c.task.words) == 10  # table 3
    assert cell("boolq", "pt").data.max_len == 512  # code, the soft tokens included
    assert {cell(f"race_{kind}", "ppt").data.max_len for kind in ("middle", "high")} == {
        612
    }  # code


def test_seeds():
    assert tuple(ppt.SEEDS) == (10, 20, 30, 40, 50)  # appendix C


@pytest.mark.parametrize("task", PRETRAINING)
def test_pre_training(task):
    c, (length, steps) = load_config(f"ppt/{task}"), PRETRAINING[task]
    assert (c.ppt.task, c.ppt.patterns) == (task, "en")
    assert (c.prompt.name, c.prompt.length, c.prompt.start) == ("soft", 100, "normal")
    assert (c.data.max_len, c.train.total_steps) == (length, steps)
    assert c.train.total_epochs == c.train.total_examples == 0
    assert c.train.eval_steps == c.train.save_steps == 2_000  # code, pretrain.py
    assert c.data.batch == 128  # code: 64 for each group of 4 GPUs, 8 GPUs
    assert (c.optim.schedule, c.optim.lr, c.optim.warmup_steps) == ("inverse_sqrt", 0.1, 0)
    assert (c.optim.name, c.optim.weight_decay, c.optim.clip) == ("adamw", 1e-2, 1.0)
    assert (c.backbone.rescale, c.backbone.dropout) == (100.0, 0.0)
    assert c.task.answer == "[mask] {label} [mask]" and not c.task.eos
    assert (c.ppt.least, c.ppt.most) == (2, 16)  # section 3.3


def test_the_learning_rate_where_a_prompt_was_released():
    """Code, learning_rates.py: 0.1 / sqrt(step + 1), counted from 0."""
    c = load_config("ppt/nsp").optim
    factor = make_schedule(c.schedule, total=8_000, warmup=c.warmup_steps, gamma=c.gamma, epoch=1)
    for step in (0, 99, 7_999):
        assert c.lr * float(factor(step)) == pytest.approx(0.1 / (step + 1) ** 0.5, rel=1e-6)
