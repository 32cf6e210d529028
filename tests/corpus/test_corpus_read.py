"""Documents of a corpus: every source gives the same ones, and what cannot be read is named."""

import functools
import gzip
import json
import os
import tracemalloc

import pytest

from jaxprompt.corpus import read
from jaxprompt.corpus.read import DocumentSource, TextSettings
from jaxprompt.corpus.split import split_units
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources import splits as sources
from jaxprompt.errors import InputError

TEXTS = ["First paragraph.\nSecond — 東京.", "Another document.", "The last\n\none."]


def read_all(place, cache_dir=None, **settings):
    return list(DocumentSource(str(place), TextSettings(**settings), cache_dir))


def write_parquet(path, columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts)


def test_every_format_gives_the_documents_of_its_files_in_their_order(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    assert read_all(tmp_path) == TEXTS
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text("\ufeff" + lines(TEXTS) + "\n  \n", "utf-8")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS).encode()))
    (folder / "c.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    write_parquet(folder / "d.parquet", {"n": [1, 2, 3], "text": TEXTS})
    (folder / "deep/e.txt").write_text("\ufeffmarked", "utf-8")
    (folder / "README.md").write_text("not a document")
    (folder / ".hidden.txt").write_text("not either")
    assert read_all(folder) == [*TEXTS, *TEXTS, TEXTS[0], *TEXTS, "marked"]
    assert read_all(folder / "a.jsonl") == read_all(folder / "*.gz")[:3] == TEXTS


def test_what_runs_wrote_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    before = DocumentSource(str(tmp_path), TextSettings()).fingerprint({})
    run = tmp_path / "runs/one"
    (run / "backbone").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}")
    (run / "backbone/vocab.txt").write_text("[PAD]")
    assert read_all(tmp_path / "**/*.txt") == ["text", "[PAD]"]  # a folder like any other
    for name in ("lock", "config.json"):
        (run / name).touch()
    for place in (tmp_path, tmp_path / "**/*.txt", f"{tmp_path}/**"):
        source = DocumentSource(str(place), TextSettings())
        assert list(source) == ["text"] and source.runs == [str(run)]
        assert source.fingerprint({}) == before
    assert read_all(run / "backbone") == ["[PAD]"]  # the place itself may be in a run
    with pytest.raises(InputError, match="no file to read"):
        read_all(tmp_path / "runs")


def test_links_are_followed_and_what_is_hidden_is_not_read(tmp_path):
    """A folder that links come back to is read once; what is left out beside is named."""
    folder, outside = tmp_path / "text", tmp_path / "shards"
    for place in (folder / ".ipynb_checkpoints", outside / "deep"):
        place.mkdir(parents=True)
        (place / "a.txt").write_text(place.name)
    (folder / "b.txt").write_text("b")
    (folder / "c.md").write_text("none")
    (folder / "linked").symlink_to(outside)
    (outside / "back").symlink_to(folder)
    (outside / "a_link").symlink_to(outside / "deep")
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    source = DocumentSource(str(folder), TextSettings())
    assert list(source) == ["b", "deep"] and list(source.files) == ["b.txt", "linked/deep/a.txt"]
    assert source.others == [str(folder / "c.md"), str(folder / "gone.txt")]
    assert read_all(folder / "**/*.txt") == ["b", "deep"]


def test_a_name_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / os.fsdecode(b"b\xff.txt")).write_text("text")
    with pytest.raises(InputError, match=r"corpus file 'b.*\.txt' is not valid \(.*surrogates"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ("file", ["\n one\ntwo\n \n\n\nthree\r\n\r\nfour"]),
        ("line", [" one\n", "two\n", "three\r\n", "four"]),
        ("blank", [" one\ntwo\n", "three\r\n", "four"]),
    ],
)
def test_what_is_a_document_of_a_text_file(tmp_path, documents, expected):
    (tmp_path / "x.txt").write_bytes(b"\n one\ntwo\n \n\n\nthree\r\n\r\nfour")
    rows = read_all(tmp_path, documents=documents)
    assert [text.strip() for text in rows] == [text.strip() for text in expected]
    assert "".join(rows).split() == "".join(expected).split()


def test_hub_and_tfds(monkeypatch):
    import datasets

    data = datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0]})
    monkeypatch.setattr(sources, "_load_hub", lambda *args: {"train": data, "test": data})
    assert read_all("hub:some/set") == TEXTS
    with pytest.raises(InputError, match="train:1: there is no field 'body'; known: label"):
        read_all("hub:some/set", field="body")
    first = DocumentSource("hub:some/set", TextSettings()).fingerprint({})
    data = datasets.Dataset.from_dict(
        {"text": [*TEXTS[:2], "The next\n\none."], "label": [0, 1, 0]}
    )
    assert DocumentSource("hub:some/set", TextSettings()).fingerprint({}) != first
    assert first["hub:some/set"][0] == 3

    raw = [{"text": text.encode()} for text in TEXTS] + [{"text": b"bad \xff"}]
    decode = functools.partial(sources.as_python, decode=True)
    rows = Rows(raw, "tfds:books/train", convert=decode)
    monkeypatch.setattr(read, "read_split", lambda *args, **kw: rows)
    with pytest.raises(InputError, match=r"tfds:books/train:4: not UTF-8 \(byte 0xff at offset 4"):
        read_all("tfds:books")
    assert read_all("tfds:books", on_error="skip") == TEXTS
    assert DocumentSource("tfds:books", TextSettings()).fingerprint({})["tfds:books"][0] == 4


BAD = b'{"text": "good"}\n{"text": "b\xe9d"}\n{"text": "fine"}\n'


@pytest.mark.parametrize("packed", [False, True])
def test_undecodable_bytes_are_named_by_file_and_offset(tmp_path, packed):
    path = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl")
    path.write_bytes(gzip.compress(BAD) if packed else BAD)
    offset = BAD.index(b"\xe9")
    message = rf"{path}:2: not UTF-8 \(byte 0xe9 at offset {offset} of the decompressed file\)"
    with pytest.raises(InputError, match=message):
        read_all(path)
    source = DocumentSource(str(path), TextSettings(on_error="skip"))
    assert list(source) == ["good", "fine"] and source.skipped == 1
    assert list(source) == ["good", "fine"] and source.skipped == 1  # anew, not 2
    assert f"offset {offset}" in source.first_skipped


@pytest.mark.parametrize("documents", read.DOCUMENTS)
def test_undecodable_bytes_of_a_text(tmp_path, documents):
    data = "\ufeffgood\n\n".encode() + b"b\xe9d\n\nfine"
    (tmp_path / "x.txt").write_bytes(data)
    (tmp_path / "y.txt").write_bytes(b"whole")
    with pytest.raises(InputError, match=rf"x.txt.*at offset {data.index(0xE9)} ") as error:
        read_all(tmp_path, documents=documents)
    assert ("x.txt:3:" in str(error.value)) == (documents != "file")
    rows = read_all(tmp_path, documents=documents, on_error="skip")
    assert [text.strip() for text in rows] == ["good", "fine", "whole"][2 * (documents == "file") :]


FLAWS = {
    '{"text": "x"': "broken JSON",
    "[1]": r"a row must be an object \{column: value\}, got \[1\]",
    '{"txt": "x", "id": 3}': "there is no field 'text'; nearest: txt, id; set corpus.field",
    '{"Ångström\\n": 1}': "there is no field 'text'; known: Ångström",
    '{"text": null}': "field 'text' must be a string, got None",
    '{"text": ["a"]}': "field 'text' must be a string, got",
    '{"text": "a \\ud83d"}': r"broken JSON \(.*surrogates not allowed",
}


@pytest.mark.parametrize("line", FLAWS)
def test_broken_rows(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n', "utf-8")
    with pytest.raises(InputError, match=f"{path}:2: {FLAWS[line]}") as error:
        read_all(path)
    assert "\n" not in str(error.value).replace("Ångström\n", "")
    source = DocumentSource(str(path), TextSettings(on_error="skip"))
    assert list(source) == ["good"] and source.skipped == 1


def test_parquet_errors(tmp_path):
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": [b"ok", b"b\xe9d", None, "é".encode()], "n": [1, 2, 3, 4]})
    with pytest.raises(
        InputError, match=f"{path}: row 1: field 'text' must be a string, got b'ok'"
    ):
        read_all(path)
    with pytest.raises(InputError, match=f"{path}: there is no field 'body'; known: n, text"):
        read_all(path, field="body", on_error="skip")
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"ok", b"b\xe9d", None, "é".encode()]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(InputError, match=rf"{path}: row 2: not UTF-8 \(byte 0xe9 at offset 1"):
        read_all(path)
    assert read_all(path, on_error="skip") == ["ok", "é"]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(InputError, match=f"{path}: broken Parquet file"):
        read_all(path, on_error="skip")


def test_a_column_of_parquet_is_found_by_its_whole_name(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    inner = pyarrow.array([{"b": "inner"}])
    table = pyarrow.table([inner, pyarrow.array(["whole"])], names=["a", "a.b"])
    pyarrow.parquet.write_table(table, path)
    assert read_all(path, field="a.b") == ["whole"]


def test_broken_gzip(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(lines(TEXTS * 99).encode())[:-20])
    with pytest.raises(InputError, match=f"{path}: broken gzip file"):
        read_all(path)


def test_places(tmp_path):
    with pytest.raises(InputError, match="nowhere' does not exist; use a folder"):
        read_all(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no file to read \(.txt.*it has: nothing"):
        read_all(tmp_path)
    with pytest.raises(InputError, match="has no file to read"):
        read_all(tmp_path / "*.txt")
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(InputError, match="it has: notes.md"):
        read_all(tmp_path)
    with pytest.raises(InputError, match="notes.md must end in one of .txt"):
        read_all(tmp_path / "notes.md")


def test_a_language_that_is_no_code():
    with pytest.raises(InputError, match="corpus language 'English' must be an ISO 639 code"):
        TextSettings(language="English")


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_a_document_over_the_limit_is_never_held(tmp_path, name):
    path = tmp_path / name
    with open(path, "wb") as file:
        file.truncate(2**26)
    with open(path, "ab") as file:
        file.write(b'\n{"text": "next"}\n')
    tracemalloc.start()
    message = "a document of over 1,000,000 bytes; raise corpus.max_document, or set corpus.doc"
    if name == "x.jsonl":
        message = (
            "a line of over 8,000,000 bytes, 8 x corpus.max_document; raise corpus.max_document"
        )
    with pytest.raises(InputError, match=message):
        read_all(path, max_document=10**6)
    rows = read_all(path, max_document=10**6, on_error="skip", documents="line")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == (["next"] if name == "x.jsonl" else ['{"text": "next"}\n'])
    assert peak < 2 ** (25 if name == "x.jsonl" else 23)


def test_the_limit_counts_bytes(tmp_path):
    path = tmp_path / "x.parquet"
    write_parquet(path, {"text": ["東" * 10, "東" * 11]})
    assert read_all(path, max_document=30, on_error="skip") == ["東" * 10]
    # Neither as JSON escapes them, nor with what stands beside them.
    rows = [{"text": "東" * count, "note": "long" * 20} for count in (10, 11)]
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_all(tmp_path / "x.jsonl", max_document=30, on_error="skip") == ["東" * 10]
    (tmp_path / "x.txt").write_text("東" * 10)
    assert read_all(tmp_path / "x.txt", max_document=30) == ["東" * 10]
    with pytest.raises(InputError, match="over 29 bytes"):
        read_all(tmp_path / "x.txt", max_document=29)


# -- units ----------------------------------------------------------------------------------------


def split(text, units="paragraph", paragraphs="line", language="en"):
    return split_units(text, units=units, paragraphs=paragraphs, language=language)


def test_paragraphs():
    text = " one a\r\none b\n\n \n\ntwo\u2028x\n\fthree\n"
    assert split(text) == ["one a", "one b", "two", "x", "three"]
    assert split(text, paragraphs="blank") == ["one a one b", "two x", "three"]
    assert split("a\r\n\r\nb\r\n \r\nc", paragraphs="blank") == ["a", "b", "c"]
    assert split(" \n\t\n") == split("", units="sentence") == []


def test_english_sentences():
    text = (
        'Dr. Smith paid $3.50 to J. R. Hill, i.e. too much. "Is it so?" he asked. Yes!\n'
        "A heading\nThe U.S. army left at 5 p.m. on Monday. It rained."
    )
    assert split(text, "sentence") == [
        "Dr. Smith paid $3.50 to J. R. Hill, i.e. too much.",
        '"Is it so?" he asked.',
        "Yes!",
        "A heading",
        "The U.S. army left at 5 p.m. on Monday.",
        "It rained.",
    ]


def test_chinese_sentences():
    text = "他说：“你好。我走了！”她笑了。真的吗？\n第二段没有句号"
    expected = ["他说：“你好。我走了！”", "她笑了。", "真的吗？", "第二段没有句号"]
    assert split(text, "sentence", language="zh") == expected


def test_a_sentence_goes_on_over_the_lines_of_a_wrapped_paragraph():
    text = "It was a long\nsentence. The\nnext.\n\nThe last"
    actual = split(text, "sentence", "blank")
    assert actual == ["It was a long sentence.", "The next.", "The last"]


def test_endless_units_are_cut():
    words = "word " * 30000
    parts = split(words)
    assert len(parts) == 3 and max(map(len, parts)) <= 2**16
    assert " ".join(parts) == words.strip()
    chinese = split("字" * 100000, language="zh")
    assert [len(part) for part in chinese] == [2**16, 100000 - 2**16]


def test_units_lose_no_text(shared):
    source = DocumentSource(str(shared / "data/corpus_books_en/dev.jsonl.gz"), TextSettings())
    for text in list(source)[:40]:
        for units in ("paragraph", "sentence"):
            assert "".join("".join(split(text, units)).split()) == "".join(text.split())


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_utf16_is_told_from_latin1(tmp_path, order):
    (tmp_path / "a.txt").write_bytes("\ufeffA text.\n".encode(order))
    with pytest.raises(InputError, match=r"a.txt: not UTF-8 .* with iconv -f UTF-16 -t UTF-8"):
        read_all(tmp_path / "a.txt")
