"""Answers compared as CMRC 2018's script does, by a statement of it made for this test."""

import pytest

from jaxprompt.scoring.metrics import score_spans

MARKS = list("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")


def pieces(text):
    """Chinese by character; the rest, of letters and digits alone here, by word."""
    letters = "".join(c for c in text.lower() if c not in MARKS)
    spaced = "".join(f" {c} " if "\u4e00" <= c <= "\u9fa5" else c for c in letters)
    return spaced.split()


def runs(words):
    """All runs of a list of words."""
    return {tuple(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def f1(right, actual):
    right, actual = pieces(right), pieces(actual)
    longest = max(map(len, runs(right) & runs(actual)), default=0)
    precision, recall = longest / max(len(actual), 1), longest / max(len(right), 1)
    return 2 * precision * recall / (precision + recall) if longest else 0.0


@pytest.mark.parametrize(
    "right, actual",
    [
        ("光荣和ω-force", "光荣和ω-force"),
        ("光荣和ω-force", "光荣"),
        ("《战国无双3》", "战国无双3"),
        ("武田信玄等人", "信玄，武田"),
        ("1998年7月", "1998 年"),
        ("20张", "没有"),
        ("村雨城", ""),
    ],
)
def test_the_longest_run_counts(right, actual):
    measured = score_spans("cmrc_f1", [[right, "别的"]], [actual])
    assert measured["cmrc_f1"] == pytest.approx(max(f1(right, actual), f1("别的", actual)))
    bare = lambda text: "".join(c for c in text.lower() if c not in MARKS)
    assert measured["exact_match"] == float(bare(right) == bare(actual))


@pytest.mark.parametrize(
    "right, actual, shared", [("1,200人", "200人", 2 / 4), ("3.14", "14", 0.0), ("12.5万", "12", 0)]
)
def test_a_number_is_one_word(right, actual, shared):
    """NLTK's tokenizer, which the script asks, leaves it whole."""
    assert score_spans("cmrc_f1", [[right]], [actual])["cmrc_f1"] == pytest.approx(shared)
