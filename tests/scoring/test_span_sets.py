"""DROP's exact match and F1 against another statement of its definition, on made and real cases."""

import gzip
import itertools
import json
import re
import string

import numpy as np
import pytest

from jaxprompt.scoring.span_sets import score_span_sets

# -- the definition, by trying every alignment ----------------------------------------------------


def as_number(text):
    try:
        return float(text)
    except ValueError:
        return None


def words_of(span):
    results = []
    for token in re.split("[ -]", span):
        token = token.lower()
        if as_number(token) is None:
            token = token.translate({ord(c): None for c in string.punctuation})
        if as_number(token) is not None:
            token = str(as_number(token))
        for word in re.sub(r"\b(?:a|an|the)\b", " ", token).split():
            results.append(word)
    return results


def f1_of(gold, pred):
    gold, pred = set(gold), set(pred)
    numbers = {word for word in gold if as_number(word) is not None}
    if numbers and not numbers & {word for word in pred if as_number(word) is not None}:
        return 0.0
    common = len(gold & pred)
    precision = common / len(pred) if pred else 1.0
    recall = common / len(gold) if gold else 1.0
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def official(gold, pred):
    """Exact match and F1 of one answer of several spans."""
    gold, pred = [words_of(x) for x in gold], [words_of(x) for x in pred]
    texts = lambda spans: [" ".join(words) for words in spans]
    exact = set(texts(gold)) == set(texts(pred)) and len(gold) == len(pred)
    size = max(len(gold), len(pred))
    gold, pred = (spans + [None] * (size - len(spans)) for spans in (gold, pred))
    best = 0.0
    for order in itertools.permutations(pred):
        scores = [0.0 if None in (a, b) else f1_of(a, b) for a, b in zip(gold, order, strict=True)]
        best = max(best, sum(scores))
    return float(exact), round(best / size, 2)


CASES = [
    (["Anna"], ["Anna"], 1.0, 1.0),
    (["the Anna"], ["anna!"], 1.0, 1.0),
    (["Anna", "Bert"], ["Bert", "Anna"], 1.0, 1.0),
    (["Anna", "Bert"], ["Anna"], 0.0, 0.5),
    (["Anna"], ["Anna", "Bert", "Carl"], 0.0, 0.33),
    (["Anna Smith"], ["Anna"], 0.0, 0.67),
    (["Anna Smith", "Anna"], ["Anna"], 0.0, 0.5),  # the better of two alignments
    (["Ralph-Big"], ["ralph big"], 1.0, 1.0),
    (["1,000 men"], ["1000.0 men"], 1.0, 1.0),
    (["12 men"], ["men"], 0.0, 0.0),  # a number that is not there
    (["men"], ["12 men"], 0.0, 0.67),
    ([""], [""], 1.0, 1.0),
    (["Anna"], [""], 0.0, 0.0),
    ([""], ["Anna"], 0.0, 0.0),
    (["the"], ["an"], 1.0, 1.0),
    (["a b", "b c", "c d"], ["c b", "d c", "x"], 0.0, 0.67),
]


@pytest.mark.parametrize("gold, pred, exact, f1", CASES)
def test_cases_by_hand(gold, pred, exact, f1):
    assert official(gold, pred) == (exact, f1)
    assert score_span_sets("f1", [[gold]], [pred]) == {"f1": f1, "exact_match": exact}


def test_the_best_of_several_answers_counts():
    scores = score_span_sets("exact_match", [[["x"], ["Anna"]], [["y"]]], [["anna"], ["x"]])
    assert scores == {"exact_match": 0.5, "f1": 0.5} and next(iter(scores)) == "exact_match"


def test_a_chinese_character_is_a_word():
    scores = score_span_sets("f1", [[["中华人民共和国"]]], [["华人民共和国"]])
    assert scores == {"f1": round(2 * 6 / 13, 2), "exact_match": 0.0}  # 7 characters, 6 of them
    assert score_span_sets("f1", [[["在 北京"]]], [["在北京"]]) == {"f1": 1.0, "exact_match": 1.0}


def test_it_is_that_of_the_definition_on_what_is_found_in_real_texts(shared):
    rng, compared = np.random.default_rng(0), 0
    with gzip.open(shared / "data/quoref/test.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    several = [row for row in rows if len(row["answers"]["text"]) > 1][:120]
    for row in several + rows[:120]:
        gold, text = row["answers"]["text"], row["context"].split()
        if len(gold) > 5:
            continue
        pred = [span for span in gold if rng.random() < 0.6]
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(len(text)))
            pred.append(" ".join(text[start : start + int(rng.integers(1, 4))]))
        pred = [" ".join(span.split()[: int(rng.integers(1, 5))]) for span in pred] or [""]
        exact, f1 = official(gold, pred)
        assert score_span_sets("f1", [[gold]], [pred]) == {"f1": f1, "exact_match": exact}, row
        compared += 1
    assert compared > 200
