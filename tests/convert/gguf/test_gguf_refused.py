"""GGUF files that are broken, or of what is not read: each is one line."""

import struct

import numpy as np
import pytest
from gguf_files import add_tensor, make_model, write_model

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.convert.weights import open_weights
from jaxprompt.errors import InputError


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
    for size in (0, 11, 30, 200, len(whole) // 4, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="is incomplete|is cut short|is not a GGUF file"):
            open_it(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "of version 1 "),
        (b"GGUF" + struct.pack(">I", 3), "only little-endian files"),
    ],
)
def test_other_files_are_refused(path, start, message):
    path.write_bytes(start + path.read_bytes()[len(start) :])
    with pytest.raises(InputError, match=message):
        open_it(path)


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("llama", "general.architecture", "mamba", "architecture 'mamba'.* gemma, gemma2, gemma3"),
        ("llama", "split.count", 3, "is one of 3 files of a model"),
        ("llama", "llama.expert_count", 8, "llama.expert_count=8, but only 0"),
        ("llama", "llama.attention.value_length", 12, "value_length=12, .* 16, the same for all"),
        ("llama", "llama.attention.head_count", [4, 2], r"head_count=\[2, 4\], .* in all layers"),
        ("llama", "llama.embedding_length", 0, "embedding_length=0, .* an integer from 1"),
        ("llama", "llama.block_count", None, "no llama.block_count, but only an integer"),
        ("llama", "llama.block_count", 1001, "block_count=1001, .* from 1 to 1,000"),
        ("llama", "llama.rope.scaling.type", "longrope", "type='longrope', .* none, linear"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", 0.0, "=0.0, .* a number above 0"),
        ("llama", "llama.attention.layer_norm_rms_epsilon", None, "epsilon, but only a number"),
        (
            "olmo2",
            "olmo2.attention.sliding_window",
            7,
            "olmo2.attention.sliding_window=7, but only",
        ),
        ("granite", "granite.logit_scale", None, "no granite.logit_scale, but only a number above"),
        ("mistral", "llama.attn_logit_softcapping", 30.0, "attn_logit_softcapping=30.0, .* only 0"),
        ("mistral", "llama.final_logit_softcapping", 30.0, "final_.*softcapping=30.0, .* only 0"),
        ("mistral", "llama.attention.sliding_window_pattern", [1, 0], r"pattern=\[0, 1\]"),
        ("mistral", "llama.attention.sliding_window_pattern", 2, "=2, .* a window in every layer"),
    ],
)
def test_metadata_of_another_function_is_refused(tmp_path, kind, key, value, message):
    def more(writer):
        for stored in writer.kv_data:
            stored.pop(key, None)
        add = {
            str: writer.add_string, float: writer.add_float32, int: writer.add_uint32,
            list: writer.add_array,
        }  # fmt: skip
        if value is not None:
            add[type(value)](key, value)

    path = write_model(tmp_path / "model.gguf", make_model(kind), kind, more=more)
    with pytest.raises(InputError, match=message):
        read_config(path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "blk.0.attn_k.bias"), ("llama", "output_norm.bias"),
        ("llama", "blk.1.attn_q_norm.weight"), ("llama", "blk.0.attn_sub_norm.weight"),
        ("llama", "blk.0.post_attention_norm.weight"), ("qwen2", "blk.0.attn_output.bias"),
        ("mistral", "blk.1.ffn_down.bias"), ("gemma", "blk.0.post_ffw_norm.weight"),
        ("olmo2", "blk.0.attn_norm.weight"), ("glm4", "blk.0.attn_output.bias"),
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


@pytest.mark.parametrize(("kind", "reason"), [(24, "I8"), (99, "99 is not a valid"), (15, "Q8_K")])
def test_a_type_that_cannot_be_unpacked(path, kind, reason):
    name = b"blk.0.ffn_up.weight"
    data = path.read_bytes()
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes, and these
    path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    with pytest.raises(InputError, match=f"ffn_up.weight in .*{reason}.* pip install -U gguf"):
        open_it(path)


def test_a_tensor_that_does_not_fit_the_metadata_is_named(tmp_path):
    path = write_model(tmp_path / "model.gguf", make_model("llama"), "llama")
    config = read_config(path)
    with pytest.raises(InputError, match=r"shape \[96, 32\], but its metadata says \[64, 32\]"):
        load_backbone(path, "llama", config | {"intermediate_size": 64})
    with pytest.raises(InputError, match="lacks 9 of the needed tensors: model.layers.2.* the f"):
        load_backbone(path, "llama", config | {"num_hidden_layers": 3})
