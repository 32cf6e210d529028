"""Tokenizers trained from a corpus load as their families' own and keep their specials."""

import json
import re
import sys
from pathlib import Path

import pytest

from jaxprompt.corpus import train_tokenizer
from jaxprompt.corpus.read import DocumentSource, TextSettings
from jaxprompt.corpus.train_tokenizer import _divide_runs
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer
from jaxprompt.errors import InputError

FAMILIES = {"bert": "masked", "electra": "masked", "roberta": "masked", "gpt2": "causal"} | {
    "t5": "seq2seq"
}
SIZE = 1200


@pytest.fixture(scope="module")
def text(shared, tmp_path_factory):
    """A file with 25 chapters, 300,000 characters."""
    source = DocumentSource(str(shared / "data/corpus_books_en/dev.jsonl.gz"), TextSettings())
    path = tmp_path_factory.mktemp("text") / "x.jsonl"
    rows = [json.dumps({"body": text}) for text in list(source)[:25]]
    path.write_text("\n".join(rows))
    return path


def train(family, text, folder, size=SIZE, **more):
    return train_tokenizer(family, str(text), folder, size, TextSettings(field="body"), **more)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    return {name: train(name, text, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.mark.default_cases("t5")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gets_its_own(family, trained, text):
    import transformers

    tokenizer = trained[family]
    special_tokens = {
        "bert": transformers.BertTokenizer, "electra": transformers.BertTokenizer,
        "roberta": transformers.RobertaTokenizer, "gpt2": transformers.GPT2Tokenizer,
        "t5": transformers.T5Tokenizer,
    }  # fmt: skip
    assert type(tokenizer) is special_tokens[family]
    assert (
        type(transformers.AutoTokenizer.from_pretrained(tokenizer.name_or_path))
        is special_tokens[family]
    )
    assert len(tokenizer) == SIZE and sorted(tokenizer.get_vocab().values()) == list(range(SIZE))
    style = FAMILIES[family]
    sentinel = "<extra_id_{}>"
    specials = read_specials(tokenizer, style, eos=True, sentinel=sentinel, num_masks=2)
    expected = {
        "bert": ((2,), (3,), (3,), (4,), 0),
        "electra": ((2,), (3,), (3,), (4,), 0),
        "roberta": ((0,), (2,), (2, 2), (SIZE - 1,), 1),
        "gpt2": ((), (), (SIZE - 1,), (), SIZE - 1),
        "t5": ((), (1,), (1,), (SIZE - 1, SIZE - 2), 0),
    }
    assert tuple(specials[1:6]) == expected[family]
    assert specials.stop == {"gpt2": SIZE - 1, "t5": 1}.get(family, -1)  # what a text ends with
    with open(text) as file:
        chapter = json.loads(file.readline())["body"]
    (ids,) = encode_texts(tokenizer, [chapter])
    assert len(ids) < len(chapter) / 2.2  # it has learned words
    assert tokenizer.unk_token_id not in ids or family == "gpt2"


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_the_same_text_gives_the_same_tokenizer(family, trained, text, tmp_path):
    """The trainers' tables have another order each time that one is made."""
    first = Path(trained[family].name_or_path)
    train(family, text, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in first.iterdir()}
    for path in first.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_what_a_killed_run_has_trained_is_not_trained_again(text, tmp_path, monkeypatch):
    """Killed after its last file; one that stopped before it trains again."""
    module = sys.modules["jaxprompt.corpus.train_tokenizer"]  # whose function has its name

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_save", stop)
        train("bert", text, tmp_path, 300)
    assert not (tmp_path / "tokenizer.json").exists()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "load_tokenizer", stop)
        train("bert", text, tmp_path, 300)
    monkeypatch.setattr(module, "_train", stop)
    assert len(train("bert", text, tmp_path, 300)) == 300
    for change in (dict(size=301), dict(lowercase=False)):
        with pytest.raises(InputError, match="already has a tokenizer.json"):
            train("bert", text, tmp_path, **dict(size=300) | change)
    (tmp_path / "x.jsonl").write_text(text.read_text() + '\n{"body": "more"}')
    with pytest.raises(InputError, match="already has a tokenizer.json"):
        train("bert", tmp_path / "x.jsonl", tmp_path, 300)


def test_text_comes_back(trained):
    text = " It was the best of times; it was the worst."
    for family in ("roberta", "gpt2"):
        odd = text + " 東京 \t ﬁ\n"
        ids = trained[family](odd, add_special_tokens=False)["input_ids"]
        assert trained[family].decode(ids) == odd
    ids = trained["t5"](text, add_special_tokens=False)["input_ids"]
    assert trained["t5"].decode(ids).strip() == text.strip()
    assert trained["t5"].convert_tokens_to_ids("<extra_id_99>") == SIZE - 100
    ids = trained["bert"](text)["input_ids"]
    assert trained["bert"].decode(ids[1:-1]).replace(" ", "") == text.lower().replace(" ", "")


def test_case(text, trained, tmp_path):
    cased = train("bert", text, tmp_path, lowercase=False)
    upper = [any(c.isupper() for c in "".join(t.get_vocab())) for t in (cased, trained["bert"])]
    pieces = lambda tokenizer: tokenizer.convert_tokens_to_string(tokenizer.tokenize("The END"))
    assert pieces(load_tokenizer(tmp_path)) == "The END" and pieces(trained["bert"]) == "the end"
    # [PAD] and its kin are upper case in both.
    assert (
        upper[0] and sum(any(map(str.isupper, word)) for word in trained["bert"].get_vocab()) == 5
    )


def test_every_second_document_is_taken(tmp_path):
    (tmp_path / "x.txt").write_text("\n".join(["aaaa bbbb", "cccc dddd"] * 50))
    settings = TextSettings(documents="line")
    tokenizer = train_tokenizer(
        "bert", str(tmp_path / "x.txt"), tmp_path / "t", 100, settings, max_chars=500
    )
    assert {"aaaa", "bbbb"} < set(tokenizer.get_vocab()) and "c" not in tokenizer.get_vocab()


@pytest.mark.long
def test_chinese_characters_do_not_fill_the_vocabulary(shared, tmp_path):
    place = str(shared / "data/corpus_novels_zh/dev.jsonl.gz")
    text = "".join(DocumentSource(place, TextSettings()))[:20_000]
    for size, unknown in ((900, 0.15), (1500, 0.06)):
        tokenizer = train_tokenizer("bert", place, tmp_path / str(size), size)
        # No more than a third where words are to be had, here all: each character is a word.
        assert len(tokenizer) == size
        assert sum(len(token) == 1 for token in tokenizer.get_vocab()) > size - 50
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids.count(tokenizer.unk_token_id) < unknown * len(ids)
    with pytest.raises(InputError, match="no t5 tokenizer of 900 tokens can be trained on this te"):
        train_tokenizer("t5", place, tmp_path / "t5", 900)


def test_a_folder_of_a_model_keeps_its_tokenizer(text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="has a model with its tokenizer; use another"):
        train_tokenizer("bert", str(text), tmp_path, 200, TextSettings(field="body"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("run", ["ab", "-+", " "])
def test_a_long_word_is_divided(run):
    """Normal text, with a word of 4,999 letters, is as it was; only white space is lost."""
    normal = "the cat, " * 3000 + "a" * 4999 + "的，" * 5000
    assert _divide_runs(normal) == normal
    text = f"{normal}\n{run * 20_000}\n{normal}"
    divided = _divide_runs(text)
    assert max(map(len, re.findall(r"\w+|\s+|[^\w\s]+", divided))) < 10_000
    assert "".join(divided.split()) == "".join(text.split())


def test_bad_input(text, tmp_path):
    with pytest.raises(
        InputError, match="tokenizer family 'robert' is unknown; nearest: roberta, bert"
    ):
        train("robert", text, tmp_path)
    for family, least in (("bert", 100), ("gpt2", 300), ("t5", 200)):
        with pytest.raises(InputError, match=f"vocab_size .*=50 must be at least {least}"):
            train(family, text, tmp_path, 50)
    with pytest.raises(InputError, match="vocab_size=1000001 must be at most 1,000,000"):
        train("bert", text, tmp_path, 1_000_001)
    (tmp_path / "empty.jsonl").write_text('{"body": ""}\n')
    with pytest.raises(InputError, match="is empty: there is no text to train a tokenizer on"):
        train("bert", tmp_path / "empty.jsonl", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="already has a tokenizer.json; delete it, or use another"):
        train("bert", text, tmp_path)
    (tmp_path / "few.jsonl").write_text('{"body": "a few words"}\n')
    assert len(train("gpt2", tmp_path / "few.jsonl", tmp_path / "few")) < SIZE
