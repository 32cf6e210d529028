"""The special tokens around an input, from what a tokenizer has."""

from types import SimpleNamespace

import pytest

from jaxprompt.data.text.specials import read_specials
from jaxprompt.errors import InputError


def tokenizer(**ids):
    names = ("cls", "sep", "bos", "eos", "pad", "mask")
    fields = {f"{name}_token_id": ids.get(name) for name in names}
    return SimpleNamespace(
        **fields, name_or_path="tiny", num_special_tokens_to_add=lambda pair: 3 + pair
    )


def read(**ids):
    return read_specials(tokenizer(**ids), "masked", eos=True, sentinel="", num_masks=1)


def test_a_masked_model_without_cls_has_the_tokens_of_a_llama():
    """As EuroBERT: the text stands between <|begin_of_text|> and <|end_of_text|>."""
    specials = read(bos=5, eos=6, pad=0, mask=7)
    assert (specials.cls, specials.end, specials.sep) == ((5,), (6,), (6, 6))
    assert (specials.masks, specials.pad) == ((7,), 0)
    both = read(cls=1, sep=2, bos=5, eos=6, pad=0, mask=7)
    assert (both.cls, both.end) == ((1,), (2,))


def test_a_tokenizer_without_either_is_refused():
    with pytest.raises(InputError, match="has no cls token"):
        read(eos=6, pad=0, mask=7)
