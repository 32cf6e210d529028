"""Saved folders: load gives the same bits and fingerprint, nothing foreign or half is left."""

import json
import os
import shutil
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
import transformers
from folders import CARD, ENCODER, KINDS, assert_same_params, load_folder, save_model
from processes import Processes
from safetensors.numpy import load_file
from tiny import CONFIGS

from jaxprompt.convert import save
from jaxprompt.convert.folder import read_config
from jaxprompt.convert.save import save_backbone
from jaxprompt.errors import InputError
from jaxprompt.files import acquire_lock
from jaxprompt.parallel.sharding import make_placement
from jaxprompt.tree import flatten


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function of a kind that makes each folder once."""
    root, saved_names = tmp_path_factory.mktemp("saved"), set()

    def make(kind):
        if kind not in saved_names:
            save_model(root / kind, kind)
            saved_names.add(kind)
        return root / kind

    return make


def write(folder, source, loaded, family="bert", **options):
    options_of_save = dict(tokenizer=source, card=CARD, run="this") | options
    return save_backbone(folder, family, read_config(source), loaded.params, **options_of_save)


@pytest.mark.long_cases(
    "mpnet-*", "xlm-roberta-xl-*", "eurobert-*", "qwen3-moe-*", "mixtral-None", "mixtral-mesh1",
    "gpt-oss-None", "gpt-oss-mesh1", "t5gemma-*",
)  # fmt: skip
@pytest.mark.parametrize("mesh", [None, (1, 1), (2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_was_loaded(saved, tmp_path, kind, mesh):
    """On 2 x 4 devices the 53 rows of the vocabulary are 56."""
    source, family = saved(kind), KINDS[kind][0]
    place = None
    if mesh:
        place = make_placement(*mesh, fsdp=True, devices=jax.devices()[: mesh[0] * mesh[1]])
    loaded = load_folder(source, family, placement=place)
    if mesh == (2, 4):
        assert loaded.params["embed"]["word"]["table"].shape[0] == 56
    write(tmp_path / "out", source, loaded, family)
    again = load_folder(tmp_path / "out", family)
    assert again.report.fingerprint == loaded.report.fingerprint
    assert again.report.heads == loaded.report.heads and again.report.unused == ()
    assert again.report.tied == loaded.report.tied
    assert_same_params(again.params, load_folder(source, family).params)


@pytest.mark.parametrize("kind", ["bert", "t5", "gpt2", "generator"])
def test_names_and_shapes_are_those_of_transformers(saved, tmp_path, kind):
    source, family = saved(kind), KINDS[kind][0]
    write(tmp_path / "out", source, load_folder(source, family), family)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "out", source))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def test_files_above_the_limit_are_divided(saved, tmp_path):
    source = saved("bert")
    loaded = load_folder(source, "bert")
    write(tmp_path / "out", source, loaded, file_bytes=4000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 4000 for f in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == loaded.report.bytes
    assert {n: f for f in files for n in load_file(f)}.keys() == index["weight_map"].keys()
    assert load_folder(tmp_path / "out", "bert").report == loaded.report


def test_bfloat16(saved, tmp_path):
    source = saved("bert")
    loaded = load_folder(source, "bert")
    write(tmp_path / "out", source, loaded, dtype="bfloat16")
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    narrow = load_folder(source, "bert", dtype="bfloat16")
    assert_same_params(
        load_folder(tmp_path / "out", "bert", dtype="bfloat16").params, narrow.params
    )
    write(tmp_path / "wide", source, narrow)
    assert_same_params(
        load_folder(tmp_path / "wide", "bert", dtype="bfloat16").params, narrow.params
    )


@pytest.mark.parametrize("factor, tolerance", [(4.0, 0.0), (100.0, 2e-7)])
def test_rescale_is_undone(saved, tmp_path, factor, tolerance):
    source = saved("t5-gated")
    plain, divided = load_folder(source, "t5"), load_folder(source, "t5", rescale=factor)
    write(tmp_path / "out", source, divided, "t5", rescale=factor)
    flat = flatten(load_folder(tmp_path / "out", "t5").params)
    for name, leaf in flatten(plain.params).items():
        np.testing.assert_allclose(flat[name], leaf, rtol=tolerance, err_msg=name)


def test_config_keeps_what_was_said(saved, tmp_path):
    source = saved("t5-gated")
    config = read_config(source) | dict(torch_dtype="float16", task_specific_params={"a": 1})
    loaded = load_folder(source, "t5")
    options = dict(tokenizer=source, card=CARD, run="r")
    save_backbone(tmp_path / "out", "t5", config, loaded.params, **options)
    actual = read_config(tmp_path / "out")
    assert actual["architectures"] == ["T5ForConditionalGeneration"]
    assert actual["dtype"] == "float32" and "torch_dtype" not in actual
    assert actual["task_specific_params"] == {"a": 1}
    assert actual["tie_word_embeddings"] is False and actual["scale_decoder_outputs"] is False
    assert actual["transformers_version"] == transformers.__version__


@pytest.mark.parametrize(
    "family, heads, kind, expected",
    [
        ("bert", ["pooler", "mlm"], "bert", "BertForMaskedLM"),
        ("bert", ["pooler"], "", "BertModel"),
        ("roberta", ["mlm"], "xlm-roberta", "XLMRobertaForMaskedLM"),
        ("roberta", ["mlm"], "camembert", "CamembertForMaskedLM"),
        ("electra", ["rtd"], "electra", "ElectraForPreTraining"),
        ("electra", ["mlm"], "electra", "ElectraForMaskedLM"),
        ("t5", ["lm"], "mt5", "MT5ForConditionalGeneration"),
        ("gpt2", ["lm"], "gpt2", "GPT2LMHeadModel"),
        ("llama", ["lm"], "llama", "LlamaForCausalLM"),
        ("llama", ["lm"], "qwen3", "Qwen3ForCausalLM"),
        ("llama", ["lm"], "gemma3_text", "Gemma3ForCausalLM"),
    ],
)
def test_the_class_that_loads_it_is_named(family, heads, kind, expected):
    actual = save.saved_config(family, {"model_type": kind}, heads)
    assert actual["architectures"] == [expected] and hasattr(transformers, expected)


def test_a_config_that_transformers_refuses_is_one_line():
    with pytest.raises(InputError, match="rejects the config .*hidden_act.* of a bert") as caught:
        save.saved_config("bert", CONFIGS["bert"] | {"hidden_act": 3}, ["mlm"])
    assert "\n" not in str(caught.value)


def test_tokenizer_and_card(saved, tmp_path):
    source = saved("bert")
    for name in ("vocab.txt", "spiece.model", "special_tokens_map.json", "notes.txt"):
        (source / name).write_text(name)
    write(tmp_path / "out", source, load_folder(source, "bert"))
    actual = {path.name for path in (tmp_path / "out").iterdir()}
    assert actual == {
        "config.json", "model.safetensors", "README.md", "training.json", "tokenizer.json",
        "vocab.txt", "spiece.model", "special_tokens_map.json",
    }  # fmt: skip
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert training.pop("versions")["transformers"] == transformers.__version__
    assert training == {"run": "this"} | CARD
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\ntags:\n- jaxprompt\n---\n\n# out")
    for line in (
        "`BertForMaskedLM`, pre-trained with jaxprompt.", "| steps | 10 |",
        f"| transformers | {transformers.__version__} |", "## corpus", "| texts | a\\|b |",
        "| mlm.loss | 2.34568 |",
        r"- the \[MASK\] ran home -\> dog",
    ):  # fmt: skip
        assert line in text.splitlines(), line


def test_a_folder_without_a_tokenizer_is_refused(saved, tmp_path):
    source = saved("bert")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="has no tokenizer; "):
        write(tmp_path / "out", source, load_folder(source, "bert"), tokenizer=tmp_path / "none")
    assert sorted(os.listdir(tmp_path)) == ["none"]


def test_only_a_folder_of_the_same_run_is_replaced(saved, tmp_path):
    source = saved("bert")
    loaded, other = load_folder(source, "bert"), load_folder(source, "bert")
    other.params["mlm"]["bias"] = other.params["mlm"]["bias"] + 1
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is free
    write(out, source, loaded)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InputError, match="contains the model of another run \\(this\\)"):
        write(out, source, other, run="that")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    write(out, source, other)
    assert_same_params(load_folder(out, "bert").params, other.params)
    assert os.listdir(tmp_path) == ["out"]
    foreign = shutil.copytree(source, tmp_path / "foreign")
    with pytest.raises(InputError, match="contains files of something else"):
        write(foreign, source, loaded)
    with pytest.raises(InputError, match="config.json contains files of something"):
        write(source / "config.json", source, loaded)


def test_of_two_processes_that_write_a_folder_one_is_refused(saved, tmp_path):
    """Both would write beside it, each into what the other moves to its place."""
    source, out = saved("bert"), tmp_path / "out"
    loaded = load_folder(source, "bert")
    lock = acquire_lock(tmp_path / ".out.lock", out, "")
    try:
        with pytest.raises(InputError, match=f"out is in use by process {os.getpid()} on .*; wait"):
            write(out, source, loaded)
    finally:
        os.close(lock)
    assert os.listdir(tmp_path) == [".out.lock"]
    write(out, source, loaded)
    assert os.listdir(tmp_path) == ["out"]


def refuse(*_):
    raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("where", ["posix_fallocate", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_loses_nothing(saved, tmp_path, monkeypatch, where):
    source = saved("bert")
    loaded, out = load_folder(source, "bert"), tmp_path / "out"
    write(out, source, loaded)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    if where == "rename":
        monkeypatch.setattr(save.Path, "rename", refuse)
    else:
        monkeypatch.setattr(save.os, where, refuse)
    with pytest.raises(InputError, match="cannot write .*: No space left on device; ") as caught:
        write(out, source, loaded)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_killed_write_leaves_nothing_that_looks_finished(saved, tmp_path, monkeypatch):
    source = saved("bert")
    loaded = load_folder(source, "bert")

    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(save, "_gather", killed)
    monkeypatch.setattr(save.shutil, "rmtree", lambda *_, **__: None)  # nor is it cleaned up
    with pytest.raises(SystemExit):
        write(tmp_path / "out", source, loaded)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [".out.partial"]
    assert not (tmp_path / ".out.partial" / "config.json").exists()
    write(tmp_path / "out", source, loaded)
    assert os.listdir(tmp_path) == ["out"]
    assert load_folder(tmp_path / "out", "bert").report == loaded.report


def test_the_host_holds_a_tensor_at_a_time(tmp_path):
    config = ENCODER | dict(
        model_type="bert", hidden_size=192, intermediate_size=768, num_hidden_layers=12
    )
    transformers.BertModel(transformers.BertConfig(**config)).save_pretrained(tmp_path / "big")
    (tmp_path / "big" / "tokenizer.json").write_text("{}")
    place = make_placement(2, 4)
    loaded = load_folder(tmp_path / "big", "bert", placement=place)
    write(tmp_path / "first", tmp_path / "big", loaded)  # compiles, and imports
    tracemalloc.start()
    write(tmp_path / "out", tmp_path / "big", loaded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = 192 * 768 * 4
    assert loaded.report.bytes > 30 * largest
    assert peak <= 3 * largest


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bert", "t5-gated"])
def test_two_processes_save_what_they_share(saved, tmp_path, kind):
    source, family = saved(kind), KINDS[kind][0]
    job = os.path.join(os.path.dirname(__file__), "save_job.py")
    with Processes(tmp_path / "logs") as processes:
        processes.start_all(2, [job, source, tmp_path / "out"])
        assert processes.wait() == [0, 0], processes.told()
        first_lines = [processes.out(i).split("\n")[0] for i in range(2)]
    assert (
        first_lines[0] == first_lines[1] and "contains the model of another run" in first_lines[0]
    )
    again, expected = load_folder(tmp_path / "out", family), load_folder(source, family)
    assert again.report == expected.report
    assert_same_params(again.params, expected.params)
