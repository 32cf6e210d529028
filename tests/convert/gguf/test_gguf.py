"""GGUF files: weights and config are those of the model that was written."""

import warnings

import gguf
import numpy as np
import pytest
import transformers
from gguf_files import KINDS, add_tensor, make_model, write_model

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.gguf.config import _GLOBAL_EVERY
from jaxprompt.convert.save import _tokenizer_files
from jaxprompt.convert.weights import open_weights
from jaxprompt.errors import InputError

torch = pytest.importorskip("torch")

# What shapes no function, or is of training, or of how the config came about.
UNTOLD = {
    "_model_name_or_path", "_name_or_path", "architectures", "attention_dropout",
    "chunk_size_feed_forward", "dtype", "id2label", "initializer_range", "is_encoder_decoder",
    "label2id", "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type",
    "quantization_config", "return_dict", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip


def read_all(path):
    with open_weights(path) as weights:
        actual = {name: weights.read(name) for name in weights.entries}
        for name, array in actual.items():
            assert (weights.entries[name].shape, weights.entries[name].dtype) == (
                array.shape,
                array.dtype.name,
            )
    return actual


def saved(model):
    """Gives what a checkpoint of a torch model holds."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def shaping(config):
    fields = {k: v for k, v in config.to_dict().items() if k not in UNTOLD}
    name = "rms_norm_eps" if "rms_norm_eps" in fields else "layer_norm_eps"
    fields[name] = pytest.approx(fields[name], rel=1e-6)
    return fields


def shaped_by(hf):
    return {
        k: v
        for k, v in transformers.AutoConfig.for_model(**hf).to_dict().items()
        if k not in UNTOLD
    }


@pytest.mark.long_cases("phi3", "olmo2", "cohere2", "granite")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_config_are_those_of_the_model(kind, tmp_path):
    model = make_model(kind)
    path = write_model(tmp_path / "model.gguf", model, kind)
    rows, expected = read_all(path), saved(model)
    assert rows.keys() == expected.keys()
    for name, array in expected.items():
        assert rows[name].dtype == np.float32
        np.testing.assert_allclose(rows[name], array, rtol=0, atol=1e-6, err_msg=name)
    hf = read_config(path)
    assert hf["architectures"] == [type(model).__name__]
    assert shaped_by(hf) == shaping(model.config)
    again = type(model)(transformers.AutoConfig.for_model(**hf)).eval()
    lost, more = again.load_state_dict(
        {name: torch.from_numpy(array) for name, array in rows.items()}, strict=False
    )
    assert not more and set(lost) <= {"lm_head.weight"}
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


# transformers reads no file of Gemma 1, no bias of a Llama and no window of Mistral, and takes 128
# for the heads of every Qwen3.
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_transformers_reads_the_same(kind, tmp_path):
    model = make_model(kind, **({"head_dim": 128} if kind == "qwen3" else {}))
    if kind == "gemma2":
        model.config.attn_logit_softcapping = 50.0  # transformers does not read it
    more = dict(query_pre_attn_scalar=256) if kind in _GLOBAL_EVERY else {}  # nor that
    path = write_model(tmp_path / "model.gguf", model, kind, quant="Q8_0")
    fields = dict(gguf_file=path.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **fields)
    hf = read_config(path) | more
    if kind == "qwen2":
        assert hf.pop("head_dim") == 8  # their config of Qwen 2 has no such field
    assert shaped_by(hf) == shaping(theirs.config)
    rows = read_all(path)
    for name, array in saved(theirs).items():
        np.testing.assert_allclose(rows.pop(name), array, rtol=0, atol=1e-6, err_msg=name)
    assert not rows


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_that_can_be_written(quant, tmp_path):
    model = make_model("llama", hidden_size=64, num_attention_heads=4)
    path = write_model(tmp_path / "model.gguf", model, "llama", quant=quant)
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(quant, "float32")
    steps = {"F16": 2**-10, "BF16": 2**-7, "Q8_0": 2**-7, "Q5_0": 2**-4, "Q5_1": 2**-4}
    for name, array in saved(model).items():
        with open_weights(path) as weights:
            assert weights.entries[name].dtype == ("float32" if array.ndim < 2 else dtype)
            actual = weights.read(name).astype(np.float32)
        error = np.abs(actual - array).max() / np.abs(array).max()
        assert error < steps.get(quant, 2**-3)
        assert array.ndim < 2 or error > 0


def random_items(kind, rows, items):
    """Draws blocks of a type whose scales are finite. -> bytes [rows, items * size]"""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(0).integers(0, 256, (rows, items * size), np.uint8)
    return data & 0x3F if kind.name not in ("MXFP4", "NVFP4") else data & 0x3


PACKED = [kind for kind in gguf.quants._type_traits if kind.name != "BF16"]


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_every_packed_type_is_read_in_parts_as_in_whole(kind, tmp_path):
    from transformers.integrations.gguf.dequant import GGML_NAME, dequantize

    numbers, _ = gguf.GGML_QUANT_SIZES[kind]
    model, path = make_model("llama"), tmp_path / "model.gguf"
    data = random_items(kind, 64, 9)

    def more(writer):
        for name in ("attn_q", "ffn_up"):
            writer.add_tensor(f"blk.5.{name}.weight", data, raw_dtype=kind)

    write_model(path, model, "llama", more=more)
    expected = gguf.quants.dequantize(data, kind)
    with open_weights(path) as weights:
        name = "model.layers.5.mlp.up_proj.weight"
        assert (weights.entries[name].shape, weights.entries[name].dtype) == (
            (64, 9 * numbers),
            "float32",
        )
        np.testing.assert_array_equal(weights.read(name), expected)
        if kind in GGML_NAME:
            theirs = dequantize(torch.from_numpy(data.reshape(-1)), int(kind)).numpy()
            np.testing.assert_allclose(expected.reshape(-1), theirs.reshape(-1), rtol=1e-6)
        rows, columns = slice(3, 41), slice(numbers - 5, 7 * numbers + 3)
        np.testing.assert_array_equal(
            weights.read_block(name, rows, columns), expected[rows, columns]
        )
        name = "model.layers.5.self_attn.q_proj.weight"
        whole = expected.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(expected.shape)
        for rows in (slice(0, 64), slice(3, 41), slice(17, 18)):
            block = weights.read_block(name, rows, columns)
            assert block.flags.c_contiguous
            np.testing.assert_array_equal(block, whole[rows, columns])


@pytest.mark.long
def test_a_released_file_has_the_numbers_and_names_of_its_model(smollm):
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm).tensors}
    unpacked = lambda name: gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
    expected = {
        "model.embed_tokens.weight": unpacked("token_embd.weight"),
        "model.norm.weight": unpacked("output_norm.weight"),
    }
    for i in (0, 29):
        prefix = f"model.layers.{i}."
        for name, ours in (
            ("attn_norm", "input_layernorm"), ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"), ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"),
        ):  # fmt: skip
            expected[f"{prefix}{ours}.weight"] = unpacked(f"blk.{i}.{name}.weight")
        for name, heads in (("q", 9), ("k", 3)):
            rows = unpacked(f"blk.{i}.attn_{name}.weight")
            turned = rows.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(rows.shape)
            expected[f"{prefix}self_attn.{name}_proj.weight"] = turned
    with open_weights(smollm) as weights:
        assert len(weights.entries) == len(theirs) == 272
        for name, array in expected.items():
            np.testing.assert_array_equal(weights.read(name), array, err_msg=name)
    theirs = transformers.AutoConfig.from_pretrained(smollm.parent, gguf_file=smollm.name)
    assert shaped_by(read_config(smollm)) == shaping(theirs)


# -- the turns of positions


def turns(tmp_path, more, kind="llama", **changes):
    model = make_model(kind, **changes)
    return read_config(write_model(tmp_path / "model.gguf", model, kind, more=more))


def test_scaled_turns(tmp_path):
    def more(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(10)

    assert turns(tmp_path, more)["rope_parameters"] == dict(
        rope_theta=50000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=10
    )

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    assert turns(tmp_path, linear, "gemma3")["rope_parameters"] == {
        "full_attention": dict(rope_theta=1e6, rope_type="linear", factor=8.0),
        "sliding_attention": dict(rope_theta=1e4, rope_type="default"),
    }


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"scaling.factor": 4.0}, 4.0),  # what names no type is linear
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.type": "linear"}, 1.0),
        ({"scaling.factor": 4.0, "scale_linear": 2.0}, 4.0),
        ({"scaling.factor": 0.0, "scale_linear": 2.0}, 1.0),
        ({"scaling.type": "linear", "scale_linear": 2.0}, 2.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0),
        ({"scaling.type": "none", "scale_linear": 4.0}, 1.0),
    ],
)
def test_turns_are_scaled_as_llama_cpp_scales_them(tmp_path, fields, factor):
    """As src/llama-model.cpp reads rope.scaling.type, and then a factor under either name."""

    def more(writer):
        for name, value in fields.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(f"llama.rope.{name}", value)

    rope = turns(tmp_path, more)["rope_parameters"]
    scaled = dict(rope_type="linear", factor=factor) if factor != 1 else dict(rope_type="default")
    assert rope == dict(rope_theta=50000.0) | scaled


def write_factors(writer, block):
    """Adds the factors that transformers' turns of a config have."""
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=block)
    plain = 1.0 / block["rope_theta"] ** (np.arange(0, 64, 2) / 64)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    add_tensor(writer, "rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_says_its_scaling_by_factors(tmp_path, factor):
    block = dict(
        rope_type="llama3", rope_theta=500000.0, factor=factor, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192,
    )  # fmt: skip
    fields = dict(head_dim=64, rope_parameters=block)
    rope = turns(tmp_path, lambda writer: write_factors(writer, block), **fields)["rope_parameters"]
    assert rope.pop("factor") == pytest.approx(factor)
    assert rope == {k: v for k, v in block.items() if k != "factor"}
    with open_weights(tmp_path / "model.gguf") as weights:
        assert "rope_freqs.weight" not in weights.entries

    def both(writer):
        write_factors(writer, block)
        writer.add_rope_scaling_factor(2.0)

    with pytest.raises(InputError, match="factor=2.0, but only 1 .with rope_freqs"):
        turns(tmp_path, both, **fields)
    other = block | dict(low_freq_factor=2.0)
    with pytest.raises(InputError, match="rope_freqs.weight=.* of Llama 3.1 and later"):
        turns(tmp_path, lambda writer: write_factors(writer, other), **fields)


def test_a_window_beside_biases_is_refused(tmp_path):
    """No class of transformers has both: the biases would be left out."""
    assert turns(tmp_path, lambda _: None, "llama-bias")["attention_bias"]
    with pytest.raises(InputError, match="blk.0.attn_q.bias, but .* without biases"):
        turns(tmp_path, lambda writer: writer.add_sliding_window(7), "llama-bias")


def test_a_turn_ends_a_text_too(tmp_path):
    assert turns(tmp_path, lambda _: None)["eos_token_id"] == 2
    assert turns(tmp_path, lambda writer: writer.add_eot_token_id(2))["eos_token_id"] == 2
    assert turns(tmp_path, lambda writer: writer.add_eot_token_id(7))["eos_token_id"] == [2, 7]


def test_layers_with_a_window_are_told_apart(tmp_path):
    flags = [True, False] * 3 + [True]
    pattern = lambda value: lambda writer: writer.add_sliding_window_pattern(value)
    kinds = {True: "sliding_attention", False: "full_attention"}
    assert turns(tmp_path, pattern(flags), "gemma3")["layer_types"] == [kinds[f] for f in flags]
    every = turns(tmp_path, pattern(2), "gemma3")["layer_types"]
    assert every == [kinds[f] for f in flags]


@pytest.mark.parametrize(("kind", "layers", "scalar"), [("gemma2", 46, 8), ("gemma3", 62, 8)])
def test_gemmas_of_27b_scale_their_scores_by_another_number(tmp_path, kind, layers, scalar):
    hf = turns(tmp_path, lambda _: None, kind, num_hidden_layers=layers, intermediate_size=2)
    assert hf["query_pre_attn_scalar"] == scalar


def test_a_saved_backbone_gets_the_tokenizer_of_the_file(smollm, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [path.name for path in _tokenizer_files(smollm)]
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
