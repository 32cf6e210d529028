"""Rows that soft prompts start from: drawn where they should be, the same for the same seed."""

import numpy as np
import pytest
from reading_rows import make_encoder

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.data.text.words import (
    choose_rows,
    ids_of_no_word,
    template_ids,
    text_ids,
)
from jaxprompt.errors import InputError

COUNTS = np.bincount(np.repeat([2007, 2003, 2009, 2005, 0], [4, 4, 2, 1, 50]))


def flat(rows):
    assert all(len(row) == 1 for row in rows)
    return [row[0] for row in rows]


def test_special_ids(bert, roberta):
    ids = ids_of_no_word(bert)
    assert {0, 1, 99, 100, 101, 102, 103, 104, 998} <= ids
    assert 1996 not in ids  # "the"
    assert {0, 1, 2, 3, 50264} <= ids_of_no_word(roberta)


def test_words_of_the_vocabulary_are_sampled_once_each(bert):
    no_words = ids_of_no_word(bert)
    few = choose_rows("vocab", bert, length=16, seed=0, vocab_size=2000, top=1050)
    assert len(set(flat(few))) == 16 and not no_words & set(flat(few)) and max(flat(few)) < 1050
    words = {i for i in range(1020) if i not in no_words}
    repeated = flat(choose_rows("vocab", bert, length=len(words) + 1, seed=0, vocab_size=1020))
    assert set(repeated) < words  # with repeats, as there are too few


def test_words_of_a_text_by_count_then_id(bert):
    draw = lambda kind, length, **more: set(
        flat(choose_rows(kind, bert, length=length, seed=0, counts=COUNTS, **more))
    )
    assert draw("frequent", 2, top=2) == {2003, 2007} and draw("frequent", 1, top=1) == {2003}
    assert draw("frequent", 4) == draw("task", 4) == {2003, 2005, 2007, 2009}
    with pytest.raises(InputError, match="the text has no words"):
        choose_rows("task", bert, length=4, seed=0, counts=np.array([2]))


def test_text_ids_leave_the_template_out(bert):
    encoder = make_encoder(bert, "{a} It was [mask].", num_slots=2)
    ids = text_ids(encoder.encode_all([Example({"a": "a cat"}), Example({"a": "dogs"})]))
    assert bert.convert_ids_to_tokens(ids) == ["a", "cat", "dogs"]
    assert text_ids([]).tolist() == []


def test_labels_then_vocabulary(roberta):
    pieces = encode_texts(roberta, [" great", " fine", " unwatchable"])
    labels = [pieces[0] + pieces[1], pieces[2]]
    rows = choose_rows("labels", roberta, length=4, seed=1, labels=labels)
    tokens = [roberta.convert_ids_to_tokens(row) for row in rows]
    assert tokens[0] == ["Ġgreat", "Ġfine"]
    assert "".join(tokens[1]) == "Ġunwatchable" and len(tokens[1]) > 1
    assert len(rows) == 4 and len(rows[2]) == len(rows[3]) == 1


def test_more_labels_than_rows_are_left_out_aloud(bert, caplog):
    rows = choose_rows("labels", bert, length=1, seed=0, labels=[[7], [8]])
    assert rows == [[7]]
    assert "2 classes, but only 1 soft tokens" in caplog.text


def test_given_text_cut_and_filled(bert, caplog):
    rows = choose_rows("text", bert, length=5, seed=0, text="a good film")
    assert bert.convert_ids_to_tokens(flat(rows)[:3]) == ["a", "good", "film"]
    assert len(rows) == 5
    short = choose_rows("text", bert, length=2, seed=0, text="a good film")
    assert bert.convert_ids_to_tokens(flat(short)) == ["a", "good"]
    assert caplog.messages == [
        "prompt.text has 3 tokens and the prompt 5: the last 2 are from the vocabulary",
        "prompt.text has 3 tokens and the prompt 2: the last 1 of the text are not used",
    ]
    choose_rows("text", bert, length=3, seed=0, text="a good film")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("kind", ["vocab", "frequent", "labels", "text", "task"])
def test_seed_decides(bert, kind):
    options = {"counts": np.ones(4000, int), "labels": [[7], [8]], "text": "it was"}
    first, again, other = (
        choose_rows(kind, bert, length=8, seed=seed, **options) for seed in (1, 1, 2)
    )
    assert len(first) == 8 and first == again != other


def test_how_many_of_the_most_common(bert):
    """The whole vocabulary (Gu et al. 2022) or 5,000 of it (Lester et al. 2021); 1,000 words."""
    draw = lambda kind, **options: flat(choose_rows(kind, bert, length=600, seed=0, **options))
    vocab, lester = draw("vocab", vocab_size=40_000), draw("vocab", top=5000)
    assert 25_000 < max(vocab) < len(bert) and np.mean(np.array(vocab) > 5000) > 0.7
    assert max(lester) < 5000
    counts = np.arange(30_000)  # the higher an id, the more often it stands in the text
    assert min(draw("frequent", counts=counts)) >= 29_000
    assert min(draw("frequent", counts=counts, top=700)) >= 29_300
    assert min(draw("task", counts=counts)) < 10_000


def test_golden_draw(bert):
    chosen = flat(choose_rows("vocab", bert, length=5, seed=42, top=5000))
    assert chosen == [1554, 3792, 1526, 4870, 3989]


def test_bad_choices(bert):
    for kind, message in (
        ("labels", "prompt.start=labels needs label words"),
        ("task", "prompt.start=task .* training examples"),
        ("text", "has no token"),
    ):
        with pytest.raises(InputError, match=message):
            choose_rows(kind, bert, length=2, seed=0, text=" ")


@pytest.mark.parametrize(
    ("text", "template"),  # of LM-BFF's run_experiment.sh
    [
        ("It was.", "Fun It was<mask>."),
        ("This is.", "Fun This is<mask>."),
        (":", "<mask>: Fun"),
        ("? ,", "Fun?<mask>, Fun"),
    ],
)
def test_a_templates_words_are_tokens_as_inside_of_it(roberta, text, template):
    """In a byte-level vocabulary "?" and " ?" are two tokens, and no space is in front of it."""
    outside = {"Fun", "ĠFun", "<mask>"}
    inside = [token for token in roberta.tokenize(template) if token not in outside]
    assert roberta.convert_ids_to_tokens(template_ids(roberta, text)) == inside
