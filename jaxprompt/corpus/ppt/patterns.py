"""Patterns and label words of the tasks of PPT (Gu et al. 2022).

A space precedes each text, as in the units of a corpus; the first one is added by `Pattern.text`.
Words are in the order of the labels: for pairs from another document to the neighbour, for single
texts from the worst to the best, for selections the names of the options.
"""

from typing import NamedTuple

from jaxprompt.errors import InputError

_LETTERS = tuple("ABCDEFGHIJKLMNOP")
_NUMERALS = (*"一二三四五六七八九十", *("十一", "十二", "十三", "十四", "十五", "十六"))
_OPTIONS = "{options}"


class Pattern(NamedTuple):
    """A template and its label words; see jaxprompt/data/text/template.py for the syntax."""

    template: str  # {first} {second}; {query} {options}; {text}
    words: tuple[str, ...]
    option: str = ""  # one option: {name}, which is its word, and {text}; "" = there are none
    space: bool = True  # words are encoded after a space

    def text(self, options: int = 0) -> str:
        """Returns the template for a number of options, whose fields are option0, option1 ..."""
        # By replace, not format, because the template has braces of its own.
        written = (
            self.option.replace("{name}", word).replace("{text}", f"{{option{i}}}")
            for i, word in enumerate(self.words[:options])
        )
        return f" {self.template.replace(_OPTIONS, ''.join(written))}"

    @property
    def fixed_texts(self) -> tuple[str, str, str]:
        """The text before the query, between it and the options, and after these."""
        head, after = self.template.split(_OPTIONS)
        before, between = head.split("{query}")
        return before, between, after


def text_fields(task: str, options: int = 0) -> tuple[str, ...]:
    """Returns the names of the texts of an example."""
    if task == "nsp":
        return ("first", "second")
    if task == "cls":
        return ("text",)
    return ("query", *(f"option{i}" for i in range(options)))


# The released code: nothing around the sentinel, and no space before the letters.
_SELECTION = Pattern(
    "{query}?{options}? The correct one is [mask]", _LETTERS, "{name}. {text}.", space=False
)
_ENGLISH = {
    "nsp": Pattern("{first} [mask] {second}", ("no", "maybe", "yes")),
    "nss": _SELECTION._replace(words=_LETTERS[:6]),
    "unified": _SELECTION,
    "cls": Pattern("{text} [mask]", ("terrible", "bad", "maybe", "good", "great")),
}
# The paper, section 3.2.
_PAPER_SELECTION = Pattern("{query}?{options} Answer is [mask].", _LETTERS, " {name}. {text}.")
_PAPER = {
    "nsp": Pattern("{first} [mask]. {second}", ("no", "maybe", "yes")),
    "nss": _PAPER_SELECTION._replace(words=_LETTERS[:6]),
    "unified": _PAPER_SELECTION,
    "cls": Pattern("{text}. [mask].", ("terrible", "bad", "maybe", "good", "great")),
}
# The paper, appendix B, whose options are named by numerals. It gives six of them; the others
# continue them for the unified task.
_CHINESE_SELECTION = Pattern(
    "{query}？{options}答案是[mask]。", _NUMERALS, "{name}、 {text}。", space=False
)
_CHINESE = {
    "nsp": Pattern("{first}[mask]。 {second}", ("矛盾", "中立", "相似"), space=False),
    "nss": _CHINESE_SELECTION._replace(words=_NUMERALS[:6]),
    "unified": _CHINESE_SELECTION,
    "cls": Pattern("{text}。[mask]。", ("差", "不好", "一般", "好", "赞"), space=False),
}
# For causal backbones, not published: the mask is moved to the end.
_ENGLISH_END = _ENGLISH | {"nsp": Pattern("{first}? {second} [mask]", _ENGLISH["nsp"].words)}
_CHINESE_END = {
    name: pattern._replace(template=pattern.template.removesuffix("。"))
    for name, pattern in _CHINESE.items()
} | {"nsp": _CHINESE["nsp"]._replace(template="{first}。 {second}[mask]")}
# The paper, appendix D: hard prompts, used with the soft one in tuning only. The words and the form
# of an option are those of pre-training.
_HARD = {
    "en": {
        "nsp": "Question: {first}? [mask]. {second}",
        "nss": "We ask {query}?{options} The answer is [mask].",
        "cls": "{text}. It was [mask].",
    },
    "zh": {
        "nsp": "问题：{first}？[mask]。 {second}",
        "nss": "问题：{query}？{options}答案是：[mask]。",
        "cls": "{text}。这很[mask]。",
    },
}
_HARD["en_paper"] = _HARD["en"]
_HARD["en_end"] = {
    "nsp": "Question: {first}? {second}. [mask]",
    "nss": "We ask {query}?{options} The answer is [mask]",
    "cls": "{text}. It was [mask]",
}
_HARD["zh_end"] = {
    "nsp": "问题：{first}？ {second}。[mask]",
    "nss": "问题：{query}？{options}答案是：[mask]",
    "cls": "{text}。这很[mask]",
}
PATTERNS = {
    "en": _ENGLISH, "en_paper": _PAPER, "en_end": _ENGLISH_END,
    "zh": _CHINESE, "zh_end": _CHINESE_END,
}  # fmt: skip
TASKS = tuple(_ENGLISH)


def get_pattern(task: str, style: str = "en", *, hard: bool = False) -> Pattern:
    """Returns a pattern by task and style: en as released, en_paper as published, zh.

    en_end and zh_end have nothing after the mask, which causal backbones need. With `hard` the
    pattern has the hard prompt of tuning (appendix D), which the unified task does not have.
    """
    pattern, templates = PATTERNS[style][task], _HARD[style]
    if not hard:
        return pattern
    if task not in templates:
        raise InputError(
            f"ppt.hard=True is not available for {task}, only for {', '.join(templates)}; set it "
            "to False"
        )
    return pattern._replace(template=templates[task])
