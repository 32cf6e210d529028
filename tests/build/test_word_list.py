"""Classes that are the words of a list: which are one token, and which rows have them."""

from pathlib import Path

import pytest
from refusing import refuse_line

from jaxprompt.build.word_list import choose_classes, drop_unlisted, read_words, use_word_list
from jaxprompt.data.rows import Rows
from jaxprompt.data.sources.files import read_file
from jaxprompt.data.tasks.readers.reading import read_example
from jaxprompt.data.tasks.registry import custom_task

WORDS = ["Paris", "1990", "paris", "antidisestablishment", "Rome", "☃", "a|b"]


def make(tokenizer, words=WORDS, spaced=True):
    return choose_classes(words, tokenizer, spaced=spaced, path="words.txt")


def test_words_of_one_token_are_classes(bert, roberta):
    words = make(bert)
    assert words.labels == ("Paris", "1990", "Rome")
    assert words.values == ("Paris|paris", "1990", "Rome")
    assert words.message() == (
        "task.vocabulary: 3 classes of 7 words; 3 are not one token and left out, 1 are the token "
        "of an earlier word"
    )
    cased = make(roberta)
    assert cased.labels == ("Paris", "1990", "Rome") and cased.values == ()
    assert make(roberta, ["great", "☃", "bad"], spaced=False).labels == ("great", "bad")


def facts(*objects, **more):
    return Rows([{"sub_label": "x", "obj_label": word} | more for word in objects], "f.jsonl")


def test_rows_of_other_objects_are_left_out(bert):
    task = custom_task(fields=["sub_label"], label="obj_label")
    task = use_word_list(task, make(bert))
    rows, count = drop_unlisted(task, facts("Rome", "Oslo", "paris", 1990, "1"))
    assert count == "2 of 5" and rows.origin(2) == "f.jsonl:4"
    assert [read_example(task, row, "x:1").label for row in rows] == [2, 0, 1]
    # What is no label is no object outside of the list: it is refused where it is read.
    for value, said in ((None, "null"), (["Rome"], "['Rome']"), (" ", "is empty")):
        (row,), _ = drop_unlisted(task, facts(value))
        assert said in refuse_line(read_example, task, row, "f.jsonl:1")
    (row,), _ = drop_unlisted(task, Rows([{"sub_label": "x", "object": "Rome"}], "f.jsonl"))
    line = refuse_line(read_example, task, row, "f.jsonl:1")
    assert "'obj_label'; columns: sub_label, object" in line


def test_capitals(bert):
    """The facts that docs/p_tuning.md gives figures of."""
    rows = read_file(Path(__file__).with_name("capitals.jsonl"))
    words = [*dict.fromkeys(word for row in rows for word in (row["obj_label"], row["sub_label"]))]
    task = use_word_list(custom_task(fields=["sub_label"], label="obj_label"), make(bert, words))
    assert (
        drop_unlisted(task, rows)[1] == "0 of 72" and len({row["obj_label"] for row in rows}) == 72
    )


def test_no_row_is_left(bert):
    task = use_word_list(custom_task(fields=["sub_label"], label="obj_label"), make(bert))
    line = refuse_line(drop_unlisted, task, facts("Oslo", "Bern"))
    assert line.startswith("f.jsonl: obj_label is not in task.vocabulary in any of 2")
    assert "'Oslo'" in line and "task.label" in line


def test_each_word_of_a_list_is_read_once(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("\ufeffRome\r\n\n New York \nRome\nOslo", "utf-8")
    assert read_words(file) == ["Rome", "New York", "Oslo"]


@pytest.mark.parametrize(
    "content, said", [(b"", "is empty"), (b" \n\n", "is empty"), (b"\xff\n", "utf-8")]
)
def test_lists_that_cannot_be_read(tmp_path, content, said):
    file = tmp_path / "words.txt"
    file.write_bytes(content)
    line = refuse_line(read_words, file)
    assert (
        line.startswith(f"task.vocabulary={file}") and said in line and "one word per line" in line
    )


def test_there_is_no_list(tmp_path):
    assert "No such file" in refuse_line(read_words, tmp_path / "none.txt")
    assert "Is a directory" in refuse_line(read_words, tmp_path)


@pytest.mark.parametrize("words, count", [(["Unwatchable", "☃"], 0), (["Rome", "rome"], 1)])
def test_too_few_words_are_one_token(bert, words, count):
    line = refuse_line(make, bert, words)
    assert (
        line.startswith(f"task.vocabulary=words.txt: {count} of 2 words") and "at least 2" in line
    )
