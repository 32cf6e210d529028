"""Texts of generated ids: where a stop string cuts them, and what a stream may show."""

import numpy as np
import pytest

from jaxprompt.data.text.decoding import TextDecoder, stop_ids
from jaxprompt.data.text.encoded import GeneratedText

END, PAD = 1, 0
WORDS = ["", "<end>", " a", " b", "#", "##", " \n", "\ufffd"]  # of ids


class Words:
    """A tokenizer whose tokens are the words above, of which the first two are special."""

    def batch_decode(self, rows, skip_special_tokens=False):
        special = 2 if skip_special_tokens else 0
        return ["".join(WORDS[i] for i in row if i >= special) for row in rows]

    def get_added_vocab(self):
        return {"<end>": END}


def decode(ids, *stop, logprobs=None):
    row = np.array([ids + [PAD] * (8 - len(ids))])
    decoder = TextDecoder(Words(), (END,), stop)
    logs = None if logprobs is None else np.array([logprobs + [0.0] * (8 - len(ids))])
    (text,) = decoder.decode(row, np.array([len(ids)]), logs)
    return text


@pytest.mark.parametrize(
    "stop, text",
    [
        ((), "a b## a#"),
        (("##",), "a b"),
        (("###",), "a b## a#"),
        (("#", " b#"), "a"),  # the first place counts
        (("a",), ""),
    ],
)
def test_a_text_is_cut_before_the_first_stop_string(stop, text):
    assert decode([2, 3, 5, 2, 4, END], *stop) == GeneratedText(text)


def test_tokens_end_with_the_one_that_completes_the_stop_string():
    logprobs = [-0.5, -1.0, -1.5, -2.0, -2.5]
    whole = decode([2, 3, 4, 4, END], logprobs=logprobs)
    assert whole == GeneratedText("a b##", (" a", " b", "#", "#", "<end>"), tuple(logprobs))
    cut = decode([2, 3, 4, 4, END], "##", logprobs=logprobs)
    assert cut == GeneratedText("a b", (" a", " b", "#", "#"), tuple(logprobs[:4]))
    first = decode([2, 3, 4, 4, END], "a", logprobs=logprobs)
    assert first == GeneratedText("", (" a",), (-0.5,))


def test_rows_with_a_stop_string_are_stopped():
    rows = np.array([[2, 4, 4, 0], [2, 4, 2, 4], [5, 0, 0, 0]])
    assert TextDecoder(Words(), (END,), ("##",)).is_stopped(rows).tolist() == [True, False, True]


@pytest.mark.parametrize(
    "ids, part",
    [
        ([2], "a"),
        ([2, 6], "a"),  # white space at the end may be cut off
        ([2, 6, 3], "a \n b"),
        ([2, 4], "a"),  # perhaps the beginning of ##
        ([2, 4, 2], "a# a"),
        ([2, 7], "a"),  # half a character
        ([2, 5, 2], "a"),
    ],
)
def test_a_stream_shows_what_cannot_change(ids, part):
    decoder = TextDecoder(Words(), (END,), ("##",))
    assert decoder.final_part(np.array(ids + [PAD] * 4), is_done=False) == part
    assert decode(ids, "##").text.startswith(part)


def test_a_stop_string_that_is_a_token_is_an_end_id():
    assert stop_ids(Words(), ("##", "<end>")) == (END,)
