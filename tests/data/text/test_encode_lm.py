"""Encoding for T5 and GPT-2: golden tokens, sentinels, decoders, branches, free texts, batches."""

import itertools

import numpy as np
import pytest
import reading_rows

from jaxprompt.data.batches.batching import EvalBatches, Layout
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encode import Answer, ExampleEncoder
from jaxprompt.data.text.specials import Specials
from jaxprompt.data.text.target import Frame, branch_plan
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.data.text.verbalizer import make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role


def make_encoder(tokenizer, style, template, *, max_len=40, **changes):
    return reading_rows.make_encoder(
        tokenizer, template, style, max_len=max_len, num_types=1, **changes
    )


def example(text="A fine film", target=""):
    return Example({"text": text}, target=target)


@pytest.mark.parametrize("text", ["A fine film .", "It was  great, wasn't it?", "3.5 stars"])
@pytest.mark.parametrize("eos", [True, False])
def test_t5_sees_what_its_tokenizer_makes_of_the_whole_text(t5, shared, text, eos):
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(shared / "tokenizers/t5")
    row = make_encoder(t5, "seq2seq", "{text} It was [mask] . Yes", eos=eos).encode(example(text))
    expected = plain(f"{text} It was <extra_id_0> . Yes", add_special_tokens=eos)["input_ids"]
    assert row[0].ids.tolist() == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{text}", "[CLS] T [gMASK] end"),
        ("{text} [sep]", "[CLS] T [gMASK] end"),  # a blank that is not written stands before it
        ("{text} [sep] [mask]", "[CLS] T sep [gMASK] end"),
        ("[mask] {text} [sep]", "[CLS] [gMASK] T end"),
    ],
)
def test_a_glm_s_input_ends_once(t5, template, expected):
    specials = {"[CLS]": 90, "[gMASK]": 91, "end": 92, "sep": 93}
    cls, blank, end, sep = ((number,) for number in specials.values())
    glm = Specials("infilling", cls, end, sep, blank, 0, 94, 95)
    encoder = ExampleEncoder(
        t5, parse(template), glm, num_slots=0, num_masks=1, max_len=40, needs_mask=False,
        num_types=1,
    )  # fmt: skip
    (row,) = encoder.encode(example())
    names = {number: name for name, number in specials.items()}
    marks = [names.get(int(number), "T") for number in row.ids]
    assert " ".join(mark for mark, _ in itertools.groupby(marks)) == expected
    text = [int(number) for number in row.ids if int(number) not in names]
    assert text == encode_texts(t5, [" A fine film"])[0]


def test_t5_glues_what_stands_without_a_space(t5):
    (row,) = make_encoder(t5, "seq2seq", "{text}? [mask].").encode(example("Is it"))
    tokens = t5.convert_ids_to_tokens(row.ids)
    assert tokens == ["▁I", "s", "▁it", "?", "<extra_id_0>", ".", "</s>"] or tokens == [
        "▁Is", "▁it", "?", "<extra_id_0>", ".", "</s>",
    ]  # fmt: skip


def test_t5_decoder_of_words(t5):
    words = make_verbalizer(t5, ["good", ("bad", "unwatchable")])
    plan = branch_plan(words.ids, Frame((32099,), ()), whole=False)
    answer = Answer(plan, (0, 32099), slots=2)
    (row,) = make_encoder(t5, "seq2seq", "{text} [mask]", answer=answer).encode(example())
    pieces = encode_texts(t5, [" unwatchable"])[0]
    decoder, count = row.decoder, len(pieces) - 1
    assert decoder.ids.tolist() == [0, 0, 0, 32099, *pieces[:-1]]
    assert decoder.slot.tolist() == [0, 1, -1, -1] + [-1] * count
    assert decoder.types.tolist() == [0] * 4 + [1] * count
    assert decoder.positions.tolist() == [*range(4), *range(4, 4 + count)]
    assert decoder.roles.tolist()[:2] == [Role.SOFT] * 2
    assert row.label_pos.tolist() == list(range(3, 4 + count))
    assert row.targets is None


def test_gpt2_reads_the_last_token_before_the_mask(gpt2):
    (row,) = make_encoder(gpt2, "causal", "{text} It was [mask]").encode(example())
    tokens = gpt2.convert_ids_to_tokens(row.ids)
    assert tokens == ["A", "Ġfine", "Ġfilm", "ĠIt", "Ġwas"]
    assert row.label_pos.tolist() == [4] and row.decoder is None


def test_gpt2_branches_follow_the_text(gpt2):
    words = make_verbalizer(gpt2, ["unwatchable", "good", "mesmerizingly"])
    plan = branch_plan(words.ids, Frame((), ()), whole=False)
    encoder = make_encoder(gpt2, "causal", "{text} It was [mask]", answer=Answer(plan))
    (row,) = encoder.encode(example())
    first, _, third = encode_texts(gpt2, [" unwatchable", " good", " mesmerizingly"])
    inner = len(first) - 1, len(third) - 1
    assert min(inner) >= 1
    assert row.ids.tolist()[5:] == first[:-1] + third[:-1]
    assert row.types.tolist() == [0] * 5 + [1] * inner[0] + [2] * inner[1]
    behind = [*range(5, 5 + inner[0]), *range(5, 5 + inner[1])]
    assert row.positions.tolist() == [*range(5), *behind]
    assert row.label_pos.tolist() == [4, *range(5, 5 + sum(inner))]


@pytest.mark.parametrize("style", ["seq2seq", "causal"])
def test_free_text(request, style):
    tokenizer = request.getfixturevalue({"seq2seq": "t5", "causal": "gpt2"}[style])
    stem = (0,) if style == "seq2seq" else ()
    answer = Answer(stem=stem, max_tokens=8)
    encoder = make_encoder(tokenizer, style, "{text}", answer=answer)
    said = [*encode_texts(tokenizer, [" two words"])[0], tokenizer.eos_token_id]
    ((learned,),) = encoder.encode_all([example(target="two words")], targets=True)
    ((prompt,),) = encoder.encode_all([example()])
    assert learned.targets.tolist() == said
    stream, before = (learned.decoder, 1) if stem else (learned, len(prompt.ids))
    assert stream.ids.tolist()[before:] == said[:-1]
    assert stream.types.tolist() == [0] * len(stream.ids)
    assert learned.label_pos.tolist() == [before - 1 + i for i in range(len(said))]
    assert prompt.label_pos.tolist() == [before - 1] and prompt.targets is None
    with pytest.raises(InputError, match=r"over data.max_target=8; raise"):
        encoder.encode_all([example(target="many words " * 5)], targets=True)


def test_a_target_has_as_many_tokens_as_are_allowed_its_end_included(t5):
    said = [*t5.convert_tokens_to_ids(["▁good", "▁film"]), t5.eos_token_id]
    three, two = (
        make_encoder(t5, "seq2seq", "{text}", answer=Answer(stem=(0,), max_tokens=n))
        for n in (3, 2)
    )
    ((row,),) = three.encode_all([example(target="good film")], targets=True)
    assert row.targets.tolist() == said
    with pytest.raises(InputError, match="has 3 tokens with its end token, over data.max_target=2"):
        two.encode_all([example(target="good film")], targets=True)


def test_room_for_what_is_said(gpt2):
    """A stream that holds all is cut so that input and text fit max_len."""
    encoder = make_encoder(
        gpt2, "causal", "{text}", answer=Answer(max_tokens=8), max_len=12, eos=False
    )
    long = example("word " * 30, target="one two three")
    ((learned,),) = encoder.encode_all([long], targets=True)
    ((prompt,),) = encoder.encode_all([long])
    assert len(prompt.ids) == 4 and len(learned.ids) == 4 + 3
    with pytest.raises(InputError, match="no room"):
        make_encoder(gpt2, "causal", "{text}", answer=Answer(max_tokens=12), max_len=12)


@pytest.mark.parametrize("style", ["seq2seq", "causal"])
def test_an_input_without_tokens(request, style):
    tokenizer = request.getfixturevalue({"seq2seq": "t5", "causal": "gpt2"}[style])
    answer = Answer(stem=(0,) if style == "seq2seq" else (), max_tokens=8)
    encoder = make_encoder(tokenizer, style, "{text}", answer=answer, eos=False)
    empty = ("", " ") if style == "seq2seq" else ("",)
    for text, targets in itertools.product(empty, (True, False)):
        with pytest.raises(InputError, match="no tokens"):
            encoder.encode_all([example(text, target="two words")], targets=targets)
    soft = make_encoder(tokenizer, style, "{text}", answer=answer, eos=False, num_slots=2)
    assert soft.encode(example(""))[0].slot.tolist() == [0, 1]


def test_batches_of_free_text(t5):
    encoder = make_encoder(t5, "seq2seq", "{text}", answer=Answer(stem=(0,), slots=1, max_tokens=8))
    rows = encoder.encode_all([example("a b c", "one"), example("d", "two three")], targets=True)
    layout = Layout(batch=3, max_len=40, pad_id=0, shift=2, decoder_shift=5)
    batch = next(iter(EvalBatches(rows, [-1, -1], layout)))
    width = max(len(row.targets) for (row,) in rows)
    assert batch.targets.shape == batch.label_pos.shape == (3, width)
    assert batch.decoder.ids.shape == (3, 1 + width)
    assert batch.encoder.positions[0, 0] == 2 and batch.decoder.positions[0, :2].tolist() == [5, 6]
    for r, i in enumerate(batch.index[:2]):
        (row,) = rows[i]
        n = len(row.targets)
        assert batch.targets[r].tolist() == row.targets.tolist() + [-1] * (width - n)
        np.testing.assert_array_equal(batch.decoder.ids[r, : n + 1], row.decoder.ids)
        assert batch.decoder.mask[r].tolist() == [True] * (n + 1) + [False] * (width - n)
        assert batch.decoder.slot[r, 0] == 0
    assert not batch.decoder.mask[2].any() and (batch.targets[2] == -1).all()


@pytest.mark.parametrize(
    ("tokenizer", "style", "template", "message"),
    [
        ("roberta", "seq2seq", "{text} [mask]", "no sentinel '<extra_id_0>'"),
        (
            "gpt2",
            "causal",
            "{text} [mask] .",
            r"at the end of its input; move \[mask\]",
        ),
        ("t5", "seq2seq", "[cls] {text}", r"has \[cls\], which this backbone does not have"),
        ("t5", "masked", "{text}", "has no cls token"),
    ],
)
def test_what_does_not_fit(request, tokenizer, style, template, message):
    with pytest.raises(InputError, match=message):
        make_encoder(request.getfixturevalue(tokenizer), style, template)


def test_a_sentence_piece_tokenizer_takes_spaces_as_written(t5):
    assert t5.convert_ids_to_tokens(encode_texts(t5, ["good"])[0]) != ["▁good"]
    assert t5.convert_ids_to_tokens(encode_texts(t5, [" good"])[0]) == ["▁good"]
    assert encode_texts(t5, [" a \n b"]) == encode_texts(t5, [" a b"])
    # The letters of lettered options, as PPT's code has them: without a space in front.
    assert encode_texts(t5, ["A", "B", "."]) == [[188], [279], [5]]
