"""The task registry and the reading of rows, on rows written by hand and on real data."""

import itertools
import re
import subprocess
import sys

import pytest

from jaxprompt.data import tasks, template
from jaxprompt.data.files import read_file
from jaxprompt.errors import InputError

NAMES = """sst2 sst5 mr cr subj mpqa trec cola imdb ag_news yahoo_answers_topics dbpedia_14 rte cb
mnli snli qnli mrpc qqp boolq wic copa chnsenticorp tnews lcqmc ocnli cmnli topics afqmc eprstmt
race race_middle race_high dream cosmos_qa c3 c3_dialog ccpm""".split()

NOT_HERE = "cr subj ag_news cb qqp topics race race_middle race_high cosmos_qa c3_dialog".split()
FOLDERS = {name: name for name in NAMES if name not in NOT_HERE}
FOLDERS["dbpedia_14"] = "dbpedia_14_kshot"


def used_fields(text):
    return {name.split("|")[0] for name in re.findall(r"\{([^}]*)\}", text)}


def test_every_task_is_known():
    assert set(NAMES) == set(tasks.task_names())


@pytest.mark.parametrize("name", NAMES)
def test_task_is_consistent(name):
    task = tasks.get_task(name)
    assert task.name == name
    assert len(task.labels) == len(task.words) >= 2
    assert len(set(task.words)) == len(task.words)
    assert task.template.count("[mask]") == 1
    assert used_fields(task.template) - {"choices"} <= set(task.fields)
    assert used_fields(task.plain) - {"choice"} <= set(task.fields)
    used = used_fields(task.plain) | used_fields(task.text)
    assert used & set(task.fields) == set(task.fields)
    assert bool(task.choices) == ("{choice}" in task.plain)
    assert not task.values or len(task.values) == len(task.labels)
    assert task.metric in ("accuracy", "f1", "macro_f1", "matthews")
    assert "train" in task.splits and "test" in task.splits
    assert bool(task.hub) == (name not in ("topics", "ccpm", "eprstmt"))


@pytest.mark.parametrize("name", NAMES)
def test_layouts_follow_the_grammar(name):
    task = tasks.get_task(name)
    layouts = ((task.template, True), (task.causal, True), (task.text, False), (task.plain, False))
    for text, needs_mask in layouts:
        template.check(
            template.parse(text),
            fields=task.fields,
            num_slots=0,
            needs_mask=needs_mask,
            has_choices=bool(task.choices),
        )


@pytest.mark.parametrize("name", NAMES)
def test_layouts_for_models_that_write(name):
    task = tasks.get_task(name)
    parts = template.parse(task.causal).parts
    assert [part.kind for part in parts].index("mask") == len(parts) - 1
    text = template.parse(task.text)
    assert not text.has_mask and not text.uses_choice
    assert not task.is_text and len(task.targets) == len(task.labels) == len(set(task.targets))
    assert all(target == target.strip() != "" for target in task.targets)
    for words in (task.words, task.causal_words or task.words):
        every = [word for group in words for word in group]
        assert len(words) == len(task.labels) and len(set(every)) == len(every)
    assert task.causal_words != task.words


@pytest.mark.parametrize("name", NAMES)
def test_causal_words_are_one_piece_each(roberta, name):
    """The byte-level BPE is GPT-2's; Chinese words take several of its pieces."""
    task = tasks.get_task(name)
    words = [word for group in task.causal_words or task.words for word in group]
    if all(word.isascii() for word in words):
        assert all(len(roberta.tokenize(f" {word}")) == 1 for word in words)


# Rows, and the texts that T5 was trained on, less the data set's name.
T5_EXAMPLES = {
    "sst2": ({"sentence": "A"}, "sentence: A", ("negative", "positive")),
    "cola": ({"sentence": "A"}, "sentence: A", ("unacceptable", "acceptable")),
    "mnli": (
        {"premise": "A", "hypothesis": "B"}, "hypothesis: B premise: A",
        ("entailment", "neutral", "contradiction"),
    ),
    "cb": (
        {"premise": "A", "hypothesis": "B"}, "hypothesis: B premise: A",
        ("entailment", "contradiction", "neutral"),
    ),
    "rte": (
        {"premise": "A", "hypothesis": "B"}, "sentence1: A sentence2: B",
        ("entailment", "not_entailment"),
    ),
    "qnli": (
        {"question": "A", "sentence": "B"}, "question: A sentence: B",
        ("entailment", "not_entailment"),
    ),
    "mrpc": (
        {"sentence1": "A", "sentence2": "B"}, "sentence1: A sentence2: B",
        ("not_equivalent", "equivalent"),
    ),
    "qqp": (
        {"question1": "A", "question2": "B"}, "question1: A question2: B",
        ("not_duplicate", "duplicate"),
    ),
    "boolq": ({"question": "A", "passage": "B"}, "passage: B question: A", ("False", "True")),
    "wic": (
        {"word": "A", "sentence1": "B", "sentence2": "C"}, "sentence1: B sentence2: C word: A",
        ("False", "True"),
    ),
    "copa": (
        {"premise": "A", "question": "cause", "choice1": "B", "choice2": "C"},
        "choice1: B choice2: C premise: A question: cause", ("choice1", "choice2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", T5_EXAMPLES)
def test_text_formats_are_those_of_t5(name):
    row, expected, targets = T5_EXAMPLES[name]
    task = tasks.get_task(name)
    example = tasks.read_example(task, row, "x:1", need_label=False)
    assert task.text.format(**example.fields) == expected
    assert task.targets == targets


@pytest.mark.parametrize("name, folder", FOLDERS.items())
def test_reads_real_rows(shared, name, folder):
    task = tasks.get_task(name)
    rows = read_file(shared / "data" / folder / "train.jsonl.gz")
    seen = set()
    for row in rows:
        example = tasks.read_example(task, row, "x:1")
        answer = row[task.label]
        assert example.label == answer or example.choices[example.label] == answer
        assert tuple(example.fields) == task.fields
        seen.add(example.label)
    assert seen == set(range(len(task.labels)))


def test_label_names_are_those_of_real_rows(shared):
    """Where a set spells its labels out, the names and numbers must agree with the registry."""
    for folder in ("sst5", "mr", "mpqa"):
        task = tasks.get_task(folder)
        for row in itertools.islice(read_file(shared / "data" / folder / "train.jsonl.gz"), 500):
            assert task.labels[row["label"]] == row["label_text"]
    for row in read_file(shared / "data" / "rte" / "train.jsonl.gz"):
        if row["hypothesis"] == "Weapons of Mass Destruction Found in Iraq.":
            assert tasks.get_task("rte").labels[row["label"]] == "not_entailment"
    questions = {
        "How did serfdom develop in and then leave Russia ?": "DESC",
        "What films featured the character Popeye Doyle ?": "ENTY",
    }
    for row in itertools.islice(read_file(shared / "data" / "trec" / "train.jsonl.gz"), 2):
        assert tasks.get_task("trec").labels[row["coarse_label"]] == questions[row["text"]]


def test_copa_turns_the_question_into_a_connective():
    row = {"premise": "It rained.", "question": "effect", "choice1": "A.", "choice2": "B."}
    task = tasks.get_task("copa")
    example = tasks.read_example(task, row | {"label": 1}, "x:1")
    expected = {"premise": "It rained.", "connective": "so", "question": "effect"}
    expected |= {"choice1": "A.", "choice2": "B."}
    assert example == tasks.Example(expected, ("A.", "B."), 1)
    with pytest.raises(InputError, match="x:1: question is 'why'; it must be one of cause, effect"):
        tasks.read_example(task, row | {"label": 1, "question": "why"}, "x:1")


@pytest.mark.parametrize(
    "task, raw, label",
    [
        ("boolq", True, 1),
        ("boolq", "false", 0),
        ("rte", 1, 1),
        ("rte", "1", 1),
        ("rte", "not_entailment", 1),
        ("rte", 1.0, 1),
        ("tnews", "116", 14),
        ("tnews", 104, 4),
        ("tnews", 14, 14),
        ("tnews", "sports", 3),
        ("copa", "choice2", 1),
    ],
)
def test_spellings_of_a_label(task, raw, label):
    task = tasks.get_task(task)
    row = dict.fromkeys(task.fields + task.choices, "x") | {"question": "cause", task.label: raw}
    assert tasks.read_example(task, row, "x:1").label == label


def test_numbers_as_class_names_hide_the_indices():
    task = tasks.custom_task(fields=["text"], labels=["1", "2", "3"])
    assert tasks.read_example(task, {"text": "a", "label": 1}, "x:1").label == 0
    assert tasks.read_example(task, {"text": "a", "label": "3"}, "x:1").label == 2
    with pytest.raises(InputError, match="label 0 is not a label"):
        tasks.read_example(task, {"text": "a", "label": 0}, "x:1")


def test_unknown_labels():
    task = tasks.get_task("sst2")
    row = {"sentence": "fine"}
    assert tasks.read_example(task, row, "x:1", need_label=False).label == -1
    for hidden in (-1, "-1", None, ""):
        example = tasks.read_example(task, row | {"label": hidden}, "x:1", need_label=False)
        assert example.label == -1
        with pytest.raises(InputError, match=r"x:1: label .* labels: negative, positive"):
            tasks.read_example(task, row | {"label": hidden}, "x:1")
    with pytest.raises(InputError, match="x:7: label 'neutral' is not a label of task sst2"):
        tasks.read_example(task, row | {"label": "neutral"}, "x:7", need_label=False)
    with pytest.raises(InputError, match="x:1: no label column 'label'; columns: sentence"):
        tasks.read_example(task, row, "x:1")


def test_fields_become_text():
    task = tasks.custom_task(fields=["a", "b"], labels=["no", "yes"])
    example = tasks.read_example(task, {"a": 3, "b": ["x", "y"], "label": "no"}, "x:1")
    assert example.fields == {"a": "3", "b": "x\ny"}
    with pytest.raises(InputError, match="x:2: column 'b' of task custom is missing; columns: a"):
        tasks.read_example(task, {"a": 3}, "x:2")
    with pytest.raises(InputError, match="x:2: column 'b' of task custom is empty"):
        tasks.read_example(task, {"a": 3, "b": None}, "x:2")


def test_choices_in_one_column():
    task = tasks.custom_task(fields=["question"], label="answer", choices=["options"])
    row = {"question": "q", "options": ["red", "blue", "2"]}
    assert task.plain == "{question} [sep] {choice}"
    for answer, label in (("blue", 1), ("B", 1), (2, 2), ("2", 2), ("0", 0)):
        example = tasks.read_example(task, row | {"answer": answer}, "x:1")
        assert example == tasks.Example({"question": "q"}, ("red", "blue", "2"), label)
    with pytest.raises(InputError, match="label 3 is not a label of task custom; labels: red, blu"):
        tasks.read_example(task, row | {"answer": 3}, "x:1")
    with pytest.raises(InputError, match="x:1: column 'options' must hold a list"):
        tasks.read_example(task, row | {"options": "red", "answer": 0}, "x:1")


def test_classes_from_rows():
    rows = [{"label": "b"}, {"label": "a"}, {"label": "b"}]
    task = tasks.with_labels(tasks.custom_task(fields=["text"]), rows)
    assert task.labels == task.targets == ("a", "b") and task.words == (("a",), ("b",))
    assert tasks.labels_from_rows([{"y": 10}, {"y": 9}, {"y": "11"}], "y") == ("9", "10", "11")
    assert tasks.labels_from_rows([{"y": True}, {"y": False}], "y") == ("false", "true")
    named = tasks.get_task("sst2")
    assert tasks.with_labels(named, rows) is named
    with pytest.raises(InputError, match="one class, 'a'; a task needs 2"):
        tasks.with_labels(tasks.custom_task(fields=["text"]), [{"label": "a"}])
    with pytest.raises(InputError, match="no label column 'label'; columns: text"):
        tasks.with_labels(tasks.custom_task(fields=["text"]), [{"text": "a"}])


def test_custom_words():
    task = tasks.custom_task(fields=["a", "b"], labels=["x", "y"], words=["bad", ["good", "fine"]])
    assert task.words == (("bad",), ("good", "fine")) and task.targets == ("bad", "good")
    assert task.plain == "{a} [sep] {b}" and task.text == "a: {a} b: {b}"
    assert task.metric == "accuracy" and not task.is_text


SUMMARY = tasks.custom_task(fields=["document"], target="summary")


def test_text_task():
    assert SUMMARY.is_text and SUMMARY.metric == "exact_match" and SUMMARY.text == "{document}"
    assert SUMMARY.labels == SUMMARY.words == SUMMARY.targets == ()
    assert tasks.with_labels(SUMMARY, [{"label": "a"}]) is SUMMARY
    assert tasks.custom_task(fields=["a"], target="b", metric="bleu").metric == "bleu"


@pytest.mark.parametrize(
    "value, references",
    [
        ("short", ("short",)),
        (["short", "brief"], ("short", "brief")),
        (("", "brief", " "), ("brief",)),
        (4, ("4",)),
        (2.0, ("2",)),
        (" spaced ", (" spaced ",)),
    ],
)
def test_target_of_a_row(value, references):
    example = tasks.read_example(SUMMARY, {"document": "long", "summary": value}, "x:1")
    expected = tasks.Example({"document": "long"}, (), -1, references[0], references)
    assert example == expected


def test_wrong_targets():
    row = {"document": "long"}
    with pytest.raises(InputError, match="x:3: no target column 'summary'; columns: document"):
        tasks.read_example(SUMMARY, row, "x:3")
    assert tasks.read_example(SUMMARY, row, "x:3", need_label=False) == tasks.Example(row)
    for empty in ("", "  ", None, [], ["", ""]):
        with pytest.raises(InputError, match="x:3: target column 'summary' is empty"):
            tasks.read_example(SUMMARY, row | {"summary": empty}, "x:3")
        example = tasks.read_example(SUMMARY, row | {"summary": empty}, "x:3", need_label=False)
        assert example == tasks.Example(row)
    for wrong in ({"text": "a"}, ["a", None], [["a"]]):
        with pytest.raises(InputError, match="x:3: target column 'summary' must hold a text or"):
            tasks.read_example(SUMMARY, row | {"summary": wrong}, "x:3", need_label=False)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"fields": []}, "task.fields is empty"),
        ({"labels": ["a"]}, "one class, 'a'"),
        ({"labels": ["a", "a"]}, "names a class twice: a, a"),
        ({"labels": ["a", "b"], "words": ["x"]}, "1 entries for 2 labels.*a, b"),
        ({"labels": ["a", "b"], "words": ["x", []]}, "words of class 'b'"),
        ({"fields": ["choice"]}, "'choice' cannot be written in a template"),
        ({"fields": ["a|b"]}, "cannot be written in a template"),
        ({"target": "y", "labels": ["a", "b"]}, "task.target='y' and task.labels are both given"),
        ({"target": "y", "words": ["a", "b"]}, "task.target='y' and task.words are both given"),
        ({"target": "y", "choices": ["a", "b"]}, "task.target='y' and task.choices are both given"),
        ({"target": "text"}, "task.target='text' is also in task.fields"),
    ],
)
def test_wrong_custom_task(parts, message):
    with pytest.raises(InputError, match=message):
        tasks.custom_task(**({"fields": ["text"]} | parts))


def test_unknown_task():
    with pytest.raises(InputError, match="unknown task 'sst-2'; nearest: sst2.*task.name=custom"):
        tasks.get_task("sst-2")


def test_import_is_light():
    code = (
        "import sys, jaxprompt.data.tasks, jaxprompt.data.sources, jaxprompt.data.fewshot;"
        "heavy = {'jax', 'datasets', 'tensorflow_datasets', 'pyarrow', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
