"""Demonstrations: golden layouts, what is cut and what never is, and how they are sampled."""

import hashlib
import itertools
import json

import numpy as np
import pytest
import reading_rows
from reading_rows import roles, shown

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.demos import DemoLayout, Demonstrations, DemoSettings
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.token_runs import TokenRun
from jaxprompt.data.text.tokenizer import encode_exact, encode_texts
from jaxprompt.errors import InputError
from jaxprompt.types import Role

IT_WAS = "{s} It was [mask]."
DULL, FUN = Example({"s": "Dull stuff"}, label=0), Example({"s": "Fun"}, label=1)
FILM = Example({"s": "A fine film"})


def make_encoder(tokenizer, template, style="masked", **changes):
    """Makes an encoder whose classes are terrible and great, as build_scorer does."""
    if style == "causal":
        separator = (TokenRun(encode_exact(tokenizer, "\n"), Role.HARD, 0),)
    else:
        separator = (TokenRun([tokenizer.sep_token_id], Role.SPECIAL, 0),)
    layout = DemoLayout(
        encode_texts(tokenizer, [" terrible", " great"]),
        separator if style != "seq2seq" else (),
        demos_first=style == "causal",
        drop_unfit=False,
        never_cut=False,
    )
    fields = {name: changes.pop(name) for name in DemoLayout._fields if name in changes}
    layout = layout._replace(**fields)
    return reading_rows.make_encoder(tokenizer, template, style, demo_layout=layout, **changes)


def encode(encoder, example, *demos):
    ((row,),) = encoder.with_demos([demos]).encode_all([example])
    return row


# -- golden ---------------------------------------------------------------------------------------


def test_behind_the_example(bert, roberta):
    (row,) = make_encoder(bert, IT_WAS).encode(FILM)  # none
    assert shown(bert, row) == "[CLS] a fine film it was [MASK] . [SEP]"
    row = encode(make_encoder(bert, IT_WAS), FILM, DULL, FUN)
    assert shown(bert, row) == (
        "[CLS] a fine film it was [MASK] . [SEP] dull stuff it was terrible . [SEP] "
        "fun it was great . [SEP]"
    )
    assert roles(row) == "*TTTHHLH*" + "TTHHHH*" + "THHHH*"
    assert row.label_pos.tolist() == [6] and not row.cut
    assert row.positions.tolist() == list(range(len(row.ids))) and not row.types.any()
    row = encode(make_encoder(roberta, IT_WAS, num_types=1), FILM, DULL, FUN)
    assert shown(roberta, row) == (
        "<s> A Ġfine Ġfilm ĠIt Ġwas <mask> . </s> D ull Ġstuff ĠIt Ġwas Ġterrible . </s> "
        "Fun ĠIt Ġwas Ġgreat . </s>"
    )
    assert row.label_pos.tolist() == [6]


def test_in_front_of_the_example(bert, gpt2):
    row = encode(make_encoder(bert, IT_WAS, demos_first=True), FILM, FUN, DULL)
    assert shown(bert, row) == (
        "[CLS] fun it was great . [SEP] dull stuff it was terrible . [SEP] "
        "a fine film it was [MASK] . [SEP]"
    )
    assert row.ids[row.label_pos].tolist() == [bert.mask_token_id]
    row = encode(make_encoder(gpt2, "{s} It was [mask]", "causal"), FILM, DULL, FUN)
    assert shown(gpt2, row) == (
        "D ull Ġstuff ĠIt Ġwas Ġterrible Ċ Fun ĠIt Ġwas Ġgreat Ċ A Ġfine Ġfilm ĠIt Ġwas"
    )
    assert row.label_pos.tolist() == [len(row.ids) - 1]
    assert roles(row) == "TTTHHHH" + "THHHH" + "TTTHH"


def test_t5_reads_them_behind_its_sentinel(t5, shared):
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(shared / "tokenizers/t5")
    row = encode(make_encoder(t5, "{s} It was [mask] .", "seq2seq"), FILM, FUN)
    tokens = t5.convert_ids_to_tokens(row.ids)
    text = "A fine film It was <extra_id_0> . Fun It was great ."
    assert row.ids.tolist() == plain(text)["input_ids"]
    assert tokens.count("<extra_id_0>") == 1 and tokens[-1] == "</s>"


def test_the_template_stands_in_each_and_slots_in_front_stand_once(bert):
    row = encode(make_encoder(bert, "{s} [soft*2] [mask] [soft*1]", num_slots=3), FILM, FUN)
    assert shown(bert, row) == "[CLS] a fine film 0 1 [MASK] 2 [SEP] fun 0 1 great 2 [SEP]"
    assert (row.ids[row.slot >= 0] == bert.pad_token_id).all()
    for first in (False, True):
        row = encode(make_encoder(bert, IT_WAS, num_slots=2, demos_first=first), FILM, FUN)
        assert shown(bert, row).startswith("0 1 [CLS]") and (row.slot >= 0).sum() == 2
    row = encode(make_encoder(bert, "[soft*2] [cls] {s} [soft*1] [mask]", num_slots=3), FILM, FUN)
    assert shown(bert, row) == "0 1 [CLS] a fine film 2 [MASK] [SEP] fun 2 great [SEP]"
    causal = make_encoder(bert, "{s} [mask]", num_slots=1)
    assert shown(bert, encode(causal, FILM, FUN)).startswith("0 [CLS]")


def test_pairs_keep_their_segments(bert):
    pair = Example({"a": "It rains.", "b": "The street is wet."})
    other = Example({"a": "Dogs bark.", "b": "Cats do."}, label=0)
    row = encode(make_encoder(bert, "{a|chop} ? [sep] [mask] , {b|lower}"), pair, other)
    assert shown(bert, row) == (
        "[CLS] it rains ? [SEP] [MASK] , the street is wet . [SEP] "
        "dogs bark ? [SEP] terrible , cats do . [SEP]"
    )
    assert "".join(map(str, row.types)) == "00000" + "11111111" + "0000" + "111111"


# -- what is cut ----------------------------------------------------------------------------------


def words(count, word="film"):
    return " ".join([word] * count)


def test_their_texts_are_cut_first_and_labels_never(bert):
    long = [Example({"s": words(9, "bad")}, label=0), Example({"s": words(5, "fun")}, label=1)]
    # [CLS] 4 it was [MASK] . [SEP] = 10, and 5 tokens beside each of the two texts.
    for max_len, expected in ((34, (9, 5)), (30, (5, 5)), (27, (4, 3)), (22, (1, 1))):
        encoder = make_encoder(bert, IT_WAS, max_len=max_len)
        row = encode(encoder, Example({"s": words(4)}), *long)
        text = shown(bert, row)
        assert [text.count(word) for word in ("film", "bad", "fun")] == [4, *expected]
        assert "it was terrible . [SEP]" in text and text.endswith("it was great . [SEP]")
        assert len(row.ids) == max_len and row.cut == (expected != (9, 5))
    row = encode(make_encoder(bert, IT_WAS, max_len=20), Example({"s": words(4)}), *long)
    text = shown(bert, row)  # then the example's own
    assert [text.count(word) for word in ("film", "bad", "fun")] == [2, 1, 1]
    assert row.cut and row.ids[row.label_pos] == [bert.mask_token_id]


def test_not_even_the_labels_fit(bert):
    encoder = make_encoder(bert, IT_WAS, max_len=18)
    with pytest.raises(InputError, match="2 demonstrations takes 19 tokens, .* by 1 or"):
        encode(encoder, FILM, DULL, FUN)
    assert len(encode(make_encoder(bert, IT_WAS, max_len=19), FILM, DULL, FUN).ids) == 19


def test_limits(bert):
    example, demo = Example({"s": words(8)}), Example({"s": words(7, "bad")}, label=0)
    row = encode(make_encoder(bert, IT_WAS, max_demo_tokens=3, max_example_tokens=5), example, demo)
    text = shown(bert, row)
    assert (text.count("film"), text.count("bad"), row.cut) == (5, 3, False)


def test_as_many_as_fit(bert):
    demos = [Example({"s": words(n, "bad")}, label=0) for n in (2, 3, 1, 4)]  # 7, 8, 6, 9 tokens
    for max_len, expected in ((39, 4), (38, 3), (30, 3), (29, 2), (24, 2), (23, 1)):
        encoder = make_encoder(bert, IT_WAS, max_len=max_len, demos_first=True, drop_unfit=True)
        row = encode(encoder, FILM, *demos)  # 9 tokens of its own
        text = shown(bert, row)
        assert text.count("terrible") == expected and not row.cut
        assert text.count("bad") == sum((2, 3, 1, 4)[:expected])
    row = encode(
        make_encoder(bert, IT_WAS, max_len=15, demos_first=True, drop_unfit=True), FILM, *demos
    )
    assert shown(bert, row).startswith("[CLS] bad it was terrible . [SEP] a fine film") and row.cut


def test_exactly_so_many_are_whole_or_named(bert):
    demos = [Example({"s": words(n, "bad")}, label=0) for n in (2, 3, 1)]  # 7, 8, 6 tokens
    encoder = make_encoder(bert, IT_WAS, max_len=30, demos_first=True, never_cut=True)
    row = encode(encoder, FILM, *demos)  # 9 tokens of its own
    assert shown(bert, row) == (
        "[CLS] bad bad it was terrible . [SEP] bad bad bad it was terrible . [SEP] "
        "bad it was terrible . [SEP] a fine film it was [MASK] . [SEP]"
    )
    assert len(row.ids) == 30 and not row.cut
    encoder = make_encoder(bert, IT_WAS, max_len=29, demos_first=True, never_cut=True)
    with pytest.raises(InputError, match="3 demonstrations takes 30 tokens, .*demos.max_demo_tok"):
        encode(encoder, FILM, *demos)
    encoder = make_encoder(
        bert, IT_WAS, max_len=29, demos_first=True, never_cut=True, max_demo_tokens=2
    )
    assert not encode(encoder, FILM, *demos).cut


# -- sampling -------------------------------------------------------------------------------------


def settings(**changes):
    plain = DemoSettings(
        1, 0, 0, samples=4, similar=1.0, encoder="", max_demo_tokens=0, max_example_tokens=0, seed=3
    )
    return plain._replace(**changes)


NAMES = ("bad", "good")
POOL = [Example({"s": f"text {i}"}, label=i % 2) for i in range(12)]


def texts(samples):
    return [[demo.fields["s"] for demo in sample] for sample in samples]


def test_one_of_each_class_in_their_order():
    demos = Demonstrations(settings(samples=50), POOL, NAMES)
    (actual,) = demos.sample([FILM])
    assert len(actual) == 50 and all([d.label for d in sample] == [0, 1] for sample in actual)
    assert {sample[0].fields["s"] for sample in actual} == {f"text {i}" for i in range(0, 12, 2)}
    (two,) = Demonstrations(settings(per_class=2), POOL, NAMES).sample([FILM])
    assert all([d.label for d in sample] == [0, 0, 1, 1] for sample in two)
    assert all(len({d.fields["s"] for d in sample}) == 4 for sample in two)


def test_never_itself_nor_a_copy_of_its_text():
    pool = [*POOL, Example({"s": "text 0"}, label=1)]  # the same text under another label
    actual = Demonstrations(settings(samples=200), pool, NAMES).sample(pool)
    for example, samples in zip(pool, actual, strict=True):
        assert example.fields["s"] not in itertools.chain(*texts(samples))
        assert len({text for sample in texts(samples) for text in sample}) > 10 - 2


def test_of_all_classes_in_random_order():
    seven = settings(per_class=0, total=7, samples=30)
    (actual,) = Demonstrations(seven, POOL, NAMES).sample([FILM])
    assert all(len({d.fields["s"] for d in sample}) == 7 for sample in actual)
    orders = {tuple(d.label for d in sample) for sample in actual}
    assert len(orders) > 20
    (every,) = Demonstrations(settings(per_class=0, total=99), POOL, NAMES).sample([POOL[3]])
    others = sorted(f"text {i}" for i in range(12) if i != 3)
    assert all(sorted(sample) == others for sample in texts(every))


def test_exactly_so_many_of_all_classes():
    four = settings(per_class=0, exact=4, samples=30)
    (actual,) = Demonstrations(four, POOL, NAMES).sample([FILM])
    assert all(len({d.fields["s"] for d in sample}) == 4 for sample in actual)
    assert len({tuple(d.label for d in sample) for sample in actual}) > 9
    as_many = settings(per_class=0, total=4, samples=30)
    assert Demonstrations(as_many, POOL, NAMES).sample([FILM]) == [actual]
    (every,) = Demonstrations(settings(per_class=0, exact=12), POOL, NAMES).sample([FILM])
    assert all(len({d.fields["s"] for d in sample}) == 12 for sample in every)


def test_a_function_of_the_text_and_the_seed_alone():
    demos = Demonstrations(settings(), POOL, NAMES)
    alone = [demos.sample([example])[0] for example in POOL]
    assert demos.sample(POOL) == alone == demos.sample(POOL[::-1])[::-1]
    assert Demonstrations(settings(seed=4), POOL, NAMES).sample(POOL) != alone
    assert len({str(texts(sample)) for sample in alone}) > 9
    assert [sample[:1] for sample in alone] == demos.single_sample().sample(POOL)


def test_they_are_drawn_by_the_hash_of_the_seed_and_the_text():
    """A draw for each sample: of each class in turn, or of all."""
    text = json.dumps([{"s": "text 4"}, []])
    digest = hashlib.sha256(f"3 {text}".encode()).digest()
    pool = [row for row in range(12) if row != 4]
    of_class = [np.array([row for row in pool if row % 2 == label]) for label in (0, 1)]
    rng, one = np.random.RandomState(np.frombuffer(digest, "<u4")), []
    for _ in range(2):
        one.append([f"text {rng.permutation(rows)[0]}" for rows in of_class])
    (actual,) = Demonstrations(settings(samples=2), POOL, NAMES).sample([POOL[4]])
    assert texts(actual) == one
    rng = np.random.RandomState(np.frombuffer(digest, "<u4"))
    of_all = [f"text {row}" for row in rng.permutation(np.concatenate(of_class))[:5]]
    five = settings(per_class=0, exact=5, samples=1)
    (actual,) = Demonstrations(five, POOL, NAMES).sample([POOL[4]])
    assert texts(actual) == [of_all]


def test_only_the_most_similar_are_sampled():
    similarities = np.random.RandomState(0).permutation(12) / 12
    calls = []

    def similarity(examples):
        calls.append(len(examples))
        return np.stack([similarities * (1 if e is FILM else -1) for e in examples])

    demos = Demonstrations(settings(samples=100, similar=0.5, encoder="e"), POOL, NAMES, similarity)
    near, far = demos.sample([FILM, DULL])
    for label in range(2):
        rows = sorted(range(label, 12, 2), key=lambda row: -similarities[row])
        actual = [{sample[label].fields["s"] for sample in samples} for samples in (near, far)]
        assert actual == [{f"text {row}" for row in half} for half in (rows[:3], rows[3:])]
    assert calls == [2]
    tiny = Demonstrations(settings(similar=0.01, per_class=2, encoder="e"), POOL, NAMES, similarity)
    assert all(len(sample) == 4 for sample in tiny.sample([FILM])[0])  # as many as are asked for


@pytest.mark.parametrize("counts, few, fitting, count", [
    (dict(per_class=7), "class 'bad' has 6", dict(per_class=6), "class 'bad' has 5"),
    (dict(per_class=0, exact=13), "there are 12", dict(per_class=0, exact=12), "there are 11"),
])  # fmt: skip
def test_too_few_examples(counts, few, fitting, count):
    """In all, and besides the example itself."""
    with pytest.raises(InputError, match=f"{few} training examples;"):
        Demonstrations(settings(**counts), POOL, NAMES)
    demos = Demonstrations(settings(**fitting), POOL, NAMES)
    assert demos.sample([FILM])
    with pytest.raises(InputError, match=f"{count} training examples other than"):
        demos.sample(POOL)


def test_too_few_of_the_most_similar():
    near = settings(per_class=0, exact=7, similar=0.5, encoder="e")
    similarity = lambda examples: np.tile(np.arange(12.0), (len(examples), 1))
    with pytest.raises(InputError, match="are 6 training examples .*, of the most similar;"):
        Demonstrations(near, POOL, NAMES, similarity).sample([FILM])


# -- averages -------------------------------------------------------------------------------------


def test_scores_are_averaged_over_samples():
    scores = np.random.RandomState(0).normal(size=(6, 3)).astype(np.float32)
    split = Split([[i] for i in range(6)], np.repeat([1, 0], 3), np.full(6, 3), [(), ()], samples=3)
    np.testing.assert_allclose(split.average(scores), [scores[:3].mean(0), scores[3:].mean(0)])
    one = split.without_samples()
    assert one.rows == [[0], [3]] and one.labels.tolist() == [1, 0] and one.size == 2
    assert split.by_example() == [[0, 1, 2], [3, 4, 5]]
    plain = one._replace(labels=np.array([1, 0]))
    assert plain.average(scores) is scores and plain.without_samples() is plain
