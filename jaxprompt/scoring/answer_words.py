"""The words of an answer, as in the official script of SQuAD."""

import re
import string
from collections import Counter
from collections.abc import Sequence

HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese is written without spaces


def answer_words(text: str) -> list[str]:
    """Splits an answer: lower case, without punctuation and articles, Chinese by character."""
    # Only ASCII punctuation, as in the script.
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(rf"([{HAN}])", r" \1 ", re.sub(r"\b(a|an|the)\b", " ", letters)).split()


# The script's list; an entry of two characters in it, "……", never equals one and is left out here.
_CMRC_MARKS = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_CMRC_RUN = r"[^\W_\u4e00-\u9fa5]+"
# 3.14 and 1,200 are one word.
_CMRC_PIECE = re.compile(rf"[\u4e00-\u9fa5]|{_CMRC_RUN}(?:(?:\.|,(?=\d)){_CMRC_RUN})*|[^\w\s]|_")


def cmrc_text(text: str) -> str:
    """Normalises an answer like CMRC 2018's script: lower case, without its punctuation marks."""
    return "".join(c for c in text.lower().strip() if c not in _CMRC_MARKS)


def cmrc_words(text: str) -> list[str]:
    """Splits an answer like CMRC 2018's script: Chinese by character, without its marks.

    Other text is split into words and marks by a regular expression, where the script uses NLTK:
    the two differ in English contractions, abbreviations and signs such as ° and ♯.
    """
    return _CMRC_PIECE.findall(cmrc_text(text))


def common_run(gold: Sequence[str], pred: Sequence[str]) -> float:
    """Returns the F1 of the longest common run of words of two answers (CMRC 2018)."""
    longest, row = 0, [0] * (len(pred) + 1)
    for word in gold:
        previous = row
        row = [0] + [1 + previous[j] if word == other else 0 for j, other in enumerate(pred)]
        longest = max(longest, *row)
    return 2 * longest / (len(gold) + len(pred)) if longest else 0.0


def shared_words(gold: Sequence[str], pred: Sequence[str]) -> float:
    """Returns the F1 of the words that two answers share; 1 if both have no words."""
    if not gold or not pred:
        return float(gold == pred)
    shared = sum((Counter(gold) & Counter(pred)).values())
    return 2 * shared / (len(gold) + len(pred))
