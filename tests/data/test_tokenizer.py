"""Texts as subwords: no name of a special token becomes one, and no subword begins with a space."""

import pytest
from tokenizers import processors

from jaxprompt.data.tokenizer import encode_texts, encode_with_offsets, load_tokenizer

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
