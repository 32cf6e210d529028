"""Few-shot tuning as in the comparisons of PPT (Gu et al. 2022, sections 4 and 5).

METHODS has a function per method, which fills a config for a task of TASKS and a kind of backbone
of KINDS. With "-deep" after the kind, keys and values of every layer are trained instead of soft
tokens.
"""

from typing import NamedTuple

from configs.parts import heads, methods
from jaxprompt.corpus.ppt import get_pattern
from jaxprompt.errors import InputError, check_known

SEEDS = (10, 20, 30, 40, 50)


class Kind(NamedTuple):
    """Values that depend on the scale of a backbone's embeddings, and its positions."""

    rescale: float
    scale: float  # standard deviation of the initial prompt
    lr: float  # of pre-training: the factor of 1 / sqrt(step)
    positions: int
    answer: str = "[mask] {label} [mask]"  # target of a decoder in pre-training
    end: bool = False  # whether [mask] must be last

    def patterns(self, style):
        """Returns the style of ppt.patterns that fits this kind of backbone."""
        return f"{style}_end" if self.end else style


KINDS = {
    # The released code divides the embeddings by 100, for float16; learning rate and initial scale
    # are those after the division: 5e-3 is 0.5 in T5's own scale, near that of its embeddings.
    "t5": Kind(100.0, 5e-3, 0.1, 2048),
    # Not published: after 100 steps the rate is that of a soft prompt in parts/methods.py.
    "masked": Kind(1.0, 0.02, 0.3, 512),
    "causal": Kind(1.0, 0.02, 0.3, 1024, end=True),
    "infilling": Kind(1.0, 0.02, 0.3, 1024, "{label}"),
}
# By name: the kind, and whether the prompt is deep.
ALL_KINDS = {name + deep: (KINDS[name], bool(deep)) for name in KINDS for deep in ("", "-deep")}


class Question(NamedTuple):
    """Values of a task; its input follows the pattern of a pre-training task."""

    group: str  # the pre-training task, whose prompt initialises this one
    texts: tuple[str, ...] = ()  # the fields of the input, in order; () = those of task.query
    words: tuple[
        str, ...
    ] = ()  # label words in the order of the classes; () = names of the options
    lr: float = 1e-2
    lr_ppt: float = 1e-2  # learning rate with a pre-trained prompt
    patterns: str = "en"
    # Hard prompt (not published) of a task whose label words no pre-training task has; only the
    # prompt of the unified task can initialise it (section 4.2).
    topics: str = ""
    # Pattern without hard words, for tasks with several texts in the place of one.
    plain: str = ""
    name: str = ""  # of the task, if different
    # The split that is scored: the original development split (sections 2 and A), which is `test`
    # where the labels of the original test split are hidden.
    scored: str = "test"
    length: int = 512  # tokens of an input, soft tokens included (released code)


def _single(field, words, **more):
    return Question("cls", (field,), words, **more)


def _pair(first, second, words, lr):
    return Question("nsp", (first, second), words, lr, 5e-2)


def _chinese(group, texts=(), words=(), lr=1e-2, **more):
    return Question(group, texts, words, lr, 5e-2 if group == "nsp" else 1e-2, "zh", **more)


_FIVE = ("terrible", "bad", "maybe", "good", "great")
_TOPICS = (
    *("culture", "science", "health", "education", "computer"),
    *("sports", "business", "music", "family", "politics"),
)
_NEWS = (
    *("故事", "文化", "娱乐", "体育", "财经", "房产", "汽车"),
    *("教育", "科技", "军事", "旅游", "国际", "农业", "游戏"),
)
# All texts of the data set (Zhang et al. 2015); the paper does not say which ones it uses, and
# nothing is released.
_QUESTION = "{question_title} {question_content} {best_answer}"
_TWO = ("sentence1", "sentence2")
# Neutral, entailment, contradiction: the words of pre-training on pairs and of the released Chinese
# data sets. Tasks with two classes use the last two, as English uses "no" and "yes".
_MEANING = ("中立", "相似", "矛盾")
TASKS = {
    "sst2": _single("sentence", ("bad", "good")),
    "sst5": _single("text", _FIVE, scored="dev"),
    "boolq": _pair("question", "passage", ("no", "yes"), 5e-3),
    "rte": _pair("premise", "hypothesis", ("yes", "no"), 5e-3),
    "cb": _pair("hypothesis", "premise", ("yes", "no", "maybe"), 5e-2),
    "race_middle": Question("nss", length=612, scored="dev"),
    "race_high": Question("nss", length=612, scored="dev"),
    "dream": Question("nss"),
    "cosmos_qa": Question("nss"),
    "yahoo_answers_topics": Question(
        "cls", (), _TOPICS, topics=f"{_QUESTION} This is about [mask].", plain=f"{_QUESTION} [mask]"
    ),
    "lcqmc": _chinese("nsp", _TWO, ("矛盾", "相似"), 5e-3, scored="dev"),
    "ocnli": _chinese("nsp", _TWO, _MEANING, 5e-3),
    "cmnli": _chinese("nsp", _TWO, _MEANING, 5e-3),
    "chnsenticorp": _chinese("cls", ("text",), ("差", "好"), scored="dev"),
    "amazon": _chinese("cls", ("comment",), ("差", "不好", "一般", "好", "赞")),
    "tnews": Question(
        "cls",
        ("sentence",),
        _NEWS,
        patterns="zh",
        topics="{sentence}。这是[mask]新闻。",
        name="tnews14",
    ),
    "c3": _chinese("nss", scored="dev"),
    "ccpm": _chinese("nss"),
}


def pt(config, task="rte", kind="t5"):
    """Prompt tuning: 100 randomly initialised soft tokens (section 4.1, released code)."""
    _few_shot(config, task, kind)
    question, (kind, deep) = TASKS[task], ALL_KINDS[kind]
    if deep:
        methods.prefix(config, length=100, lr=question.lr, dropout=0.0)
    else:
        methods.soft(config, length=100, lr=question.lr, start="normal")
        config.prompt.scale = kind.scale
    config.optim.weight_decay = 1e-2  # includes the soft tokens


def hybrid_pt(config, task="rte", kind="t5"):
    """Prompt tuning with a hard prompt too (appendix D)."""
    pt(config, task, kind)
    _with_words(config, task)


def lm_adapt(config, task="rte", kind="t5"):
    """Prompt tuning of an LM-adapted backbone; set backbone.path."""
    pt(config, task, kind)


def ppt(config, task="rte", kind="t5"):
    """Prompt tuning from the pre-trained prompt of the task's group."""
    if TASKS[task].topics:
        raise InputError(
            f"task {task} has topics as label words, but the prompt of {TASKS[task].group} was "
            "pre-trained with other words; use unified_ppt, as the paper does (section 4.2)"
        )
    pt(config, task, kind)
    config.prompt.init = f"prompts/{TASKS[task].group}"
    config.optim.lr = TASKS[task].lr_ppt


def hybrid_ppt(config, task="rte", kind="t5"):
    """PPT with a hard prompt too."""
    ppt(config, task, kind)
    _with_words(config, task)


def multiple_choice(config, task="rte", kind="t5"):
    """Prompt tuning, each task as multiple choice among its label words (section 4.2)."""
    pt(config, task, kind)
    config.task.form, config.task.fields, config.task.template = "unified", (), ""
    config.task.spaced = ""
    config.optim.lr = 1e-2


def unified_ppt(config, task="rte", kind="t5"):
    """`multiple_choice` from the pre-trained prompt of the unified task (section 3.3)."""
    multiple_choice(config, task, kind)
    config.prompt.init = "prompts/unified"
    config.optim.lr = 5e-3 if task == "rte" else 1e-2  # few-shot scripts


def full(config, task="rte", kind="t5"):
    """Full fine-tuning with a hard prompt; FULL_RATES has the learning rates per model size."""
    _few_shot(config, task, kind)
    methods.full(config, lr=5e-6)
    _with_words(config, task)
    config.optim.weight_decay = 1e-2


METHODS = {
    function.__name__: function
    for function in (
        full, pt, hybrid_pt, lm_adapt, ppt, hybrid_ppt, unified_ppt, multiple_choice
    )
}  # fmt: skip
RATES = {name: (5e-3, 1e-2, 2e-2, 5e-2) for name in METHODS}  # section 4.1
RATES["full"] = (5e-6, 1e-5, 3e-5, 1e-4)  # for other backbones than T5: not published
# Full fine-tuning of a T5 or mT5, by size (appendix C.1, table 2).
FULL_RATES = {
    "small": (2e-4, 5e-4, 1e-3),
    "base": (2e-4, 5e-4, 1e-3),
    "large": (5e-5, 1e-4, 2e-4),
    "xl": (3e-5, 5e-5, 1e-4),
    "xxl": (3e-6, 5e-6, 1e-5),
}


def _with_words(config, task):
    question = TASKS[task]
    if question.topics:
        _cloze(config, question, question.topics)
    else:
        config.ppt.hard = True


def _cloze(config, question, template):
    if config.ppt.patterns.endswith("_end"):
        template = template.partition("[mask]")[0] + "[mask]"
    config.task.form, config.task.fields, config.task.template = "cloze", (), template
    config.task.spaced = str(get_pattern(question.group, question.patterns).space).lower()


def _few_shot(config, task, kind):
    kind, deep = ALL_KINDS[check_known("the kind of backbone", kind, ALL_KINDS)]
    config.backbone.dropout = 0.0
    config.backbone.rescale = kind.rescale
    question = TASKS[task]
    config.task.name, config.task.words, config.task.eos = (
        question.name or task,
        question.words,
        False,
    )
    config.task.form, config.task.fields = question.group, question.texts
    config.ppt.patterns = kind.patterns(question.patterns)
    if question.plain:
        _cloze(config, question, question.plain)
    heads.verbalizer(config, scores="full", span="target")
    if len(question.words) > 5:  # section 4.1: 8 examples per label, as many for dev
        config.data.protocol = {"name": "kshot", "k": 8}
    else:  # 32 examples, as many for dev
        config.data.protocol = {"name": "balanced", "n": 32}
    config.data.test_split = question.scored
    config.data.max_len, config.data.multiple = (
        min(question.length, kind.positions - 100 * deep),
        64,
    )
    config.data.batch = 16  # 2 groups of 4 GPUs, 8 each (few-shot scripts)
    config.optim.schedule = {"name": "constant"}
    config.optim.clip = 1.0
    config.train.total_epochs = 50.0
    config.train.eval_steps = 6
