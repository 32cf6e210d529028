"""Files of sentences with tags: what each format holds, and which line of a broken one is named."""

import gzip

import pytest

from jaxprompt.data.sources.files import read_file
from jaxprompt.data.sources.splits import read_split
from jaxprompt.data.tasks.readers.reading import read_all, with_labels
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError

LINES = "3 The cat has eaten ||| B-A0 I-A0 O B-V\n\n1 It eats # ||| B-A0 B-V O\n"
PROPS = """
The    DT (NP*  (S*  - -    (A1*   (A0*
cat    NN *)    *    - -    *      *)
,      ,  *     *    - -    *)     *
seen   VB (VP*  *    - see  (V*    *
asleep JJ *)    *    - -    (C-A1*) *
here   RB *     *    - -    *      (R-A0*)
#      NN *     *    - -    *      *
sleeps VB (VP*) *)   - sleep *     (V*)

no     DT (S*)  (S*) - -
"""
PROPS = PROPS.replace("(V*    *\n", "(V*)   *\n")
GOLD = """#begin document (a); part 000
a 0 0 He  PRP (S* -    - - x * (ARG0*) * -
a 0 1 was VB  *   be   1 - x * *       (V*) -
a 0 2 eating VB * eat  1 - x * (V*)    *  (1
a 0 3 it  PRP *)  -    - - x * (ARG1*) *  1)

a 0 0 No  DT  *   -    - - x * -
#end document
"""
ENTITIES = "-DOCSTART- -X- O\n\nEU NNP B-Org\nrejects VB O\n\nRome NN B-Loc\n"


def read(tmp_path, text, name="a.txt"):
    (tmp_path / name).write_text(text)
    return read_file(tmp_path / name)


def test_a_line_per_predicate(tmp_path):
    rows = read(tmp_path, LINES)
    assert list(rows) == [
        {"tokens": "The cat has eaten".split(), "predicate": 3, "tags": "B-A0 I-A0 O B-V".split()},
        {"tokens": "It eats #".split(), "predicate": 1, "tags": "B-A0 B-V O".split()},
    ]
    assert rows.origin(1) == f"{tmp_path / 'a.txt'}:3"
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(LINES.encode()))
    assert list(read_file(tmp_path / "b.txt.gz")) == list(rows)


def test_objects_in_a_text_file_are_json_lines(tmp_path):
    """SciBERT and OpenNRE publish their relations so."""
    rows = read(tmp_path, '\n{"text": "a b", "label": "X"}\n { "text": "c", "label": "Y"}\n')
    assert [row["label"] for row in rows] == ["X", "Y"] and rows.origin(1).endswith("a.txt:3")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert list(read_file(tmp_path / "b.txt.gz")) == [{"text": "a"}]
    with pytest.raises(InputError, match="a.txt:2: broken JSON"):
        read(tmp_path, '{"text": "a"}\n{"text": \n')
    assert read(tmp_path, "{ ( O\nx ) O\n")[0]["tokens"] == ["{", "x"]


@pytest.mark.parametrize("name", ["train.props", "train.conll", "train.txt"])
def test_columns_of_conll_2005(tmp_path, name):
    (row,) = rows = read(tmp_path, PROPS, name)  # the second sentence has no predicate
    assert row["tokens"] == "The cat , seen asleep here # sleeps".split()
    assert row["predicate"] == [3, 7] and rows.origin(0).endswith(f"{name}:2")
    assert row["tags"] == [
        "B-A1 I-A1 I-A1 B-V B-C-A1 O O O".split(),
        "B-A0 I-A0 O O O B-R-A0 O B-V".split(),
    ]
    task = get_task("conll05")
    spread = read_split(task, "train", source=str(tmp_path))
    task = with_labels(task, spread, spread.origin)
    examples = read_all(task, spread, spread.origin)
    assert [e.fields["predicate"] for e in examples] == ["seen", "sleeps"]
    assert [list(e.tags) for e in examples] == row["tags"]
    assert "B-C-A1" in task.labels and spread.origin(1) == spread.origin(0) == rows.origin(0)


def test_columns_of_conll_2012(tmp_path):
    (row,) = read(tmp_path, GOLD, "dev.v4_gold_conll")
    assert row["tokens"] == "He was eating it".split() and row["predicate"] == [2, 1]
    assert row["tags"] == ["B-ARG0 O B-V B-ARG1".split(), "O B-V O O".split()]


def test_entities_of_conll_2012(tmp_path):
    """Those of every sentence, also of one without a predicate."""
    cells = iter(["(PERSON*", "*", "*)", "(DATE)", "*"])
    lines = [line if "x" not in line else line.replace(" x *", f" x {next(cells)}", 1)
             for line in GOLD.replace("x * -", "x *\t-").splitlines()]  # fmt: skip
    (tmp_path / "train.gold_conll").write_text("\n".join(lines))
    task = get_task("ontonotes5")
    rows = read_split(task, "train", source=str(tmp_path))
    assert [row["tags"] for row in rows] == ["B-PERSON I-PERSON I-PERSON B-DATE".split(), ["O"]]
    assert rows[1]["tokens"] == ["No"] and rows.origin(1).endswith("train.gold_conll:7")
    lines[1] = lines[1].replace("(PERSON*", "PERSON")
    (tmp_path / "train.gold_conll").write_text("\n".join(lines))
    with pytest.raises(InputError, match="conll:2: 'PERSON' is not valid for an entity"):
        read_split(task, "train", source=str(tmp_path))


def test_words_with_a_tag_each(tmp_path):
    rows = read(tmp_path, ENTITIES, "train.conll")
    assert list(rows)[0] == {"tokens": ["EU", "rejects"], "tags": ["B-Org", "O"]}
    numbered = read(tmp_path, "1\tEU\tNNP\tB-Org\n2\trejects\tVB\tO\n", "x.conll")
    assert list(numbered) == list(rows)[:1]
    numbered = read(tmp_path, "0\tEU\tNNP\tB-Org\n1\trejects\tVB\tO\n", "x.conll")
    assert list(numbered) == list(rows)[:1]
    task = with_labels(get_task("conll04"), rows)
    assert task.labels == ("O", "B-Loc", "I-Loc", "B-Org", "I-Org")


def test_a_word_may_hold_a_space_that_does_not_break(tmp_path):
    rows = read(tmp_path, "Berlin\u00a0Mitte B-LOC\n\u00a0\n10\u00a0000 O\r\nmen\tO\n", "x.conll")
    assert [row["tokens"] for row in rows] == [["Berlin\u00a0Mitte"], ["10\u00a0000", "men"]]
    (row,) = read(tmp_path, "1 10\u00a0000 eat ||| B-A0 B-V\n")
    assert row["tokens"] == ["10\u00a0000", "eat"]


@pytest.mark.parametrize(
    "text, line, message",
    [
        ("1 It eats ||| B-A0 B-V\nIt eats ||| O O\n", 2, "'It eats ||| O O' must be the index of"),
        ("1 It eats ||| B-A0 B-V\n1 It eats O O\n", 2, "must be the index of the predicate"),
        ("It - (A0*\neats eat (V*)\n", 2, "'(V*)' is not valid for a role where A0 is open"),
        ("It - (A0*\nis - *\neats eat *\n", 3, "A0, is not closed"),
        ("It - *)\neats eat (V*)\n", 1, "'*)' is not valid for a role where none is open"),
        ("It - (A0*\nall - *A1)\neats eat (V*)\n", 2, "'*A1)' is not valid"),
        ("It - A0*\neats eat (V*)\n", 1, "'A0*' is not valid for a role"),
        ("It - (A0*)\neats eat\n", 2, "2 columns, but line 1, where the sentence begins"),
        ("It - (A0*) *\neats eat (V*) *\n", 1, "column 2 has 1 predicates, but 2 columns of roles"),
        ("- (A0*)\neat (V*)\n", 1, "no column of words before the predicates"),
        ("#begin document (a)\nIt is *\n", 2, "3 columns, but CoNLL-2012 has 12 or more"),
        (GOLD.replace("(V*) -", "(ARG1*) -"), 2, "column 13 has roles but no (V*)"),
        ("It\neats\n", 1, "'It' is a word without a tag"),
    ],
)  # fmt: skip
def test_the_line_of_a_broken_file_is_named(tmp_path, text, line, message):
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'a.txt'}:{line}: "), caught.value
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_without_a_predicate(tmp_path):
    with pytest.raises(InputError, match="no sentence has a predicate"):
        read(tmp_path, "#begin document (a)\n" + GOLD.split("\n\n")[1])
