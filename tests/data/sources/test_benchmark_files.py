"""Files of GLUE, SuperGLUE and SQuAD as they are downloaded: rows, labels and submissions."""

import json
import re

import pytest

from jaxprompt.data.sources import submissions
from jaxprompt.data.sources.records import from_file, with_examples
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.readers.reading import read_all
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError

WSC = {
    "text": "Mark told Pete many lies about himself, which Pete included in his book. He should "
    "have been more truthful.", "idx": 0, "label": False,
    "target": {
        "span2_index": 13, "span1_index": 0, "span1_text": "Mark", "span2_text": "He"
    },
}  # fmt: skip
MULTIRC = {
    "idx": 3, "version": 1.1,
    "passage": {
        "text": "While this process moved along, diplomacy continued its rounds.",
        "questions": [
            {"question": "What moved?", "idx": 7, "answers": [
                {"text": "A process", "idx": 20, "label": 1},
                {"text": "Nothing", "idx": 21, "label": 0},
            ]},
            {"question": "What continued?", "idx": 8, "answers": [
                {"text": "Diplomacy", "idx": 22, "label": 1},
            ]},
        ],
    },
}  # fmt: skip
RECORD = {
    "source": "Daily mail", "idx": 5,
    "passage": {
        "text": "Ann met Bo in Rome.\n@highlight\nAnn won\n@highlight\nBo lost",
        "entities": [
            {"start": 0, "end": 2}, {"start": 8, "end": 9}, {"start": 14, "end": 17},
            {"start": 31, "end": 33},
        ],
    },
    "qas": [
        {"query": "In Rome @placeholder lost", "idx": 11,
         "answers": [{"start": 8, "end": 9, "text": "Bo"}]},
        {"query": "@placeholder won", "idx": 12,
         "answers": [{"start": 0, "end": 2, "text": "Ann"}]},
    ],
}  # fmt: skip
PASSAGE = "Ann met Bo in Rome.\n- Ann won\n- Bo lost"
GLUE = {
    "cola": ("index\tsentence\n7\tBill whistled.\n",
             "gj04\t1\t\tOur friends won't buy this.\nks08\t0\t*\tThey drank the pub.\n",
             [1, 0], {"sentence": "They drank the pub."}),
    "sst2": ("index\tsentence\n7\tuneasy mishmash\n",
             "sentence\tlabel\nhide new secretions \t0\na joy\t1\n", [0, 1], {"sentence": "a joy"}),
    "mrpc": ("index\t#1 ID\t#2 ID\t#1 String\t#2 String\n7\t1\t2\tPCCW's \"chief\" .\tIt is\n",
             "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t70\t71\ta b\tc d\n"
             '0\t72\t73\tHe said "no\te f\n', [1, 0],
             {"sentence1": 'He said "no', "sentence2": "e f"}),
    "stsb": ("index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
             "7\tmain\tf\t2012\t0\tn\tn\ta\tb\n",
             "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\t"
             "score\n0\tmain\tf\t2012\t0\tn\tn\ta b\tc d\t5.000\n1\tmain\tf\t2012\t1\tn\tn\te\tf"
             "\t0.250\n", [5.0, 0.25], {"sentence1": "e", "sentence2": "f"}),
    "qqp": ("id\tquestion1\tquestion2\n7\tWhy?\tHow?\n",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n133273\t213221\t213222\ta?\tb?\t0"
            "\n402555\t536040\t536041\tc?\td?\t1\n", [0, 1],
            {"question1": "c?", "question2": "d?"}),
    "mnli": ("index\tpromptID\tpairID\tsentence1_binary_parse\tsentence2_binary_parse\t"
             "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tgenre\n"
             "7\t3\t3e\tx\tx\tx\tx\ta b\tc d\ttravel\n",
             "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
             "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
             "0\t3\t3n\tg\tx\tx\tx\tx\ta\tb\tneutral\tneutral\n"
             "1\t4\t4e\tg\tx\tx\tx\tx\tc\td\tneutral\tentailment\n", [1, 0],
             {"premise": "c", "hypothesis": "d"}),
    "qnli": ("index\tquestion\tsentence\n7\tWhen?\tThen.\n",
             "index\tquestion\tsentence\tlabel\n0\ta?\tb\tentailment\n1\tc?\td\tnot_entailment\n",
             [0, 1], {"question": "c?", "sentence": "d"}),
    "rte": ("index\tsentence1\tsentence2\n7\ta b\tc d\n",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\tc\td\tentailment\n",
            [1, 0], {"premise": "c", "hypothesis": "d"}),
    "wnli": ("index\tsentence1\tsentence2\n7\ta b\tc d\n",
             "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n1\tc\td\t0\n", [1, 0],
             {"sentence1": "c", "sentence2": "d"}),
}  # fmt: skip
SQUAD = {
    "version": "v2.0",
    "data": [
        {"title": "Rome", "paragraphs": [
            {"context": "Ann met Bo in Rome.", "qas": [
                {"id": "q1", "question": "Whom did Ann meet?", "is_impossible": False,
                 "answers": [{"text": "Bo", "answer_start": 8}]},
                {"id": "q2", "question": "Who won?", "is_impossible": True, "answers": [],
                 "plausible_answers": [{"text": "Ann", "answer_start": 0}]},
            ]},
        ]},
        {"title": "Oslo", "id": "A2", "paragraphs": [
            {"context": "It snows in Oslo.", "id": "P2", "qas": [
                {"id": "q3", "question": "Where?", "answers": [
                    {"text": "Oslo", "answer_start": 12}, {"text": "in Oslo", "answer_start": 9}]},
            ]},
        ]},
    ],
}  # fmt: skip


def hide(row):
    """Takes the labels and answers out, as of test files."""
    if isinstance(row, list):
        return [hide(item) for item in row]
    if not isinstance(row, dict):
        return row
    answer_columns = {"label"} | ({"answers"} if "query" in row else set())
    return {name: hide(value) for name, value in row.items() if name not in answer_columns}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def read(name, path):
    """Reads a split to learn from. -> its examples"""
    task = get_task(name)
    rows = read_split(task, "train", files={"train": str(path)})
    return read_all(task, rows, rows.origin)


def read_records(name, path):
    """Reads a file to be answered. -> task, records"""
    task = get_task(name)
    records = list(with_examples(task, from_file(str(path), task.columns)))
    assert not [record.error for record in records if record.error]
    return task, records


def submit(form, name, path, answers):
    task, records = read_records(name, path)
    submissions.check_submission(form, task, records)
    return submissions.format_submission(form, task, records, answers)


def test_wsc(tmp_path):
    path = write(tmp_path / "train.jsonl", [WSC])
    (example,) = read("wsc", path)
    assert example.label == 0 and example.fields["span1_text"] == "Mark"
    assert (
        example.fields["text"][slice(*example.entities[0])] == example.fields["span2_text"] == "He"
    )
    path = write(tmp_path / "test.jsonl", [hide(WSC)])
    text = submit("superglue", "wsc", path, [{"prediction": "true"}])
    assert text == '{"idx": 0, "label": "True"}\n'


def test_multirc(tmp_path):
    path = write(tmp_path / "train.jsonl", [MULTIRC])
    examples = read("multirc", path)
    assert [example.label for example in examples] == [1, 0, 1]
    assert [example.fields["answer"] for example in examples] == [
        "A process",
        "Nothing",
        "Diplomacy",
    ]
    assert examples[0].question == examples[1].question != examples[2].question
    path = write(tmp_path / "test.jsonl", [hide(MULTIRC)])
    answers = [{"prediction": name} for name in ("false", "true", "true")]
    assert json.loads(submit("superglue", "multirc", path, answers)) == {
        "idx": 3, "passage": {"questions": [
            {"idx": 7, "answers": [{"idx": 20, "label": 0}, {"idx": 21, "label": 1}]},
            {"idx": 8, "answers": [{"idx": 22, "label": 1}]},
        ]},
    }  # fmt: skip


def test_record(tmp_path):
    path = write(tmp_path / "train.jsonl", [RECORD])
    examples = read("record", path)
    assert [example.fields["entity"] for example in examples] == ["Ann", "Bo", "Rome"] * 2
    assert [example.label for example in examples] == [0, 1, 0, 1, 0, 0]
    assert {example.fields["passage"] for example in examples} == {PASSAGE}
    assert examples[1].fields["query"] == "In Rome Bo lost"
    path = write(tmp_path / "test.jsonl", [hide(RECORD)])
    answers = [{"scores": {"false": 1 - x, "true": x}} for x in (0.1, 0.2, 0.7, 0.6, 0.5, 0.2)]
    text = submit("superglue", "record", path, answers)
    assert text == '{"idx": 11, "label": "Rome"}\n{"idx": 12, "label": "Ann"}\n'


@pytest.mark.parametrize(("name", "row"), [("multirc", MULTIRC), ("record", RECORD), ("wsc", WSC)])
def test_columns_of_a_user_stay(name, row, tmp_path):
    path = write(tmp_path / "test.jsonl", [hide(row) | {"which": "first"}])
    _, records = read_records(name, path)
    assert len(records) and {record.row["which"] for record in records} == {"first"}


@pytest.mark.parametrize(("index", "text"), [(1, "he"), (2, "He"), (0, "he"), (1, "HE")])
def test_a_pronoun_that_stands_beside_its_index(index, text, tmp_path):
    row = {"text": "Mark said he, not his son, lied", "span1_text": "Mark", "span1_index": 0,
           "span2_text": text, "span2_index": index, "label": True, "idx": 0}  # fmt: skip
    (example,) = read("wsc", write(tmp_path / "train.jsonl", [row]))
    assert example.fields["text"][slice(*example.entities[0])] == "he,"
    row["span2_text"] = "she"
    with pytest.raises(InputError, match="entity 1, 'she' in 'span2_text', .* in 'text'"):
        read("wsc", write(tmp_path / "train.jsonl", [row]))


def test_highlights_of_the_hub_are_read_alike(tmp_path):
    row = {"passage": RECORD["passage"]["text"], "query": "@placeholder won", "answers": ["Ann"],
           "entities": ["Ann", "Bo"], "idx": {"passage": 5, "query": 12}}  # fmt: skip
    examples = read("record", write(tmp_path / "train.jsonl", [row]))
    assert [example.fields["passage"] for example in examples] == [PASSAGE] * 2


@pytest.mark.parametrize("name", GLUE)
def test_glue(name, tmp_path):
    hidden, labelled, labels, fields = GLUE[name]
    path = tmp_path / "train.tsv"
    path.write_text(labelled, "utf-8")
    examples = read(name, path)
    assert [
        example.label if example.number is None else example.number for example in examples
    ] == labels
    assert examples[1].fields == fields
    path = tmp_path / "test.tsv"
    path.write_text(hidden, "utf-8")
    task, (record,) = read_records(name, path)
    assert record.example.label == -1 and record.example.number is None
    prediction = 2.5 if task.number else task.labels[1]
    text = submit("glue", name, path, [{"prediction": prediction}])
    named = name in ("mnli", "qnli", "rte")
    expected = "2.500" if task.number else task.labels[1] if named else "1"
    assert text == f"index\tprediction\n7\t{expected}\n"


@pytest.mark.parametrize("name", ["squad", "squad_v2", "quoref", "cmrc2018", "xquad_zh"])
def test_squad(name, tmp_path):
    path = tmp_path / "train-v2.0.json"
    path.write_text(json.dumps(SQUAD), "utf-8")
    examples = read(name, path)
    assert [example.references for example in examples] == [("Bo",), ("",), ("Oslo", "in Oslo")]
    assert [example.fields["context"] for example in examples[1:]] == [
        "Ann met Bo in Rome.", "It snows in Oslo."
    ]  # fmt: skip
    answers = [{"prediction": text} for text in ("Bo", "", "Oslo")]
    assert json.loads(submit("squad", name, path, answers)) == {"q1": "Bo", "q2": "", "q3": "Oslo"}


def test_nested_rows_of_relations_are_answered_too(tmp_path):
    """The rows that `train` reads, `predict` reads as well."""
    names = (("Ann", "Bo"), ("Bo", "Rome"))
    pairs = [{"x": x, "y": y, "r": ["unanswerable"]} for x, y in names]
    path = tmp_path / "test.json"
    path.write_text(json.dumps([[["Ann: Hi, Bo.", "Bo: Hi from Rome."], pairs]]), "utf-8")
    _, records = read_records("dialog_re", path)
    assert [record.example.fields["entity2"] for record in records] == ["Bo", "Rome"]


def without(row, *path):
    """Copies a row without what stands at a path."""
    row = json.loads(json.dumps(row))
    part = row
    for step in path[:-1]:
        part = part[step]
    del part[path[-1]]
    return row


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("wsc", WSC | {"target": "He"}, "'target' is 'He'; in the benchmark's format it is an ob"),
        ("wsc", without(WSC, "target", "span1_text"), "there is no column 'span1_text'"),
        ("multirc", without(MULTIRC, "passage", "questions"), "'questions' is None; in the bench"),
        ("multirc", MULTIRC | {"passage": {"text": "a", "questions": ["b"]}}, "'questions' is 'b'"),
        ("multirc", without(MULTIRC, "passage", "questions", 0, "question"),
         "column 'question' is null"),
        ("multirc", without(MULTIRC, "passage", "questions", 0, "answers", 0, "label"),
         "there is no column 'label'"),
        ("record", without(RECORD, "passage", "entities"), "'entities' is None"),
        ("squad", {"paragraphs": [{"context": "a"}]}, "'qas' is None; in the benchmark's"),
    ],
)  # fmt: skip
def test_broken_rows_are_one_line(name, row, message, tmp_path):
    path = write(tmp_path / "train.jsonl", [row])
    with pytest.raises(InputError, match=re.escape(f"{path}:1: ") + ".*" + re.escape(message)):
        read(name, path)


def test_snli_whose_header_lacks_four_labels(tmp_path):
    """As GLUE's train.tsv: some rows have the labels of five people."""
    path = tmp_path / "train.tsv"
    rows = ["A man\tA cat\tneutral\tneutral", "It\tIs\tneutral" + "\tentailment" * 5]
    path.write_text("\n".join(["sentence1\tsentence2\tlabel1\tgold_label", *rows]))
    task = get_task("snli")
    read = read_split(task, "train", source=str(tmp_path))
    assert [task.labels[x.label] for x in read_all(task, read, read.origin)] == [
        "neutral", "entailment",
    ]  # fmt: skip
    path.write_text(path.read_text() + "\tneutral")
    with pytest.raises(InputError, match="train.tsv:3: 9 cells, but the header has 4"):
        read_split(task, "train", source=str(tmp_path))
