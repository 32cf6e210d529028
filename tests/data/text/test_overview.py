"""What a run says of its labels and of texts that are cut, on counts made by hand."""

import pytest
from reading_rows import make_encoder

from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text import overview
from jaxprompt.data.text.encode import Answer
from jaxprompt.data.text.encoded import count_cut


def test_which_index_is_which_label_and_how_many_there_are():
    labels = {"train": [0, 2, 2, 1, 2], "dev": [2, 1, 0], "test": [0, -1]}
    lines = overview.label_messages(("very bad", " okay", "good\x1b[2J"), labels)
    assert lines == ["labels in train: 0 = very bad (1), 1 = ' okay' (1), 2 = 'good\\x1b[2J' (3)"]


def test_which_word_stands_for_which_class():
    messages = overview.label_word_messages(("neg ", "pos"), (("bad", "awful"), ("pos",)))
    assert messages == ["label words: 'neg ' = 'bad', 'awful'; pos = 'pos'"]
    # Nothing where each class is its own word, or has none.
    assert overview.label_word_messages(("neg", "pos"), (("neg",), ("pos",))) == []
    assert overview.label_word_messages(("neg", "pos"), ()) == []
    many = [str(i) for i in range(overview.MANY + 1)]
    assert overview.label_word_messages(many, [("x",)] * len(many)) == []


def test_a_class_that_dev_lacks_is_said():
    lines = overview.label_messages(("a", "b", "c"), {"train": [0, 0, 1], "dev": [0]})
    assert lines[1:] == ["class b has no examples in dev (1 in train)"]
    assert len(overview.label_messages(("a", "b"), {"train": [0, 1]})) == 1


def test_names_that_differ_in_case_or_spaces_only():
    names = ("Food", "food ", "tool", "FOOD", "Tool box")
    lines = overview.label_messages(names, {"train": [0, 0, 1, 3, 2, 4]})[1:]
    assert lines == [
        "warning: labels 'Food' (2) and 'food ' (1) and 'FOOD' (1) differ only in case or spaces "
        "and are 3 classes; spell them the same if they are one"
    ]


@pytest.mark.parametrize(
    "names, counts, expected",
    [
        (("positive", "postive", "negative"), (9, 1, 9), "'postive' (1) resembles 'positive' (9)"),
        (("billing", "shipping", "Biling "), (9, 9, 1), "'Biling ' (1) resembles 'billing' (9)"),
        (("positive", "postive"), (9, 2), ""),  # both are frequent
        (("positive", "postive"), (1, 1), ""),
        (("topic 10", "topic 11", "1.25", "1.26"), (9, 1, 9, 1), ""),
        (("entailment", "not_entailment", "neutral"), (9, 1, 9), ""),
    ],
)
def test_a_label_that_occurs_once_and_resembles_another(names, counts, expected):
    train = [i for i, count in enumerate(counts) for _ in range(count)]
    warnings = overview.label_messages(names, {"train": train})[1:]
    expected = [f"warning: label {expected}"] if expected else []
    assert [line.partition(";")[0] for line in warnings] == expected


def test_of_many_classes_the_most_frequent_are_told():
    names = [f"Word{i}" for i in range(overview.MANY)]
    labels = {"train": [3, 3, 7, 5, 3, 7], "dev": [1]}
    assert len(overview.label_messages(names, labels)[0].split(", ")) == overview.MANY
    assert overview.label_messages([*names, "word1"], labels) == [
        "labels in train: 3 of 101 classes, most frequent: Word3 (3), Word7 (2), Word5 (1)"
    ]


STYLES = {"bert": "masked", "roberta": "causal", "t5": "seq2seq"}


@pytest.mark.parametrize("kind", STYLES)
def test_texts_that_are_cut(request, kind):
    """A text is cut where it is longer than what the template leaves of max_len, not before."""
    tokenizer, style = request.getfixturevalue(kind), STYLES[kind]
    answer = Answer(max_tokens=2) if style == "causal" else Answer()
    rows = lambda examples, most: make_encoder(
        tokenizer, "{a} {b}", style, num_slots=2, max_len=most, num_types=1, answer=answer
    ).encode_all(examples)
    examples = [Example({"a": "the " * n, "b": "the"}) for n in (1, 9, 3, 4, 5)]
    lengths = [len(example[0].ids) for example in rows(examples, 200)]
    assert lengths == [lengths[0] + n for n in (0, 8, 2, 3, 4)]
    behind = 2 if style == "causal" else 0
    for most, cut in ((lengths[2] + behind, 3), (lengths[4] + behind, 1), (200, 0)):
        assert count_cut(rows(examples, most)) == cut
    splits = {"train": rows(examples, lengths[2] + behind), "dev": rows(examples[:2], 200)}
    assert overview.truncation_message(24, splits).endswith(": train 3 of 5, dev 0 of 2")


def test_an_example_of_several_rows_is_cut_once(tokenizer):
    encoder = make_encoder(tokenizer, "{a} {choice}", max_len=9, num_types=1)
    long, short = Example({"a": "the " * 9}, ("x", "y")), Example({"a": "the"}, ("x", "y"))
    assert count_cut(encoder.encode_all([long, short])) == 1
