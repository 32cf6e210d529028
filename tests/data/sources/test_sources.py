"""Sources: every format and place gives the same rows, and every broken file is named."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pandas
import pyarrow.parquet
import pytest

from jaxprompt.data.sources import splits as sources
from jaxprompt.data.sources.files import raw_lines, read_file
from jaxprompt.data.sources.records import from_file
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.errors import InputError

ROWS = [
    {"text": 'He said "no", twice.', "label": "good"},
    {"text": "Zürich — 東京", "label": "bad"},
    {"text": "third", "label": "good"},
]
TASK = custom_task(fields=["text"], labels=["bad", "good"])


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_csv(path, sep=","):
    pandas.DataFrame(ROWS).to_csv(path, sep=sep, index=False)


WRITERS = {
    "jsonl": write_jsonl,
    "json": lambda path: pandas.DataFrame(ROWS).to_json(path, orient="records"),
    "csv": write_csv,
    "tsv": lambda path: write_csv(path, "\t"),
    "parquet": lambda path: pandas.DataFrame(ROWS).to_parquet(path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_formats(tmp_path, kind):
    path = tmp_path / f"train.{kind}"
    WRITERS[kind](path)
    rows = sources.read_split(TASK, "train", source=str(tmp_path))
    assert list(rows) == [rows[i] for i in range(3)] == ROWS
    line = 2 if kind in ("csv", "tsv") else 1
    assert rows.origin(0) == f"{path}:{line}"
    streamed = [(record.origin, record.row) for record in from_file(str(path))]
    assert streamed == [(rows.origin(i), rows[i]) for i in range(3)]
    if kind != "parquet":
        packed = tmp_path / f"x.{kind}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert list(read_file(packed)) == ROWS


def test_a_row_of_a_table_is_read_before_the_next(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\na\nb,c\n")
    records = from_file(str(path))
    assert next(records).row == {"text": "a"}
    with pytest.raises(InputError, match="a.csv:3: 2 cells"):
        next(records)


def test_lines_are_counted_as_an_editor_does(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": "b"}', "utf-8")
    rows = read_file(path)
    assert [rows.origin(0), rows.origin(1)] == [f"{path}:2", f"{path}:4"]


AS_WRITTEN = {
    "index.csv": b",text,label\n0,fine,good\n1,poor,bad\n",
    "named index.csv": b"Unnamed: 0,text,label\n0,fine,good\n1,poor,bad\n",
    "excel.csv": b"\xef\xbb\xbfsep=;\r\ntext;label\r\nfine;good\r\npoor;bad\r\n",
    "semicolons.csv": b"\xef\xbb\xbftext;label\r\nfine;good\r\npoor;bad\r\n",
    "quoted.csv": b'"text";"label"\n"fine";"good"\n"poor";"bad"\n',
    "tabs.csv": b"text\tlabel\nfine\tgood\npoor\tbad\n",
    "index.tsv": b"\ttext\tlabel\n0\tfine\tgood\n1\tpoor\tbad\n",
    "quoted.tsv": b'\xef\xbb\xbf"text"\t"label"\r\n"fine"\t"good"\r\n"poor"\t"bad"\r\n',
    "blank.csv": b"\r\ntext,label\r\n\r\nfine,good\r\npoor,bad\r\n\r\n",
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_tables_as_spreadsheets_and_pandas_write_them(tmp_path, name):
    for path, pack in ((tmp_path / name, bytes), (tmp_path / f"{name}.gz", gzip.compress)):
        path.write_bytes(pack(AS_WRITTEN[name]))
        rows = list(read_file(path))
        assert [(row["text"], row["label"]) for row in rows] == [("fine", "good"), ("poor", "bad")]
        index = [value for column, value in rows[1].items() if column not in ("text", "label")]
        assert index == ["1"] * ("index" in name)  # kept, and in nobody's way


def test_what_divides_cells_may_stand_in_quotes(tmp_path):
    """In CSV always; in TSV where the file quotes as pandas does."""
    text = 'He said "no",\tthen;\tleft.\n\nReally.'
    quoted = '"He said ""no"",\tthen;\tleft.\n\nReally."'
    for name, mark in (("a.csv", ","), ("b.csv", ";"), ("c.csv", "\t"), ("d.tsv", "\t")):
        (tmp_path / name).write_text(f"text{mark}label\n{quoted}{mark}good\nlast{mark}bad\n")
        rows = read_file(tmp_path / name)
        assert list(rows) == [{"text": text, "label": "good"}, {"text": "last", "label": "bad"}]
        assert [rows.origin(0), rows.origin(1)] == [f"{tmp_path / name}:{n}" for n in (2, 5)]
    (tmp_path / "e.tsv").write_text('text\tlabel\n"It ""is""."\tgood\nlast\tbad\n')
    assert read_file(tmp_path / "e.tsv")[0]["text"] == 'It "is".'


@pytest.mark.parametrize("first", ['"Hello', '"Hello" he', 'a "b" c', '"Hello"', '""', "'a'"])
def test_tsv_without_quoting_keeps_its_quotes(tmp_path, first):
    """As in the GLUE files, where a quote begins a cell and ends in another row."""
    path = tmp_path / "a.tsv"
    path.write_text(f'text\tlabel\n{first}\tgood\n"one" two\tbad\nend"\tgood\n')
    assert [row["text"] for row in read_file(path)] == [first, '"one" two', 'end"']
    path.write_text(f"text\tlabel\n{first}\tgood\n")
    assert [row["text"] for row in read_file(path)] == [first]


def test_long_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "word " * 40_000 + ",good\n", "utf-8")
    assert len(read_file(path)[0]["text"]) == 200_000


def test_folder_names(tmp_path):
    write_jsonl(tmp_path / "validation.jsonl")
    where = {"source": str(tmp_path)}
    assert list(sources.read_split(TASK, "dev", **where)) == ROWS
    assert sources.has_split(TASK, "dev", **where)
    assert not sources.has_split(TASK, "train", **where)
    with pytest.raises(InputError, match=r"one train file, .*has 0; .*: validation.jsonl"):
        sources.read_split(TASK, "train", **where)
    write_csv(tmp_path / "dev.csv")
    with pytest.raises(InputError, match=r"has 2; its files: dev.csv, validation.jsonl"):
        sources.read_split(TASK, "dev", **where)


def test_named_files(tmp_path):
    path = tmp_path / "mine.csv"
    write_csv(path)
    files = {"train": str(path)}
    assert list(sources.read_split(TASK, "train", files=files)) == ROWS
    assert sources.has_split(TASK, "train", files=files)
    assert not sources.has_split(TASK, "dev", files=files)
    with pytest.raises(InputError, match=r"data.files has no dev split .*; it has: train"):
        sources.read_split(TASK, "dev", files=files)


def test_set_in_the_package():
    task = get_task("topics")
    sizes = {name: len(sources.read_split(task, name)) for name in ("train", "dev", "test")}
    assert sizes == {"train": 96, "dev": 96, "test": 240}
    assert all(sources.has_split(task, name) for name in sizes)
    row = sources.read_split(task, "train", source="package")[0]
    assert row["label"] in task.labels
    with pytest.raises(InputError, match="task sst2 has no data of its own"):
        sources.read_split(get_task("sst2"), "train", source="package")


def parquet_of(*columns):
    sink = io.BytesIO()
    arrays = [pyarrow.array(column) for column in columns]
    pyarrow.parquet.write_table(pyarrow.table(arrays, ["text"] * len(arrays)), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl:2: broken JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a.jsonl:2: a row must be an object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9t\xe9"}\n', r"a.jsonl:2: not UTF-8 .*0xe9"),
        ("a.jsonl", b"\n\n", r"a.jsonl: the file has no rows"),
        ("a.json", b'{"text": ["a"]}', r"a.json: must be a list"),
        ("a.json", b"[{]", r"a.json: broken JSON"),
        ("a.json", b"[{}] [{}]", r"a.json: broken JSON"),
        ("a.json", b'{\n"text": "a"}', r"a.json: must be a list"),
        ("a.json", b'{"text": "a"}\n{"text"', r"a.json:2: broken JSON"),
        ("a.csv", b"text,label\na,b\nc\n", r"a.csv:3: 1 cells, but the header has 2 \(text, label"),
        ("a.csv", b'text,label\n"a,b\nc,d\n', r"a.csv:2: broken row"),
        ("a.csv", b"sep=;\ntext;label\na;b\nc\n", r"a.csv:4: 1 cells, but the header has 2"),
        ("a.csv", b"text,text\na,b\n", r"a.csv:1: the header must name every column once"),
        ("a.csv", b"text,label\n", r"a.csv: the file has no rows"),
        ("a.csv", b"text,label\ra,b\r", r"a.csv:1: broken row"),
        ("a.csv", b"text,label\n\xff,b\n", r"a.csv:2: not UTF-8 .* -f WINDOWS-1252"),
        ("a.csv", "text,label\n".encode("utf-16"), r"a.csv:1: not UTF-8 .* -f UTF-16"),
        ("a.tsv", b"text\tlabel\na\tb\tc\n", r"a.tsv:2: 3 cells, but the header has 2"),
        ("a.tsv", b'text\tlabel\na "b\tc\nd\n', r"a.tsv:3: 1 cells, but the header has 2"),
        ("a.csv", b"text,,label\na,b,c\n", r"a.csv:1: the header must name every column once"),
        ("a.parquet", b"PAR1 nothing", r"a.parquet: broken Parquet file"),
        ("a.parquet", b"PAR1" + 8 * b"\xff" + b"\x08\0\0\0PAR1", r"a.parquet: cannot be read"),
        (
            "a.parquet",
            parquet_of(pyarrow.array([b"\xff"]).view("string")),
            "broken Parquet .*utf-8",
        ),
        (
            "a.parquet",
            parquet_of(pyarrow.array([2**30], "date32")),
            "broken Parquet .*days=1073741824",
        ),
        ("a.parquet", parquet_of(["a"], ["b"]), "must name every column once, got: text, text"),
        ("a.jsonl.gz", b"plain text", r"a.jsonl.gz: broken gzip file"),
        ("a.jsonl.gz", b"", r"a.jsonl.gz: the file has no rows"),
        (
            "a.csv",
            gzip.compress(b"text,label\na,b\n", mtime=0),
            r"a.csv:1: not UTF-8 .* ending .gz",
        ),
        ("a.csv", b"PK\x03\x04\xff\n", r"a.csv:1: not UTF-8 .* is a ZIP archive or"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12],
            r"jsonl.gz: broken gzip file",
        ),
        ("a.xlsx", b"", r"a.xlsx: unknown file format; .* .jsonl"),
        ("a.parquet.gz", b"", r"a.parquet.gz: unknown file format"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        sources.read_split(TASK, "train", files={"train": str(path)})
    assert "\n" not in str(caught.value)


LIMIT = 2**20  # instead of 64 MiB
LONG = "x" * (LIMIT // 8)


@pytest.mark.parametrize(
    "columns",
    [
        lambda: {"a": pyarrow.nulls(LIMIT // 8 + 1)},
        lambda: {"a": [LONG] * 8},
        lambda: {"a": pyarrow.DictionaryArray.from_arrays([0] * 8, [LONG])},
    ],
    ids=["rows", "texts", "categories"],
)
def test_parquet_of_repeated_values_has_a_limit(tmp_path, monkeypatch, columns):
    monkeypatch.setattr("jaxprompt.data.sources.files._MAX_UNPACKED", LIMIT)
    monkeypatch.setattr("jaxprompt.data.sources.files._MAX_RATIO", 2)
    table, path = pyarrow.table(columns()), tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table[1:], path)
    assert read_file(path)[0] == table[1:2].to_pylist()[0]
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(InputError, match="over 1,048,576 bytes"):
        read_file(path)


def test_gzip_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxprompt.data.sources.files._MAX_UNPACKED", LIMIT)
    path = tmp_path / "a.jsonl.gz"
    for extra in (0, 1):
        path.write_bytes(gzip.compress(b'{"a": 1}\n'.ljust(LIMIT + extra)))
        with pytest.raises(InputError, match="over 1,048,576") if extra else nullcontext():
            assert next(raw_lines(path)) == b'{"a": 1}\n'  # refused before a row is parsed


def test_features_of_any_depth_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    metadata = {"huggingface": "[" * 5000 + "]" * 5000}
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}, metadata=metadata), path)
    assert list(read_file(path)) == [{"a": 1}]


def test_missing_files(tmp_path):
    with pytest.raises(InputError, match=r"none.jsonl: no such file"):
        read_file(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"data folder .*nowhere does not exist"):
        sources.read_split(TASK, "train", source=str(tmp_path / "nowhere"))
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(InputError, match=r"train.jsonl is not a folder"):
        sources.read_split(TASK, "train", source=str(tmp_path / "train.jsonl"))
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(InputError, match=r"dir.jsonl: is a folder"):
        read_file(tmp_path / "dir.jsonl")
    with pytest.raises(InputError, match=r"task custom has no data of its own"):
        sources.read_split(TASK, "train")


def as_saved(data, folder):
    data.with_format("numpy").save_to_disk(folder)


def as_downloaded(data, folder, configs=""):
    (folder / "data").mkdir(parents=True)
    for name, rows in data.items():
        for i in range(2):
            path = folder / f"data/{name}-{i:05}-of-00002.parquet"
            rows.shard(2, i, contiguous=True).to_parquet(path)
    if configs:
        (folder / "README.md").write_text(f"---\n{configs}---\n")


def with_a_card(data, folder):
    files = [{"split": "validation", "path": "data/held-*"}, {"split": "train", "path": "data/a-*"}]
    renamed = {"held": data["validation"], "a": data["train"]}
    as_downloaded(renamed, folder, f"configs: {[{'config_name': 'x', 'data_files': files}]}\n")


@pytest.mark.parametrize("write", [as_saved, as_downloaded, with_a_card])
def test_folders_of_data_sets(tmp_path, write):
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["good", "bad"])}
    )
    data = datasets.Dataset.from_list(ROWS, features=features)
    folder = tmp_path / "data set"
    write(datasets.DatasetDict(train=data, validation=data.select([2, 1])), folder)
    place = {"source": str(folder), "cache_dir": str(tmp_path / "cache")}
    task = custom_task(fields=["text"], label="label")
    rows = sources.read_split(task, "train", **place)
    assert list(rows) == ROWS and rows.origin(1) == f"{folder}/train:2"
    assert list(sources.read_split(task, "dev", **place)) == [ROWS[2], ROWS[1]]
    assert [sources.has_split(task, name, **place) for name in ("dev", "test")] == [True, False]


def test_a_folder_of_one_data_set_is_train(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    assert list(sources.read_split(TASK, "train", source=str(tmp_path))) == ROWS
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(InputError, match=f"data folder {tmp_path} cannot be loaded"):
        sources.read_split(TASK, "train", source=str(tmp_path))


HUB = """
from glob import glob

from huggingface_hub.constants import HF_HUB_CACHE

from jaxprompt.data.sources.splits import has_split, read_split
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task, get_task
from jaxprompt.errors import InputError

def message(*args, **kwargs):
    try:
        return list(read_split(*args, **kwargs))
    except InputError as error:
        return str(error)

mine = custom_task(fields=["sentence"], labels=["negative", "positive"])
task, rows = get_task("sst2"), read_split(get_task("sst2"), "test")
results = {
    "known": list(rows),
    "origin": rows.origin(1),
    "label": read_example(task, rows[1], rows.origin(1)).label,
    "has": [has_split(task, "dev"), has_split(task, "test")],
    "no_dev": message(task, "dev"),
    "mine": message(mine, "dev", source="hub:stanfordnlp/sst2"),
    "reversed": message(get_task("subj"), "train"),
    "mine_has": has_split(mine, "test", source="hub:stanfordnlp/sst2"),
    "renamed": message(get_task("mpqa"), "train"),
    "branch": message(get_task("trec"), "train"),
    "nested": [message(get_task(name), "train") for name in ("c3_mixed", "c3_dialog", "c3")],
    "absent": message(get_task("cr"), "train"),
    "subset": message(mine, "train", source="hub:stanfordnlp/sst2:nope"),
    "chats": [
        read_example(task, read_split(task, "train", source=source)[0], "").fields["messages"]
        for name, columns in (("messages", ["messages"]), ("pairs", ["prompt", "completion"]))
        for task in (custom_task(fields=[], messages=columns),)
        for folder in glob(f"{HF_HUB_CACHE}/datasets--org--{name}/snapshots/*")
        for source in (f"hub:org/{name}", folder)
    ],
}
import json
print(json.dumps(results))
"""


def cached_set(home, name, files, revision="main"):
    """Lays a data set out as a download from the hub leaves it."""
    folder = home / "hub" / f"datasets--{name.replace('/', '--')}"
    commit = "0123456789" * 4
    (folder / "refs" / revision).parent.mkdir(parents=True)
    (folder / "refs" / revision).write_text(commit)
    for path, content in files.items():
        path = folder / "snapshots" / commit / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")


def test_hub_offline_from_a_prepared_cache(tmp_path):
    rows = [{"sentence": "poor", "label": 0}, {"sentence": "fine", "label": 1}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    card = """---
dataset_info:
  features:
  - name: sentence
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': negative
          '1': positive
---
"""
    parts = {"train.jsonl": lines, "validation.jsonl": lines}
    cached_set(tmp_path, "stanfordnlp/sst2", parts | {"README.md": card})
    turned = card.replace("negative", "objective").replace("positive", "subjective")
    cached_set(tmp_path, "SetFit/subj", {"train.jsonl": lines, "README.md": turned})
    cached_set(tmp_path, "rahulsikder223/SentEval-MPQA", {"train.jsonl": lines})
    question = '{"text": "Who ?", "coarse_label": 3}\n'
    files = {"default/train/0000.jsonl": question}
    cached_set(tmp_path, "CogComp/trec", files, "refs/convert/parquet")
    questions = {
        "question": ["a", "b"],
        "answer": ["x", "z"],
        "choice": [["x", "y"], ["y", "z", "w"]],
    }
    nested = {"documents": ["one", "two"], "document_id": "m1", "questions": questions}
    listed = [
        dict(zip(questions, values, strict=True))
        for values in zip(*questions.values(), strict=True)
    ]
    parts = {"mixed": questions, "dialog": listed}
    written = {name: json.dumps(nested | {"questions": part}) for name, part in parts.items()}
    files = {f"{name}/train-0.jsonl": f"{line}\n" * 2 for name, line in written.items()}
    configs = "".join(f"- config_name: {x}\n  data_files: {x}/train-*\n" for x in parts)
    messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    shard = "data/train-00000-of-00001.jsonl"
    chat = [*messages, messages[0] | {"name": "Ada"}, messages[1] | {"weight": 0}]
    cached_set(tmp_path, "org/messages", {shard: json.dumps({"messages": chat}) + "\n"})
    pair = json.dumps({"prompt": messages[:1], "completion": messages[1:]})
    cached_set(tmp_path, "org/pairs", {shard: pair + "\n"})
    cached_set(tmp_path, "dataset-org/c3", files | {"README.md": f"---\nconfigs:\n{configs}---\n"})
    done = subprocess.run(
        [sys.executable, "-c", HUB],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["known"] == rows
    assert document["origin"] == "stanfordnlp/sst2/validation:2"
    assert document["label"] == 1
    assert document["has"] == [False, True]
    assert "no dev split" in document["no_dev"] and "train, validation" in document["no_dev"]
    assert document["mine"] == [rows[0] | {"label": "negative"}, rows[1] | {"label": "positive"}]
    # A known task numbers the classes in another order than the data set that names them.
    assert [row["label"] for row in document["reversed"]] == ["objective", "subjective"]
    assert document["mine_has"] is False
    assert document["renamed"] == [{"text": r["sentence"], "label": r["label"]} for r in rows]
    assert document["branch"] == [json.loads(question)]
    once = [{"context": ["one", "two"], "document_id": "m1"} | question for question in listed]
    assert document["nested"] == [once * 2, once * 2, once * 4]
    # From the cache and from a folder. Arrow fills what a message lacks with null.
    read = [json.loads(text) for text in document["chats"]]
    chat[3].pop("weight")
    assert [x["messages"] for x in read] == [chat, chat, messages, messages]
    assert [x["trained"] for x in read] == [[1]] * 4
    assert "'SetFit/CR' cannot be loaded" in document["absent"]
    assert "HF_HUB_OFFLINE" in document["absent"]
    assert "'stanfordnlp/sst2:nope' cannot be loaded" in document["subset"]


def test_a_hub_id_is_never_read_from_this_machine(tmp_path, monkeypatch):
    """`datasets` takes "text" for a reader of the current folder, and a folder before the hub."""
    monkeypatch.chdir(tmp_path)
    refuse = SimpleNamespace(load_dataset=lambda *args, **kw: pytest.fail(f"loads {args}"))
    monkeypatch.setitem(sys.modules, "datasets", refuse)
    (tmp_path / "train.txt").write_text("one\n")
    write_jsonl(tmp_path / "train.jsonl")
    write_jsonl(tmp_path / "train.json")
    for name in ("text", "pandas", "imagefolder:x", "", "./x", "a/b/c", "hf://datasets/a/b"):
        with pytest.raises(InputError, match="must be owner/name; use hub:owner/name"):
            sources.read_split(TASK, "train", source=f"hub:{name}" if name else "hub::x")
    (tmp_path / "stanfordnlp/sst2").mkdir(parents=True)
    write_jsonl(tmp_path / "stanfordnlp/sst2/train.jsonl")
    for task, source in ((TASK, "hub:stanfordnlp/sst2"), (get_task("sst2"), "hub")):
        with pytest.raises(InputError, match="is also a local folder, .*/stanfordnlp/sst2, which"):
            sources.read_split(task, "train", source=source)


@pytest.mark.parametrize(
    "name, odd", [("snli", -1), ("snli", "-"), ("ocnli", -1), ("ocnli", "-"), ("cmnli", "-1")]
)
def test_examples_without_an_agreed_label_are_left_out(name, odd, tmp_path):
    """A split of which no example has one hides its labels, and stays."""
    task = get_task(name)
    rows = [{**dict.fromkeys(task.fields, "a text"), "label": label} for label in (0, odd, 2)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", [rows[1], rows[1]])
    actual = sources.read_split(task, "train", source=str(tmp_path))
    assert [row["label"] for row in actual] == [0, 2] and actual.origin(1).endswith(":3")
    assert len(sources.read_split(task, "test", source=str(tmp_path))) == 2


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """A folder with a real data set that TFDS wrote as array_record."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class ToyPolarity(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=["bad", "good"]),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(6),
                "validation": self._generate_examples(2),
            }

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"text": f"row {i} é", "label": i % 2}
            yield count, {"text": "no label", "label": -1}

    folder = tmp_path_factory.mktemp("tfds")
    ToyPolarity(data_dir=folder, file_format="array_record").download_and_prepare()
    return str(folder)


def test_tfds(tfds_folder):
    where = {"source": "tfds:toy_polarity", "cache_dir": tfds_folder}
    rows = sources.read_split(TASK, "train", **where)
    expected = [{"text": f"row {i} é", "label": ("bad", "good")[i % 2]} for i in range(6)]
    assert sorted(rows, key=lambda row: row["text"]) == expected and rows.left_out == 1
    assert rows[5] == list(rows)[5]
    assert rows.classes == rows.select([1]).classes == ("bad", "good")
    assert rows.origin(2).startswith("tfds:toy_polarity/train:")
    assert len(sources.read_split(TASK, "dev", **where)) == 2
    assert sources.has_split(TASK, "dev", **where)
    assert not sources.has_split(TASK, "test", **where)
    with pytest.raises(InputError, match="tfds:toy_polarity has no test split .*: train, val"):
        sources.read_split(TASK, "test", **where)


def test_tfds_imports_no_class_of_its_files(tfds_folder, tmp_path, monkeypatch):
    """A prepared data set names the class of each feature; its module may be one of the folder."""
    where = {"source": "tfds:toy_polarity:1.0.0", "cache_dir": str(tmp_path / "sets")}
    shutil.copytree(tfds_folder, tmp_path / "sets")
    # Of a version that is named, TFDS reads the files, not the code.
    assert len(sources.read_split(TASK, "train", **where)) == 6
    path = tmp_path / "sets/toy_polarity/1.0.0/features.json"
    about = json.loads(path.read_text())
    label = about["featuresDict"]["features"]["label"]
    label["pythonClassName"] = "planted.Label"
    path.write_text(json.dumps(about))
    (tmp_path / "planted.py").write_text("raise SystemExit('the planted module ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="a feature of class 'planted.Label', which is not"):
        sources.read_split(TASK, "train", **where)
    with pytest.raises(SystemExit, match="the planted module ran"):
        import planted  # noqa: F401


@pytest.mark.parametrize("name", ["huggingface:glue/sst2", "kaggle:set", "my-space:set:1.0.0"])
def test_tfds_runs_no_code_of_other_namespaces(name, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setattr(tfds, "builder", lambda *args, **kw: pytest.fail(f"builds {args}"))
    with pytest.raises(InputError, match=f"tfds:{name} belongs to another namespace"):
        sources.has_split(TASK, "train", source=f"tfds:{name}")


def test_tfds_errors(tmp_path):
    where = {"source": "tfds:no_such_set", "cache_dir": str(tmp_path)}
    with pytest.raises(InputError, match="tfds:no_such_set cannot be loaded .*; check the name"):
        sources.read_split(TASK, "train", **where)
