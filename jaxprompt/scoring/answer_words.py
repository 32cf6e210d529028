"""The words of an answer as the official script of SQuAD compares them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese is written without spaces


def answer_words(text: str) -> list[str]:
    """Splits an answer: lower case, without punctuation and articles, Chinese by character."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(rf"([{HAN}])", r" \1 ", re.sub(r"\b(a|an|the)\b", " ", kept)).split()


def shared_words(gold: Sequence[str], pred: Sequence[str]) -> float:
    """F1 of the words that two answers share; of two without words 1."""
    if not gold or not pred:
        return float(gold == pred)
    shared = sum((Counter(gold) & Counter(pred)).values())
    return 2 * shared / (len(gold) + len(pred))
