"""`annotate`: a classifier, trained here, labels a corpus, which `pretrain` then learns from."""

import json
import os
import signal

import numpy as np
import pytest
from spoil import files
from tiny_pretrain import corpus_texts, made, words_of
from tiny_run import (
    ROOT,
    TOPICS,
    flags,
    jaxprompt,
    make_backbone,
    read_lines,
    sentences,
    succeed,
    timeless,
    write_rows,
)

from jaxprompt.__main__ import main
from jaxprompt.corpus.ppt import Annotations, AnnotationWriter
from jaxprompt.data.text.tokenizer import load_tokenizer

ANNOTATOR = ROOT / "configs/ppt/annotator.py"
STARS = ("1 star", "2 star", "3 stars", "4 stars", "5 stars")
BATCH, PART = 4, 4 * 64  # units that are labelled and written together
# 10 and 11 characters, 3 and 4 tokens, 10,801 characters, more tokens than are read.
ODD = [
    "a. b, c? !",
    "a. b, c? d!",
    "the old cat",
    "the old cat was",
    "the old cat was near a dog  " * 386,
    "the cat " * 99,
]
UNITS = 40 * 8 + len(ODD)
STEPS = 60


@pytest.fixture(scope="module")
def texts():
    """The documents: one more than `pretrain` has elsewhere, of units too short or long."""
    return [*corpus_texts(), "\n".join(ODD)]


@pytest.fixture(scope="module")
def fields(tmp_path_factory, texts):
    """A RoBERTa fine-tuned on five classes, of which the rows have three, and the corpus."""
    root = tmp_path_factory.mktemp("annotate")
    make_backbone(root / "roberta", "roberta")
    label = dict(zip(TOPICS, STARS[::2], strict=True))
    for seed, (split, size) in enumerate({"train": 96, "dev": 30}.items()):
        rows = [row | {"label": label[row["label"]]} for row in sentences(seed, size)]
        write_rows(root / f"{split}.jsonl", rows)
    write_rows(root / "corpus.jsonl", [{"text": text} for text in texts])
    return {
        "backbone.path": root / "roberta", "backbone.dtype": "float32", "backbone.dropout": 0,
        "data.source": root, "data.protocol": "", "data.max_len": 64, "data.batch": 16,
        "data.eval_batch": BATCH, "optim.lr": 3e-3, "optim.schedule.warmup_steps": 1,
        "train.total_epochs": 0, "train.total_steps": STEPS, "train.eval_steps": STEPS,
        "train.tracker": "none", "mesh.data": 1,
        "corpus.path": root / "corpus.jsonl", "corpus.processes": 1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def words(fields):
    """Writes a command; a field of a block has two underscores: data__batch=8."""

    def write(workdir, output, **changes):
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        place = [f"--config={ANNOTATOR}", f"--workdir={workdir}", f"--output={output}"]
        return ["annotate", *place, *flags(fields | changes)]

    return write


@pytest.fixture(scope="module")
def annotated(words, tmp_path_factory):
    """The classifier's workdir and its labels. -> (workdir, output, what was printed)"""
    import contextlib
    import io

    root = tmp_path_factory.mktemp("annotated")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words(root / "run", root / "labels")) == 0
    return root / "run", root / "labels", out.getvalue()


def result_of(out: str) -> dict:
    return timeless(json.loads(out))


@pytest.mark.long
def test_it_labels_as_predict_does(annotated, fields, texts, tmp_path, capsys):
    """From the text itself, by the exported classifier: the first word has no space before it."""
    workdir, output, printed = annotated
    # The workdir is that of `train` with the same config.
    place = (f"--config={workdir / 'config.json'}", f"--workdir={workdir}")
    assert json.loads((workdir / "config.json").read_text())["corpus"]["path"] == ""
    assert jaxprompt(capsys, "export", *place)[0] == 0
    units = [unit.strip() for text in texts for unit in text.splitlines()]
    rows = write_rows(tmp_path / "units.jsonl", [{"text": unit} for unit in units])
    words = [f"--workdir={workdir}", f"--input={rows}", f"--output={tmp_path / 'out'}"]
    succeed(capsys, "predict", *words)
    expected = np.array([list(row["scores"].values()) for row in read_lines(tmp_path / "out")])
    tokenizer = load_tokenizer(fields["backbone.path"])
    lengths = [len(tokenizer.tokenize(f" {unit}")) for unit in units]
    # Released tools/infer_roberta.py: more than 10 characters, and more than 5 tokens with <s> and
    # </s>; what is longer than 10,000 characters is cut.
    read = [n + 2 > 5 and len(unit) > 10 for n, unit in zip(lengths, units, strict=True)]
    assert read[-len(ODD) :] == [False, True, False, True, True, True]
    annotations = Annotations(output)
    assert annotations.classes == STARS and len(annotations) == len(units) == UNITS
    np.testing.assert_allclose(
        annotations.probabilities, np.where(np.array(read)[:, None], expected, 0), atol=1e-3
    )

    table = annotations.probabilities.astype(np.float32)
    best, highest, limits = table.argmax(1), table.max(1), np.array([0.95, 0.5, 0.5, 0.5, 0.7])
    labels = np.bincount(best[highest > 0], minlength=5)
    counts = np.bincount(best[highest > limits[best]], minlength=5)
    assert 0 < counts.sum() < labels.sum()
    by_class = lambda values: dict(zip(STARS, values.tolist(), strict=True))
    expected = {
        "units": UNITS, "left_out": 2, "labels": by_class(labels), "kept": by_class(counts),
        "thresholds": by_class(limits), "kept_share": pytest.approx(counts.sum() / UNITS),
        "output": str(output),
    }  # fmt: skip
    result = result_of(printed)
    assert {name: result[name] for name in expected} == expected


@pytest.mark.long
def test_pretrain_learns_from_it(annotated, fields, tmp_path_factory, tmp_path, capsys):
    """By another tokenizer, on the units that are sure."""
    changes = dict(
        corpus__path=fields["corpus.path"], ppt__annotations=annotated[1], train__total_steps=2,
        train__eval_steps=2,
    )  # fmt: skip
    words = words_of(tmp_path_factory, "cls-bert", tmp_path / "run", **changes)
    out, _ = succeed(capsys, *words)
    assert np.isfinite(json.loads(out)["held_out"]["loss"])
    labels = json.loads((tmp_path / "run/record.json").read_text())["labels"]
    num_kept = list(json.loads(annotated[2])["kept"].values())
    annotator, *counts = labels[: 1 + len(num_kept)]  # and digests of where they stand
    assert annotator == Annotations(annotated[1]).annotator
    assert all(count <= most for count, most in zip(counts, num_kept, strict=True))
    assert 0 < sum(counts) < sum(num_kept)  # without those of held-out documents


# -- cut off, and on other devices ----------------------------------------------------------------


@pytest.mark.long
def test_it_goes_on_where_it_was_cut_off(annotated, words, tmp_path, capsys, monkeypatch):
    """After some units, in the middle of one, and after a signal."""
    workdir, labels, printed = annotated
    after = PART + 50
    command, append = words(workdir, tmp_path / "labels"), AnnotationWriter.append

    def append_half(self, probabilities):
        append(self, probabilities[: after - self.done])
        if self.done == after:
            self._file.write(b"cut")
            raise KeyboardInterrupt

    def append_and_signal(self, probabilities):
        os.kill(os.getpid(), signal.SIGINT)
        append(self, probabilities)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AnnotationWriter, "append", append_half)
        main(command)
    assert not (tmp_path / "labels/meta.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(AnnotationWriter, "append", append_and_signal)
        code, out, err = jaxprompt(capsys, *command)
    assert code == 130 and out == "" and f"{UNITS} units, {after} done" in err
    assert err.splitlines()[-1].startswith("stopped by Ctrl-C with ")
    after = int(err.splitlines()[-1].split(" with ")[1].split()[0])
    out, err = succeed(capsys, *command)
    assert f"{UNITS} units, {after} done" in err
    assert files(tmp_path / "labels") == files(labels)
    assert result_of(out) | {"output": ""} == result_of(printed) | {"output": ""}


def assert_close(output, expected) -> None:
    """Compares labels up to the order of sums."""
    actual, expected = Annotations(output), Annotations(expected)
    assert actual.annotator == expected.annotator
    np.testing.assert_allclose(actual.probabilities, expected.probabilities, atol=1e-3)


@pytest.mark.long
def test_eight_devices_label_as_one(words, tmp_path_factory, tmp_path):
    """A masked LM as it is, by its label words: nothing is trained."""
    changes = dict(
        backbone__path=made(tmp_path_factory, "bert"), trainable="", head__name="verbalizer",
        task__template="{text} [mask]", task__words="terrible,bad,maybe,good,great",
    )  # fmt: skip
    for name, mesh in (("one", {}), ("eight", dict(mesh__data=4, mesh__model=2))):
        assert main(words(tmp_path / "run", tmp_path / name, **changes, **mesh)) == 0
    assert not (tmp_path / "run/config.json").exists()
    assert_close(tmp_path / "eight", tmp_path / "one")
    counts = Annotations(tmp_path / "one").counts([0] * 5)
    assert counts[[0, 2, 4]].sum() > 0.9 * counts.sum() and counts[[0, 2, 4]].all()


# -- refused --------------------------------------------------------------------------------------


VERBALIZER = {
    "head.name": "verbalizer", "task.words": "terrible,bad,maybe,good,great",
    "task.template": "{text} [mask]",
}  # fmt: skip
REFUSED = [
    ({"corpus.path": ""}, "corpus.path is empty"),
    ({"ppt.thresholds": "0.5,0.5"}, "ppt.thresholds=0.5, 0.5 must be 5 numbers"),
    ({"task.labels": "bad,fair,good"}, "must be 3 numbers, one per class (bad"),
    ({"task.target": "said", "task.labels": "", "head.name": "text", "task.template": "{text}"},
     "task custom writes texts"),
    ({"task.labels": ""}, "task custom does not say which of its classes is the worst"),
    ({"task.labels": "bad,good", "ppt.thresholds": "0.5,0.5"}, "the annotator has 2 classes"),
    ({"task.template": "{text|lower} [mask]"}, "{text} has a modifier in the template"),
    (VERBALIZER | {"demos.per_class": 1}, "set demos.per_class=0"),
    ({"task.choices": "a,b"}, "task custom has choices"),
    ({"task.fields": "a,b"}, "task custom has 2 texts, a, b"),
    ({"ppt.task": "cls"}, "ppt.task=cls pre-trains a prompt"),
    ({"runs.seeds": "1,2"}, "config.runs defines a grid"),
    ({"head.pooler": "cls"}, "head.pooler (saved 'trained', now 'cls')"),
]  # fmt: skip


def test_what_is_refused_before_anything_is_read(refused, annotated, words, tmp_path, monkeypatch):
    def forbid(*_args, **_kwargs):
        raise AssertionError("read before the config was checked")

    empty = write_rows(tmp_path / "empty.jsonl", [{"text": " "}])
    line = refused(*words(tmp_path / "new", tmp_path / "labels", **{"corpus.path": empty}))
    assert "is empty: no document has text, 1 are blank" in line  # before the classifier is trained
    assert not (tmp_path / "new/config.json").exists()
    for name in ("backbone.folder.resolve", "corpus.index_corpus", "task.read_examples"):
        monkeypatch.setattr(f"jaxprompt.build.{name}", forbid)
    for changes, message in REFUSED:
        assert message in refused(*words(annotated[0], tmp_path / "labels", **changes)), changes
    assert not (tmp_path / "labels/labels.bin").exists()
    assert "--output is missing" in refused("annotate", f"--config={ANNOTATOR}", "--workdir=w")


def test_labels_that_are_finished(refused, annotated, words, tmp_path, capsys):
    """The same command counts them once more; by another classifier they are in the way."""
    workdir, output, printed = annotated
    before = files(output)
    out, err = succeed(capsys, *words(workdir, output))
    assert f"{UNITS} units, {UNITS} done" in err
    assert result_of(out) == result_of(printed) and files(output) == before
    for place, started in ((tmp_path / "new", False), (workdir, True)):
        line = refused(*words(place, output, data__max_len=32), started=started)
        assert line == f"{output} already has finished annotations; use another folder"
    assert files(output) == before
