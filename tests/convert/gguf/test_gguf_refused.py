"""GGUF files that are broken, or of what is not read: each is one line."""

import struct
import sys

import numpy as np
import pytest

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.gguf.tensors import _quantized_type
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.weights import open_weights
from jaxprompt.data.text.gguf_header import read_header
from jaxprompt.errors import InputError

gguf = pytest.importorskip("gguf", reason="the package gguf is absent: pip install gguf")

from gguf_files import add_tensor, finish, make_model, write_model  # noqa: E402


@pytest.fixture
def path(tmp_path):
    return write_model(tmp_path / "model.gguf", make_model("llama"), "llama", quant="Q8_0")


def open_it(path):
    read_config(path)
    with open_weights(path):
        pass


def test_a_file_cut_anywhere_is_one_line(path):
    whole = path.read_bytes()
    open_it(path)
    for size in (0, 3, 4, 11, 30, 200, len(whole) // 4, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(
            InputError, match="is incomplete|is cut short|is not a GGUF file"
        ) as caught:
            open_it(path)
        assert "\n" not in str(caught.value)


def test_damaged_headers_are_one_line(path):
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused, end = 0, min(at.start for at in read_header(path).tensors.values())
    for _ in range(150):
        broken = bytearray(whole)
        for at in rng.integers(4, end, 3):
            broken[at] = rng.integers(256)
        path.write_bytes(broken)
        try:
            open_it(path)
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04", "is not a GGUF file: it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "of version 1, but only"),
        (b"GGUF" + struct.pack(">I", 3), "only little-endian files"),
    ],
)
def test_other_files_are_refused(path, start, message):
    path.write_bytes(start + path.read_bytes()[len(start) :])
    with pytest.raises(InputError, match=message):
        open_it(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("add_expert_count", 8, r"llama.expert_count=8, but only 0"),
        ("add_value_length", 12, "llama.attention.value_length=12, .* 16, the same for all heads"),
        ("add_head_count", [4, 2], r"llama.attention.head_count=\[2, 4\], .* same in all layers"),
        ("add_embedding_length", 0, "llama.embedding_length=0, .* an integer of at least 1"),
        ("add_rope_scaling_type", "longrope", "rope.scaling.type='longrope', .* none, linear"),
        ("add_layer_norm_rms_eps", 0.0, "layer_norm_rms_epsilon=0.0, .* a number above 0"),
        (
            "add_head_count",
            3,
            "attn_q.weight in .* has 64 rows, which must be divisible by twice the 3",
        ),
    ],
)
def test_metadata_of_another_function_is_refused(tmp_path, key, value, message):
    def more(writer):
        if key == "add_rope_scaling_type":
            return writer.add_string("llama.rope.scaling.type", value)
        for stored in writer.kv_data:  # else the writer tells of a key that is written twice
            stored.pop(f"llama.attention.{key[4:]}", None)
            stored.pop("llama.attention.layer_norm_rms_epsilon" if "eps" in key else "", None)
            stored.pop(f"llama.{key[4:]}", None)
        getattr(writer, key)(value)

    path = write_model(tmp_path / "model.gguf", make_model("llama"), "llama", more=more)
    with pytest.raises(InputError, match=message):
        open_it(path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "blk.0.attn_k.bias"), ("llama", "output_norm.bias"),
        ("llama", "blk.1.attn_q_norm.weight"), ("llama", "blk.0.attn_sub_norm.weight"),
        ("llama", "blk.0.post_attention_norm.weight"), ("qwen2", "blk.0.attn_output.bias"),
        ("mistral", "blk.1.ffn_down.bias"), ("gemma", "blk.0.post_ffw_norm.weight"),
    ],
)  # fmt: skip
def test_a_tensor_that_the_model_has_not_is_named(tmp_path, kind, name):
    """llama.cpp would compute with it."""
    more = lambda writer: add_tensor(writer, name, np.ones(32, np.float32))
    path = write_model(tmp_path / "model.gguf", make_model(kind), kind, more=more)
    with pytest.raises(
        InputError, match=rf"has {name}, which is not supported for \w+; use another"
    ):
        open_it(path)


@pytest.mark.parametrize(
    ("key", "add", "message"),
    [
        ("attn_logit_softcapping", 30.0, "llama.attn_logit_softcapping=30.0, but only 0"),
        ("final_logit_softcapping", 30.0, "llama.final_logit_softcapping=30.0, but only 0"),
        ("sliding_window_pattern", [True, False], r"sliding_window_pattern=\[False, True\]"),
        ("sliding_window_pattern", 2, "sliding_window_pattern=2, .* a window in every layer"),
    ],
)
def test_what_a_llama_does_not_do_is_named(tmp_path, key, add, message):
    more = lambda writer: getattr(writer, f"add_{key}")(add)
    path = write_model(tmp_path / "model.gguf", make_model("mistral"), "mistral", more=more)
    with pytest.raises(InputError, match=message):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "needed"),
    [("block_count", "an integer of at least 1"), ("attention.layer_norm_rms_epsilon", "a number")],
)
def test_metadata_that_is_not_there_is_named(tmp_path, key, needed):
    def more(writer):
        for stored in writer.kv_data:
            stored.pop(f"llama.{key}", None)

    path = write_model(tmp_path / "model.gguf", make_model("llama"), "llama", more=more)
    with pytest.raises(InputError, match=f"has no llama.{key}, but only {needed}"):
        read_config(path)


def test_an_architecture_that_is_not_read(tmp_path):
    path = finish(gguf.GGUFWriter(tmp_path / "model.gguf", "mamba"), tmp_path / "model.gguf")
    with pytest.raises(
        InputError, match="of architecture 'mamba', .*; known: gemma, gemma2, gemma3"
    ):
        read_config(path)


@pytest.mark.parametrize(("kind", "reason"), [(24, "I8"), (99, "99 is not a valid"), (15, "Q8_K")])
def test_a_type_that_cannot_be_unpacked(path, kind, reason):
    name = b"blk.0.ffn_up.weight"
    data = path.read_bytes()
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes, and these
    path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    with pytest.raises(InputError, match=f"ffn_up.weight in .*{reason}.* pip install -U gguf"):
        open_it(path)


def test_without_the_package_plain_types_are_read(path, tmp_path, monkeypatch):
    plain = write_model(tmp_path / "plain.gguf", make_model("llama"), "llama")
    _quantized_type.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match="is quantised, and .* run: pip install gguf$"):
        open_it(path)
    open_it(plain)


def test_one_of_several_files(tmp_path):
    more = lambda writer: writer.add_uint16("split.count", 3)
    path = write_model(tmp_path / "model.gguf", make_model("llama"), "llama", more=more)
    with pytest.raises(InputError, match="is one of 3 files of a model; join them"):
        open_it(path)


@pytest.mark.parametrize(
    "given, message",
    [
        ((48, 32), r"has shape \[48, 32\], its metadata says \[64, 32\]; the file is damaged"),
        (None, r"lacks 1 of the needed tensors: model.layers.1.mlp.gate_proj.weight; the file is"),
    ],
)
def test_a_tensor_that_does_not_fit_the_metadata_is_named(given, message, tmp_path):
    model = make_model("llama", intermediate_size=64)
    path = write_model(tmp_path / "whole.gguf", model, "llama")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = field.contents()
            if isinstance(value, list):
                writer.add_array(name, value)
            else:
                writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name == "blk.1.ffn_gate.weight":
            if given is None:
                continue
            data = np.zeros(given, np.float32)
        writer.add_tensor(tensor.name, data)
    finish(writer, tmp_path / "other.gguf")
    with pytest.raises(InputError, match=message):
        path = tmp_path / "other.gguf"
        load_backbone(path, "llama", read_config(path))
