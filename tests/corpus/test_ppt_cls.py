"""Pseudo-labels on disk, and the task made of them: what is kept, resumed, refused."""

import numpy as np
import pytest
from ppt_corpus import bert_forms, even_corpus, make_corpus, number_documents, unit_numbers

from jaxprompt.corpus.denoise.samples import sample_rng
from jaxprompt.corpus.ppt import Annotations, AnnotationWriter, cls
from jaxprompt.errors import InputError

CLASSES = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
SURE = [0.96, 0.6, 0.6, 0.6, 0.8]


def sure_of(label, probability):
    row = np.full(5, (1 - probability) / 4)
    row[label] = probability
    return row


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path / "store", number_documents([[8, 8, 5, 8], [6] * 6, [7, 7]]))


def annotate(folder, corpus, rows):
    writer = AnnotationWriter(folder, corpus, CLASSES, "roberta 1a2b")
    writer.append(np.array(rows))
    return writer.seal()


def test_labels_above_their_thresholds(tmp_path, corpus):
    rows = [sure_of(label, p) for label, p in enumerate(SURE)]
    rows += [sure_of(label, p) for label, p in enumerate([0.94, 0.49, 0.5, 0.45, 0.69])]
    rows += [np.zeros(5), sure_of(4, 0.71)]
    annotated = annotate(tmp_path / "labels", corpus, rows)
    assert annotated.labels().tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1, -1, -1, 4]
    assert annotated.labels([0, 0, 0, 0, 0.7]).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, -1, -1, 4]
    assert annotated.counts([0, 0, 0, 0, 0.7]).tolist() == [2, 2, 2, 2, 2]
    assert annotated.counts([0.0] * 5).sum() == 11  # of 12 units: a row of zeros has no label
    np.testing.assert_allclose(annotated.probabilities, rows, atol=1e-3)
    assert (
        annotated.classes == CLASSES
        and annotated.annotator == "roberta 1a2b"
        and len(annotated) == 12
    )
    assert not annotated.probabilities.flags.writeable
    with pytest.raises(InputError, match="must be 5 numbers, one per class"):
        annotated.labels([0.5] * 4)


def test_units_become_examples(tmp_path, corpus):
    labels = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0]
    annotated = annotate(tmp_path / "labels", corpus, [sure_of(label, 0.97) for label in labels])
    task = cls.make(corpus, [2, 0], bert_forms("cls", num_slots=2), annotated)
    examples = [task(row, sample_rng(0, 0)) for row in range(len(task))]
    assert [(*unit_numbers(row), label) for row, label in examples] == [
        (10, 0), (11, 0), (0, 0), (1, 1), (2, 2), (3, 3),
    ]  # fmt: skip
    assert task.counts.tolist() == [3, 1, 1, 1, 0] and task.majority == 3 / 6
    row, _ = examples[2]
    assert row.ids.tolist() == [0, 0, 2, *[2000] * 8, 4, 3]  # slots [CLS] text [MASK] [SEP]


def test_writing_goes_on_where_it_ended(tmp_path, corpus):
    folder, rows = tmp_path / "labels", np.array([sure_of(i % 5, 0.9) for i in range(12)])
    first = AnnotationWriter(folder, corpus, CLASSES, "roberta")
    first.append(rows[:7])
    first.close()
    with open(folder / "labels.bin", "ab") as file:
        file.write(b"\x00\x3c\x00")  # a row that was cut by a full disk
    with pytest.raises(
        InputError, match="has no annotations, or they are not finished; run annotate"
    ):
        Annotations(folder)
    second = AnnotationWriter(folder, corpus, CLASSES, "roberta")
    assert second.done == 7
    second.append(rows[7:])
    actual = second.seal()
    np.testing.assert_array_equal(actual.probabilities, rows.astype(np.float16))
    assert sorted(path.name for path in folder.iterdir()) == ["labels.bin", "meta.json"]
    # Of the same work nothing is left to do, of other work it is in the way.
    third = AnnotationWriter(folder, corpus, CLASSES, "roberta")
    assert third.done == 12
    np.testing.assert_array_equal(third.seal().probabilities, actual.probabilities)
    third.close()
    with pytest.raises(InputError, match="already has finished annotations; use another folder"):
        AnnotationWriter(folder, corpus, CLASSES, "bert")
    assert sorted(path.name for path in folder.iterdir()) == ["labels.bin", "meta.json"]


def test_work_of_another_kind_is_not_gone_on_with(tmp_path, corpus):
    folder = tmp_path / "labels"
    AnnotationWriter(folder, corpus, CLASSES, "roberta").close()
    for changed, message in (
        ((CLASSES, "bert"), "another annotator"), ((CLASSES[:3], "roberta"), "another classes"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"started with {message}; restore it, or delete"):
            AnnotationWriter(folder, corpus, *changed)
    other = even_corpus(tmp_path / "other", 2, 3)
    with pytest.raises(InputError, match="started with another units"):
        AnnotationWriter(folder, other, CLASSES, "roberta")
    corpus.fingerprint["settings"] = {"units": "sentence"}
    with pytest.raises(InputError, match="corpus.units was paragraph.*; restore it, or del"):
        AnnotationWriter(folder, corpus, CLASSES, "roberta")


def test_what_cannot_be_written(tmp_path, corpus):
    writer = AnnotationWriter(tmp_path / "labels", corpus, CLASSES, "roberta")
    for wrong in (np.full((1, 5), 0.5), np.full((1, 5), np.nan)):
        with pytest.raises(ValueError, match="rows must sum to 1 or 0"):
            writer.append(wrong)
    writer._file.close()
    writer._file = open("/dev/full", "wb")
    with pytest.raises(InputError, match="cannot write .*: No space left on device"):
        writer.append(np.zeros((12, 5)))
    with pytest.raises(InputError, match="No space left on device"):
        writer.close()


@pytest.mark.parametrize("name", ["labels.bin", "meta.json"])
def test_a_damaged_file(tmp_path, corpus, name):
    annotate(tmp_path / "labels", corpus, [sure_of(i % 5, 0.9) for i in range(12)])
    path = tmp_path / "labels" / name
    whole = path.read_bytes()
    flipped = [
        whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        for at in range(0, len(whole), 7)
    ]
    for data in [*flipped, whole[:-2], whole + b"\0\0", b""]:
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{path} is damaged, .*; delete {path.parent}, and"):
            Annotations(path.parent)
    path.write_bytes(whole)
    assert len(Annotations(path.parent)) == 12


@pytest.mark.parametrize("name", ["labels.bin", "part.json"])
def test_unfinished_work_that_is_damaged(tmp_path, corpus, name):
    """It is not gone on with: the rows that are there would be labels for ever."""
    folder, rows = tmp_path / "labels", np.array([sure_of(i % 5, 0.9) for i in range(12)])
    writer = AnnotationWriter(folder, corpus, CLASSES, "roberta")
    writer.append(rows[:7])
    writer.close()
    whole = (folder / name).read_bytes()
    for data in (bytes([whole[0] ^ 1]) + whole[1:], whole[:-1]):
        (folder / name).write_bytes(data)
        with pytest.raises(InputError, match=f"{folder / name} is damaged, .*; delete {folder}"):
            AnnotationWriter(folder, corpus, CLASSES, "roberta")
    (folder / name).write_bytes(whole)
    writer = AnnotationWriter(folder, corpus, CLASSES, "roberta")
    writer.append(rows[7:])
    np.testing.assert_array_equal(writer.seal().probabilities, rows.astype(np.float16))


def test_labels_of_other_text_or_classes(tmp_path, corpus):
    annotated = annotate(tmp_path / "labels", corpus, [sure_of(0, 0.97)] * 12)
    forms = bert_forms("cls")
    other = even_corpus(tmp_path / "other", 2, 5)
    with pytest.raises(
        InputError, match=r"annotates different text \(12 units\) than .* \(10 units\)"
    ):
        cls.make(other, range(2), forms, annotated)
    with pytest.raises(InputError, match=r"has 5 classes \(1 star, .*\), but ppt.task=cls has 3"):
        annotated.check(corpus, 3)
    with pytest.raises(InputError, match="none of 12 units has a label above its"):
        cls.make(corpus, range(3), forms, annotated, [0.98] * 5)


def test_another_tokenizer_of_the_same_text_will_do(tmp_path, corpus):
    annotated = annotate(tmp_path / "labels", corpus, [sure_of(0, 0.97)] * 12)
    corpus.fingerprint["tokenizer"] = "another"
    assert len(cls.make(corpus, range(3), bert_forms("cls"), annotated)) == 12
    corpus.fingerprint["settings"] = {"units": "sentence"}
    with pytest.raises(InputError, match="annotates different text"):
        cls.make(corpus, range(3), bert_forms("cls"), annotated)
