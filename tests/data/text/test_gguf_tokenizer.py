"""The tokenizer of a GGUF file: the ids of transformers' own, and one saved copy of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from released_tokenizers import draw_texts, write_form
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxprompt.data.text import gguf_tokenizer
from jaxprompt.data.text.gguf_tokenizer import tokenizer_folder
from jaxprompt.data.text.tokenizer import encode_texts, load_tokenizer, starts_with_space
from jaxprompt.errors import InputError

gguf = pytest.importorskip("gguf", reason="the package gguf is absent: pip install gguf")

from gguf_files import finish  # noqa: E402

SUBJECTS = (
    "a dull film",
    "the café's 3rd  menu",
    "x = f(a_1) # код",
    "日本語の文",
    "naïve 🙂 talk",
)
SENTENCES = [
    form.format(subject)
    for subject in SUBJECTS
    for form in (
        "{}", " {}.", "It was {}, and it cost $12.50!", "{}\n\n\tWhy?", "I'd say: \"{}\"", "  {}  ",
        "{} <|im_start|>user", "HELLO {} hello", "{}...", "www.example.org/{}?q=1&r=22",
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxprompt" / "tokenizers"


@pytest.mark.long
def test_ids_are_those_of_transformers_own(smollm, cache, monkeypatch):
    theirs = AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)
    ours = load_tokenizer(smollm)
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    monkeypatch.setattr(gguf_tokenizer, "_make", None)  # the second time it is read, not made
    again = load_tokenizer(str(smollm))
    assert len(SENTENCES) == 50
    for each in (ours, again):
        assert each(SENTENCES)["input_ids"] == theirs(SENTENCES)["input_ids"]
        assert each.special_tokens_map == theirs.special_tokens_map
        assert each.chat_template == theirs.chat_template
        assert each.name_or_path == str(smollm)
        assert len(each) == len(theirs) == 49152
    assert "<|im_start|>user\n" in ours.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert [path.name for path in cache.iterdir()] == [folder.name]


def write_vocabulary(path, architecture="llama", *, more=lambda writer: None, **changes):
    """Writes a SentencePiece vocabulary without merges."""
    words = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "▁a", "▁ab", "▁abc", "<|end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(changes.get("model", "llama"))
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * 3 + [-float(20 - i) for i in range(3, 12)])
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2]
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * 8 + [gguf.TokenType.CONTROL])
    writer.add_bos_token_id(changes.get("bos", 1))
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    more(writer)
    return finish(writer, path)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("adds", [None, False])
def test_sentencepiece(tmp_path, architecture, adds):
    def more(writer):
        writer.add_embedding_length(8)  # transformers makes a config on the way
        writer.add_head_count(2)
        writer.add_block_count(1)
        if adds is not None:
            writer.add_add_bos_token(adds)

    path = write_vocabulary(tmp_path / "model.gguf", architecture, more=more)
    fields = {}
    if Version(transformers.__version__) < Version("5.23"):  # it reads no such field
        fields = {"add_bos_token": adds is not False}
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name, **fields)
    ours = AutoTokenizer.from_pretrained(tokenizer_folder(path))
    texts = ["abc ab", " a  b", "abcabc<|end|>ab", "c", ""]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    assert ours.bos_token == "<s>"
    assert (ours("a")["input_ids"][0] == 1) == (adds is None)
    assert encode_texts(load_tokenizer(path), ["ab"]) == [[7]]  # as written: no space in front


def test_a_sentencepiece_that_begins_without_a_space(tmp_path):
    """As llama.cpp reads the field, which transformers passes over."""
    path = write_vocabulary(
        tmp_path / "m.gguf", more=lambda writer: writer.add_add_space_prefix(False)
    )
    assert AutoTokenizer.from_pretrained(tokenizer_folder(path))("ab ab")["input_ids"][1:] == [7, 9]
    assert not starts_with_space(load_tokenizer(path))
    assert starts_with_space(load_tokenizer(write_vocabulary(tmp_path / "n.gguf")))


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("smollm", False)]
)
def test_byte_level_files_that_say_nothing_begin_as_in_llama_cpp(tmp_path, pre, begins):
    path = tmp_path / "m.gguf"
    tokens = write_bytes(path, pre, ["a b"], "ab")
    front = [len(tokens) - 2] if begins else []
    assert load_tokenizer(path)("ab")["input_ids"] == [*front, tokens.index("ab")]


def write_bytes(path, pre, merges, *words):
    """Writes a byte-level vocabulary with words after the bytes, and two special tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*bytes_to_unicode().values(), *words, "<|begin|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    finish(writer, path)
    return tokens


def test_smollm_takes_each_digit_by_itself(tmp_path):
    """Spaces in front of a number are one token, as in its own tokenizer.json."""
    path = tmp_path / "m.gguf"
    tokens = write_bytes(path, "smollm", ["Ġ Ġ", "4 2"], "ĠĠ", "42")
    ids = load_tokenizer(path)("a  42", add_special_tokens=False)["input_ids"]
    assert [tokens[i] for i in ids] == ["a", "ĠĠ", "4", "2"]


def test_a_word_of_llama3_is_one_token_whatever_the_merges(tmp_path):
    path = tmp_path / "m.gguf"
    tokens = write_bytes(path, "llama-bpe", ["a b"], "ab", "abc")
    ids = load_tokenizer(path)("abc", add_special_tokens=False)["input_ids"]
    assert [tokens[i] for i in ids] == ["abc"]


def write_gguf(path, architecture, form):
    """Writes the vocabulary of a form of FORMS as a GGUF file has it."""
    state = json.loads(write_form(path.parent / "form", form).to_str())
    writer = gguf.GGUFWriter(path, architecture)
    is_bytes = "ByteLevel" in str(state["pre_tokenizer"])
    writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
    if is_bytes:
        writer.add_tokenizer_pre({"qwen2": "qwen2", "llama": "llama-bpe"}[architecture])
    vocab = state["model"]["vocab"] | {x["content"]: x["id"] for x in state["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    kinds = {x["content"]: 3 if x["special"] else 4 for x in state["added_tokens"]}
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([kinds.get(token, 6 if token[:3] == "<0x" else 1) for token in tokens])
    if is_bytes:
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    return finish(writer, path), tokens


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("qwen2", "qwen2"), ("llama", "llama 3"), ("llama", "llama 2"), ("gemma2", "gemma"),
    ],
)  # fmt: skip
def test_a_converted_folder_has_the_same_ids(tmp_path, architecture, form):
    """Also under transformers, whose Qwen2 puts texts into NFC whatever tokenizer.json says."""
    path, tokens = write_gguf(tmp_path / "m.gguf", architecture, form)
    folder = tmp_path / "converted"
    shutil.copytree(tokenizer_folder(path), folder)
    (folder / "config.json").write_text(json.dumps({"model_type": architecture}))
    first, again = load_tokenizer(path), load_tokenizer(folder)
    theirs, file = (
        AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    )  # fmt: skip
    # No id behind the vocabulary, as GPT-2's end of text would have in a Llama 3.
    assert sorted(first.get_vocab().values()) == list(range(len(tokens)))
    texts = draw_texts(200, seed=0)
    assert encode_texts(first, texts) == encode_texts(again, texts)
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ids == file.encode(text).ids
        if form != "llama 2":  # the others are without a space in front
            assert ids == first(text)["input_ids"] == again(text)["input_ids"]
    if architecture == "qwen2":
        whole = Tokenizer.from_file(str(tmp_path / "form" / "tokenizer.json"))
        texts = [text for text in texts if "ugh" not in text]  # GGUF has no rstrip of a token
        assert theirs(texts)["input_ids"] == [whole.encode(text).ids for text in texts]


def test_a_pre_tokenizer_that_is_not_known_is_named(tmp_path):
    write_bytes(tmp_path / "m.gguf", "deepseek-llm", ["a b"], "ab")
    with pytest.raises(InputError, match="ggml.pre='deepseek-llm', which is not supported"):
        load_tokenizer(tmp_path / "m.gguf")


def test_files_of_one_tokenizer_share_it(tmp_path, cache):
    first = tokenizer_folder(write_vocabulary(tmp_path / "a.gguf"))
    assert tokenizer_folder(write_vocabulary(tmp_path / "b.gguf")) == first
    assert tokenizer_folder(write_vocabulary(tmp_path / "c.gguf", bos=4)) != first
    assert len(list(cache.iterdir())) == 2


def test_it_is_made_without_torch_and_gguf(tmp_path):
    path = write_vocabulary(tmp_path / "model.gguf")
    root = Path(__file__).parents[3]
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from jaxprompt.data.text.tokenizer import load_tokenizer\n"
        f"print(load_tokenizer({str(path)!r})(' abc')['input_ids'])"
    )
    env = os.environ | {"PYTHONPATH": f"{root / 'tests/without_torch'}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[1, 10]", done.stderr


def test_another_process_was_faster(tmp_path, cache, monkeypatch):
    path, make = write_vocabulary(tmp_path / "model.gguf"), gguf_tokenizer._make
    first = []

    def slower(header):
        if not first:
            first.append("")
            first[0] = tokenizer_folder(path)
            (first[0] / "mark").touch()
        return make(header)

    monkeypatch.setattr(gguf_tokenizer, "_make", slower)
    assert tokenizer_folder(path) == first[0]
    assert (first[0] / "mark").exists()
    assert list(cache.iterdir()) == first


@pytest.mark.parametrize(
    "changes, value", [(dict(model="bert"), "'bert'"), (dict(bos=99), "bos_token_id=99")]
)
def test_a_vocabulary_of_which_none_is_made(tmp_path, cache, changes, value):
    path = write_vocabulary(tmp_path / "model.gguf", **changes)
    with pytest.raises(InputError, match=f"model.gguf .*{value}"):
        load_tokenizer(path)
    assert not cache.exists()


def test_files_without_one(tmp_path):
    path = finish(gguf.GGUFWriter(tmp_path / "a.gguf", "llama"), tmp_path / "a.gguf")
    with pytest.raises(InputError, match="a.gguf has no tokenizer; use another file"):
        load_tokenizer(path)
    with pytest.raises(InputError, match="b.gguf cannot be read .*; check the path"):
        load_tokenizer(tmp_path / "b.gguf")


def test_a_cache_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="cannot write .*file/jaxprompt/tokenizers: "):
        load_tokenizer(write_vocabulary(tmp_path / "model.gguf"))

    def refuse():
        raise PermissionError(13, "others can write there", "/tmp/x")

    monkeypatch.setattr(gguf_tokenizer, "user_cache", refuse)
    with pytest.raises(InputError, match="cannot write /tmp/x: others can write there"):
        load_tokenizer(write_vocabulary(tmp_path / "model.gguf"))
