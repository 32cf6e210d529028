"""Tasks whose parts do not fit together, and rows that a task cannot read."""

import re

import pytest

from jaxprompt.data.tasks.readers.candidates import example_rows
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.errors import InputError

CLASSES = {"fields": ["text"], "labels": ["a", "b"]}
CHOICES = {"fields": ["text"], "choices": ["options"]}
TARGET = {"fields": ["text"], "target": "y"}
NUMBER = {"fields": ["text"], "number": "count", "limits": (0.0, 4.0)}
CANDIDATES = {
    "fields": ("question", "word"), "question": ("question",), "metric": "answer_f1",
    "candidate": "word", "candidates": ("options", "answers"), "placeholder": "___",
}  # fmt: skip
RELATION = {
    "fields": ("text",), "labels": ("is", "none"), "entities": ("head", "tail"),
    "negative": "none", "offsets": "characters",
}  # fmt: skip
ROLES = {"fields": ["words"], "tags": "tags", "predicate": "verb", "labels": ["V"]}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"fields": []}, "task.fields is empty"),
        ({"fields": ["choice"]}, "'choice' cannot be written in a template"),
        ({"fields": ["a|b"]}, "cannot be written in a template"),
        ({"fields": ["label", "text"]}, "task.fields includes 'label'"),
        (CLASSES | {"labels": ["a"]}, "task.labels=a must be 2 or more distinct"),
        (CLASSES | {"labels": ["a", "a"]}, "task.labels=a,a must be 2 or more distinct"),
        (CLASSES | {"labels": ["a", " "]}, "must not have empty names"),
        (CLASSES | {"words": ["x", ["z", ""]]}, "must not have empty names"),
        (CLASSES | {"words": ["x"]}, "1 entries for 2 labels; give one per class, in the order a"),
        (CLASSES | {"metric": "f1", "positive": "c"}, "task.positive='c' is not a class of task"),
        (TARGET | {"labels": ["a", "b"]}, "task.target='y' and task.labels are both set"),
        (TARGET | {"words": ["a", "b"]}, "task.target='y' and task.words are both set"),
        (TARGET | {"choices": ["a", "b"]}, "task.target='y' and task.choices are both set"),
        (TARGET | {"target": "text"}, "task.target='text' is also in task.fields"),
        (TARGET | {"positive": "a"}, "task.positive='a' is not a class of task custom"),
        (NUMBER | {"limits": (4.0, 0.0)}, "task.limits=(4.0, 0.0) must be the minimum"),
        (NUMBER | {"labels": ("a", "b")}, "task.number='count' and task.labels are both set"),
        (CANDIDATES | {"question": ()}, "set task.question"),
        (CANDIDATES | {"candidate": "", "candidates": ()}, "task.candidate='' must be one of"),
        (CANDIDATES | {"candidates": ("options",)}, "task.candidates=options must be two columns"),
        (CANDIDATES | {"candidate": "answer"}, "task.candidate='answer' must be one of"),
        (RELATION | {"negative": "NA"}, "task.negative='NA' is not a class of task custom; known"),
        (RELATION | {"offsets": "letters"}, "task.offsets='letters' is unknown"),
        (RELATION | {"markers": ("@", "@")}, "task.markers has 2 words for 2 entities"),
        (RELATION | {"entities": (), "markers": ("@",)}, "task.entities is empty"),
        (RELATION | {"entities": ("a|b|c", "d")}, "'a|b|c' is not valid with task.offsets=char"),
        (RELATION | {"entities": ("a|", "d")}, "'a|' is not valid with task.offsets=characters"),
        (RELATION | {"offsets": "tags"}, "'head' is not valid with task.offsets=tags"),
        (RELATION | {"offsets": "tags", "entities": ("x|x", "y")}, "'x|x' is not valid"),
        (RELATION | {"offsets": "text", "entities": ("a|b", "d")}, "'a|b' is not valid"),
        (RELATION | {"target": "label", "labels": ()}, "is only valid for a task with classes"),
        (RELATION | {"fields": ("text", "entity1")}, "'entity1' is a reserved name"),
        (ROLES | {"scheme": "none", "labels": ()}, "predicate=verb needs tags that span"),
        (ROLES | {"labels": ["O", "B-"]}, "task.labels has 'B-'"),
        (ROLES | {"metric": "accuracy"}, "task.metric=accuracy counts words"),
    ],
)
def test_parts_of_a_task_that_do_not_fit(fields, message):
    with pytest.raises(InputError, match=re.escape(message)):
        custom_task(**fields)


TEXT = {"text": "abc def ghi"}
NEAR = TEXT | {"head": [0, 3], "tail": [4, 7], "label": "is"}
GAPS = {"question": "a ___ ?", "options": ["cat", "dog"], "answers": ["dog"]}
NOT_TEXT = [
    (None, "null"), (float("nan"), "nan"), (float("inf"), "inf"), ([1, 2], "[1, 2]"),
    ({"a": 1}, "{'a': 1}"), (b"x", "b'x'"),
]  # fmt: skip


@pytest.mark.parametrize(
    "fields, row, message",
    [
        *((CLASSES, {"text": value}, f"column 'text' is {shown}") for value, shown in NOT_TEXT),
        *((CLASSES, TEXT | {"label": value}, f"column 'label' is {shown}, which is not a label")
          for value, shown in (*NOT_TEXT, ("", "empty"), ("  ", "empty"))),
        (CLASSES, {"a": 1}, "there is no column 'text'; columns: a"),
        (CLASSES, TEXT, "there is no column 'label'; columns: text"),
        (CHOICES, TEXT | {"options": "red", "label": 0}, "column 'options' must be a list"),
        (CHOICES, TEXT | {"options": ["x", None], "label": 0}, "column 'options' is null"),
        (CHOICES, TEXT | {"options": ["x"] * 27, "label": 0}, "27 choices, but task custom has"),
        (TARGET, TEXT, "there is no column 'y'; columns: text"),
        *((TARGET, TEXT | {"y": value}, "target column 'y' is empty")
          for value in ("", "  ", None, [], ["", ""])),
        *((TARGET, TEXT | {"y": value}, "column 'y' is ")
          for value in ({"text": "a"}, ["a", None], [["a"]], float("nan"))),
        (NUMBER, TEXT | {"count": "many"}, "column 'count' is 'many', not a number"),
        (NUMBER, TEXT | {"count": True}, "column 'count' is True, not a number"),
        (NUMBER, TEXT | {"count": None}, "column 'count' is None, not a number"),
        (NUMBER, TEXT | {"count": 5}, "column 'count' is 5, not a number from 0 to 4"),
        (NUMBER, TEXT | {"count": -0.1}, "column 'count' is -0.1, not a number from 0 to 4"),
        (NUMBER, TEXT, "there is no column 'count'; columns: text"),
        (CANDIDATES, GAPS | {"options": "cat"}, "column 'options' must be a list of 1 or more"),
        (CANDIDATES, GAPS | {"options": []}, "column 'options' must be a list of 1 or more"),
        (CANDIDATES, GAPS | {"options": ["cat", None]}, "column 'options' is null, not text"),
        (CANDIDATES, GAPS | {"answers": ["bird"]}, "none of the 1 answers in 'answers' (e.g. 'b"),
        (RELATION, NEAR | {"tail": [4, 12]}, "entity 2 is characters 4 to 12, but the text has 11"),
        (RELATION, NEAR | {"tail": ["4", "12"]}, "entity 2 is characters 4 to 12"),  # as of a CSV
        (RELATION, NEAR | {"tail": [-1, 3]}, "entity 2 is characters -1 to 3"),
        (RELATION, NEAR | {"head": [5, 4]}, "entity 1 is characters 5 to 4"),
        (RELATION, NEAR | {"head": [2, 2]}, "entity 1 is characters 2 to 2"),
        (RELATION, NEAR | {"head": [3, 4]}, "entity 1 is empty or white space"),
        (RELATION, NEAR | {"tail": [2, 6]}, "entity 1 'abc' and entity 2 'c de' overlap"),
        *((RELATION, NEAR | {"tail": value}, "entity 2, tail, must be a start and an end in whole")
          for value in (None, [1.5, 3], [4], [True, 3])),
        (RELATION, NEAR | {"label": "no"}, "label 'no' is not a label of task custom; labels: is"),
        (RELATION, TEXT | {"head": [0, 3]}, "there is no column 'tail'; columns: text, head"),
        (RELATION | {"offsets": "words", "entities": ("head", "h.pos")}, NEAR | {"h": {}},
         "there is no column 'h.pos'; columns: text"),
        (RELATION | {"offsets": "last_word", "entities": ("head", "a|b")}, NEAR | {"a": 0, "b": 3},
         "entity 1 is words 0 to 4, but the text has 3"),
    ],
)  # fmt: skip
def test_rows_that_a_task_cannot_read(fields, row, message):
    task = custom_task(**fields)
    with pytest.raises(InputError, match=f"^x:3: .*{re.escape(message)}") as error:
        for new_row in example_rows(task, row, "x:3"):
            read_example(task, new_row, "x:3")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "where, place",
    [("a.csv:2", "a.csv, header"), ("b.tsv.gz:9", "b.tsv.gz, header"), ("a.jsonl:2", "a.jsonl:2")],
)
def test_a_missing_column_is_that_of_the_header_and_has_a_nearest(where, place):
    with pytest.raises(InputError) as error:
        read_example(custom_task(**CLASSES), {"txt ": "a", "label": "x", "a,b": "c"}, where)
    message = f"{place}: there is no column 'text'; columns: 'txt ', label, 'a,b'; nearest: 'txt '"
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("text", [
    "no <e1>a</e1> here", "<e1>a</e1> <e2>b", "<e1>a</e1> <e1>b</e1> <e2>c</e2>",
    "<e1>a <e2>b</e1></e2>", "<e1></e1> <e2>b</e2>",
])  # fmt: skip
def test_tags_of_entities_that_are_missing(text):
    row = {"sentence": text, "relation": 1}
    with pytest.raises(InputError, match="^x:3: .*entity [12]"):
        read_example(get_task("sem_eval_2010_task_8"), row, "x:3")
