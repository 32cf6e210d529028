"""Texts as subwords: no name of a special token becomes one, and no subword begins with a space."""

import pytest
import transformers
from sentence_pieces import KINDS, write_pieces
from tokenizers import processors

from jaxprompt.data.tokenizer import (
    encode_exact,
    encode_texts,
    encode_with_offsets,
    keeps_spaces,
    load_tokenizer,
    starts_with_space,
)

SPECIALS = {
    "t5": "5 </s> euros <extra_id_0> here <pad>",
    "bert-uncased": "5 [SEP] euros [MASK] here [PAD]",
    "roberta": "5 </s> euros <mask> here <pad>",
}


@pytest.mark.parametrize("name", SPECIALS)
def test_no_name_of_a_special_token_becomes_one(name, shared):
    tokenizer = load_tokenizer(shared / "tokenizers" / name)
    text = SPECIALS[name]
    specials = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    (ids,) = encode_texts(tokenizer, [text])
    placed, places = encode_with_offsets(tokenizer, [text])[text]
    assert specials.isdisjoint(ids) and specials.isdisjoint(placed)
    assert len(placed) == len(places)
    read = tokenizer.decode(ids)
    assert all(word in read for word in ("5", "euros", "here"))


@pytest.mark.parametrize("name", ["t5", "bert-uncased", "roberta", "no trimmed offsets"])
def test_no_subword_begins_with_a_space(name, shared):
    folder = "roberta" if " " in name else name
    tokenizer = load_tokenizer(shared / "tokenizers" / folder)
    if folder != name:  # as ModernBERT's
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    text = "Ada lives in  Paris,\tnot in Rome ."
    _, places = encode_with_offsets(tokenizer, [text])[text]
    words = [text[start:end] for start, end in places if end > start]
    assert all(word == word.strip() for word in words)
    assert "".join(words) == "".join(text.split())
    start = text.index("Paris")
    first = [own for own in places.tolist() if own[1] > start][0]
    assert first[0] == start


@pytest.mark.parametrize("kind", KINDS)
def test_white_space_is_that_of_the_tokenizer_as_released(kind, tmp_path):
    released = transformers.AutoTokenizer.from_pretrained(write_pieces(tmp_path, kind))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("hello\nworld", "hello  world", "hello\tworld\n\nhi there ", "a</s>b", ""):
        front = " " * starts_with_space(tokenizer) * bool(text)
        expected = released(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        (ids,) = encode_texts(tokenizer, [front + text])
        assert ids == expected
        placed, places = encode_with_offsets(tokenizer, [front + text])[front + text]
        assert placed == ids and len(places) == len(ids)
    assert keeps_spaces(tokenizer)
    assert encode_exact(tokenizer, "\n") == [3 + ord("\n")]


def test_white_space_of_any_length_is_a_space_of_t5(shared):
    tokenizer = load_tokenizer(shared / "tokenizers/t5")
    released = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers/t5")
    for text in ("a house", "a \n\t house \n", "  a house"):
        expected = released(text, add_special_tokens=False)["input_ids"]
        text = f" {text}"
        assert encode_texts(tokenizer, [text]) == [expected]
        placed, places = encode_with_offsets(tokenizer, [text])[text]
        assert placed == expected and text[slice(*places[-1])].strip() == "house"


def test_words_behind_a_space(shared):
    assert not keeps_spaces(load_tokenizer(shared / "tokenizers/bert-uncased"))
    assert keeps_spaces(load_tokenizer(shared / "tokenizers/roberta"))
    assert keeps_spaces(load_tokenizer(shared / "tokenizers/t5"))
