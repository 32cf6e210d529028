"""Bad workdirs, checkpoints and exports: one line, exit code 2, and nothing on disk changes."""

import json
import re
import shutil
from pathlib import Path

import pytest
from spoil import BASE, edit, files, write_card
from tiny_run import flags, tiny_fields, write_rows

from jaxprompt.__main__ import main

# -- workdirs, checkpoints, exports ---------------------------------------------------------------

COMMANDS = ("train", "evaluate", "export")


def again(run: Path, command: str, *words: object) -> list[object]:
    """Writes the command that uses a run's own config."""
    saved = run.parent / "config.json"
    if not saved.exists():
        shutil.copy(run / "config.json", saved)
    return [command, f"--config={saved}", f"--workdir={run}", *words]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_workdir_of_another_config(refused, no_reading, run, command):
    no_reading()
    before = files(run)
    line = refused(*again(run, command, "--config.seed=7"))
    assert f"{run} contains a run with a different config: seed (saved 0, now 7)" in line
    assert files(run) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_other_backbone_weights(refused, run, other_backbone, command):
    (run / "result.json").unlink()
    before = files(run)
    line = refused(*again(run, command, f"--config.backbone.path={other_backbone}"))
    assert f"{run} was trained with weights" in line and "use the same backbone" in line
    assert files(run) | {"config.json": b""} == before | {"config.json": b""}


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_workdir_without_a_run(refused, no_reading, backbone, data, tmp_path, command):
    no_reading()
    words = flags(tiny_fields(backbone, data))
    line = refused(command, f"--config={BASE}", f"--workdir={tmp_path / 'none'}", *words)
    assert "no checkpoint in" in line and "train first" in line
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_checkpoint(refused, request, run, command):
    """Its best parameters, or the state from which a run resumes."""
    (best,) = (run / "checkpoints").glob("*/best")
    (run / "result.json").unlink()
    damaged = best if command != "train" else best.parent
    path = max((p for p in damaged.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-10])
    before = files(run)
    if command != "train":
        request.getfixturevalue("no_reading")()
    line = refused(*again(run, command))
    assert f"checkpoint {best.parent} is damaged or belongs to another run" in line
    assert f"delete {run} to train again" in line
    assert files(run) == before


def test_an_export_that_cannot_be_written(refused, run, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = files(run)
    line = refused(*again(run, "export", f"--output={tmp_path / 'file/out'}"))
    assert "cannot write" in line and "Not a directory" in line
    line = refused(*again(run, "export", f"--npy={tmp_path / 'train.jsonl'}"))
    assert "train.jsonl must end in .npy" in line
    line = refused(*again(run, "export", f"--npy={tmp_path / 'x.npy'}"))
    assert "--npy: a prefix prompt has no soft tokens" in line
    assert files(run) == before and (tmp_path / "file").read_text() == "mine"


def test_an_export_that_replaces_another_says_so(run, tmp_path, capsys):
    folder = shutil.copytree(run / "export", tmp_path / "out")
    words = list(map(str, again(run, "export", f"--output={folder}")))
    assert main(words) == 0
    assert "replaced" not in capsys.readouterr().err  # it is the same
    edit(folder / "prompt.json", seed=5)
    assert main(words) == 0
    line = f"{folder}: replaced another export: name 'custom', method 'prefix', "
    assert f"{line}seed 5" in capsys.readouterr().err
    assert main(words) == 0 and "replaced" not in capsys.readouterr().err


@pytest.fixture
def predict(refused, run):
    """Predicts with the run's export, which must be refused. -> its line"""
    return lambda *words: refused("predict", f"--prompt={run / 'export'}", *words)


def test_exports_that_are_not_whole(predict, no_reading, run):
    no_reading()
    tensors, card = run / "export/prompt.safetensors", run / "export/prompt.json"
    text = card.read_text()
    for spoilt in ({"task": {}}, {"layout": {}}, {"prompt": {}}, {"head": {}}):
        write_card(card, json.loads(text) | spoilt)
        line = predict("--text=a")
        assert re.search(rf"{card}: (the field )?{min(spoilt)}\.", line)
    spoilt = json.loads(text)
    spoilt["layout"]["max_length"] = 5
    write_card(card, spoilt)
    assert "unknown field 'layout.max_length'" in predict("--text=a")
    card.write_text(text[:50])
    assert f"{card} is not valid JSON" in predict("--text=a")
    card.write_text(text)
    tensors.write_bytes(tensors.read_bytes()[:-10])
    assert f"{tensors} is damaged, or from another export" in predict("--text=a")
    tensors.unlink()
    assert f"cannot read {tensors}: No such file" in predict("--text=a")


def test_predicting_on_other_weights(predict, run, other_backbone, capsys):
    line = predict("--text=the cat", f"--backbone={other_backbone}")
    assert "the prompt was trained on the weights" in line and "--force" in line
    words = ["--text=the cat", f"--backbone={other_backbone}", "--force"]
    assert main(["predict", f"--prompt={run / 'export'}", *words]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] in ("beast", "food", "tool")


def test_predicting_on_another_shape(predict, model):
    edit(model / "config.json", num_attention_heads=4)
    line = predict("--text=the cat", f"--backbone={model}", "--force")
    assert "prompt/k" in line and "the backbone needs" in line


def test_input_that_cannot_be_read(predict, no_reading, tmp_path, monkeypatch):
    no_reading()
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"text": "cat"}\n{"text": \n')
    assert f"{path}:2: broken JSON" in predict(f"--input={path}", f"--output={out}")
    path.write_text("")
    assert f"{path} contains no text; give at least one" in predict(f"--input={path}")
    assert "/no/in.jsonl: no such file" in predict("--input=/no/in.jsonl")
    monkeypatch.setattr("sys.stdin", ["the cat\n", '{"text": \n'])
    assert "stdin:2: broken JSON" in predict()
    monkeypatch.setattr("sys.stdin", [])
    assert "stdin contains no text" in predict()
    monkeypatch.setattr("sys.stdin", None)
    assert "stdin is closed; use --input=FILE" in predict("--input=-")
    assert not out.exists()


def test_an_output_that_would_replace_the_input(predict, no_reading, tmp_path):
    no_reading()
    source, link = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text\nthe cat\n")
    link.symlink_to(source)
    for output in (source, link):
        line = predict(f"--input={source}", f"--output={output}", "--on-error=skip")
        assert f"--output={output} would overwrite --input={source}" in line
    several = [f"--input={source}", f"--output={source}", "--column=text"]
    assert f"--output={source} would overwrite --input={source}" in predict(*several)
    assert source.read_text() == "text\nthe cat\n" and link.is_symlink()


def test_an_output_that_cannot_be_written(predict, refused, no_reading, run, tmp_path):
    """Told before the weights and the input are read."""
    no_reading()
    for words in (["--text=the cat"], ["--column=text", "--input=/no/in.jsonl"]):
        line = predict(*words, f"--output={tmp_path / 'no/out.jsonl'}")
        assert f"{tmp_path / 'no'} does not exist; create it, or give another" in line
        assert f"{tmp_path} is a folder; give a file" in predict(*words, f"--output={tmp_path}")
        line = predict(*words, f"--output={tmp_path / 'out.csv'}")
        assert "JSON lines are written, not .csv; call it out.jsonl" in line
    line = refused(*again(run, "evaluate", f"--output={tmp_path / 'no/out.jsonl'}"))
    assert f"{tmp_path / 'no'} does not exist; create it, or give another" in line
    assert not (tmp_path / "no").exists()


def test_an_output_that_would_replace_the_data_of_a_run(refused, no_reading, run, data, tmp_path):
    no_reading()
    for split in ("train", "dev", "test"):
        path = data / f"{split}.jsonl"
        before = path.read_bytes()
        line = refused(*again(run, "evaluate", f"--output={path}"))
        assert f"--output={path} would overwrite {split}.jsonl of data.source={data}" in line
        assert path.read_bytes() == before
    dev_file = write_rows(tmp_path / "own.jsonl", [{"text": "cat", "label": "beast"}])
    words = [f"--config.data.files.dev={dev_file}", f"--output={dev_file}"]
    line = refused(*again(run, "evaluate", *words))
    assert f"--output={dev_file} would overwrite data.files.dev={dev_file}" in line


def test_input_rows_without_the_field(predict, tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [{"text": "cat"}, {"txt": "cat"}])
    line = predict(f"--input={path}")
    assert f"{path}:2: there is no column 'text'" in line and "columns: txt" in line
