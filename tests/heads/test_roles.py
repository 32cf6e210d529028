"""Roles of a predicate: it stands in every window, and only the words of the text are tagged."""

import numpy as np
import pytest

from jaxprompt.data.tasks.readers.candidates import example_rows
from jaxprompt.data.tasks.readers.reading import read_all, read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.specials import read_specials
from jaxprompt.data.text.template import parse
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head

WORDS = "The man who saw Xqzwvb saw a dog and the dog saw him again on Monday , he said .".split()
TAGS = ["O"] * len(WORDS)
TAGS[:2], TAGS[5], TAGS[6:8] = ["B-A0", "I-A0"], "B-V", ["B-A1", "I-A1"]
ROW = {"tokens": WORDS, "predicate": 5, "tags": TAGS}
PLAIN, MARKED = "{tokens} [sep] {predicate}", "{tokens|marked} [sep] {predicate}"


def make_task(rows=(ROW,), **fields):
    task = custom_task(fields=("tokens",), tags="tags", predicate="predicate", **fields)
    rows = [example_row for row in rows for example_row in example_rows(task, row, "r:1")]
    task = with_labels(task, rows)
    return task, read_all(task, rows, "r:{}".format)


def make_encoder(tokenizer, task, template, max_len):
    specials = read_specials(tokenizer, "masked", eos=True, sentinel="", num_masks=0)
    return ExampleEncoder(
        tokenizer, parse(template), specials, num_slots=0, num_masks=1, max_len=max_len,
        needs_mask=False, num_types=2, entities=task.marked, markers=task.markers,
    )  # fmt: skip


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("max_len", [64, 20, 13])
def test_windows_lose_no_word_and_each_has_the_predicate(tokenizer, template, max_len):
    task, examples = make_task(markers=("<", ">") if template == MARKED else ())
    assert task.plain == template
    encoder = make_encoder(tokenizer, task, template, max_len)
    head = make_head("tags", stride=2)
    split = head.encode(encoder, task, examples, classes=0, targets=True)
    assert (len(split.rows) > 1) == (max_len < 64) and split.size == 1
    firsts = [ids[0] for ids in encoder.tokenise(WORDS)]
    actual = [int(i) for (row,) in split.rows for i in row.ids[row.label_pos]]
    assert actual == firsts  # neither markers nor the predicate behind [SEP] is tagged
    tags = [task.labels[i] for row in split.labels for i in row if i >= 0]
    assert tags == TAGS
    left, saw, right = (ids for ids in encoder.tokenise(["<", "saw", ">"]))
    sep = tokenizer.sep_token_id
    for (row,) in split.rows:
        assert len(row.ids) <= max_len and (not row.cut or max_len == 13)  # Xqzwvb
        ids = row.ids.tolist()
        assert ids[-2 - len(saw) : -1][1:] == saw and ids[-1] == sep
        marked = [*left, *saw, *right]
        places = [i for i in range(len(ids)) if ids[i : i + len(marked)] == marked]
        assert len(places) == (template == MARKED)
    scores = np.full((*split.labels.shape, len(task.labels)), -5.0, np.float32)
    np.put_along_axis(scores, np.maximum(split.labels, 0)[..., None], 5.0, -1)
    for metric, other in (("role_f1", "entity_f1"), ("entity_f1", "role_f1")):
        measured = head.measure(metric, split, scores, 0)
        assert list(measured) == [metric, "precision", "recall", "accuracy", other]
        assert measured[metric] == measured[other] == 1.0
    (answer,) = head.answers(task, examples, split, scores, 0)
    text = " ".join(WORDS)
    place = answer["predicate_span"]
    assert place == {"text": "saw", "word": 5, "start": text.index("saw a"), "end": 26}
    assert [(r["type"], text[r["start"] : r["end"]]) for r in answer["roles"]] == [
        ("A0", "The man"), ("A1", "a dog"),
    ]  # fmt: skip


def test_a_window_holds_the_predicate_on_its_own_side(tokenizer):
    task, examples = make_task(markers=("<", ">"))
    split = make_head("tags", stride=0).encode(
        make_encoder(tokenizer, task, MARKED, 13), task, examples, classes=0, targets=True
    )
    sides = []
    ((left,),) = make_encoder(tokenizer, task, MARKED, 13).tokenise("<")
    for (row,) in split.rows:
        at = row.ids.tolist().index(left)
        sides.append("before" if at < row.label_pos[0] else "behind" if
                     at > row.label_pos[-1] else "inside")  # fmt: skip
    assert (
        sides[0] == "behind"
        and sides[-1] == "before"
        and sides == sorted(sides, key=["behind", "inside", "before"].index)
    )


def test_what_cannot_be_laid_out_is_refused(tokenizer):
    task, examples = make_task(markers=("<", ">"))
    encoder = make_encoder(tokenizer, task, MARKED, 7)
    with pytest.raises(InputError, match="the predicate and its markers take 3 tokens, which leav"):
        make_head("tags").encode(encoder, task, examples, classes=0, targets=True)
    with pytest.raises(
        InputError, match="must contain the words once and without modifiers, as in '{tok"
    ):
        make_head("tags").check_template(parse("{tokens|soft} [sep] {predicate}"))


def test_a_list_of_predicates_becomes_examples():
    tags = ["B-V O".split(), "B-A0 B-V".split()]
    _, examples = make_task([{"tokens": "go on", "predicate": [0, 1.0], "tags": tags}])
    assert [e.fields["predicate"] for e in examples] == ["go", "on"]
    assert [e.entities for e in examples] == [((0, 2),), ((3, 5),)]
    assert [list(e.tags) for e in examples] == tags


@pytest.mark.parametrize(
    "change, message",
    [
        ({"predicate": 20}, "r:0: column 'predicate' is 20; it must be the index"),
        ({"predicate": -1}, "r:0: column 'predicate' is -1; it must be the index"),
        ({"predicate": None}, "r:0: column 'predicate' is None; it must be"),
        ({"predicate": True}, "r:0: column 'predicate' is True; it must be the index"),
        ({"predicate": "saw"}, "r:0: column 'predicate' is 'saw'; it must be the index"),
        ({"predicate": []}, "r:1: column 'predicate' lists no predicate; give the index of one"),
        ({"predicate": [1, 2]}, "r:1: column 'predicate' lists 2 predicates"),
        ({"tags": ["O"]}, "r:0: 20 words in column 'tokens', but 1 tags in 'tags'"),
        ({"tags": ["I-A0", *TAGS[1:]]}, "r:0: word 1 has 'I-A0' after 'the beginning', which"),
        ({"tags": ["B-A0", "B-A9", *TAGS[2:]]}, "r:0: tag 'B-A9' is not one of task custom"),
    ],
)
def test_rows_that_are_wrong(change, message):
    task, _ = make_task(scheme="iob2")
    with pytest.raises(InputError) as caught:
        read_all(task, example_rows(task, ROW | change, "r:1"), "r:{}".format)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value), caught.value


def test_a_row_without_a_predicate_and_tags_that_break_a_rule():
    task, _ = make_task(scheme="iob2")
    with pytest.raises(InputError, match="r:9: there is no column 'predicate'; columns: toke"):
        read_example(task, {"tokens": WORDS}, "r:9", need_label=False)
    wrong = ROW | {"tags": ["O", "I-A1", *TAGS[2:]]}
    rule = r"r:1: word 2 has 'I-A1' after 'O'.*I-X may only follow B-X or I-X"
    with pytest.raises(InputError, match=rule):
        read_all(task, [ROW, wrong, wrong], "r:{}".format)
    with pytest.raises(InputError, match=rule):
        with_labels(custom_task(fields=("tokens",), tags="tags", predicate="predicate",
                                scheme="iob2"), [ROW, wrong, wrong], "r:{}".format)  # fmt: skip


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tags": ""}, "task.predicate='predicate' is only valid for a task"),
        ({"tags": "predicate"}, "not in task.fields or task.tags"),
        ({"fields": ("predicate",), "predicate": "p"}, "no field may be called 'predicate'"),
        ({"labels": ("O", "A0")}, "task.labels has 'A0', which is not an IOB2 tag"),
        ({"markers": ("<",)}, "task.markers has 1 words for 1 predicate; give two"),
        ({"predicate": "", "metric": "role_f1"}, "metric role_f1 compares the roles of predicates"),
        ({"predicate": "", "markers": ("<", ">")}, "task.entities is empty"),
    ],
)
def test_tasks_that_do_not_fit(fields, message):
    task_fields = {"fields": ("tokens",), "tags": "tags", "predicate": "predicate"} | fields
    with pytest.raises(InputError) as caught:
        custom_task(**task_fields)
    assert message in str(caught.value)
