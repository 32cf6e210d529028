"""Texts as subwords: no name of a special token becomes one, and no subword begins with a space."""

import json

import pytest
import sentencepiece
import transformers
from released_tokenizers import FORMS, draw_texts, write_form
from sentence_pieces import KINDS, write_pieces
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxprompt.data.text import tokenizer as tokenizer_module
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.tokenizer import (
    encode_exact,
    encode_texts,
    encode_with_offsets,
    keeps_spaces,
    load_tokenizer,
    num_segments,
    spaced_sections,
    special_ids,
    starts_with_space,
)
from jaxprompt.errors import InputError

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
    first = [place for place in places.tolist() if place[1] > start][0]
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


def train_pieces(path, **specials):
    """Trains a SentencePiece vocabulary that replaces characters first, as released ones do."""
    text = ["hello world , the cat sat on the mat .", "你 好 , 天 气 ! ( 一 ) ?"] * 40
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=file, vocab_size=60, minloglevel=2,
            hard_vocab_limit=False, normalization_rule_name="nmt_nfkc", character_coverage=1.0,
            **specials,
        )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def save_earlier(folder, tokenizer):
    """Writes tokenizer.json with the steps of transformers 4. -> its path"""
    replaced = json.loads(tokenizer.backend_tokenizer.to_str())
    steps = [{"type": "Strip", "strip_left": True, "strip_right": True}]
    steps += [
        step for step in replaced["normalizer"]["normalizers"] if step["type"] == "Precompiled"
    ]
    replaced["normalizer"] = {"type": "Sequence", "normalizers": steps}
    replaced["pre_tokenizer"]["pretokenizers"][0]["prepend_scheme"] = "always"
    replaced["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(replaced))
    return str(folder / "tokenizer.json")


T5 = dict(pad_id=0, pad_piece="<pad>", bos_id=-1, eos_id=1, unk_id=2)
DEBERTA = dict(
    pad_id=0, pad_piece="[PAD]", bos_id=1, bos_piece="[CLS]", eos_id=2, eos_piece="[SEP]", unk_id=3,
    unk_piece="[UNK]",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "file", "specials"),
    [
        ("mt5", "spiece.model", T5), ("t5", "spiece.model", T5),
        ("deberta-v2", "spm.model", DEBERTA),
    ],
)  # fmt: skip
def test_a_sentencepiece_file_alone(tmp_path, family, file, specials):
    """T5 1.1, mT5 and DeBERTa v3 have no tokenizer.json on the hub."""
    whole = train_pieces(tmp_path / file, **specials)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("hello world", "你好，天气！（一）", "the　ｃａｔ"):
        # Ours puts no space before a text, see test_white_space_is_that_of_the_tokenizer.
        expected = whole.EncodeAsIds(text)
        actual = tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
        assert actual == expected, (tokenizer.tokenize(text), whole.EncodeAsPieces(text))
    if family == "deberta-v2":  # as earlier versions of transformers have saved it
        reloaded = Tokenizer.from_file(save_earlier(tmp_path, tokenizer))
        expected = reloaded.encode("你好，天气！").ids
        (tmp_path / file).unlink()
        again = load_tokenizer(tmp_path)
        assert again(" 你好，天气！", add_special_tokens=False)["input_ids"] == expected


def test_a_tokenizer_file_is_read_as_it_stands(tmp_path):
    """transformers would read it as the vocabulary of the class of its model_type."""
    pieces = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "ab": 5, "▁ab": 6}
    tokenizer = Tokenizer(
        models.BPE(pieces, [("▁", "a"), ("a", "b"), ("▁a", "b")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert encode_texts(load_tokenizer(tmp_path), [" ab ab"]) == [[6, 6]]


@pytest.mark.parametrize("name", FORMS)
def test_ids_are_those_of_the_file(name, tmp_path, monkeypatch):
    """Before spaces are taken as written, which the second half of this test is about."""
    file, texts = write_form(tmp_path, name), draw_texts(200, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_module, "_take_spaces_as_written", lambda tokenizer: None)
        tokenizer = load_tokenizer(tmp_path)
    for text, second in zip(texts, texts[1:] + texts[:1], strict=True):
        expected = file.encode(text).ids
        assert tokenizer(text)["input_ids"] == expected
        pair = file.encode(text, second)
        assert tokenizer(text, second)["input_ids"] == pair.ids
        types = tokenizer(text, second, return_token_type_ids=True)["token_type_ids"]
        assert types == pair.type_ids
        assert tokenizer.decode(expected) == file.decode(expected, skip_special_tokens=False)
    assert tokenizer.get_vocab() == file.get_vocab()
    tokenizer, file.encode_special_tokens = load_tokenizer(tmp_path), True
    front, unknown = " " * starts_with_space(tokenizer), tokenizer.unk_token_id
    plain = [text for text in texts if "<code>" not in text and "ugh" not in text]
    assert len(plain) > 80
    for text, ids in zip(plain, encode_texts(tokenizer, [front + x for x in plain]), strict=True):
        written = file.encode(text, add_special_tokens=False).ids
        assert ids == [unknown if i in special_ids(tokenizer) else i for i in written]


@pytest.mark.parametrize(
    ("name", "spaced"),
    [
        ("roberta of words", "always"), ("llama 2", "always"), ("llama 2 later", "first"),
        ("roberta", "never"), ("gemma", "never"), ("t5 later", "always"), ("deberta v3", "always"),
    ],
)  # fmt: skip
def test_texts_are_glued(name, spaced, tmp_path):
    write_form(tmp_path, name)
    tokenizer = load_tokenizer(tmp_path)
    assert spaced_sections(tokenizer) == spaced
    front = " " * starts_with_space(tokenizer)
    parts = encode_texts(tokenizer, [f"{front}the cat", " sat", ",", "  7", "."])
    (whole,) = encode_texts(tokenizer, [f"{front}the cat sat,  7."])
    assert tokenizer.decode(sum(parts, [])) == tokenizer.decode(whole)
    first = [tokenizer.convert_ids_to_tokens(ids)[0] for ids in parts]
    assert [token[0] in "▁Ġ" for token in first] == [bool(front), True, False, True, False]


def test_special_tokens_and_settings_are_those_of_the_class_and_config(tmp_path):
    """The file has neither; GPT-2's class drops the file's <code> where the config lists tokens."""
    write_form(tmp_path, "dolma")
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"special": true', '"special": false'))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {
        "pad_token": "<pad>", "additional_special_tokens": ["<turn>"], "padding_side": "left",
        "model_max_length": 77, "chat_template": "{{ messages }}",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    released = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    size = Tokenizer.from_file(str(path)).get_vocab_size()
    assert "<code>" not in released.get_vocab()
    assert type(tokenizer) is transformers.GPT2Tokenizer
    assert tokenizer.special_tokens_map == released.special_tokens_map
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 0)
    assert sorted(tokenizer.convert_tokens_to_ids(["<pad>", "<turn>"])) == [size, size + 1]
    assert special_ids(tokenizer) == {size, size + 1} and len(tokenizer) == size + 2
    for name in ("padding_side", "model_max_length", "chat_template", "model_input_names"):
        assert getattr(tokenizer, name) == getattr(released, name)
    text = "a <turn> b <code> 2024:\n\n<pad>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert {size, size + 1} < set(tokenizer(text)["input_ids"])
    assert 0 not in encode_texts(tokenizer, ["a<|endoftext|>b"])[0]


@pytest.mark.parametrize("vocabulary", [None, True, False])
def test_a_cased_vocabulary_without_a_word_on_its_case(tmp_path, vocabulary):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Hello", "The", "the", "cat", "hello"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    if vocabulary is None:
        with pytest.raises(InputError, match='2 of its 5 words.*{"do_lower_case": false}'):
            load_tokenizer(tmp_path)
        (tmp_path / "vocab.txt").write_text("\n".join(word.lower() for word in words[5:]))
        return
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": vocabulary}))
    assert encode_texts(load_tokenizer(tmp_path), ["The cat"]) == [[7 if vocabulary else 6, 8]]


def test_a_bert_whose_config_names_no_model_type(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat")
    (tmp_path / "config.json").write_text('{"type_vocab_size": 2}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer("The cat")["input_ids"] == [2, 5, 6, 3] and tokenizer.mask_token_id == 4


def test_a_tokenizer_that_is_code_beside_its_files(tmp_path):
    """As GLM's; the code is not run."""
    (tmp_path / "config.json").write_text('{"model_type": "glm"}')
    auto_map = {"AutoTokenizer": ["code.OwnTokenizer", None]}
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("1 / 0")
    with pytest.raises(InputError, match="its class OwnTokenizer is code in its folder"):
        load_tokenizer(tmp_path)


def test_an_albert_with_the_vocabulary_of_a_bert(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n好\n坏")
    (tmp_path / "config.json").write_text('{"model_type": "albert"}')
    assert encode_texts(load_tokenizer(tmp_path), ["好坏"]) == [[5, 6]]


def test_a_gpt2_with_the_vocabulary_of_a_bert_ends_with_its_separator(shared):
    bert = load_tokenizer(shared / "tokenizers/bert-uncased")
    specials = read_specials(bert, "causal", eos=True, sentinel="", num_masks=0)
    assert (specials.cls, specials.stop) == ((bert.cls_token_id,), bert.sep_token_id)


def test_a_second_text_is_a_segment_where_the_tokenizer_says_so(shared, tmp_path):
    assert num_segments(load_tokenizer(shared / "tokenizers/bert-uncased"), 2) == 2
    roberta = load_tokenizer(shared / "tokenizers/roberta")
    assert (num_segments(roberta, 2), num_segments(roberta, 0)) == (1, 0)
