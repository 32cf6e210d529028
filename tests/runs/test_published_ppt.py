"""The settings of PPT (Gu et al. 2022) that are published, each beside the place that says so.

Sections, tables and appendices are the paper's; "code" is the released repository, thu-coai/PPT at
dad6f2d, whose scripts and loaders fix what the paper leaves out.
"""

import json
import re

import pytest

from configs.parts import ppt
from configs.ppt import dtype_of
from jaxprompt.build.examples import (
    apply_form,
    read_examples,
    read_split_rows,
    read_task,
    source_split,
)
from jaxprompt.build.notes import ineffective_field_notes
from jaxprompt.config.load import load_config
from jaxprompt.config.run import Balanced, InverseSqrt, KShot, Schedule
from jaxprompt.corpus.ppt import get_pattern
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError
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
        assert cell(task, method).prompt.get("init") == f"prompts/{group}"
    assert cell(task, "unified_ppt").prompt.get("init") == "prompts/unified"  # section 3.3
    for method in ("pt", "hybrid_pt", "lm_adapt", "multiple_choice"):
        assert cell(task, method).prompt.get("init") == ""  # section 4.2
        assert cell(task, method).prompt.get("start") == "normal"


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
        config = cell(task, method)
        assert apply_form(config, read_task(config.task)).template == template


@pytest.mark.parametrize("method", ["full", "pt", "hybrid_pt", "multiple_choice", "unified_ppt"])
@pytest.mark.parametrize("kind", ["t5", "causal"])
def test_every_method_reads_the_same_texts_of_yahoo(method, kind):
    """Table 5 compares methods: title, content and answer, those of the data set."""
    config = load_config(f"ppt/cells:yahoo_answers_topics,{method},{kind}")
    formed_task = apply_form(config, read_task(config.task))
    layout = config.task.template or (
        formed_task.causal if kind == "causal" else formed_task.template
    )
    fields = re.findall(r"\{(?!choices)(\w+)\}", layout)
    assert fields == ["question_title", "question_content", "best_answer"]
    assert ("This is about" in layout) == (method in ("full", "hybrid_pt"))


@pytest.mark.parametrize("task", ppt.TASKS)
def test_the_original_validation_split_is_scored(task):
    """Sections 2 and A."""
    config = load_config(f"ppt/cells:{task},pt,t5")
    definition = read_task(config.task)
    split = definition.splits.get(source_split(config, "test"))
    if definition.hub and task not in ("dream", "cosmos_qa"):  # not the paper's
        # Yahoo has no validation split.
        assert split == ("test" if task == "yahoo_answers_topics" else "validation")


def test_dev_stands_in_for_test_where_train_gives_dev(tmp_path):
    for split in ("train", "dev", "test"):
        rows = [{"text": f"{split} {i}", "label": i % 5} for i in range(80)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config("ppt/cells:sst5,pt,t5")
    config = config.replace({"data.source": str(tmp_path)})
    origin = lambda examples: {example.fields["text"].split()[0] for example in examples}
    splits = read_examples(config).splits
    assert {name: origin(examples) for name, examples in splits.items()} == {
        "train": {"train"}, "dev": {"train"}, "test": {"dev"},
    }  # fmt: skip
    assert origin(
        example for *_, example in read_split_rows(config, read_task(config.task), "test")
    ) == {"dev"}
    config = config.replace({"data.test_split": "test"})
    assert origin(read_examples(config, ("test",)).splits["test"]) == {"test"}
    config = config.replace({"data.test_split": "dev", "data.protocol": ""})
    with pytest.raises(InputError, match="data.test_split=dev would report the examples that"):
        read_examples(config)
    # A file that is named as test is test.
    files = {f"data.files.{x}": str(tmp_path / f"{x}.jsonl") for x in ("train", "test")}
    config = config.replace({"data.source": "", "data.protocol": "balanced"} | files)
    assert origin(read_examples(config).splits["test"]) == {"test"}
    assert any(
        "data.test_split=dev has no effect" in line for line in ineffective_field_notes(config)
    )


def test_precision_is_mixed_at_11b_alone():
    """Appendix C."""
    sizes = ("small", "base", "large", "xl", "xxl")
    dtypes = [load_config(f"ppt/t5_{size}:rte,pt").backbone.dtype for size in sizes]
    assert dtypes == ["float32"] * 4 + ["bfloat16"]
    paths = ("google/t5-v1_1-xxl", "google/mt5-xxl", "google/t5-xxl-lm-adapt", "google/t5-v1_1-xl")
    assert [dtype_of(path) for path in paths] == ["bfloat16"] * 3 + ["float32"]
    others = "ppt/cells:rte,full,masked", "ppt/nsp", "ppt/annotator"
    assert {load_config(path).backbone.dtype for path in others} == {"float32"}


@pytest.mark.parametrize("method", RATES)
def test_learning_rates_of_tuning(method):
    actual = {task: cell(task, method).optim.lr for task in RATES[method]}
    assert actual == RATES[method]
    assert ppt.RATES[method] == (5e-3, 1e-2, 2e-2, 5e-2)  # appendix C.2


@pytest.mark.parametrize("method", ["pt", "hybrid_pt", "ppt", "hybrid_ppt", "unified_ppt"])
@pytest.mark.parametrize("task", ["sst2", "rte", "race_high"])
def test_tuning(task, method):
    config = cell(task, method)
    actual = config.prompt.name, config.prompt.get("length"), config.prompt.get("decoder")
    assert actual == ("soft", 100, 0)  # section 4.1
    assert tuple(config.trainable) == ()  # section 3.1: the model is fixed
    assert config.data.protocol == Balanced(n=32)  # section 4.1
    assert config.data.batch == 16  # appendix C.2
    assert (config.train.total_epochs, config.train.total_steps, config.train.eval_steps) == (
        50,
        0,
        6,
    )  # C.2
    assert (config.optim.name, config.optim.schedule) == ("adamw", Schedule())  # constant
    assert (config.optim.weight_decay, config.optim.clip) == (
        1e-2,
        1.0,
    )  # code, scripts and ds_fp16.json
    assert (config.optim.b1, config.optim.b2, config.optim.eps) == (
        0.9,
        0.999,
        1e-8,
    )  # code, FusedAdam
    assert (
        config.backbone.rescale == 100.0 and config.backbone.dropout == 0.0
    )  # code, tools/transform.py
    actual = config.head.get("scores"), config.head.get("span"), config.task.eos
    assert actual == ("full", "target", False)  # code, train.py
    group = next(name for name, tasks in GROUPS.items() if task in tasks)
    assert config.task.form == ("unified" if method == "unified_ppt" else group)
    assert config.ppt.hard == ("hybrid" in method)  # appendix D


def test_many_classes_take_eight_examples_each():
    config = cell("yahoo_answers_topics", "pt")
    assert config.data.protocol == KShot(k=8, dev_k=0)  # section 4.1
    assert len(config.task.words) == 10  # table 3
    assert cell("boolq", "pt").data.max_len == 512  # code, the soft tokens included
    assert {cell(f"race_{kind}", "ppt").data.max_len for kind in ("middle", "high")} == {
        612
    }  # code


def test_seeds():
    assert tuple(ppt.SEEDS) == (10, 20, 30, 40, 50)  # appendix C


@pytest.mark.parametrize("task", PRETRAINING)
def test_pre_training(task):
    config, (length, steps) = load_config(f"ppt/{task}"), PRETRAINING[task]
    assert (config.ppt.task, config.ppt.patterns) == (task, "en")
    assert (config.prompt.name, config.prompt.get("length"), config.prompt.get("start")) == (
        "soft",
        100,
        "normal",
    )
    assert (config.data.max_len, config.train.total_steps) == (length, steps)
    assert config.train.total_epochs == config.train.total_examples == 0
    assert config.train.eval_steps == config.train.save_steps == 2_000  # code, pretrain.py
    assert config.data.batch == 128  # code: 64 for each group of 4 GPUs, 8 GPUs
    assert (config.optim.schedule, config.optim.lr) == (InverseSqrt(warmup_steps=0), 0.1)
    assert (config.optim.name, config.optim.weight_decay, config.optim.clip) == ("adamw", 1e-2, 1.0)
    assert (config.backbone.rescale, config.backbone.dropout) == (100.0, 0.0)
    assert config.task.answer == "[mask] {label} [mask]" and not config.task.eos
    assert (config.ppt.min_options, config.ppt.max_options) == (2, 16)  # section 3.3


def released_rate(step, lr=0.1, warmup=1):
    """What AnnealingLR.get_lr gives by "noam" at a step from 0 on (code, learning_rates.py).

    Its --warmup 0.0 is a warmup of one step, whose first update has no rate at all.
    """
    return lr / warmup**0.5 * step / warmup if step <= warmup else lr / (step + 1) ** 0.5


def test_the_learning_rate_where_a_prompt_was_released():
    """Behind the first two steps, in which ours is on its curve already (docs/differences.md)."""
    config = load_config("ppt/nsp").optim
    factor = make_schedule(config.schedule, total=8_000, epoch=1)
    ours = {step: config.lr * float(factor(step)) for step in (0, 1, 2, 99, 7_999)}
    for step in (2, 99, 7_999):
        assert ours[step] == pytest.approx(released_rate(step), rel=1e-6)
    assert (released_rate(0), released_rate(1)) == (0.0, 0.1)
    assert (ours[0], ours[1]) == pytest.approx((0.1, 0.1 / 2**0.5), rel=1e-6)
