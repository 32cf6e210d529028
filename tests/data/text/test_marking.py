"""Entities inside a text: markers of words and of rows, and cutting that loses none of them."""

import numpy as np
import pytest
import reading_rows
from reading_rows import shown
from refusing import refuse_line

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.marking import mark_entities, truncate_around_entities
from jaxprompt.types import Role

TEXT = "The child (so small) was put into the cradle."
CHILD, SMALL, CRADLE = (4, 9), (14, 19), (38, 44)
ROWS = "{text|soft} {entity1} [soft*2] [mask] [soft*1] {entity2}"


def make_example(*spans, text=TEXT):
    names = {f"entity{i}": text[a:b] for i, (a, b) in enumerate(spans, 1)}
    return Example({"text": text} | names, entities=spans)


def make_encoder(tokenizer, text=ROWS, slots=7, **fields):
    return reading_rows.make_encoder(tokenizer, text, num_slots=slots, entities=2, **fields)


def test_rows_stand_around_each_entity(bert):
    (row,) = make_encoder(bert).encode(make_example(CHILD, CRADLE))
    assert shown(bert, row) == (
        "[CLS] the 0 child 1 ( so small ) was put into the 2 cradle 3 . "
        "child 4 5 [MASK] 6 cradle [SEP]"
    )
    soft = row.roles == Role.SOFT
    assert (soft == (row.slot >= 0)).all() and soft.sum() == 7
    assert (row.roles[(row.slot < 0)][1:-1] != Role.HARD).all()


def test_slots_are_those_of_the_entity_wherever_it_stands(bert):
    """The second entity first: its own rows around it."""
    (row,) = make_encoder(bert).encode(make_example(CRADLE, CHILD))
    assert shown(bert, row).startswith("[CLS] the 2 child 3 ( so small )")
    assert "the 0 cradle 1 . cradle 4" in shown(bert, row)


def test_words_around_entities(bert):
    encoder = make_encoder(bert, "{text|marked} [mask]", slots=0, markers=("*", "*", "+", "^"))
    (row,) = encoder.encode(make_example(CHILD, CRADLE))
    assert shown(bert, row) == (
        "[CLS] the * child * ( so small ) was put into the + cradle ^ . [MASK] [SEP]"
    )
    marks = np.isin(row.ids, bert.convert_tokens_to_ids(["*", "+", "^"]))
    assert (row.roles[marks] == Role.HARD).all() and marks.sum() == 4
    default = make_encoder(bert, "{text|marked} [mask]", slots=0)
    (row,) = default.encode(make_example(CHILD, CRADLE))
    assert "the @ child @ (" in shown(bert, row)


@pytest.mark.parametrize("kind", ["roberta", "t5"])
def test_tokens_are_those_of_the_sentence(kind, request):
    """With rows around entities the others are as without them: spaces stay with their words."""
    tokenizer = request.getfixturevalue(kind)
    style = "masked" if kind == "roberta" else "seq2seq"
    for spans in ((CHILD, CRADLE), (SMALL, CRADLE), ((0, 3), CRADLE), (CHILD, (38, 45))):
        example = make_example(*spans)
        plain = make_encoder(tokenizer, "{text} [mask]", slots=0, style=style)
        marked = make_encoder(tokenizer, "{text|soft} [mask]", slots=4, style=style)
        (row,), (other,) = marked.encode(example), plain.encode(example)
        assert row.ids[row.slot < 0].tolist() == other.ids.tolist()


def test_a_text_behind_a_space(roberta):
    """A text that the template puts behind others begins with a space, marked or not."""
    for spans in ((CHILD, CRADLE), ((0, 3), CRADLE)):
        plain = make_encoder(roberta, "[mask] {text}", slots=0)
        marked = make_encoder(roberta, "[mask] {text|soft}", slots=4)
        (row,), (other,) = (encoder.encode(make_example(*spans)) for encoder in (marked, plain))
        assert row.ids[row.slot < 0].tolist() == other.ids.tolist()


def test_an_entity_that_is_not_marked(bert):
    (row,) = make_encoder(bert).encode(
        Example({"text": "a b", "entity1": "a", "entity2": "z"}, entities=((0, 1), (-1, -1)))
    )
    assert shown(bert, row) == "[CLS] 0 a 1 b a 4 5 [MASK] 6 z [SEP]"


# -- long texts -----------------------------------------------------------------------------------


def by_loop(lengths, sides, room):
    """Takes tokens away one by one: outer ends, the longer one first, then middles."""
    lengths_left = list(lengths)
    while sum(lengths_left) > room:
        outer = [i for i, side in enumerate(sides) if side != 1 and lengths_left[i]]
        candidates = outer or [i for i in range(len(lengths_left)) if lengths_left[i]]
        longest = max(candidates, key=lambda i: (lengths_left[i], i))
        lengths_left[longest] -= 1
    return lengths_left


def test_cutting_is_that_of_the_loop():
    rng = np.random.default_rng(0)
    for _ in range(300):
        sides = [0, *[1] * rng.integers(0, 3), 2]
        lengths = rng.integers(0, 12, len(sides)).tolist()
        room = int(rng.integers(0, sum(lengths) + 3))
        actual = truncate_around_entities(lengths, sides, room)
        assert [a + b for a, b in actual] == by_loop(lengths, sides, room)
        for (first, last), side in zip(actual, sides, strict=True):
            assert (
                (first == 0) if side == 0 else (last == 0) if side == 2 else first - last in (0, 1)
            )


@pytest.mark.parametrize(
    "before, between, behind", [(60, 3, 2), (2, 3, 60), (30, 40, 30), (0, 90, 0)]
)
@pytest.mark.parametrize("mark", ["soft", "marked"])
def test_no_entity_is_lost(bert, mark, before, between, behind):
    text = " ".join(["x"] * before + ["old child"] + ["y"] * between + ["cradle"] + ["z"] * behind)
    at, other = text.index("old child"), text.index("cradle")
    example = make_example((at, at + 9), (other, other + 6), text=text)
    text = ROWS.replace("soft}", f"{mark}}}")
    encoder = make_encoder(bert, text, 7 if mark == "soft" else 3, max_len=32)
    (row,) = encoder.encode(example)
    assert len(row.ids) == 32 and row.cut
    words = shown(bert, row)
    inside = ("0 old child 1", "2 cradle 3") if mark == "soft" else (
        "@ old child @", "# cradle #")  # fmt: skip
    assert all(one in words for one in inside) and words.count("old child") == 2
    # What stays is what stands near them.
    assert ("x" in words) == (before > 0 and between < 40)
    if between < 10:
        assert words.count(" y") == between


def test_the_longest_entities_are_told_where_nothing_else_fits(bert):
    text = " ".join(["word"] * 30) + " end"
    line = refuse_line(
        make_encoder(bert, max_len=24).encode, make_example((0, 149), (150, 153), text=text)
    )
    assert "for entities" in line and "raise max_len to" in line


def test_divided_texts_are_whole():
    for spans in ((CHILD, CRADLE), (CRADLE, SMALL), (CHILD,), ((0, 3), (3, 9))):
        pieces = list(mark_entities(TEXT, spans, space=False))
        joined = "".join(piece.text for piece in pieces)
        assert joined == TEXT and sum(piece.kind == "marker" for piece in pieces) == 2 * len(spans)
