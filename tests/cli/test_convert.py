"""A backbone written out once: a folder with the same numbers, names and tokenizer."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import make_backbone, succeed


def test_a_folder_is_written_again(backbone, tmp_path, capsys):
    # What a model writes with is in a file beside its config.
    backbone = shutil.copytree(backbone, tmp_path / "own")
    (backbone / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    words = (f"--backbone={backbone}", f"--output={tmp_path / 'a'}")
    out, err = succeed(capsys, "convert", *words)
    assert out == "" and f"{tmp_path / 'a'}: " in err and "without cls.seq_relationship" in err
    assert (tmp_path / "a/generation_config.json").read_text() == '{"eos_token_id": [1, 7]}'
    before, after = (load_file(x / "model.safetensors") for x in (backbone, tmp_path / "a"))
    left = {name.rpartition(".")[0] for name in before.keys() - after}
    assert left == {"cls.seq_relationship"}
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[name])
    card = (tmp_path / "a" / "README.md").read_text()
    assert "converted with jaxprompt" in card and f"| source | {backbone} |" in card
    assert "## unused\n\n- cls.seq_relationship" in card
    succeed(capsys, "convert", *words)  # the same conversion replaces it


@pytest.mark.parametrize("flags, line", [
    (["--output=a"], "--backbone is missing"),
    (["--backbone=nowhere/at/all", "--output=a"], "'nowhere/at/all'"),
    (["--backbone=BACKBONE", "--output=a", "--dtype=int8"], "--dtype='int8'"),
    (["--backbone=BACKBONE", "--output=a", "--config.seed=1"], "convert takes no --config"),
    (["--backbone=BACKBONE", "--output=BACKBONE"], "contains files of something else"),
])  # fmt: skip
def test_what_cannot_be_done_is_named(flags, line, backbone, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert line in refused("convert", *(flag.replace("BACKBONE", str(backbone)) for flag in flags))
    assert not (tmp_path / "a").exists()


def test_a_glm_has_no_class_there(tmp_path, refused):
    folder = make_backbone(tmp_path / "glm", "glm")
    line = refused("convert", f"--backbone={folder}", f"--output={tmp_path / 'a'}", started=True)
    assert "transformers has no class that loads a glm" in line
