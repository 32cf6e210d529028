"""How label words are fed and read: branches behind one stem, masks, whole targets."""

import numpy as np
import pytest

from jaxprompt.data.text.specials import Specials
from jaxprompt.data.text.target import (
    Frame,
    branch_plan,
    make_answer_frame,
    masked_plan,
    read_answer,
)
from jaxprompt.errors import InputError

# Two classes: a word of 1 piece and one of 3; a word of 2.
WORDS = np.array([[[7, -1, -1], [8, 9, 10]], [[11, 12, -1], [-1, -1, -1]]], np.int32)
T5 = Specials("seq2seq", (), (1,), (1,), (99, 98), 0, stop=1)


def test_pieces_at_masks():
    plan = masked_plan(WORDS)
    assert len(plan.fed) == 0 and plan.reads.tolist() == [0, 1, 2]
    assert plan.words.at.tolist() == [[[0, -1, -1], [0, 1, 2]], [[0, 1, -1], [-1, -1, -1]]]
    assert plan.words.rows.tolist() == [7, 8, 9, 10, 11, 12]
    is_word = WORDS >= 0
    np.testing.assert_array_equal(plan.words.rows[plan.words.where[is_word]], WORDS[is_word])
    assert (plan.words.where[~is_word] == -1).all()


def test_each_longer_word_is_a_branch():
    plan = branch_plan(WORDS, Frame((99,), ()), whole=False)
    assert plan.fed.tolist() == [8, 9, 11]
    assert plan.branch.tolist() == [1, 1, 2]
    assert plan.depth.tolist() == [1, 2, 1]
    assert plan.reads.tolist() == [0, 1, 2, 3]  # the stem's end, then each token fed
    assert plan.words.ids.tolist() == WORDS.tolist()
    assert plan.words.at.tolist() == [[[0, -1, -1], [0, 1, 2]], [[0, 3, -1], [-1, -1, -1]]]


def test_the_whole_target_has_stem_and_end():
    plan = branch_plan(np.array([[[7]], [[8]]], np.int32), Frame((99, 98), (97,)), whole=True)
    assert plan.fed.tolist() == [7, 8] and plan.branch.tolist() == [1, 2]
    assert plan.reads.tolist() == [-2, -1, 0, 1, 2]
    assert plan.whole.ids.tolist() == [[[99, 98, 7, 97]], [[99, 98, 8, 97]]]
    assert plan.reads[plan.whole.at].tolist() == [[[-2, -1, 0, 1]], [[-2, -1, 0, 2]]]
    assert plan.words.ids.tolist() == [[[7]], [[8]]]  # decided by the label alone
    assert plan.reads[plan.words.at].tolist() == [[[0]], [[0]]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[mask] {label}", Frame((99,), ())),
        ("[mask] {label} [mask]", Frame((99,), (98,))),
        ("{label} [sep]", Frame((), (1,))),
        ("{label}", Frame((), ())),
    ],
)
def test_answers(text, expected):
    answer, sentinels = read_answer(text)
    assert sentinels == text.count("[mask]")
    assert make_answer_frame(answer, T5) == expected


def test_a_glm_writes_no_sentinel():
    glm = T5._replace(style="infilling", masks=(97,))
    assert make_answer_frame(read_answer("{label} [sep]")[0], glm) == Frame((), (1,))
    with pytest.raises(InputError, match=r"task.answer='\[mask\] \{label\}' has \[mask\], but a"):
        make_answer_frame(read_answer("[mask] {label}")[0], glm)


@pytest.mark.parametrize("text", ["[mask]", "{word}", "{label} {label}", "It is {label}", "[soft]"])
def test_answers_that_say_nothing(text):
    with pytest.raises(InputError, match="task.answer="):
        read_answer(text)
