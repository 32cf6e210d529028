"""Reading tasks and the unified form: rows, names of choices, what is cut, token by token."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ppt_corpus import CHINESE, task_encoder, tiny_bert

from jaxprompt.corpus.ppt import get_pattern, make_forms, to_selection_form
from jaxprompt.corpus.ppt.reading import UnitEncoder
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.template import parse
from jaxprompt.data.text.tokenizer import encode_texts
from jaxprompt.data.text.verbalizer import make_verbalizer
from jaxprompt.errors import InputError
from jaxprompt.types import Role

STYLES = {"t5": "seq2seq", "bert": "masked", "roberta": "masked"}
MARKS = {"t5": 32099, "bert": 103, "roberta": 50264}  # the sentinel, or the mask


def real_rows(shared, task, folder="", count=60):
    rows = read_file(shared / "data" / (folder or task.name) / "train.jsonl.gz")
    return [read_example(task, row, "x:1") for row in itertools.islice(rows, count)]


def pieces(tokenizer, *texts):
    """Ids of texts, each behind a space."""
    return encode_texts(tokenizer, [f" {text}" for text in texts])


def contains(ids, part):
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(part))
    return bool((windows == np.array(part)).all(-1).any())


# -- the form of pre-training ---------------------------------------------------------------------

TEXTS = ["Where did it go?", "Away it went", "It was a cat", "Nowhere at all", "In the house"]
PASSAGE = custom_task(fields=["query"], label="answer", choices=["options"])


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize("style", ["en", "en_paper"])
@pytest.mark.parametrize("number, max_len", [(2, 90), (4, 90), (4, 48), (16, 180)])
def test_a_row_is_that_of_pretraining(request, kind, style, number, max_len):
    tokenizer, family = request.getfixturevalue(kind), STYLES[kind]
    pattern = get_pattern("unified", style)
    query, *options = [TEXTS[0] + " It was so." * (8 * (max_len == 48)), *TEXTS[1:] * 4]
    options = options[:number]
    forms = make_forms(
        pattern, tokenizer, family, num_slots=5, max_len=max_len, options=(number,),
        num_types=2, eos=False,
    )  # fmt: skip
    text_pieces = pieces(tokenizer, query, *options)
    names = ["query", *(f"option{i}" for i in range(number))]
    filled = forms.forms[number].fill(dict(zip(names, map(np.array, text_pieces), strict=True)))
    assert len(filled.ids) == max_len if max_len == 48 else len(filled.ids) < max_len
    encoder = task_encoder(
        tokenizer, family, to_selection_form(PASSAGE, pattern), max_len=max_len, slots=5
    )
    (row,) = encoder.encode(Example({"query": query}, tuple(options)))
    assert row.num_choices == filled.num_choices == number
    for name in ("ids", "slot", "types", "roles", "positions", "label_pos"):
        np.testing.assert_array_equal(getattr(row, name), getattr(filled, name), name)
    assert [filled.ids[filled.label_pos[0]], row.decoder and row.decoder.ids[1]] in (
        [MARKS[kind], None], [filled.ids[1], MARKS[kind]],
    )  # fmt: skip


# -- the rows of the released code ----------------------------------------------------------------

A, B, STOP, ASKED, THEN = 188, 279, 5, 58, 117  # A and B unspaced, ".", "?", ";"
TAIL = "The correct one is"


def options_of(tokenizer, *texts):
    """Letter, stop, text, stop; letters without a space are those of the released code."""
    letters = [A, B, 254, 308, 427, 371, 517, 566, 196, 683]
    parts = [
        [letter, STOP, *option, STOP]
        for letter, option in zip(letters, pieces(tokenizer, *texts), strict=False)
    ]
    return sum(parts, [])


@pytest.mark.parametrize(
    ("name", "words", "listed", "layout"),
    [
        ("sst2", ("bad", "good"), "bad good", "{sentence} ?"),
        ("rte", ("yes", "no"), "no yes", "{hypothesis} ? {premise} ."),
        ("boolq", ("no", "yes"), "no yes", "{question} ? {passage} ."),
        ("yahoo_answers_topics", (), "", "{question_title} ?"),  # all else is empty in these rows
        ("dream", None, "", "{dialogue} ; {question} ?"),
    ],
)
def test_unified_rows_are_those_of_the_released_code(t5, shared, name, words, listed, layout):
    task = get_task(name)
    if words:
        task = replace(task, words=tuple((word,) for word in words))
    form = to_selection_form(task, get_pattern("unified"))
    encoder = task_encoder(t5, "seq2seq", form, max_len=2000, slots=3)
    marks = {"?": [ASKED], ".": [STOP], ";": [THEN]}
    (tail,) = pieces(t5, TAIL)
    for example in real_rows(shared, form):
        options = listed.split() or example.choices
        expected = [0] * 3
        for part in layout.split():
            expected += marks.get(part) or pieces(t5, example.fields[part[1:-1]].strip())[0]
        expected += options_of(t5, *options) + [ASKED] + tail + [MARKS["t5"]]
        (row,) = encoder.encode(example)
        assert row.ids.tolist() == expected
        assert row.decoder.ids.tolist()[:2] == [0, MARKS["t5"]]
        assert row.num_choices == len(options) and 0 <= example.label < row.num_choices
    assert form.labels == task.labels  # a prediction is named as before
    ids = make_verbalizer(t5, form.words, leading_space=form.spaced).ids
    letters = [B, A] if name == "rte" else [A, B]  # label_map in RTEDatasets.py
    assert ids[:2, 0, 0].tolist() == letters and ids.shape == (len(task.labels), 1, 1)


@pytest.mark.parametrize(("style", "mark"), [("en", "?"), ("zh", "？")])
def test_a_pair_is_asked_by_both_texts(style, mark):
    """Of a task without a query of its own, as LCQMC (section 3.3)."""
    task = get_task("lcqmc")
    assert not task.query
    form = to_selection_form(task, get_pattern("unified", style))
    stop = form.option[-1]
    assert form.template.startswith(f" {{sentence1}}{mark} {{sentence2}}{stop}{{choices}}")


@pytest.mark.parametrize(
    ("style", "words", "options", "names"),
    [
        ("en", "yes no maybe", "no maybe yes", "C A B"),  # label_map in CBDatasets.py
        ("en", "Yes No", "No Yes", "B A"),
        ("zh", "中立 相似 矛盾", "矛盾 中立 相似", "二 三 一"),
        ("en", "terrible bad maybe good great", "terrible bad maybe good great", "A B C D E"),
        ("en", "yes later", "yes later", "A B"),
    ],
)
def test_no_maybe_and_yes_are_listed_in_this_order(style, words, options, names):
    """Section 3.3, whatever the order of the classes; other words stand in the latter."""
    pair = custom_task(fields=["a", "b"], labels=list("vwxyz")[: len(words.split())])
    pair = replace(pair, words=tuple((word,) for word in words.split()))
    form = to_selection_form(pair, get_pattern("unified", style))
    assert " ".join(form.options) == options
    assert " ".join(word for (word,) in form.words) == names
    assert form.labels == pair.labels


def test_a_left_to_right_model_ends_with_the_question(gpt2):
    """Byte-level BPE is GPT-2's; what a pattern has behind the mask is left out."""
    for style, end in (("en", "ĠThe Ġcorrect Ġone Ġis"), ("en_paper", ". ĠAnswer Ġis")):
        form = to_selection_form(get_task("sst2"), get_pattern("unified", style))
        encoder = task_encoder(gpt2, "causal", form)
        (row,) = encoder.encode(Example({"sentence": "fine"}, form.options))
        shown = " ".join(gpt2.convert_ids_to_tokens(row.ids.tolist()))
        assert shown.startswith("Ġfine ?") and shown.endswith(end)
        assert row.label_pos.tolist() == [len(row.ids) - 1]


def test_the_users_own_words():
    form = to_selection_form(custom_task(fields=["a"], labels=["x", "y"]), get_pattern("unified"))
    assert (form.options, form.words, form.labels) == (("x", "y"), (("A",), ("B",)), ("x", "y"))
    assert form.template == " {a}?{choices}? The correct one is [mask]"
    pair = custom_task(fields=["a", "b"], labels=["x", "y"], words=[("ja", "si"), "no"])
    assert to_selection_form(pair, get_pattern("unified")).template.startswith(
        " {a}? {b}.{choices}?"
    )
    assert to_selection_form(pair, get_pattern("unified", "zh")).template.startswith(
        " {a}？ {b}。{choices}答"
    )
    form = to_selection_form(pair, get_pattern("unified"), "{b} or {a|whole}?")
    assert form.template.startswith(" {b} or {a|whole}?{choices}") and form.options == ("ja", "no")
    example = read_example(form, {"a": 1, "b": 2, "label": "y"}, "x:1")
    assert example == Example({"a": "1", "b": "2"}, ("ja", "no"), 1)
    with pytest.raises(InputError, match="label 'ja' is not a label of task custom; labels: x, y"):
        read_example(form, {"a": 1, "b": 2, "label": "ja"}, "x:1")


# -- names and forms of choices -------------------------------------------------------------------


def test_chinese_choices_have_numerals(shared):
    """2 to 4 of them, the answer a text; those that a row lacks do not count."""
    task, counts = get_task("c3"), set()
    tokenizer = tiny_bert(CHINESE + list("问、"))
    encoder = task_encoder(tokenizer, "masked", task, max_len=2000)
    for example in real_rows(shared, task, count=300):
        (row,) = encoder.encode(example)
        names = [tokenizer.convert_ids_to_tokens(int(i)) for i in row.ids[row.roles == Role.HARD]]
        wanted = "".join(f"{name}、。" for name in "一二三四"[: row.num_choices])
        assert "".join(names) == f"问[UNK]{wanted}答案是。"
        counts.add(row.num_choices)
    assert counts == {2, 3, 4}


def test_letters_of_race_are_no_texts():
    """An option may read like the letter of another."""
    row = {"article": "a", "question": "q", "options": ["B", "A", "C", "D"], "answer": "B"}
    assert read_example(get_task("race"), row, "x:1").label == 1
    texts = {"dialogue": ["a"], "question": "q", "choice": ["B", "A", "C"], "answer": "B"}
    assert read_example(get_task("dream"), texts, "x:1").label == 0


# -- what is cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize("form", ["cloze", "unified"])
def test_only_the_article_is_cut(request, shared, kind, form):
    """Question, options, slots and mask survive on real dialogues; what is left is a beginning."""
    tokenizer = request.getfixturevalue(kind)
    task = get_task("dream")
    task = to_selection_form(task, get_pattern("unified")) if form == "unified" else task
    examples, cut = real_rows(shared, task, count=100), 0
    full = task_encoder(tokenizer, STYLES[kind], task, max_len=4000, slots=7)
    short = task_encoder(tokenizer, STYLES[kind], task, max_len=96, slots=7)
    for example in examples:
        (whole,), (row,) = full.encode(example), short.encode(example)
        assert len(row.ids) == min(96, len(whole.ids))
        lost = len(whole.ids) - len(row.ids)
        cut += lost > 0
        for part in pieces(tokenizer, example.fields["question"], *example.choices):
            assert contains(row.ids, part)
        # The article stands first: what is gone is one stretch, its end.
        space = " " * (kind == "t5" or form == "unified")
        (article,) = encode_texts(tokenizer, [space + example.fields["dialogue"]])
        at = 7 + (STYLES[kind] == "masked")
        remaining = len(article) - lost
        assert remaining > 0
        expected = np.delete(whole.ids, np.s_[at + remaining : at + len(article)])
        np.testing.assert_array_equal(row.ids, expected)
        assert (row.ids == MARKS[kind]).sum() == 1 and (row.slot >= 0).sum() == 7
    assert cut > 25


def test_a_text_that_is_whole_needs_no_other(bert):
    task = custom_task(fields=["q"], labels=["a", "b"], template="{q|whole} [mask]")
    (row,) = task_encoder(bert, "masked", task, max_len=5).encode(Example({"q": "one two"}))
    assert len(row.ids) == 5
    with pytest.raises(InputError, match="takes 6 tokens .* max_len 5; raise max_len to 6"):
        task_encoder(bert, "masked", task, max_len=5).encode(Example({"q": "one two three"}))


# -- units of a corpus ----------------------------------------------------------------------------


def test_units_within_the_limits_are_read(t5):
    """Of 6 tokens or more, </s> counted, and above 10 characters, as the released code of PPT."""
    texts = {
        "word word word word": False,  # 4 tokens
        "word word word word word": True,  # 5
        "a b c de!?": False,  # 10 characters
        "a b c def!?": True,  # 11
        "word " * 1999 + "words": True,  # 10,000
        "word " * 1999 + "words.": True,  # cut, as any text that is longer than data.max_len
    }
    ids = [np.array(piece_ids, np.int32) for piece_ids in pieces(t5, *texts)]
    assert [len(piece_ids) for piece_ids in ids[:2]] == [4, 5] and min(map(len, ids[2:])) > 5
    corpus = SimpleNamespace(unit=ids.__getitem__)
    task = custom_task(fields=["text"], labels=["a", "b"], template="{text} [mask]")
    reader = UnitEncoder(corpus, t5, task_encoder(t5, "seq2seq", task), parse(task.template), 512)
    read, rows = reader.rows(range(len(texts)))
    assert [at in read for at in range(len(texts))] == list(texts.values())
    assert len(rows) == len(read) and contains(rows[0][0].ids, ids[1])


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "choices", "message"),
    [
        ("dream", "cloze", 1, "x:3: column 'choice' must be a list of 2 or more choices"),
        (
            "dream",
            "cloze",
            4,
            "x:3: 4 choices, but task dream has names for only 3; shorten the list",
        ),
        (
            "custom",
            "unified",
            17,
            "x:3: 17 choices, but task custom has names for only 16; shorten",
        ),
        ("custom", "cloze", 27, "x:3: 27 choices, but task custom has names for only 26; shorten"),
        ("dream", "cloze", 3, "x:3: label 'none' is not a label of task dream; labels: 0, 1, 2"),
        ("custom", "unified", 3, "x:3: label 'none' is not a label of task custom; labels: 0, 1"),
    ],
)
def test_rows_that_do_not_fit(name, form, choices, message):
    task = custom_task(fields=["question"], label="answer", choices=["choice"])
    task = get_task(name) if name != "custom" else task
    task = to_selection_form(task, get_pattern("unified")) if form == "unified" else task
    row = {"dialogue": "a", "question": "q", "answer": "none"}
    with pytest.raises(InputError) as error:
        read_example(task, row | {"choice": [str(i) for i in range(choices)]}, "x:3")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


MANY = custom_task(fields=["a"], labels=[f"class {i}" for i in range(17)])


@pytest.mark.parametrize(
    ("task", "query", "message"),
    [
        (MANY, "", "names for 16 options, but task custom has 17 classes"),
        (custom_task(fields=["a"], target="b"), "", "task custom generates text; use"),
        (PASSAGE, "{query} [mask]", r"has mask; with task.form=unified write only"),
        (PASSAGE, "{query} {choices}", "has choices; with task.form=unified write"),
    ],
)
def test_tasks_that_do_not_fit(task, query, message):
    with pytest.raises(InputError, match=message):
        to_selection_form(task, get_pattern("unified"), query)


@pytest.mark.parametrize(
    "option", ["{name}.", "{text}", "{name} {text} {text}", "{name|lower} {text}", "{x} [mask]"]
)
def test_options_that_do_not_fit(bert, option):
    task = replace(PASSAGE, template="{query} {choices} [mask]", words=(("A",), ("B",)))
    with pytest.raises(InputError, match="must contain {name} and {text} once each"):
        task_encoder(bert, "masked", replace(task, option=option))
