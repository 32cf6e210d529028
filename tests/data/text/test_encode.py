"""Encoding: golden tokens, slots and roles for two tokenizers; truncation; literal specials."""

import functools
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reading_rows import make_encoder, roles, shown
from sentence_pieces import KINDS, write_pieces
from transformers import AutoTokenizer

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.marking import truncated_lengths
from jaxprompt.data.text.tokenizer import load_tokenizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role

load = functools.cache(load_tokenizer)
ANIMALS = ("dog", "cat")


def example(choices=(), **fields):
    return Example(fields, choices, 0)


GOLDEN = [
    (
        "{sentence} It was [mask].",
        {},
        "[CLS] a fine film it was [MASK] . [SEP]",
        "<s> A Ġfine Ġfilm ĠIt Ġwas <mask> . </s>",
        "*TTTHHLH*",
        "00000000" + "0",
        [6],
    ),
    (
        "{sentence}",
        {"num_slots": 3},
        "0 1 2 [CLS] a fine film [SEP]",
        "0 1 2 <s> A Ġfine Ġfilm </s>",
        "SSS*TTT*",
        "00000000",
        [3],
    ),
    (
        "[soft*1] [cls] {sentence} [soft*2] [mask] ! [sep]",
        {"num_slots": 3, "num_masks": 2},
        "0 [CLS] a fine film 1 2 [MASK] [MASK] ! [SEP]",
        "0 <s> A Ġfine Ġfilm 1 2 <mask> <mask> Ġ! </s>",
        "S*TTTSSLLH*",
        "0" * 11,
        [7, 8],
    ),
    (
        "[soft] {sentence}",
        {"num_slots": 2},
        "[CLS] 0 1 a fine film [SEP]",
        "<s> 0 1 A Ġfine Ġfilm </s>",
        "*SSTTT*",
        "0" * 7,
        [0],
    ),
    (
        "[mask] : {sentence|lower} \\[x\\] [soft]",
        {"num_slots": 2},
        "[CLS] [MASK] : a fine film [ x ] 0 1 [SEP]",
        "<s> <mask> Ġ: Ġa Ġfine Ġfilm Ġ[ x ] 0 1 </s>",
        "*LHTTTHHHSS*",
        "0" * 12,
        [1],
    ),
]


@pytest.mark.parametrize(("template", "settings", "words", "bpe", "kinds", "types", "pos"), GOLDEN)
def test_golden(bert, roberta, template, settings, words, bpe, kinds, types, pos):
    for tok, expected in ((bert, words), (roberta, bpe)):
        (row,) = make_encoder(tok, template, **settings).encode(example(sentence="A fine film"))
        assert shown(tok, row) == expected
        assert roles(row) == kinds
        assert "".join(map(str, row.types)) == types
        assert row.label_pos.tolist() == pos
        assert (row.ids[row.slot >= 0] == tok.pad_token_id).all()
    dtypes = [row.ids.dtype, row.slot.dtype, row.types.dtype, row.roles.dtype, row.label_pos.dtype]
    assert dtypes == ["int32", "int32", "int32", "int8", "int32"]


def test_lm_bff_pair(bert, roberta):
    template = "{premise|chop}? [mask], {hypothesis|lower}"
    pair = example(premise="It rains.", hypothesis="The street is wet.")
    (row,) = make_encoder(bert, template).encode(pair)
    assert shown(bert, row) == "[CLS] it rains ? [MASK] , the street is wet . [SEP]"
    (row,) = make_encoder(roberta, template).encode(pair)
    assert shown(roberta, row) == "<s> It Ġrains ? <mask> , Ġthe Ġstreet Ġis Ġwet . </s>"
    assert roles(row) == "*TTHLHTTTTT*"


def test_real_sentences_equal_the_whole_text_encoded_at_once(tokenizer, shared):
    path = shared / "data/sst2/dev.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    with gzip.open(path, "rt") as lines:
        sentences = [json.loads(line)["sentence"] for line in lines]
    encoded = make_encoder(tokenizer, "{s} It was [mask].", max_len=128).encode_all(
        [example(s=sentence) for sentence in sentences]
    )
    whole = tokenizer([f"{s} It was{tokenizer.mask_token}." for s in sentences])["input_ids"]
    assert len(sentences) > 800
    assert [row.ids.tolist() for (row,) in encoded] == whole


def test_specials_of_one_text_and_of_a_pair_are_the_tokenizers(tokenizer):
    texts = ("An old dog, asleep", "Unbelievably quiet here")
    num_types = 2 if tokenizer.sep_token == "[SEP]" else 1
    for template, texts_used in (("{a}", texts[:1]), ("{a} [sep] {b}", texts)):
        (row,) = make_encoder(tokenizer, template, num_types=num_types).encode(
            Example(dict(zip("ab", texts_used, strict=False)))
        )
        expected = tokenizer(*texts_used)
        assert row.ids.tolist() == expected["input_ids"]
        if "token_type_ids" in expected:
            assert row.types.tolist() == expected["token_type_ids"]
        else:
            assert not row.types.any()


def test_segments_rise_after_each_inner_separator_up_to_the_last_type(bert):
    text = "[soft] [cls] {a} [sep] {b} [sep] {a} [sep]"
    pair = example(a="one", b="two")
    (row,) = make_encoder(bert, text, num_slots=2, num_types=2).encode(pair)
    assert shown(bert, row) == "0 1 [CLS] one [SEP] two [SEP] one [SEP]"
    assert row.types.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    (row,) = make_encoder(bert, text, num_slots=2, num_types=10).encode(pair)
    assert row.types.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2]


def test_white_space_in_front_of_a_template(bert, roberta):
    """A byte-level BPE then reads the first text as any other, the second still as a first."""
    pair = example(a="one", b="two")
    (row,) = make_encoder(roberta, " {a} [sep] {b}", num_slots=1).encode(pair)
    assert shown(roberta, row) == "0 <s> Ġone </s> </s> two </s>"
    (row,) = make_encoder(bert, " {a} [sep] {b}", num_slots=1).encode(pair)
    assert shown(bert, row) == "0 [CLS] one [SEP] two [SEP]"


def test_choice_gives_a_row_each(roberta):
    rows = make_encoder(roberta, "{premise} [sep] {choice}").encode(
        example(("It froze", "It boiled"), premise="The water got cold")
    )
    assert [shown(roberta, row) for row in rows] == [
        "<s> The Ġwater Ġgot Ġcold </s> </s> It Ġfroze </s>",
        "<s> The Ġwater Ġgot Ġcold </s> </s> It Ġboiled </s>",
    ]
    assert roles(rows[0]) == "*TTTT**TT*"
    assert [row.num_choices for row in rows] == [0, 0]  # each row is one choice


def test_choices_are_lettered(bert, roberta):
    question = example(("red", "dark blue"), q="Which colour?")
    (row,) = make_encoder(bert, "{q} {choices} Answer: [mask]").encode(question)
    assert shown(bert, row) == ("[CLS] which colour ? a . red b . dark blue answer : [MASK] [SEP]")
    assert roles(row) == "*TTTHHTHHTTHHL*"
    (row,) = make_encoder(roberta, "{q} {choices} Answer: [mask]").encode(question)
    assert shown(roberta, row) == (
        "<s> Which Ġcolour ? ĠA . Ġred ĠB . Ġdark Ġblue ĠAnswer : <mask> </s>"
    )


def test_names_of_specials_in_a_text_stay_text(tokenizer):
    typed = f"see {tokenizer.mask_token} and {tokenizer.sep_token} here"
    (row,) = make_encoder(tokenizer, "{text} [mask]").encode(example(text=typed))
    assert (row.ids == tokenizer.mask_token_id).sum() == 1
    assert (row.ids == tokenizer.sep_token_id).sum() == 1
    decoded = tokenizer.decode(row.ids[row.roles == Role.TEXT])
    assert decoded.replace(" ", "").lower() == typed.replace(" ", "").lower()


def cut_by_loop(lengths, room):
    """One token at a time from the longest, the later of two equals."""
    lengths_left = list(lengths)
    while sum(lengths_left) > room:
        longest = max(lengths_left)
        lengths_left[len(lengths_left) - 1 - lengths_left[::-1].index(longest)] -= 1
    return lengths_left


def test_kept_lengths_equal_the_loop():
    rng = np.random.RandomState(0)
    for _ in range(500):
        lengths = rng.randint(0, 12, rng.randint(1, 5)).tolist()
        room = int(rng.randint(0, 30))
        assert truncated_lengths(lengths, room) == cut_by_loop(lengths, room)


@pytest.mark.parametrize("max_len", [20, 21, 22, 27, 28, 37, 38, 47, 48, 49])
def test_truncation_takes_fields_only(tokenizer, max_len):
    template = "[soft*2] [cls] {a} is [mask] [soft*3] {b} {choices} so it was [sep]"
    case = example(("red", "blue"), a="dog " * 8 + "dog", b="cat " * 19 + "cat")
    settings = {"num_slots": 5, "num_masks": 2}
    (full,) = make_encoder(tokenizer, template, max_len=100, **settings).encode(case)
    (row,) = make_encoder(tokenizer, template, max_len=max_len, **settings).encode(case)
    assert len(full.ids) == 19 + 29 and len(row.ids) == min(max_len, 19 + 29)
    dogs, cats = (tokenizer([w, f" {w}"], add_special_tokens=False)["input_ids"] for w in ANIMALS)
    expected = cut_by_loop([9, 20], max_len - 19)
    for animal, count in zip((dogs, cats), expected, strict=True):
        assert np.isin(row.ids, sum(animal, [])).sum() == count
    left = [~np.isin(r.ids, sum(dogs + cats, [])) for r in (full, row)]
    for before, after in zip(full[:4], row[:4], strict=True):
        np.testing.assert_array_equal(before[left[0]], after[left[1]])
    assert row.slot[row.slot >= 0].tolist() == [0, 1, 2, 3, 4]
    assert row.roles[row.label_pos].tolist() == [Role.LABEL] * 2


def test_no_room_for_text(bert):
    with pytest.raises(InputError, match="takes 12 tokens .10 for slots.*max_len 12"):
        make_encoder(bert, "{a}", num_slots=10, max_len=12)
    with pytest.raises(InputError, match="1099511627776 slots.*max_len 12"):  # 8 TiB as a list
        make_encoder(bert, "{a}", num_slots=2**40, max_len=12)
    make_encoder(bert, "{a}", num_slots=10, max_len=13)
    tight = make_encoder(bert, "{a} {choice}", max_len=6)
    with pytest.raises(InputError, match="takes 7 tokens .*max_len 6"):
        tight.encode(example(("one two three four five",), a="x"))


def test_an_example_without_a_field(bert):
    with pytest.raises(InputError, match="no field 'sentence'; nearest: sentences"):
        make_encoder(bert, "{sentence}").encode(example(sentences="x"))


def test_empty_text_encodes_to_nothing(roberta):
    (row,) = make_encoder(roberta, "{a} It was [mask] {b}").encode(example(a="", b=" "))
    assert shown(roberta, row) == "<s> ĠIt Ġwas <mask> </s>"


def test_order_is_kept_over_chunks(bert, monkeypatch):
    monkeypatch.setattr("jaxprompt.data.text.encode._CHUNK", 7)
    examples = [example(a=f"number {i}", b="a short text of ten words or so") for i in range(30)]

    encoded = make_encoder(bert, "{a} [sep] {b} [mask]", num_slots=20).encode_all(examples)

    for i in (0, 6, 7, 29):
        text = encoded[i][0].ids[encoded[i][0].roles == Role.TEXT]
        assert bert.decode(text).startswith(f"number {i} a short")


@pytest.fixture
def folder(shared, tmp_path):
    def copy(name, *files):
        for file in files:
            (tmp_path / file).write_bytes((shared / "tokenizers" / name / file).read_bytes())
        return tmp_path

    return copy


@pytest.mark.parametrize(
    ("name", "files"),
    [("bert-uncased", ["vocab.txt"]), ("roberta", ["vocab.json", "merges.txt"])],
)
def test_vocabulary_files_and_config_are_enough(shared, folder, name, files):
    text = "Unbelievably, it rained!"
    ids = load_tokenizer(folder(name, *files, "config.json"))(text)["input_ids"]
    assert ids == load(shared / "tokenizers" / name)(text)["input_ids"]


@pytest.mark.long
@pytest.mark.slow
def test_prepared_hub_cache_is_enough_offline(shared, tmp_path):
    home = tmp_path / "hub/models--someone--bert"
    snapshot = home / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    for file in (shared / "tokenizers/bert-uncased").iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    state = json.loads((snapshot / "tokenizer.json").read_text())
    state["normalizer"]["lowercase"] = False  # as the class's is not
    (snapshot / "tokenizer.json").write_text(json.dumps(state))
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0123abcd")
    code = (
        "from jaxprompt.data.text.tokenizer import load_tokenizer as load\n"
        "print(len(load('someone/bert')))\n"
        "print(load('someone/bert', revision='0123abcd').tokenize('The'))\n"
        "load('someone/absent')"
    )
    # The hub's client reads its environment once, when imported: hence a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["30522", "['[UNK]']"]
    assert "InputError: tokenizer 'someone/absent' cannot be read" in done.stderr


def test_unreadable_tokenizers(shared, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(InputError, match="cannot be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="has 5 tokens, all special"):
        load_tokenizer(folder("bert-uncased", "config.json"))
    folder("bert-uncased", "vocab.txt")
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(tmp_path)
    state = json.loads((shared / "tokenizers/bert-uncased/tokenizer.json").read_text())
    state["model"]["vocab"]["zebra"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="'zebra' the id 2147483648"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    vocabulary = (tmp_path / "vocab.txt").read_text()
    (tmp_path / "vocab.txt").write_text(vocabulary.replace("[UNK]\n", ""))
    with pytest.raises(InputError, match="cannot encode a text.*UNK"):
        load_tokenizer(tmp_path)


# -- white space behind text as it is --------------------------------------------------------------

WRITTEN = {
    '{a}["; Q: "]{b}["\\nA: "]{a}': "{a}; Q: {b}\nA: {a}",
    '{a}["\\n"]{b}': "{a}\n{b}",
    '{a}[" to "]the {b} , {a}': "{a} to the {b} , {a}",
}
STYLES = {"t5": "seq2seq", "roberta": "masked"}


@pytest.mark.parametrize("template", WRITTEN)
@pytest.mark.parametrize("name", [*STYLES, *KINDS])
def test_a_word_keeps_the_space_that_is_written_before_it(template, name, shared, tmp_path):
    """The ids are those of the joined text."""
    folder = shared / "tokenizers" / name if name in STYLES else write_pieces(tmp_path, name)
    released, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    style = STYLES.get(name, "causal")
    texts = {"a": "the house", "b": "hello world"}
    (actual,) = make_encoder(tokenizer, template, style, num_types=1).encode(example(**texts))
    assert actual.ids.tolist() == released(WRITTEN[template].format(**texts))["input_ids"]
