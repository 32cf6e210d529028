"""Tuning with few rows as PPT compares it (Gu et al. 2022, sections 4 and 5).

Each function fills a config with one method of METHODS on one task of TASKS, for a kind of backbone
of KINDS; with "-deep" behind it keys and values of every layer are learned in place of soft tokens.
"""

from typing import NamedTuple

from configs.parts import methods
from jaxprompt.errors import choose

SEEDS = (10, 20, 30, 40, 50)


class Kind(NamedTuple):
    """What depends on the scale of a backbone's embeddings, and its positions."""

    rescale: float
    scale: float  # of the first prompt
    lr: float  # of pre-training: the factor of 1 / sqrt(step)
    positions: int


KINDS = {
    # Divided for float16 in the released code; the rates here and the scale of the start are of
    # that space: 0.5 in T5's own, near what its embeddings have.
    "t5": Kind(100.0, 5e-3, 0.1, 2048),
    # Not published: after 100 steps the rate is the one of a soft prompt in parts/methods.py.
    "masked": Kind(1.0, 0.02, 0.3, 512),
    "causal": Kind(1.0, 0.02, 0.3, 1024),
}
# By name: the kind, and whether the prompt is deep.
ALL_KINDS = {name + deep: (KINDS[name], bool(deep)) for name in KINDS for deep in ("", "-deep")}


class Asked(NamedTuple):
    """How a task is asked, as in the released code, where nothing but the sentinel is added."""

    group: str  # the pre-training task whose prompt it starts from
    template: str  # "" = as the unified task is, which is how choices are
    # With words beside the soft prompt (appendix D), which full fine-tuning takes too; "" = as the
    # task has it, for none is published.
    hard: str
    words: tuple[str, ...]  # in the order of the classes
    lr: float = 1e-2
    lr_ppt: float = 1e-2  # of a prompt that was pre-trained
    patterns: str = "en"


def _single(field, words):
    return Asked("cls", f"{{{field}}} [mask]", f"{{{field}}} It was [mask].", words)


def _pair(first, second, words, lr):
    hard = f"Question: {{{first}}}? [mask]. {{{second}}}"
    return Asked("nsp", f"{{{first}}} [mask] {{{second}}}", hard, words, lr, 5e-2)


def _chinese(group, template="", words=(), lr=1e-2):
    return Asked(group, template, "", words, lr, 5e-2 if group == "nsp" else 1e-2, "zh")


def _reading(article):
    hard = f"We ask {{{article}}}; {{question|whole}}?{{choices}} The answer is [mask]."
    return Asked("nss", "", hard, ())


_FIVE = ("terrible", "bad", "maybe", "good", "great")
_TOPICS = (
    *("culture", "science", "health", "education", "computer"),
    *("sports", "business", "music", "family", "politics"),
)
_TWO = "{sentence1} [mask] {sentence2}"
# Neutral, entailment, contradiction: the words of pre-training on pairs and of the released Chinese
# sets. Two classes take the outer ones, as English takes "no" and "yes".
_MEANING = ("中立", "相似", "矛盾")
TASKS = {
    "sst2": _single("sentence", ("bad", "good")),
    "sst5": _single("text", _FIVE),
    "boolq": _pair("question", "passage", ("no", "yes"), 5e-3),
    "rte": _pair("premise", "hypothesis", ("yes", "no"), 5e-3),
    "cb": _pair("hypothesis", "premise", ("yes", "no", "maybe"), 5e-2),
    "race_middle": _reading("article"),
    "race_high": _reading("article"),
    "dream": _reading("dialogue"),
    "cosmos_qa": _reading("context"),
    "yahoo_answers_topics": Asked(
        "cls", "{question_title} [mask]", "{question_title} This is about [mask].", _TOPICS
    ),
    "lcqmc": _chinese("nsp", _TWO, ("矛盾", "相似"), 5e-3),
    "ocnli": _chinese("nsp", _TWO, _MEANING, 5e-3),
    "cmnli": _chinese("nsp", _TWO, _MEANING, 5e-3),
    "chnsenticorp": _chinese("cls", "{text} [mask]", ("差", "好")),
    "c3": _chinese("nss"),
    "ccpm": _chinese("nss"),
}


def pt(c, task="rte", kind="t5"):
    """Prompt tuning: 100 soft tokens from noise, as the released code has it (section 4.1)."""
    _few_shot(c, task, kind)
    own, (kind, deep) = TASKS[task], ALL_KINDS[kind]
    if deep:
        methods.prefix(c, length=100, lr=own.lr, dropout=0.0)
    else:
        methods.soft(c, length=100, lr=own.lr, start="normal")
        c.prompt.scale = kind.scale
    c.task.template = own.template
    if not own.template:
        c.task.form = "unified"
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
    c.task.form, c.task.template = "unified", ""
    c.optim.lr = 1e-2


def unified_ppt(c, task="rte", kind="t5"):
    """The same from the prompt of the unified task (section 3.3)."""
    multiple_choice(c, task, kind)
    c.prompt.init = "prompts/unified"


def full(c, task="rte", kind="t5"):
    """Full fine-tuning with words around the answer."""
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
RATES["full"] = (5e-6, 1e-5, 3e-5, 1e-4)  # not published; what such backbones are tuned at


def _with_words(c, task):
    c.task.form, c.task.template = "cloze", TASKS[task].hard


def _few_shot(c, task, kind):
    kind, deep = ALL_KINDS[choose("the kind of backbone", kind, ALL_KINDS)]
    c.backbone.dtype = "bfloat16"
    c.backbone.dropout = 0.0
    c.backbone.rescale = kind.rescale
    own = TASKS[task]
    c.task.name, c.task.words, c.task.eos = task, own.words, False
    c.ppt.patterns = own.patterns
    c.head.name, c.head.scores, c.head.span = "verbalizer", "full", "target"
    if len(own.words) > 5:  # section 4.1: 8 rows a label, as many for dev
        c.data.protocol, c.data.k = "kshot", 8
    else:  # 32 rows, as many for dev
        c.data.protocol, c.data.n = "balanced", 32
    c.data.max_len, c.data.multiple = min(512, kind.positions - 100 * deep), 64
    c.data.batch = 16  # 8 a group of 4 GPUs on 8 of them (few-shot scripts)
    c.optim.schedule = "constant"
    c.optim.clip = 1.0
    c.train.total_epochs = 50.0
    c.train.eval_steps = 6
