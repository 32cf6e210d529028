"""Bad workdirs, checkpoints and exports: one line, exit code 2, and nothing on disk changes."""

import json
import shutil
from pathlib import Path

import pytest
from spoil import BASE, edit, files
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
    assert f"{run} contains a run with a different config: seed (saved 0, given 7)" in line
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


def test_a_folder_without_an_export(predict, no_reading, run):
    no_reading()
    (run / "export/prompt.safetensors").unlink()
    assert "has no export; run python -m jaxprompt export" in predict("--text=a")


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


def test_an_output_that_cannot_be_written(predict, refused, no_reading, run, data, tmp_path):
    """Told before the weights and the input are read. What is refused test_files shows."""
    no_reading()
    rows = data / "test.jsonl"
    for words in (["--text=the cat"], ["--column=text", f"--input={rows}"]):
        line = predict(*words, f"--output={tmp_path / 'no/out.jsonl'}")
        assert f"{tmp_path / 'no'} does not exist; create it, or give another" in line
    for words in ([], ["--column=text"]):
        line = predict(f"--input={rows}", *words, f"--output={rows}")
        assert f"--output={rows} would overwrite --input={rows}" in line
    for split in ("train", "dev", "test"):
        path = data / f"{split}.jsonl"
        line = refused(*again(run, "evaluate", f"--output={path}"))
        assert f"--output={path} would overwrite {split}.jsonl of data.source={data}" in line
    path = write_rows(tmp_path / "own.jsonl", [{"text": "cat", "label": "beast"}])
    words = [f"--config.data.files.dev={path}", f"--output={path}"]
    line = refused(*again(run, "evaluate", *words))
    assert f"--output={path} would overwrite data.files.dev={path}" in line
    assert not (tmp_path / "no").exists()
