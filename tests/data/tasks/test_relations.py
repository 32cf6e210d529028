"""Tasks of relations: where entities stand, what rows are refused, and names as label words."""

import json
import re

import pytest
from refusing import refuse_line

from jaxprompt.data.sources.digest import summarize
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.definitions.relations import RELATIONS
from jaxprompt.data.tasks.readers.dialogues import read_turns
from jaxprompt.data.tasks.readers.entities import ABSENT, _occurrences, relation_words
from jaxprompt.data.tasks.readers.reading import read_example, with_labels
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.data.text import template
from jaxprompt.errors import InputError
from jaxprompt.scoring import metrics

ROWS = {
    "sem_eval_2010_task_8": {
        "sentence": "The <e1>child</e1> was in the <e2>cradle</e2>.", "relation": 5, "id": 2
    },
    "scierc": {"text": "A [[ method ]] to learn << structure >> .", "label": "USED-FOR"},
    "chemprot": {
        "text": "<< Ang II >>-induced; [[ [3H]L-x ]] >> y", "label": "INHIBITOR", "metadata": []
    },
    "tacred": {
        "token": ["He", "was", "born", "in", "New", "York", "."], "subj_start": 0, "subj_end": 0,
        "obj_start": 4, "obj_end": 5, "relation": "per:city_of_birth", "subj_type": "PERSON",
    },
    "wiki80": {
        "token": ["New", "York", "Airport", "serves", "it"], "relation": "country",
        "h": {"name": "new york airport", "id": "Q1", "pos": [0, 3]},
        "t": {"name": "it", "id": "Q2", "pos": [4, 5]},
    },
    "event_arguments": {
        "tokens": ["They", "attacked", "the", "old", "bridge"], "role": "Target",
        "trigger": {"text": "attacked", "start": 1, "end": 2}, "argument": [2, 5],
    },
    "dialog_re": {
        "dialog": ["Speaker 1: Hi, Joe!", "Speaker 2: Hey."], "x": "Speaker 2", "y": "Joe",
        "r": ["per:alternate_names"], "t": [""],
    },
}  # fmt: skip
ENTITIES = {
    "sem_eval_2010_task_8": ("child", "cradle"),
    "scierc": ("method", "structure"),
    "chemprot": ("[3H]L-x", "Ang II"),
    "tacred": ("He", "New York"),
    "wiki80": ("New York Airport", "it"),
    "event_arguments": ("attacked", "the old bridge"),
    "dialog_re": ("Speaker 2", "Joe"),
}
TEXTS = {
    "sem_eval_2010_task_8": "The child was in the cradle.",
    "scierc": "A method to learn structure .",
    "chemprot": "Ang II-induced; [3H]L-x >> y",
    "tacred": "He was born in New York .",
    "dialog_re": "Speaker 1: Hi, Joe!\nSpeaker 2: Hey.",
}


@pytest.mark.parametrize("name", RELATIONS)
def test_a_task_is_consistent(name):
    task = get_task(name)
    assert len(task.labels) == len(set(task.words)) == len(set(task.targets)) >= 7
    assert len(task.entities) == 2 and task.metric in metrics.METRICS_OF["classes"]
    assert not task.negative or task.negative in task.labels
    for text, needs_mask in ((task.template, True), (task.causal, True), (task.plain, False)):
        parsed = template.parse(text)
        template.validate_template(
            parsed, fields=task.texts, num_slots=0, needs_mask=needs_mask, has_choices=False,
            entities=2,
        )  # fmt: skip
        assert [part.mark for part in parsed.parts if part.mark] == ["marked"]
    assert template.parse(task.causal).parts[-1].kind == "mask"
    sizes = dict(sem_eval_2010_task_8=19, tacred=42, wiki80=80, chemprot=13, dialog_re=37)
    assert len(task.labels) == sizes.get(name, len(task.labels))


@pytest.mark.parametrize("name", ROWS)
def test_rows_by_their_published_columns(name):
    task, row = get_task(name), ROWS[name]
    example = read_example(task, row, "x:1")
    text = example.fields[task.fields[0]]
    assert tuple(text[a:b] for a, b in example.entities) == ENTITIES[name]
    assert (example.fields["entity1"], example.fields["entity2"]) == ENTITIES[name]
    assert text == TEXTS.get(name, text)
    label = row[task.label]
    right = {5: "Content-Container(e2,e1)", **dict.fromkeys(task.labels)}  # a number, or a name
    name = label[0] if isinstance(label, list) else label
    assert task.labels[example.label] == (right[name] or name)
    bare = {column: value for column, value in row.items() if column != task.label}
    assert read_example(task, bare, "x:1", need_label=False).label == -1


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("event_arguments", "the old bridge is the [mask] of attacked"),  # its role in the event
        ("wiki80", "New York Airport is the [mask] of it"),
        ("dialog_re", "Speaker 2 is the [mask] of Joe"),
    ],
)
def test_the_template_asks_what_one_entity_is_of_the_other(name, question):
    """Of events what the argument is of the trigger; DART, appendix A.2, asks of relations so."""
    task = get_task(name)
    fields = read_example(task, ROWS[name], "x:1").fields
    assert re.sub(r"\{(entity\d)\}", lambda m: fields[m[1]], task.template).endswith(question)


@pytest.mark.parametrize("name, folder, splits", [
    ("sem_eval_2010_task_8", "sem_eval_2010_task_8", {"train": 8_000, "test": 2_717}),
    ("scierc", "scierc_relation", {"train": 3_219, "dev": 455, "test": 974}),
])  # fmt: skip
def test_real_rows(shared, name, folder, splits):
    """Every entity is the text between its tags, in its place; nothing else of a text is lost."""
    task = get_task(name)
    tags = [entry.split("|") for entry in task.entities]
    for split, size in splits.items():
        rows = read_split(task, split, source=str(shared / "data" / folder))
        assert len(rows) == size
        for i, row in enumerate(rows):
            example = read_example(task, row, rows.origin(i))
            raw, text = row[task.fields[0]], example.fields[task.fields[0]]
            written = sorted(zip(example.entities, tags, strict=True), reverse=True)
            for (start, end), (opens, closes) in written:
                text = text[:start] + opens + text[start:end] + closes + text[end:]
            assert text == raw


@pytest.mark.parametrize("text, slots, entities, said", [
    ("{text|soft} [mask]", 3, 2, "puts 4 soft tokens around 2 entities, but the method has only 3"),
    ("{text|soft} [soft*2] [mask]", 5, 2, "but the prompt has 5 slots; make the two equal (4 of"),
    ("{text|marked} [mask]", 0, 0, "marks the entities of 'text'"),
    ("{other|marked} {text} [mask]", 0, 2, "but only {text} has"),
    ("{text|marked|lower} [mask]", 0, 2, "positions |lower would"),
    ("{text|marked} {text|soft} [mask]", 4, 2, "marks the entities of 'text'"),
])  # fmt: skip
def test_templates_that_do_not_fit(text, slots, entities, said):
    line = refuse_line(
        template.validate_template, template.parse(text), fields=("text", "other"), num_slots=slots,
        needs_mask=True, has_choices=False, entities=entities,
    )  # fmt: skip
    assert said in line


# -- the user's own -------------------------------------------------------------------------------


def test_own_columns_and_found_labels():
    task = custom_task(
        fields=("text", "note"), entities=("a|b", "c|d"), offsets="characters", negative="none"
    )
    rows = [
        {"text": "abc def ghi", "note": "n", "a": "0", "b": 3, "c": 8.0, "d": 11, "label": label}
        for label in ("org:part_of", ["none", "org:part_of"])
    ]
    task = with_labels(task, rows)
    assert task.labels == ("none", "org:part_of")
    assert task.words == (("none",), ("organization part of",))
    assert task.template == "{text|marked} {note} {entity1} is the [mask] of {entity2}"
    assert task.plain == "{text|marked} [sep] {note}"
    first, second = (read_example(task, row, "x:1") for row in rows)
    assert first.fields == {"text": "abc def ghi", "note": "n", "entity1": "abc", "entity2": "ghi"}
    assert (first.label, first.references) == (1, ())
    assert (second.label, second.references) == (0, ("none", "org:part_of"))
    line = refuse_line(with_labels, custom_task(
        fields=("text",), entities=("a|b", "c|d"), offsets="characters", negative="no"), rows
    )  # fmt: skip
    assert "task.negative='no' is not a class" in line


@pytest.mark.parametrize("name, words", [
    ("per:city_of_birth", "person city of birth"),
    ("org:top_members/employees", "organization top members employees"),
    ("per:stateorprovince_of_death", "person state or province of death"),
    ("Cause-Effect(e1,e2)", "cause effect"),
    ("Cause-Effect(e2,e1)", "inverse cause effect"),
    ("SUBSTRATE_PRODUCT-OF", "substrate product of"),
    ("memberOf", "member of"),
    ("no_relation", "no relation"),
    ("属于", "属于"),
    ("--", "--"),
    ("part (whole)", "part whole"),
])  # fmt: skip
def test_names_of_relations_as_words(name, words):
    assert relation_words(name) == words


def test_digests_of_other_tasks_are_as_before():
    """What runs recorded before entities were there still holds."""
    task = get_task("sst2")
    example = read_example(task, {"sentence": "fine", "label": 1}, "x:1")
    actual = summarize([example], task.labels).digest
    assert actual == "27c8837a7bf2c1a5bf3eb01f3b5756a42e76619ddfc8b644d9e5046d521e624e"
    marked = read_example(get_task("scierc"), ROWS["scierc"], "x:1")
    moved = marked._replace(entities=((0, 1), marked.entities[1]))
    digests = {summarize([e], ()).digest for e in (marked, moved)}
    assert len(digests) == 2


# -- dialogues ------------------------------------------------------------------------------------

TURNS = ["Speaker 1: Hey!", "Speaker 2: Hi Joe, hi mom.", "Speaker 1: Love you.", "Speaker 2: Bye."]
PAIRS = [
    {"x": "Speaker 1", "y": "Speaker 2", "r": ["per:spouse", "per:parents"], "t": ["love", ""]},
    {"x": "Speaker 2", "y": "joe", "r": ["unanswerable"], "t": [""]},
    {"x": "Speaker 2", "y": "Mr. Bing", "r": ["unanswerable"], "t": [""]},
    {"x": "Speaker 2", "y": "Lov", "r": ["unanswerable"], "t": [""]},
]


def test_dialogues_as_published(tmp_path):
    """A file holds pairs of turns and of all that is asked of them; each of these is a row."""
    path = tmp_path / "train.json"
    path.write_text(json.dumps([[TURNS, PAIRS], [TURNS[:1], [PAIRS[0]]]]))
    task = get_task("dialog_re")
    rows = read_split(task, "train", files={"train": str(path)})
    assert [rows.origin(i).rpartition(":")[2] for i in range(5)] == ["1", "1", "1", "1", "2"]
    actual = [read_example(task, row, rows.origin(i)) for i, row in enumerate(rows)]
    assert actual[0].references == ("per:spouse", "per:parents")
    assert actual[0].label == task.labels.index("per:spouse")
    text = "\n".join(TURNS)
    assert [text[a:b] for a, b in actual[1].entities] == ["Speaker 2", "Joe"]
    assert actual[1].fields["entity2"] == "joe"
    # Not said, and in "Love" it is part of another word.
    assert actual[2].entities[1] == actual[3].entities[1] == actual[4].entities[1] == ABSENT
    with pytest.raises(InputError, match="a row must be an object"):
        read_file(path)


@pytest.mark.parametrize(
    ("text", "name", "actual"),
    [
        ("an Art party, in art", "art", [(17, 20)]), ("an Art party", "art", [(3, 6)]),
        ("他在IBM公司工作", "IBM", [(2, 5)]), ("他在田纳西州", "田纳西", [(2, 5)]),
        ("삼성이 샀다", "삼성", [(0, 2)]), ("we use C++, not C++11", "C++", [(7, 10), (16, 19)]),
        ("it costs US$5", "$5", [(11, 13)]), ("it costs $50", "$5", []),
        ("cartoon art2", "art", []),
    ],
)  # fmt: skip
def test_a_name_is_found_as_a_word(text, name, actual):
    assert _occurrences(name, text) == actual


def test_events_with_several_arguments(tmp_path):
    """A row of an event holds its candidates; each is an example of its own."""
    event = {"tokens": ["They", "attacked", "the", "bridge"], "trigger": [1, 2]}
    event["arguments"] = [
        {"argument": [0, 1], "role": "Attacker"}, {"argument": [2, 4], "role": "NA"}
    ]  # fmt: skip
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(event) + "\n")
    task = get_task("event_arguments")
    rows = read_split(task, "train", files={"train": str(path)})
    actual = [read_example(task, row, rows.origin(i)) for i, row in enumerate(rows)]
    assert [(one.fields["entity2"], task.labels[one.label]) for one in actual] == [
        ("They", "Attacker"), ("the bridge", "NA")
    ]  # fmt: skip
    assert {rows.origin(i) for i in range(2)} == {f"{path}:1"}


@pytest.mark.parametrize("value", [
    5, None, "x", [3], ["x"], [{"argument": [0, 1], "role": "NA"}, None],
    {"argument": [0, 1], "role": "NA"}, {"argument": [[0, 1]], "role": ["NA", "NA"]},
])  # fmt: skip
def test_a_nested_column_of_something_else_is_named_with_its_line(value, tmp_path):
    event = {"tokens": ["They", "attacked"], "trigger": [1, 2]}
    whole = event | {"arguments": [{"argument": [0, 1], "role": "NA"}]}
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps(event_row) + "\n" for event_row in (whole, event | {"arguments": value}))
    )
    line = refuse_line(read_split, get_task("event_arguments"), "train", files={"train": str(path)})
    assert line.startswith(f"{path}:2: column 'arguments' must be a list of objects")


def test_dialogues_turn_by_turn():
    task = get_task("dialog_re")
    row = {"dialog": TURNS, **PAIRS[0]}
    actual = list(read_turns(task, row, read_example(task, row, "x:1"), "x:1", 3))
    assert [one.expressed for one in actual] == [(), ("per:spouse",), ("per:spouse", "per:parents")]
    assert [one.fields["dialog"] for one in actual] == ["\n".join(TURNS[:n]) for n in (2, 3, 4)]
    assert {one.pair for one in actual} == {3} and {one.label for one in actual} == {16}
    row = {"dialog": TURNS, **PAIRS[2]}  # never named: told at the last turn alone
    (last,) = read_turns(task, row, read_example(task, row, "x:1"), "x:1", 0)
    assert last.fields["dialog"] == "\n".join(TURNS)
    line = refuse_line(list, read_turns(task, row | {"dialog": "text"}, last, "x:9", 0))
    assert line.startswith("x:9: task.metric=f1c reads turn by turn")
    line = refuse_line(list, read_turns(task, row | {"t": ["a", "b"]}, last, "x:9", 0))
    assert line.startswith("x:9: 2 triggers in column 't' for 1 relations")
