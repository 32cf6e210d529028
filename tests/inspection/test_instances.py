"""Which words of a text are marked as nearest to its prompt, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
from letters import Letters

from jaxprompt.inspection.instances import _compare_text
from jaxprompt.types import Injection, Role, Stream

# Words 0 to 5 lie at these degrees on a circle, and soft tokens too: a cosine is of a difference.
WORDS = (0, 20, 40, 60, 80, 100)
PAD, TEMPLATE, TEXT = (False, Role.TEXT), (True, Role.HARD), (True, Role.TEXT)


def circle(*degrees):
    turns = np.deg2rad(degrees)
    return np.stack([np.cos(turns), np.sin(turns)], -1).astype(np.float32)


def look_at(tokens, slots, *, there=None, top=2):
    """Marks a text of (word, (mask, role)) tokens beside soft tokens at some degrees."""
    ids, kinds = zip(*tokens, strict=True)
    mask, roles = (np.array([values]) for values in zip(*kinds, strict=True))
    encoder = SimpleNamespace(ids=np.array([ids]), mask=mask, roles=roles)
    backbone = SimpleNamespace(bind=lambda _: SimpleNamespace(words=lambda: 3 * circle(*WORDS)))
    prompt = SimpleNamespace(num_slots=lambda: 2)
    model = SimpleNamespace(backbone=backbone, prompt=prompt)
    scorer = SimpleNamespace(model=model, tokenizer=Letters())
    stream = Stream(slots=2 * circle(*slots)[None], slots_mask=None if there is None else [there])
    inject = lambda params, batch: Injection(stream)
    batch = SimpleNamespace(encoder=encoder)
    return _compare_text(scorer, inject, {"backbone": {}}, batch, top, "a class")


TOKENS = [(4, TEMPLATE), (5, TEXT), (0, TEXT), (3, TEXT), (1, TEXT), (4, PAD)]


def test_words_are_marked_by_their_highest_cosine_with_any_soft_token():
    case = look_at(TOKENS, (86, 15))  # f is 14 from the first, b is 5 from the second
    assert case.tokens == ("f", "a", "d", "b") and case.label == "a class"
    np.testing.assert_allclose(case.cosines, np.cos(np.deg2rad([14, 15, 26, 5])), atol=1e-6)
    assert case.nearest == (0, 3)  # in the order of the text
    assert look_at(TOKENS, (86, 15), top=3).nearest == (0, 1, 3)


def test_soft_tokens_that_a_text_lacks_and_label_rows_mark_nothing():
    case = look_at(TOKENS, (86, 15), there=[False, True])
    np.testing.assert_allclose(case.cosines, np.cos(np.deg2rad([85, 15, 45, 5])), atol=1e-6)
    assert case.nearest == (1, 3)
    assert look_at(TOKENS, (86, 15), there=[False, False]).nearest == ()
    behind = look_at(TOKENS, (86, 15, 60))  # a label row, at d
    assert behind.nearest == (0, 3)


@pytest.mark.parametrize("top", [1, 9])
def test_no_more_words_are_marked_than_there_are(top):
    assert len(look_at(TOKENS, (86, 15), top=top).nearest) == min(top, 4)
