"""How the tasks are asked and answered: patterns and label words of PPT (Gu et al. 2022).

A space stands before each text, as the units of a corpus have it; that of the first is understood
here, and written out by `Pattern.text`. Words are in the order of the labels: of pairs from another
document to the neighbour, of single texts from the worst to the best, of selections the names of
the options.
"""

from typing import NamedTuple

from jaxprompt.errors import InputError, nearest

_LETTERS = tuple("ABCDEFGHIJKLMNOP")
_NUMERALS = tuple("一二三四五六")
_PLACE = "{options}"


class Pattern(NamedTuple):
    """One way to ask; see jaxprompt/data/template.py for how a template is written."""

    template: str  # {first} {second}; {query} {options}; {text}
    words: tuple[str, ...]
    option: str = ""  # one option: {name}, which is its word, and {text}; "" = there are none
    space: bool = True  # words are encoded behind a space

    def text(self, options: int = 0) -> str:
        """Writes the template out for a number of options, whose fields are option0, option1 ..."""
        parts = (
            self.option.replace("{name}", word).replace("{text}", f"{{option{i}}}")
            for i, word in enumerate(self.words[:options])
        )
        return f" {self.template.replace(_PLACE, ''.join(parts))}"

    @property
    def around(self) -> tuple[str, str]:
        """What stands between the query and the options, and what behind them."""
        before, behind = self.template.split(_PLACE)
        return before.removeprefix("{query}"), behind


def fields(task: str, options: int = 0) -> tuple[str, ...]:
    """Names the texts of an example."""
    if task == "nsp":
        return ("first", "second")
    if task == "cls":
        return ("text",)
    return ("query", *(f"option{i}" for i in range(options)))


# The released code: nothing around the sentinel, and letters glued to what stands before them.
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
# The paper's patterns in Chinese, in our wording; the words for pairs and the numerals are those of
# the released repository. More options than six have letters: numerals above ten are no single
# characters.
_CHINESE_SELECTION = Pattern(
    "{query}？{options}答案是[mask]。", _LETTERS, "{name}、 {text}。", space=False
)
_CHINESE = {
    "nsp": Pattern("{first}[mask]。 {second}", ("矛盾", "中立", "相似"), space=False),
    "nss": _CHINESE_SELECTION._replace(words=_NUMERALS),
    "unified": _CHINESE_SELECTION,
    "cls": Pattern("{text}。[mask]。", ("差", "不好", "一般", "好", "赞"), space=False),
}
PATTERNS = {"en": _ENGLISH, "en_paper": _PAPER, "zh": _CHINESE}
TASKS = tuple(_ENGLISH)


def get_pattern(task: str, style: str = "en") -> Pattern:
    """Finds a pattern by task and style: en as released, en_paper as published, zh."""
    if task not in TASKS:
        raise InputError(f"unknown pre-training task {task!r}; {nearest(task, TASKS)}")
    if style not in PATTERNS:
        raise InputError(f"unknown style of patterns {style!r}; {nearest(style, PATTERNS)}")
    return PATTERNS[style][task]
