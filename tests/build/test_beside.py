"""What stands between demonstrations, by the kind of tokenizer."""

from types import SimpleNamespace

import numpy as np
import pytest
from sentence_pieces import KINDS, write_pieces

from jaxprompt.build.scorer import demo_format
from jaxprompt.data.text.demos import DemoSettings
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_break_ends_each_on_a_left_to_right_model(kind, tmp_path):
    tokenizer = load_tokenizer(write_pieces(tmp_path, kind))
    specials = read_specials(tokenizer, "causal", eos=True, sentinel="", masks=1)
    laid = SimpleNamespace(
        specials=specials, verbalizer=SimpleNamespace(ids=np.array([[[7, -1]], [[8, 9]]]))
    )
    settings = SimpleNamespace(
        per_class=0, total=0, exact=2, max_demo_tokens=0, max_example_tokens=0
    )
    beside = demo_format(SimpleNamespace(settings=settings), laid, tokenizer)
    assert [tokenizer.decode(run.ids) for run in beside.separator] == ["\n"]
    assert beside.words == [[7], [8, 9]] and beside.first and beside.whole


def test_a_head_without_label_words_shows_none():
    settings = DemoSettings(1, 0, 0, 1, 1.0, "", 0, 0, 0)
    laid = SimpleNamespace(specials=None, verbalizer=None, head=SimpleNamespace(name="linear"))
    with pytest.raises(InputError, match="linear"):
        demo_format(SimpleNamespace(settings=settings), laid, None)
