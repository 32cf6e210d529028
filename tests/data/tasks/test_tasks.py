"""The task registry and the reading of rows, on rows written by hand and on real data."""

import json
import re
import subprocess
import sys

import pytest

from jaxprompt.build.examples import read_task
from jaxprompt.config.load import load_config
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks import registry as tasks
from jaxprompt.data.tasks.definitions.relations import RELATIONS
from jaxprompt.data.tasks.definitions.sequences import SEQUENCES
from jaxprompt.data.tasks.readers.candidates import example_rows, expand_rows
from jaxprompt.data.tasks.readers.reading import (
    has_label,
    read_example,
    with_labels,
)
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text import template
from jaxprompt.errors import InputError
from jaxprompt.heads import make_head
from jaxprompt.scoring import metrics, questions
from jaxprompt.scoring.relations import collect_facts

NAMES = """sst2 sst5 mr cr subj mpqa trec cola imdb ag_news yahoo_answers_topics dbpedia_14 rte cb
mnli snli qnli mrpc wnli qqp boolq wic wsc multirc record copa chnsenticorp tnews lcqmc ocnli cmnli
topics afqmc eprstmt race race_middle race_high dream cosmos_qa c3 c3_mixed c3_dialog ccpm
amazon tnews14""".split()

NOT_HERE = """cr subj ag_news cb qqp wnli topics race race_middle race_high cosmos_qa c3_mixed
c3_dialog amazon tnews14""".split()
OTHERS = "conll2003 squad squad_v2 quoref cmrc2018 xquad_zh stsb".split()
FOLDERS = {name: name for name in NAMES if name not in NOT_HERE}
FOLDERS |= {"dbpedia_14": "dbpedia_14_kshot", "record": "record_32"}


def used_fields(text):
    return {name.split("|")[0] for name in re.findall(r"\{([^}]*)\}", text)}


def test_every_task_is_known():
    classes = {name for name in tasks.task_names() if tasks.get_task(name).kind == "classes"}
    assert set(NAMES) == classes - set(RELATIONS)
    assert set(tasks.task_names()) - classes == {*OTHERS, *SEQUENCES}


@pytest.mark.parametrize("name", [*OTHERS, *SEQUENCES])
def test_tasks_without_classes_are_consistent(name):
    task = tasks.get_task(name)
    assert used_fields(task.plain) == set(task.texts) and not task.labels and not task.words
    parsed = template.parse(task.plain)
    template.validate_template(
        parsed, fields=task.texts, num_slots=4, needs_mask=False, has_choices=False
    )
    assert task.metric in metrics.METRICS_OF[task.kind] and bool(task.hub) == (name in OTHERS)
    assert name != "conll2003" or task.values[:3] == ("O", "B-PER", "I-PER")
    assert (task.metric == "role_f1") == bool(task.predicate) == (name in ("conll05", "conll12"))


@pytest.mark.parametrize("name", NAMES)
def test_task_is_consistent(name):
    task = tasks.get_task(name)
    assert task.name == name
    assert len(task.labels) == len(task.words) >= 2
    assert len(set(task.words)) == len(task.words)
    assert task.template.count("[mask]") == 1
    assert used_fields(task.template) - {"choices"} <= set(task.texts)
    assert used_fields(task.plain) - {"choice"} <= set(task.fields)
    used = used_fields(task.plain) | used_fields(task.text)
    assert used & set(task.fields) == set(task.fields)
    assert bool(task.choices) == ("{choice}" in task.plain)
    assert not task.values or len(task.values) == len(task.labels)
    assert task.metric in ("accuracy", "f1", "macro_f1", "matthews", *questions.METRICS)
    assert "train" in task.splits and "test" in task.splits
    assert bool(task.hub) == (name not in ("topics", "ccpm", "eprstmt", "amazon"))
    layouts = ((task.template, True), (task.causal, True), (task.text, False), (task.plain, False))
    for text, needs_mask in layouts:
        template.validate_template(
            template.parse(text),
            fields=task.fields,
            num_slots=0,
            needs_mask=needs_mask,
            has_choices=bool(task.choices),
            entities=len(task.entities),
        )
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
    "multirc": (
        {"paragraph": "A", "question": "B", "answer": "C"},
        "question: B answer: C paragraph: A", ("False", "True"),
    ),
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
    example = read_example(task, row, "x:1", need_label=False)
    assert task.text.format(**example.fields) == expected
    assert task.targets == targets


@pytest.mark.long_cases("tnews-tnews")
@pytest.mark.parametrize("name, folder", FOLDERS.items())
def test_reads_real_rows(shared, name, folder):
    task = tasks.get_task(name)
    split = "test" if name == "wsc" else "train"  # FewGLUE's training rows are of one class
    rows = expand_rows(task, read_file(shared / "data" / folder / f"{split}.jsonl.gz"))
    labels_seen = set()
    for row in rows:
        example = read_example(task, row, "x:1")
        answer = row[task.label]
        assert example.label == answer or example.choices[example.label] == answer
        assert set(example.fields) == set(task.texts)
        labels_seen.add(example.label)
    assert labels_seen == set(range(len(task.labels)))


def documented_names(shared):
    """The label names that the data's README gives by number, folder by folder: {folder: names}."""
    text = (shared / "data/README.md").read_text("utf-8")
    for section in text.split("\n### ")[1:]:
        line = re.search(r"^- labels: (.*)$", section, re.M)[1]
        if line.startswith(("coarse 0 ", "0 ")):  # of trec the coarse ones, which are ours
            named = line.removeprefix("coarse ").split("; fine")[0]
            pairs = (part.split(" ", 1) for part in named.split(", "))
            yield section.split(":")[0], {int(number): name for number, name in pairs}
        elif line.startswith("0-14 = "):  # tnews: raw values and names
            pairs = (part.split(" ", 1) for part in line.removeprefix("0-14 = ").split(", "))
            yield section.split(":")[0], dict(enumerate(name for _, name in pairs))


def test_label_names_are_those_of_the_datas_own_documentation(shared):
    tasks_of = {folder: name for name, folder in FOLDERS.items()}
    spelled = lambda name: name.lower().replace(" meaning", "").replace(" ", "_")
    checked = set()
    for folder, names in documented_names(shared):
        if folder not in tasks_of:
            continue
        task = tasks.get_task(tasks_of[folder])
        assert [spelled(name) for name in task.labels] == [spelled(names[i]) for i in sorted(names)]
        checked.add(task.name)
    by_text = {"c3", "ccpm", "dream", "record"}  # the answer is the text or index of a choice
    assert checked == FOLDERS.keys() - by_text


def test_fine_labels_of_trec_agree_with_the_names_of_the_coarse(shared):
    """The fine labels of the hub are in the order of the names "ABBR:abb" ... "NUM:weight"."""
    first = {"ABBR": 0, "ENTY": 2, "DESC": 24, "HUM": 28, "LOC": 32, "NUM": 37}
    ends = [*list(first.values())[1:], 50]
    fine = [
        n for (n, start), end in zip(first.items(), ends, strict=True) for _ in range(start, end)
    ]
    names = tasks.get_task("trec").labels
    for row in read_file(shared / "data/trec/train.jsonl.gz"):
        assert names[row["coarse_label"]] == fine[row["fine_label"]]


def test_meaning_of_labels_that_no_row_names(shared):
    for row in read_file(shared / "data" / "rte" / "train.jsonl.gz"):
        if row["hypothesis"] == "Weapons of Mass Destruction Found in Iraq.":
            assert tasks.get_task("rte").labels[row["label"]] == "not_entailment"
    # LM-BFF maps 0 to "subjective" and 1 to "objective".
    assert tasks.get_task("subj").labels == ("subjective", "objective")
    assert tasks.get_task("subj").words == (("subjective",), ("objective",))


_SENTIMENT = {"positive": "great", "negative": "terrible"}
_PAIR = {"entailment": "Yes", "not_entailment": "No"}
_THREE_WAY = {"entailment": "Yes", "neutral": "Maybe", "contradiction": "No"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, _SENTIMENT) for name in ("sst2", "mr", "cr", "mpqa")),
        ("sst5", {"very positive": "great", "positive": "good", "neutral": "okay",
                  "negative": "bad", "very negative": "terrible"}),
        ("trec", {"ABBR": "Expression", "ENTY": "Entity", "DESC": "Description", "HUM": "Human",
                  "LOC": "Location", "NUM": "Number"}),
        ("cola", {"acceptable": "correct", "unacceptable": "incorrect"}),
        ("mnli", _THREE_WAY), ("snli", _THREE_WAY), ("rte", _PAIR), ("qnli", _PAIR),
        ("mrpc", {"equivalent": "Yes", "not_equivalent": "No"}),
        ("qqp", {"duplicate": "Yes", "not_duplicate": "No"}),
    ],
)  # fmt: skip
def test_label_words_are_those_of_lm_bff(name, words):
    """Gao et al. 2021, "Making pre-trained language models better few-shot learners", table 1."""
    task = tasks.get_task(name)
    assert dict(zip(task.labels, task.words, strict=True)) == {
        label: (word,) for label, word in words.items()
    }


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"c3", "c3_mixed", "c3_dialog", "ccpm"}))
def test_a_label_that_is_the_name_of_a_class_decides(name):
    """Also where a number beside it, in the data set's own order, says another class."""
    task = tasks.get_task(name)
    row = dict.fromkeys(task.fields + task.choices, "x") | {"question": "cause", "span2_index": 0}
    if len(task.choices) == 1:
        row[task.choices[0]] = [f"text {i}" for i in range(len(task.labels))]
    for index, label in enumerate(task.labels):
        assert read_example(task, row | {task.label: label}, "x:1").label == index
        if not task.choices:
            other = (index + 1) % len(task.labels)
            raw = task.values[other].split("|")[0] if task.values else other
            named = row | {task.label: raw, f"{task.label}_text": label}
            assert read_example(task, named, "x:1").label == index
            unknown = named | {f"{task.label}_text": "no name of a class"}
            assert read_example(task, unknown, "x:1").label == other


def test_wsc_marks_the_pronoun(shared):
    task, others = tasks.get_task("wsc"), []
    for row in read_file(shared / "data/wsc/test.jsonl.gz"):
        marked = read_example(task, row, "x:1").fields["entity1"]
        others += [marked] * (marked.strip(".,") != row["span2_text"])
    assert not others  # the index of one row is published one off: "want to use it"


def test_copa_turns_the_question_into_a_connective():
    row = {"premise": "It rained.", "question": "effect", "choice1": "A.", "choice2": "B."}
    task = tasks.get_task("copa")
    example = read_example(task, row | {"label": 1}, "x:1")
    expected = {"premise": "It rained.", "connective": "so", "question": "effect"}
    expected |= {"choice1": "A.", "choice2": "B."}
    assert example == Example(expected, ("A.", "B."), 1)
    with pytest.raises(InputError, match="x:1: question is 'why'; it must be one of cause, effect"):
        read_example(task, row | {"label": 1, "question": "why"}, "x:1")


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
        ("tnews14", "116", 13),
        ("tnews14", 13, 12),
        ("tnews14", "agriculture", 12),
        ("tnews14", 11, 11),
        ("amazon", 1, 0),
        ("amazon", 5.0, 4),
        ("copa", "choice2", 1),
    ],
)
def test_spellings_of_a_label(task, raw, label):
    task = tasks.get_task(task)
    row = dict.fromkeys(task.fields + task.choices, "x") | {"question": "cause", task.label: raw}
    assert read_example(task, row, "x:1").label == label


def test_a_class_that_is_left_out(tmp_path):
    """TNews has 14 classes in PPT (table 3): the examples of the 15th are not read, by any name."""
    task = tasks.get_task("tnews14")
    assert len(task.labels) == 14 and "stock" not in task.labels
    labels = [0, 12, "114", "stock", 14]
    text = "".join(json.dumps({"sentence": "a", "label": x}) + "\n" for x in labels)
    (tmp_path / "train.jsonl").write_text(text)
    rows = read_split(task, "train", source=str(tmp_path))
    assert [read_example(task, row, "x:1").label for row in rows] == [0, 13]
    assert rows.origin(1).endswith("train.jsonl:5")


@pytest.mark.parametrize(
    ("name", "positive"),
    [("mrpc", "equivalent"), ("qqp", "duplicate"), ("multirc", "true"), ("record", "true")],
)
def test_the_positive_class_of_a_benchmark_is_its_own(name, positive):
    """F1 of GLUE is of paraphrases (Wang et al. 2018), that of SuperGLUE of right answers."""
    task = tasks.get_task(name)
    assert task.positive == positive == task.labels[task.positive_class]
    assert task.positive_message == f"{task.metric}: the positive class is {positive}"
    block = load_config("base", [("task.name", name), ("task.positive", task.labels[0])]).task
    with pytest.raises(InputError, match=f"positive class of .* is '{positive}'"):
        read_task(block)


def test_the_positive_class_of_a_task():
    make = lambda **fields: tasks.custom_task(fields=["text"], metric="f1", **fields)
    rows = [{"label": "spam"}, {"label": "ham"}]
    for task in (make(labels=["ham", "spam"]), with_labels(make(), rows)):
        assert task.positive == "spam" and task.positive_class == 1
    for task in (
        make(labels=["ham", "spam"], positive="ham"), with_labels(make(positive="ham"), rows)
    ):  # fmt: skip
        assert task.positive_class == 0 and "positive class is ham" in task.positive_message
        assert collect_facts(task, []).positive == 0
    assert tasks.custom_task(fields=["text"], labels=["ham", "spam"]).positive_message == ""
    with pytest.raises(InputError, match="'hma' is not a class of task custom, which has ham, s"):
        with_labels(make(positive="hma"), rows)


def test_unknown_labels():
    task = tasks.get_task("sst2")
    row = {"sentence": "fine"}
    assert read_example(task, row, "x:1", need_label=False).label == -1
    for hidden in (-1, "-1", -1.0, "-1.0", None, "", " ", float("nan")):
        example = read_example(task, row | {"label": hidden}, "x:1", need_label=False)
        assert example.label == -1
        assert not has_label(task, row | {"label": hidden})
    for hidden in (-1, "-1"):
        with pytest.raises(InputError, match=r"x:1: label .* labels: negative, positive"):
            read_example(task, row | {"label": hidden}, "x:1")
    with pytest.raises(InputError, match="^x:7: label 'neutral' is not a .* set task.name=custom"):
        read_example(task, row | {"label": "neutral"}, "x:7")
    for unknown in ("neutral", 7, [1, 2], {"a": 1}):  # predicted all the same
        example = read_example(task, row | {"label": unknown}, "x:7", need_label=False)
        assert example.label == -1 and has_label(task, row | {"label": unknown})


def test_labels_of_training_rows_are_checked_where_they_are_collected():
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}, {"text": "c", "label": None}]
    task = tasks.custom_task(fields=["text"])
    with pytest.raises(InputError, match="a.csv:9: column 'label' is null, which is not a label"):
        with_labels(task, rows, lambda number: f"a.csv:{number + 7}")
    with pytest.raises(InputError, match="row 3: column 'label' is null"):
        with_labels(task, rows)


def test_a_label_that_is_one_choice_by_its_text_and_another_by_its_number():
    task = tasks.custom_task(fields=["a"], label="y", choices=["c"])
    row = {"a": "q", "c": ["1", "2", "3"]}
    for value in ("1", 1, 1.0):
        with pytest.raises(InputError, match=f"x:2: y {value!r} is both the text of choice A and"):
            read_example(task, row | {"y": value}, "x:2")
    for value, choice in (("3", 2), ("B", 1), (0, 0), (3, 2)):
        assert read_example(task, row | {"y": value}, "x:2").label == choice
    numbers = row | {"c": [4, 7, 9.0]}
    for value, choice in ((7, 1), ("9", 2), (9, 2), (7.0, 1), (0, 0)):
        assert read_example(task, numbers | {"y": value}, "x:2").label == choice
    letters = row | {"c": ["x", "y", "A"]}
    with pytest.raises(InputError, match="'A' is both the text of choice C and .* of choice A"):
        read_example(task, letters | {"y": "A"}, "x:2")
    plain = row | {"c": ["one", "two"]}
    assert read_example(task, plain | {"y": "two"}, "x:2").label == 1
    assert read_example(task, plain | {"y": "1"}, "x:2").label == 1


@pytest.mark.parametrize("name", ["dream", "c3", "c3_mixed", "c3_dialog"])
def test_lists_of_lines_are_joined(name):
    task = tasks.get_task(name)
    (column,) = task.lines
    row = {column: ["one", "two"], "question": "q", "choice": ["a", "b"], "answer": "b"}
    assert read_example(task, row, "x:1").fields[column] == "one\ntwo"
    with pytest.raises(InputError, match=f"column '{column}' is null"):
        read_example(task, row | {column: ["a", None]}, "x:1")


def test_fields_become_text():
    task = tasks.custom_task(fields=["a", "b"], labels=["no", "yes"])
    example = read_example(task, {"a": 3, "b": "", "label": "no"}, "x:1")
    assert example.fields == {"a": "3", "b": ""}


def test_choices_in_one_column():
    task = tasks.custom_task(fields=["question"], label="answer", choices=["options"])
    row = {"question": "q", "options": ["red", "blue", "2"]}
    assert task.plain == "{question} [sep] {choice}"
    for answer, label in (("blue", 1), ("B", 1), (2, 2), ("2", 2), ("0", 0)):
        example = read_example(task, row | {"answer": answer}, "x:1")
        assert example == Example({"question": "q"}, ("red", "blue", "2"), label)
    with pytest.raises(InputError, match="label 3 is not a label of task custom; labels: red, blu"):
        read_example(task, row | {"answer": 3}, "x:1")


def labels_of(*values):
    """Returns the classes of rows with these labels."""
    rows = [{"y": value} for value in values]
    return with_labels(tasks.custom_task(fields=["text"], label="y"), rows).labels


def test_classes_from_rows():
    rows = [{"label": "b"}, {"label": "a"}, {"label": "b"}]
    task = with_labels(tasks.custom_task(fields=["text"]), rows)
    assert task.labels == task.targets == ("a", "b") and task.words == (("a",), ("b",))
    assert labels_of(10, 9, "11") == ("9", "10", "11")
    assert labels_of(True, False) == ("false", "true")
    named = tasks.get_task("sst2")
    assert with_labels(named, rows) is named
    with pytest.raises(InputError, match="every training row has the label 'a'"):
        with_labels(tasks.custom_task(fields=["text"]), [{"label": "a"}])


@pytest.mark.parametrize(
    ("names", "right", "wrong"),
    [
        (("+1", "-1"), (("+1", 1, 1.0, "1"), ("-1", -1)), ("0", 0, 2)),
        (("0.5", "1.5", "2.5"), (("0.5",), (1.5,), ("2.5",)), (1, "2", 0, 2.0)),
        ((".5", "1e-3"), ((".5",), ("1e-3",)), (0, "1")),
        (("1", "+2"), ((1,), (2, "+2")), (0,)),
        (("False", "True"), ((False, "false", "False", 0), (True, "true", "1")), ("TRUE",)),
        (("1.2.3", "4"), (("1.2.3", 0), (4, "1")), (2,)),
    ],
)
def test_classes_that_are_numbers_are_found_by_name_alone(names, right, wrong):
    """Of others a number is an index. A data frame and JSON write some names in another way."""
    task = tasks.custom_task(fields=["text"], labels=names)
    for label, values in enumerate(right):
        for value in values:
            assert read_example(task, {"text": "a", "label": value}, "x:1").label == label
    for value in wrong:
        with pytest.raises(InputError, match=re.escape(f"label {value!r} is not a label of")):
            read_example(task, {"text": "a", "label": value}, "x:1")


def test_whole_numbers_that_pandas_wrote_as_floats():
    """A column of whole numbers with a gap anywhere is written "0.0", "1.0"."""
    assert labels_of("0.0", "1.0", "10.0", "1") == ("0", "1", "10")
    assert labels_of("0.5", "1.0") == ("0.5", "1.0") and labels_of("-1.0", "0.0") == ("-1", "0")
    assert labels_of("1", "--1", "01") == ("--1", "01", "1")
    assert labels_of("07", "7") == ("07", "7")
    task = tasks.custom_task(fields=["text"], labels=labels_of("0.0", "1.0"))
    for value, index in (("0.0", 0), ("1.0", 1), ("1", 1), (1.0, 1)):
        assert read_example(task, {"text": "a", "label": value}, "x:1").label == index
    spelled = tasks.custom_task(fields=["text"], labels=["1.0", "2.0"])
    assert read_example(spelled, {"text": "a", "label": "2.0"}, "x:1").label == 1
    row = {"sentence": "a", "label": "1.0"}
    assert read_example(tasks.get_task("sst2"), row, "x:1").label == 1


def test_custom_words():
    task = tasks.custom_task(fields=["a", "b"], labels=["x", "y"], words=["bad", ["good", "fine"]])
    assert task.words == (("bad",), ("good", "fine")) and task.targets == ("bad", "good")
    assert task.plain == "{a} [sep] {b}" and task.text == "a: {a} b: {b}"
    assert task.metric == "accuracy" and not task.is_text


SUMMARY = tasks.custom_task(fields=["document"], target="summary")


def test_text_task():
    assert SUMMARY.is_text and SUMMARY.metric == "exact_match" and SUMMARY.text == "{document}"
    assert SUMMARY.labels == SUMMARY.words == SUMMARY.targets == ()
    assert with_labels(SUMMARY, [{"label": "a"}]) is SUMMARY
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
    example = read_example(SUMMARY, {"document": "long", "summary": value}, "x:1")
    expected = Example({"document": "long"}, (), -1, references[0], references)
    assert example == expected


def test_targets_that_are_hidden():
    row = {"document": "long"}
    for hidden in ({}, {"summary": ""}, {"summary": None}, {"summary": ["", " "]}):
        assert read_example(SUMMARY, row | hidden, "x:3", need_label=False) == Example(row)
    with pytest.raises(InputError, match="column 'summary' is null, not text"):
        read_example(SUMMARY, row | {"summary": ["a", None]}, "x:3", need_label=False)


def test_numbers():
    """A number that is hidden, as -1 out of the limits or as nothing, is none."""
    task = tasks.custom_task(fields=["text"], number="count", limits=(0.0, 4.0))
    for value, number in ((0, 0.0), ("4", 4.0), (2.5, 2.5)):
        assert read_example(task, {"text": "a", "count": value}, "x:1").number == number
    for hidden in ({"count": -1}, {"count": None}, {}):
        example = read_example(task, {"text": "a"} | hidden, "x:1", need_label=False)
        assert example.number is None
    with pytest.raises(InputError, match="predicts numbers; use pearson, spearman"):
        metrics.check_metric("accuracy", 0, kind="numbers")
    with pytest.raises(InputError, match="optim.label_smoothing=0.1 is only valid with classes"):
        make_head("regression").objectives(0.1)


def test_candidates_fill_the_field_that_names_their_question():
    task = tasks.custom_task(
        fields=["question", "word"], question=["question"], metric="answer_f1", candidate="word",
        candidates=["options", "answers"], placeholder="___",
    )  # fmt: skip
    row = {"question": "a ___ ?", "options": ["cat", "dog"], "answers": ["dog"]}
    rows = example_rows(task, row, "x:1")
    examples = [read_example(task, row, "x:1", False) for row in rows]
    assert [example.fields["question"] for example in examples] == ["a cat ?", "a dog ?"]
    assert [row["label"] for row in rows] == [0, 1]
    assert examples[0].question == examples[1].question != ""


def test_a_column_of_the_question_is_needed_where_answers_are_scored():
    names = {"fields": ("text", "word"), "question": ("text", "aks"), "metric": "f1a"}
    task, row = (
        tasks.custom_task(**names, labels=("0", "1")),
        {"text": "a", "ask": "b", "word": "c"},
    )
    for needed in (True, False):
        with pytest.raises(InputError, match="x:1: there is no column 'aks'; columns: text, ask"):
            read_example(task, row | {"label": 1}, "x:1", needed)
    assert read_example(task, row, "x:1", False).label == -1
    names |= {"candidate": "word", "candidates": ("options", "answers")}
    task, row = tasks.custom_task(**names), {"text": "a", "ask": "b", "options": ["c", "d"]}
    with pytest.raises(InputError, match="x:1: there is no column 'aks'"):
        example_rows(task, row | {"answers": ["c"]}, "x:1")
    assert len(example_rows(task, row | {"answers": []}, "x:1")) == 2


def test_unknown_task():
    with pytest.raises(InputError, match="unknown task 'sst-2'; nearest: sst2.*task.name=custom"):
        tasks.get_task("sst-2")


def test_import_is_light():
    code = (
        "import sys, jaxprompt.data.tasks.registry, jaxprompt.data.sources.splits;"
        "import jaxprompt.data.sampling.fewshot;"
        "heavy = {'jax', 'datasets', 'tensorflow_datasets', 'pyarrow', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
