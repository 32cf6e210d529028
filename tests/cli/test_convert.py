"""A backbone written out once: a folder with the same numbers, names and tokenizer."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import jaxprompt, make_backbone

from jaxprompt.data.text.tokenizer import load_tokenizer


def convert(capsys, *flags):
    return jaxprompt(capsys, "convert", *flags)


def test_a_folder_is_written_again(backbone, tmp_path, capsys):
    # What a model writes with is in a file beside its config.
    backbone = shutil.copytree(backbone, tmp_path / "own")
    (backbone / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    code, out, err = convert(capsys, f"--backbone={backbone}", f"--output={tmp_path / 'a'}")
    assert code == 0 and out == "", err
    assert f"{tmp_path / 'a'}: " in err and "without cls.seq_relationship" in err
    assert (tmp_path / "a/generation_config.json").read_text() == '{"eos_token_id": [1, 7]}'
    before, after = (load_file(x / "model.safetensors") for x in (backbone, tmp_path / "a"))
    assert before.keys() - after.keys() == {
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    }
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[name])
    card = (tmp_path / "a" / "README.md").read_text()
    assert "converted with jaxprompt" in card and f"| source | {backbone} |" in card
    assert "## unused\n\n- cls.seq_relationship" in card
    text = "the cat is near a red saw"
    assert (
        load_tokenizer(tmp_path / "a")(text)["input_ids"]
        == load_tokenizer(backbone)(text)["input_ids"]
    )
    # The same conversion replaces it, another one does not.
    assert convert(capsys, f"--backbone={backbone}", f"--output={tmp_path / 'a'}")[0] == 0
    whole = (f"--backbone={tmp_path / 'a'}", f"--output={tmp_path / 'b'}")
    assert convert(capsys, *whole)[0] == 0
    assert "unused" not in (tmp_path / "b" / "README.md").read_text()
    code, _, err = convert(capsys, f"--backbone={tmp_path / 'a'}", f"--output={tmp_path / 'a'}")
    assert code == 2 and "contains the model of another run" in err


def test_a_gguf_file_becomes_a_folder(tmp_path, capsys):
    pytest.importorskip("gguf", reason="the package gguf is absent: pip install gguf")
    torch = pytest.importorskip("torch")
    import transformers
    from gguf_files import make_model, write_model

    def add_tokenizer(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * 64)
        writer.add_token_types([2, 3, 3] + [1] * 61)  # unknown, control, plain
        writer.add_unk_token_id(0)

    model = make_model("qwen3")
    path = write_model(tmp_path / "m.gguf", model, "qwen3", more=add_tokenizer)
    code, _, err = convert(
        capsys, f"--backbone={path}", f"--output={tmp_path / 'a'}", "--dtype=bfloat16"
    )
    assert code == 0, err
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("flags, line", [
    (["--output=a"], "--backbone is missing"),
    (["--backbone=nowhere/at/all", "--output=a"], "'nowhere/at/all'"),
    (["--backbone=BACKBONE", "--output=a", "--dtype=int8"], "--dtype='int8'"),
    (["--backbone=BACKBONE", "--output=a", "--config.seed=1"], "convert takes no --config"),
    (["--backbone=BACKBONE", "--output=BACKBONE"], "contains files of something else"),
])  # fmt: skip
def test_what_cannot_be_done_is_named(flags, line, backbone, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = convert(capsys, *(flag.replace("BACKBONE", str(backbone)) for flag in flags))
    assert code == 2 and line in err and err.count("\n") == 1, err
    assert not (tmp_path / "a").exists()


def test_a_glm_has_no_class_there(tmp_path, capsys):
    folder = make_backbone(tmp_path / "glm", "glm")
    code, _, err = convert(capsys, f"--backbone={folder}", f"--output={tmp_path / 'a'}")
    assert code == 2 and "transformers has no class that loads a glm" in err
