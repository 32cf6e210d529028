"""Tuning with few rows as PPT compares it (Gu et al. 2022, sections 4 and 5).

Each function fills a config with one method of METHODS on one task of TASKS, for a kind of backbone
of KINDS; with "-deep" behind it keys and values of every layer are learned in place of soft tokens.
"""

from typing import NamedTuple

from configs.parts import heads, methods
from jaxprompt.corpus.ppt import get_pattern
from jaxprompt.errors import InputError, check_known

SEEDS = (10, 20, 30, 40, 50)


class Kind(NamedTuple):
    """What depends on the scale of a backbone's embeddings, and its positions."""

    rescale: float
    scale: float  # of the first prompt
    lr: float  # of pre-training: the factor of 1 / sqrt(step)
    positions: int
    answer: str = "[mask] {label} [mask]"  # of pre-training: where a decoder writes, around words
    end: bool = False  # [mask] must come last

    def patterns(self, style):
        """Returns the style of ppt.patterns in which a backbone of this kind reads [mask]."""
        return f"{style}_end" if self.end else style


KINDS = {
    # Divided for float16 in the released code; the rates here and the scale of the start are of
    # that space: 0.5 in T5's own, near what its embeddings have.
    "t5": Kind(100.0, 5e-3, 0.1, 2048),
    # Not published: after 100 steps the rate is the one of a soft prompt in parts/methods.py.
    "masked": Kind(1.0, 0.02, 0.3, 512),
    "causal": Kind(1.0, 0.02, 0.3, 1024, end=True),
    "infilling": Kind(1.0, 0.02, 0.3, 1024, "{label}"),
}
# By name: the kind, and whether the prompt is deep.
ALL_KINDS = {name + deep: (KINDS[name], bool(deep)) for name in KINDS for deep in ("", "-deep")}


class Asked(NamedTuple):
    """How a task is asked: by the pattern of a pre-training task, in the style `patterns`."""

    group: str  # the pre-training task, whose prompt it starts from
    texts: tuple[str, ...] = ()  # the fields that are asked, in order; () = as task.query has it
    words: tuple[str, ...] = ()  # in the order of the classes; () = the names of the options
    lr: float = 1e-2
    lr_ppt: float = 1e-2  # of a prompt that was pre-trained
    patterns: str = "en"
    # With words that no pre-training task has: its hard prompt, not published. No pre-trained
    # prompt but that of the unified task is for it (section 4.2).
    topics: str = ""
    # Of several texts, where the pre-training task has one: the pattern without hard words.
    plain: str = ""
    name: str = ""  # of the task, where it has another
    # The split that is scored: of every data set the original development split (sections 2 and A),
    # which `test` is already where the labels of another are hidden.
    scored: str = "test"
    length: int = 512  # tokens of an input, the soft ones included (released code)


def _single(field, words, **more):
    return Asked("cls", (field,), words, **more)


def _pair(first, second, words, lr):
    return Asked("nsp", (first, second), words, lr, 5e-2)


def _chinese(group, texts=(), words=(), lr=1e-2, **more):
    return Asked(group, texts, words, lr, 5e-2 if group == "nsp" else 1e-2, "zh", **more)


_FIVE = ("terrible", "bad", "maybe", "good", "great")
_TOPICS = (
    *("culture", "science", "health", "education", "computer"),
    *("sports", "business", "music", "family", "politics"),
)
_NEWS = (
    *("故事", "文化", "娱乐", "体育", "财经", "房产", "汽车"),
    *("教育", "科技", "军事", "旅游", "国际", "农业", "游戏"),
)
# The texts of the data set (Zhang et al. 2015), which every method reads; the paper does not say
# which of them it takes, and nothing is released.
_QUESTION = "{question_title} {question_content} {best_answer}"
_TWO = ("sentence1", "sentence2")
# Neutral, entailment, contradiction: the words of pre-training on pairs and of the released Chinese
# sets. Two classes take the outer ones, as English takes "no" and "yes".
_MEANING = ("中立", "相似", "矛盾")
TASKS = {
    "sst2": _single("sentence", ("bad", "good")),
    "sst5": _single("text", _FIVE, scored="dev"),
    "boolq": _pair("question", "passage", ("no", "yes"), 5e-3),
    "rte": _pair("premise", "hypothesis", ("yes", "no"), 5e-3),
    "cb": _pair("hypothesis", "premise", ("yes", "no", "maybe"), 5e-2),
    "race_middle": Asked("nss", length=612, scored="dev"),
    "race_high": Asked("nss", length=612, scored="dev"),
    "dream": Asked("nss"),
    "cosmos_qa": Asked("nss"),
    "yahoo_answers_topics": Asked(
        "cls", (), _TOPICS, topics=f"{_QUESTION} This is about [mask].", plain=f"{_QUESTION} [mask]"
    ),
    "lcqmc": _chinese("nsp", _TWO, ("矛盾", "相似"), 5e-3, scored="dev"),
    "ocnli": _chinese("nsp", _TWO, _MEANING, 5e-3),
    "cmnli": _chinese("nsp", _TWO, _MEANING, 5e-3),
    "chnsenticorp": _chinese("cls", ("text",), ("差", "好"), scored="dev"),
    "amazon": _chinese("cls", ("comment",), ("差", "不好", "一般", "好", "赞")),
    "tnews": Asked(
        "cls",
        ("sentence",),
        _NEWS,
        patterns="zh",
        topics="{sentence}。这是[mask]新闻。",
        name="tnews14",
    ),  # fmt: skip
    "c3": _chinese("nss", scored="dev"),
    "ccpm": _chinese("nss"),
}


def pt(c, task="rte", kind="t5"):
    """Prompt tuning: 100 soft tokens from noise, as the released code has it (section 4.1)."""
    _few_shot(c, task, kind)
    question, (kind, deep) = TASKS[task], ALL_KINDS[kind]
    if deep:
        methods.prefix(c, length=100, lr=question.lr, dropout=0.0)
    else:
        methods.soft(c, length=100, lr=question.lr, start="normal")
        c.prompt.scale = kind.scale
    c.optim.weight_decay = 1e-2  # of soft tokens too


def hybrid_pt(c, task="rte", kind="t5"):
    """The same beside words (appendix D)."""
    pt(c, task, kind)
    _with_words(c, task)


def lm_adapt(c, task="rte", kind="t5"):
    """Prompt tuning of a backbone after LM adaptation; give its backbone.path."""
    pt(c, task, kind)


def ppt(c, task="rte", kind="t5"):
    """Prompt tuning from the prompt that was pre-trained for the task's group."""
    if TASKS[task].topics:
        raise InputError(
            f"task {task} has topics as label words, and the prompt of {TASKS[task].group} was "
            "pre-trained on other words; take unified_ppt, as the paper does (section 4.2)"
        )
    pt(c, task, kind)
    c.prompt.init = f"prompts/{TASKS[task].group}"
    c.optim.lr = TASKS[task].lr_ppt


def hybrid_ppt(c, task="rte", kind="t5"):
    """The same beside words."""
    ppt(c, task, kind)
    _with_words(c, task)


def multiple_choice(c, task="rte", kind="t5"):
    """Prompt tuning from noise, every task as a choice among its label words (section 4.2)."""
    pt(c, task, kind)
    c.task.form, c.task.fields, c.task.template = "unified", (), ""
    c.task.spaced = ""
    c.optim.lr = 1e-2


def unified_ppt(c, task="rte", kind="t5"):
    """The same from the prompt of the unified task (section 3.3)."""
    multiple_choice(c, task, kind)
    c.prompt.init = "prompts/unified"
    c.optim.lr = 5e-3 if task == "rte" else 1e-2  # few-shot scripts


def full(c, task="rte", kind="t5"):
    """Full fine-tuning with words around the answer; FULL_RATES has those of the sizes."""
    _few_shot(c, task, kind)
    methods.full(c, lr=5e-6)
    _with_words(c, task)
    c.optim.weight_decay = 1e-2


METHODS = {
    function.__name__: function
    for function in (
        full, pt, hybrid_pt, lm_adapt, ppt, hybrid_ppt, unified_ppt, multiple_choice
    )
}  # fmt: skip
RATES = {name: (5e-3, 1e-2, 2e-2, 5e-2) for name in METHODS}  # section 4.1
RATES["full"] = (5e-6, 1e-5, 3e-5, 1e-4)  # of other backbones: not published, as they are tuned
# Of full fine-tuning of a T5 or mT5, by size (appendix C.1, table 2).
FULL_RATES = {
    "small": (2e-4, 5e-4, 1e-3),
    "base": (2e-4, 5e-4, 1e-3),
    "large": (5e-5, 1e-4, 2e-4),
    "xl": (3e-5, 5e-5, 1e-4),
    "xxl": (3e-6, 5e-6, 1e-5),
}


def _with_words(c, task):
    question = TASKS[task]
    if question.topics:
        _cloze(c, question, question.topics)
    else:
        c.ppt.hard = True


def _cloze(c, question, template):
    if c.ppt.patterns.endswith("_end"):
        template = template.partition("[mask]")[0] + "[mask]"
    c.task.form, c.task.fields, c.task.template = "cloze", (), template
    c.task.spaced = str(get_pattern(question.group, question.patterns).space).lower()


def _few_shot(c, task, kind):
    kind, deep = ALL_KINDS[check_known("the kind of backbone", kind, ALL_KINDS)]
    c.backbone.dropout = 0.0
    c.backbone.rescale = kind.rescale
    question = TASKS[task]
    c.task.name, c.task.words, c.task.eos = question.name or task, question.words, False
    c.task.form, c.task.fields = question.group, question.texts
    c.ppt.patterns = kind.patterns(question.patterns)
    if question.plain:
        _cloze(c, question, question.plain)
    heads.verbalizer(c, scores="full", span="target")
    if len(question.words) > 5:  # section 4.1: 8 rows per label, as many for dev
        c.data.protocol = {"name": "kshot", "k": 8}
    else:  # 32 rows, as many for dev
        c.data.protocol = {"name": "balanced", "n": 32}
    c.data.test_split = question.scored
    c.data.max_len, c.data.multiple = min(question.length, kind.positions - 100 * deep), 64
    c.data.batch = 16  # 8 a group of 4 GPUs on 8 of them (few-shot scripts)
    c.optim.schedule = {"name": "constant"}
    c.optim.clip = 1.0
    c.train.total_epochs = 50.0
    c.train.eval_steps = 6
