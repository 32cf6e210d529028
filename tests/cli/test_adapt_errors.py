"""Bad input of `adapt`, as a user meets it: one line, exit code 2."""

import errno
import os
import shutil

import pytest
from spoil import BASE, edit
from tiny_adapt import adapted, made, tiny_fields, without_result, words_of
from tiny_run import ROOT, flags, jaxprompt, write_rows

from jaxprompt.corpus.store import StoreWriter


@pytest.fixture
def own(tmp_path_factory, tmp_path):
    """A copy of the corpus to spoil."""
    return shutil.copytree(made(tmp_path_factory, "corpus"), tmp_path / "corpus")


@pytest.fixture
def kind(tmp_path_factory, tmp_path):
    """Copies a kind of backbone to spoil. -> its folder"""
    return lambda name: shutil.copytree(made(tmp_path_factory, name), tmp_path / name)


@pytest.fixture
def adapt(refused, tmp_path_factory, tmp_path):
    """Starts a run that must be refused, some fields changed. -> its line"""

    def call(objective="mlm", backbone="bert", config=None, started=False, **changes) -> str:
        folder = made(tmp_path_factory, backbone) if isinstance(backbone, str) else backbone
        fields = tiny_fields(folder, made(tmp_path_factory, "corpus"))
        fields |= {name.replace("__", "."): value for name, value in changes.items()}
        if config == BASE:  # which has no objective
            del fields["objective.examples"]
        config = config or ROOT / f"configs/adapt/{objective}.py"
        workdir = tmp_path / "new"
        words = [f"--config={config}", f"--workdir={workdir}", *flags(fields)]
        line = refused("adapt", *words, started=started)
        assert not (workdir / "config.json").exists()
        return line

    return call


# -- the config -----------------------------------------------------------------------------------


def test_what_must_be_given(adapt):
    line = adapt(config=BASE, train__total_epochs=0)
    assert line.startswith("objective.name is empty; give one of mlm, rtd, clm, prefix_lm, span_")
    assert adapt(corpus__path="").startswith(
        "corpus.path is empty; give a folder, a file or a glob"
    )
    assert adapt(backbone__path="").startswith("backbone.path is empty; give a folder with weights")
    line = adapt(corpus__held_out=0)
    assert line == "corpus.held_out=0 leaves no document to evaluate on; use a share above 0"
    assert "unknown option objective.name='mln'; nearest: mlm" in adapt(objective__name="mln")
    line = adapt(optim__label_smoothing=0.1)
    assert line.startswith(
        "optim.label_smoothing=0.1 has no effect in adapt, which trains on running"
    )
    assert "cache.location=host has no effect in adapt" in adapt(cache__location="host")
    assert "corpus.on_error='ignore' is unknown" in adapt(corpus__on_error="ignore")


@pytest.mark.parametrize(
    "objective, backbone, words",
    [
        ("clm", "bert", "objective.name=clm does not work with a bert; use mlm, rtd"),
        ("mlm", "gpt2", "objective.name=mlm does not work with a gpt2; use clm"),
        ("mlm", "t5-v1.1", "objective.name=mlm does not work with a t5; use prefix_lm, span"),
        (
            "span_corruption",
            "bert",
            "objective.name=span_corruption does not work with a bert; use mlm",
        ),
        (
            "rtd",
            "roberta-trunk",
            "contains a roberta; replaced-token detection needs an ELECTRA or a",
        ),
        ("rtd", "gpt2", "objective.name=rtd does not work with a gpt2; use clm"),
    ],
)
def test_an_objective_that_the_backbone_has_no_head_for(adapt, objective, backbone, words):
    assert words in adapt(objective, backbone)


@pytest.mark.parametrize("family", ["roberta-trunk", "bert"])
def test_a_drawn_backbone_without_the_head(adapt, kind, family):
    folder = kind(family)
    (folder / "model.safetensors").unlink()
    line = adapt("rtd", folder)
    assert f"a {family.partition('-')[0]} has no rtd head; use an objective for " in line


def test_rows_that_the_backbone_cannot_read(adapt):
    assert "data.max_len=80 exceeds the 66 positions of" in adapt(data__max_len=80)
    line = adapt("mlm", "roberta-trunk", data__max_len=66)  # its first position is the third
    assert "data.max_len=66 exceeds the 64 positions of" in line
    assert "data.max_len=2 leaves no room" in adapt(data__max_len=2)


def test_what_a_mesh_cannot_take(adapt):
    line = adapt(mesh__data=8, data__batch=12)
    assert "data.batch=12 is not divisible by mesh.data=8; use a multiple of 8" in line
    assert "mesh.model=4 does not divide the 2 of backbone/layers/" in adapt(mesh__model=4)
    line = adapt("rtd", "electra", mesh__model=2)  # the generator has a quarter of the heads
    assert "mesh.model=2 does not divide the 1 of generator/layers/" in line


# -- the tokenizer --------------------------------------------------------------------------------


def test_a_tokenizer_without_a_mask(adapt, kind, tmp_path_factory):
    folder = kind("bert")
    for path in [*folder.glob("tokenizer*"), folder / "vocab.txt"]:
        path.unlink(missing_ok=True)
    for path in made(tmp_path_factory, "t5-init").glob("tokenizer*"):
        shutil.copy(path, folder)
    line = adapt("mlm", folder)
    assert f"tokenizer {str(folder)!r} has no mask token, which masking needs; use an" in line


def test_too_few_sentinels(adapt):
    line = adapt("span_corruption", "t5-v1.1", data__max_len=96)
    assert "sentinels like <extra_id_0> are needed, but tokenizer " in line
    assert " has 3; " in line
    line = adapt("span_corruption", "t5-v1.1", backbone__sentinel="<X{}>")
    assert "sentinels like <X0> are needed" in line and " has 0; " in line


def test_ids_beyond_the_embedding(adapt, kind):
    for name, config in (("bert", "mlm"), ("t5-init", "prefix_lm")):
        folder = kind(name)
        edit(folder / "config.json", vocab_size=50)
        line = adapt(config, folder)
        assert "the tokenizer has ids up to " in line and "only 50 rows; use" in line


# -- the text -------------------------------------------------------------------------------------


def test_an_empty_corpus(adapt, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    line = adapt(corpus__path=empty)
    assert (
        f"corpus {str(empty)!r} has no file to read (.txt, " in line and "it has: nothing" in line
    )
    write_rows(empty / "x.jsonl", [{"text": " "}, {"text": ""}])
    line = adapt(corpus__path=empty)
    assert f"corpus {str(empty)!r} is empty: no document has text, 2 are blank" in line
    assert "/no/where' does not exist; use a folder" in adapt(corpus__path="/no/where")
    write_rows(empty / "x.jsonl", [{"text": "the cat"}])
    line = adapt(corpus__path=empty, started=True)
    assert "holds out 1 of 1 documents, which leaves none to train on" in line


def test_undecodable_bytes(adapt, own, tmp_path_factory, tmp_path, capsys, monkeypatch):
    (own / "bad.txt").write_bytes(b"the caf\xe9")
    line = adapt(corpus__path=own)
    assert f"{own / 'bad.txt'}: not UTF-8 (byte 0xe9 at offset 7 of the decompressed file)" in line
    assert "set corpus.on_error=skip" in line
    monkeypatch.setattr("jaxprompt.training.loop.train_loop", lambda *_: None)
    changes = dict(corpus__path=own, corpus__on_error="skip")
    words = words_of(tmp_path_factory, "mlm-bert", tmp_path / "run", **changes)
    code, _, err = jaxprompt(capsys, *words)
    assert code == 0 and "60 documents, " in err
    assert f"1 documents were skipped, the first: {own / 'bad.txt'}: not UTF-8 (byte 0xe9" in err


def test_a_document_that_is_too_long(adapt, own):
    line = adapt(corpus__path=own, corpus__max_document=40)
    assert line.startswith(
        f"{own / 'corpus.jsonl'}:1: a document of over 40 bytes; raise corpus.max"
    )
    assert "set corpus.on_error=skip" in line


def test_another_field_than_the_documents_have(adapt, own):
    line = adapt(corpus__path=own, corpus__field="txt")
    assert ":1: there is no field 'txt'; nearest: text; set corpus.field" in line


@pytest.mark.parametrize("moment", ["open", "_write", "seal"])
def test_a_full_disk_while_indexing(adapt, tmp_path, monkeypatch, moment):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = "__init__" if moment == "open" else moment
    monkeypatch.setattr(StoreWriter, name, full)
    line = adapt(corpus__store=tmp_path / "store")
    assert f"cannot write {tmp_path / 'store'}" in line and "No space left on device" in line
    assert not [path for path in (tmp_path / "store").iterdir() if path.is_dir()]


@pytest.mark.long
def test_a_corpus_that_changed_under_a_run(refused, own, tmp_path_factory, tmp_path):
    """Where the run stood, its folder is left as it is."""
    workdir = without_result(adapted(tmp_path_factory, "mlm-bert"), tmp_path / "run")
    edit(workdir / "config.json", **{"corpus.path": str(own)})
    words = words_of(tmp_path_factory, "mlm-bert", workdir, corpus__path=own)
    text = (own / "corpus.jsonl").read_text()
    before = (workdir / "metrics.jsonl").read_bytes()
    changes = {
        "corpus.jsonl has different text": ("corpus.jsonl", text.replace("the", "eht")),
        "more.txt is new": ("more.txt", "the cat"),
    }
    for said, (name, new) in changes.items():
        (own / name).write_text(new)
        line = refused(*words, started=True)
        assert f"the corpus is not the one of the saved run: {said}; restore it, or use" in line
        (own / name).unlink() if name == "more.txt" else (own / name).write_text(text)
    line = refused(*words, "--config.corpus.units=sentence", started=True)
    assert "units" in line
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_layers_that_changed_under_a_run(refused, kind, tmp_path_factory, tmp_path):
    """The weights are the same, and config.json says that they compute something else."""
    workdir, folder = (
        without_result(adapted(tmp_path_factory, "mlm-bert"), tmp_path / "run"),
        kind("bert"),
    )
    edit(folder / "config.json", layer_norm_eps=1e-3)
    edit(workdir / "config.json", **{"backbone.path": str(folder)})
    words = words_of(tmp_path_factory, "mlm-bert", workdir, backbone__path=folder)
    line = refused(*words, started=True)
    assert "was trained with another config.json for these weights" in line


@pytest.mark.long
def test_settings_that_changed_under_a_run(refused, tmp_path_factory, tmp_path):
    workdir = without_result(adapted(tmp_path_factory, "mlm-bert"), tmp_path / "run")
    for field in ("objective__rate=0.2", "data__max_len=16", "corpus__held_out=0.1"):
        name, value = field.split("=")
        line = refused(*words_of(tmp_path_factory, "mlm-bert", workdir, **{name: value}))
        assert name.replace("__", ".") in line
