"""Words near learned rows: which table of an untied backbone they are looked for in."""

from types import SimpleNamespace

import numpy as np
import pytest
from letters import Letters

from jaxprompt.inspection.learned_rows import LABEL, SOFT, nearest_words

WORDS = np.array([[1, 0], [0, 1], [-1, 0]], np.float32)
OUTPUT = np.array([[0, 1], [-1, 0], [1, 0]], np.float32)


class Untied:
    """A backbone whose input and output tables differ."""

    dims = SimpleNamespace(vocab=3)

    def bind(self, variables):
        return self

    def words(self):
        return WORDS

    def lm_table(self):
        return OUTPUT, None


@pytest.mark.parametrize(
    ("kind", "lists_classes", "table"),
    [(LABEL, False, OUTPUT), (LABEL, True, WORDS), (SOFT, False, WORDS)],
)
def test_rows_that_score_classes_are_compared_with_the_output_table(kind, lists_classes, table):
    """They are scored as its words are; all other rows stand in the input, as do copies in a list
    of classes.
    """
    scorer = SimpleNamespace(
        model=SimpleNamespace(backbone=Untied()), tokenizer=Letters(),
        head=SimpleNamespace(LISTS_CLASSES=lists_classes),
    )  # fmt: skip
    rows = np.array([[2, 0.1], [0.1, 3]], np.float32)
    actual = nearest_words(scorer, {"backbone": {}}, rows, 1, kind)
    for row, (word,) in zip(rows, actual, strict=True):
        best = int(np.argmax(table @ row))
        assert (word.id, word.token) == (best, "abc"[best])
        assert word.cosine == pytest.approx(float(table[best] @ row / np.linalg.norm(row)))
        np.testing.assert_array_equal(word.vector, table[best])
