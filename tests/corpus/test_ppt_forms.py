"""Patterns laid out: the same row as downstream, in English and Chinese, for each kind of model."""

import re

import numpy as np
import pytest
from ppt_corpus import CHINESE, LETTERS, bert_forms, make_encoder, tiny_bert

from jaxprompt.corpus.ppt import PATTERNS, TASKS, Pattern, get_pattern, make_forms
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.errors import InputError

TEXTS = {
    "first": "The cat sat .", "second": "It slept all day .", "text": "A fine film, it was!",
    "query": "Where did it go?", "option0": "Away it went", "option1": "It was a cat",
    "option2": "Nowhere at all",
}  # fmt: skip
STYLES = {"t5": "seq2seq", "bert": "masked", "roberta": "masked", "causal": "causal"}
OPTIONS = {"nss": 3, "unified": 3}


@pytest.mark.parametrize("kind", ["t5", "bert", "roberta"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("style", ["en", "en_paper", "en_end"])
@pytest.mark.parametrize("max_len", [80, 48])
def test_rows_are_those_of_downstream(request, kind, task, style, max_len):
    tokenizer, family = request.getfixturevalue(kind), STYLES[kind]
    pattern, options = get_pattern(task, style), OPTIONS.get(task, 0)
    forms = make_forms(
        pattern, tokenizer, family, num_slots=5, max_len=max_len, options=(options,),
        decoder_slots=2 * (family == "seq2seq"), num_types=2, eos=True,
    )  # fmt: skip
    texts = {name: text if max_len == 80 else f"{text} " * 9 for name, text in TEXTS.items()}
    encoder = make_encoder(
        tokenizer, family, pattern.text(options), pattern.words, spaced=pattern.space,
        max_len=max_len, slots=5, decoder_slots=2 * (family == "seq2seq"), eos=True,
    )  # fmt: skip
    (wanted,) = encoder.encode(Example(texts, ("a choice",) * options))
    spaced = [f" {text}" for text in texts.values()]  # as the units of a corpus are
    ids = [np.array(piece_ids, np.uint16) for piece_ids in encode_texts(tokenizer, spaced)]
    filled = forms.forms[options].fill(dict(zip(texts, ids, strict=True)))
    assert_same(filled, wanted)
    assert len(filled.ids) <= max_len


def assert_same(actual, wanted):
    for name, field in actual._asdict().items():
        other = getattr(wanted, name)
        if name == "decoder" and field is not None:
            for one, two in zip(field[:-1], other[:-1], strict=True):
                np.testing.assert_array_equal(one, two)
        elif field is not None or other is not None:
            np.testing.assert_array_equal(field, other, name)
            assert np.asarray(field).dtype == np.asarray(other).dtype


def test_the_length_that_is_named_has_room_for_all_numbers_of_options(bert):
    """Those of 4 options take the most tokens beside their texts."""
    lay = lambda max_len: make_forms(
        get_pattern("unified", "en"), bert, "masked", num_slots=5, max_len=max_len,
        options=(2, 4, 3), num_types=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="for 5 texts; raise max_len to") as error:
        lay(10)
    enough = int(re.search(r"raise max_len to (\d+)", str(error.value))[1])
    assert lay(enough).forms.keys() == {2, 3, 4} and lay(enough).forms[4].max_text_tokens == 5
    with pytest.raises(InputError, match=f"raise max_len to {enough} or more"):
        lay(enough - 1)


@pytest.mark.parametrize("style", [style for style in PATTERNS if style.endswith("_end")])
@pytest.mark.parametrize("task", TASKS)
def test_patterns_that_end_with_the_mask(task, style):
    """The words and options are those of the style they come from, also beside a hard prompt."""
    pattern, origin = (get_pattern(task, name) for name in (style, style.partition("_")[0]))
    assert pattern.template.endswith("[mask]") and pattern[1:] == origin[1:]
    if task != "unified":
        hard = get_pattern(task, style, hard=True)
        assert hard.template.endswith("[mask]") and hard[1:] == origin[1:]


def test_a_left_to_right_model_reads_behind_the_text(roberta):
    """Its label words stand behind the text, and move with it."""
    pattern = Pattern("{first} And? {second} It is [mask]", ("unwatchable", "good"))
    forms = make_forms(pattern, roberta, "causal", num_slots=3, max_len=60)
    encoder = make_encoder(
        roberta, "causal", pattern.text(), pattern.words, spaced=True, max_len=60, slots=3, eos=True
    )
    (wanted,) = encoder.encode(Example({"first": "One two three four", "second": "Five"}))
    first, second = map(np.array, encode_texts(roberta, [" One two three four", " Five"]))
    filled = forms.forms[0].fill({"first": first, "second": second})
    assert_same(filled, wanted)
    assert filled.types.max() == 1 and len(filled.label_pos) > 1


ROWS = {
    "nsp": "[CLS] [UNK] [MASK] [MASK] 。 [UNK] [SEP]",
    "cls": "[CLS] [UNK] 。 [MASK] [MASK] 。 [SEP]",
    "nss": "[CLS] [UNK] ？ 一 、 [UNK] 。 二 、 [UNK] 。 三 、 [UNK] 。 答 案 是 [MASK] 。 [SEP]",
}
ROWS["unified"] = ROWS["nss"].replace("[MASK]", "[MASK] [MASK]")  # numerals above ten have two


@pytest.mark.parametrize("task", TASKS)
def test_chinese_patterns(task):
    """Words of two characters take two masks."""
    options = OPTIONS.get(task, 0)
    forms = bert_forms(task, style="zh", options=(options,), num_slots=0)
    row = forms.forms[options].fill(dict.fromkeys(TEXTS, np.array([1])))
    tokenizer = tiny_bert(CHINESE + LETTERS)
    assert tokenizer.convert_ids_to_tokens(row.ids) == ROWS[task].split()
    assert (row.ids[row.label_pos] == tokenizer.mask_token_id).all()
    words = [tokenizer.convert_ids_to_tokens(w[w >= 0]) for w in forms.verbalizer.ids[:, 0]]
    assert ["".join(word) for word in words] == [w.lower() for w in get_pattern(task, "zh").words]


def test_words_of_the_patterns():
    english = {task: get_pattern(task).words for task in TASKS}
    assert english == {
        "nsp": ("no", "maybe", "yes"), "nss": tuple("ABCDEF"),
        "unified": tuple("ABCDEFGHIJKLMNOP"), "cls": ("terrible", "bad", "maybe", "good", "great"),
    }  # fmt: skip
    chinese = {task: get_pattern(task, "zh").words for task in TASKS}
    assert chinese["nsp"] == ("矛盾", "中立", "相似") and chinese["nss"] == tuple("一二三四五六")
    assert chinese["cls"] == ("差", "不好", "一般", "好", "赞")
    for style in PATTERNS:
        for task, pattern in PATTERNS[style].items():
            assert len(pattern.words) == len(english[task])


def test_loss_on_sentinels_is_a_choice(t5):
    """Read alone: the label. With `whole`: what the decoder says from <extra_id_0> on."""
    make = lambda **changes: make_forms(
        get_pattern("nsp"), t5, "seq2seq", num_slots=2, max_len=30, **changes
    )
    text = np.full(4, 2000)
    fill = lambda forms: forms.forms[0].fill({"first": text, "second": text})
    alone, whole = make(), make(answer="[mask] {label} [mask]", whole=True)
    assert fill(alone).label_pos.tolist() == [1]
    row = fill(whole)
    assert row.decoder.ids.tolist() == [0, 32099, 150, 2087, 4273]
    assert row.label_pos.tolist() == [0, 1, 2, 3, 4]
    for label, word in enumerate([150, 2087, 4273]):
        assert whole.plan.whole.ids[label, 0].tolist() == [32099, word, 32098]
        # <extra_id_1> is read behind the word of its own class.
        assert whole.plan.whole.at[label, 0].tolist() == [0, 1, 2 + label]
    assert row.decoder.types.tolist() == [0, 0, 1, 2, 3]


def test_too_short_a_row():
    message = "leaves 1 tokens of max_len 14 for 2 texts; raise max_len to 15 or more"
    with pytest.raises(InputError, match=message):
        bert_forms("nsp", max_len=14, num_slots=10)
