"""Loading as codes: those of the numbers on every mesh, or the file's own."""

import jax
import numpy as np
import pytest
import transformers
from tiny import assert_equal, quantize_params

from jaxprompt.convert.folder import read_config
from jaxprompt.convert.load import load_backbone
from jaxprompt.errors import InputError
from jaxprompt.layers.quantized import dequantize_tree
from jaxprompt.parallel.sharding import check_divisible, make_placement
from jaxprompt.tree import SEPARABLE, count, flatten, is_layer_list, stack_layers

torch = pytest.importorskip("torch")

VOCAB = 53  # two devices do not divide it
BERT = dict(
    vocab_size=VOCAB, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=40,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=64, d_kv=32, num_heads=2, d_ff=64, num_layers=1,
    num_decoder_layers=2, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
)  # fmt: skip
MODELS = {
    "bert": ("BertForPreTraining", BERT),
    "gpt2": ("GPT2LMHeadModel", dict(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2)),
    "t5": ("T5ForConditionalGeneration", T5),
    "modernbert": ("ModernBertForMaskedLM", BERT | dict(pad_token_id=0)),
}
MESHES = {"one": (1, 1, False), "tensor": (1, 2, False), "fsdp": (2, 1, True), "both": (2, 2, True)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """-> a folder with one of every family"""
    root = tmp_path_factory.mktemp("saved")
    for family, (name, sizes) in MODELS.items():
        torch.manual_seed(0)
        model = getattr(transformers, name)
        model(model.config_class(**sizes)).save_pretrained(root / family)
    return root


def load(folder, family, **how):
    return load_backbone(folder / family, family, read_config(folder / family), **how)


@pytest.mark.default_cases(
    "bert-int4-both", "gpt2-int8-tensor", "modernbert-fp8-fsdp", "t5-int4-one"
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "family, quantize", [*zip(MODELS, ("int4", "int8", "int4", "fp8"), strict=True)]
)
def test_codes_are_those_of_the_numbers_wherever_they_lie(saved, family, quantize, mesh):
    data, model, fsdp = MESHES[mesh]
    placement = make_placement(data, model, fsdp=fsdp, devices=jax.devices()[: data * model])
    plain = load(saved, family, placement=placement)
    loaded = load(saved, family, quantize=quantize, placement=placement)
    check_divisible(placement, flatten({"backbone": loaded.params}))
    expected = quantize_params(jax.device_get(plain.params), quantize)
    assert_equal(jax.device_get(loaded.params), expected)
    separate = load(saved, family, quantize=quantize, placement=placement, separate_layers=True)
    flat = flatten({"backbone": separate.params})
    check_divisible(placement, flat)
    assert separate.report == loaded.report
    for name, shardings in placement.param_shardings(flat).items():
        for leaf, sharding in zip(*map(jax.tree.leaves, (flat[name], shardings)), strict=True):
            assert leaf.sharding == sharding
        assert is_layer_list(flat[name]) == (name.split("/")[1] in SEPARABLE)
    assert_equal(jax.device_get(stack_layers(separate.params)), expected)
    assert count(loaded.params) == count(plain.params)
    assert loaded.report.bytes == sum(x.nbytes for x in jax.tree.leaves(loaded.params))
    fingerprint = loaded.report.fingerprint
    assert fingerprint == f"{quantize}-{plain.report.fingerprint}"
    assert fingerprint == load(saved, family, quantize=quantize).report.fingerprint
    query = flatten({"backbone": loaded.params})
    name = next(n for n in query if n.endswith(("up/kernel/codes", "gate/kernel/codes")))
    assert query[name].sharding.is_fully_replicated == (mesh == "one")


def test_a_divided_residual_stream_is_quantized_after_the_division(saved):
    plain = load(saved, "t5", rescale=10.0)
    loaded = load(saved, "t5", rescale=10.0, quantize="int8")
    assert_equal(loaded.params, quantize_params(plain.params, "int8"))


def test_sizes_that_blocks_do_not_divide_are_refused(tmp_path):
    config = transformers.BertConfig(**BERT | dict(hidden_size=48, num_attention_heads=2))
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match=r"quantize=int4 .* divisible by 32, but"):
        load(tmp_path, "bert", quantize="int4")


def test_numbers_that_float16_does_not_hold_are_named(tmp_path):
    model = transformers.BertForPreTraining(transformers.BertConfig(**BERT))
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight[3, 5] = 1e6
    model.save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match=r"layer.1.output.dense.weight .* float16.*quantize=none"):
        load(tmp_path, "bert", quantize="int4")


@pytest.fixture
def gguf_of(tmp_path):
    from gguf_files import make_model, write_model

    def write(quant):
        sizes = dict(hidden_size=64, num_attention_heads=4, head_dim=32, intermediate_size=128)
        return write_model(
            tmp_path / f"{quant}.gguf", make_model("llama", **sizes), "llama", quant=quant
        )

    return write


@pytest.mark.parametrize(
    "quant, quantize", [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q4_0", "int8"), ("Q4_1", "int8"),
                        ("Q8_0", "int8")],
)  # fmt: skip
def test_blocks_of_a_gguf_file_are_taken_over(gguf_of, quant, quantize):
    path = gguf_of(quant)
    plain = load_backbone(path, "llama", read_config(path))
    loaded = load_backbone(path, "llama", read_config(path), quantize=quantize)
    assert_equal(
        jax.jit(dequantize_tree, static_argnums=1)(loaded.params, np.float32), plain.params
    )
    assert loaded.report.requantized == 0


def test_codes_that_are_taken_over_have_a_fingerprint_of_their_own(gguf_of):
    """Those that are made of the same numbers differ from them."""
    int8_file, float_file = gguf_of("Q8_0"), gguf_of("F32")
    numbers, codes, other = (
        load_backbone(path, "llama", read_config(path), quantize=quantize)
        for path, quantize in ((int8_file, "none"), (int8_file, "int8"), (int8_file, "int4"))
    )
    assert codes.report.fingerprint != f"int8-{numbers.report.fingerprint}"
    # 4 bits cannot take 8 over, so that these are made of the numbers.
    assert other.report.fingerprint == f"int4-{numbers.report.fingerprint}"
    plain = load_backbone(
        float_file, "llama", read_config(float_file), quantize="int8"
    ).report.fingerprint
    bare = load_backbone(float_file, "llama", read_config(float_file)).report.fingerprint
    assert plain == f"int8-{bare}"


def test_codes_of_a_gguf_file_lie_on_a_mesh(gguf_of):
    path = gguf_of("Q4_1")
    placement = make_placement(2, 2, fsdp=True, devices=jax.devices()[:4])
    plain, actual = (
        load_backbone(path, "llama", read_config(path), quantize="int4", placement=where)
        for where in (None, placement)
    )
    assert_equal(jax.device_get(actual.params), plain.params)
    assert actual.report.fingerprint == plain.report.fingerprint


def test_what_has_more_bits_in_the_file_is_quantized_anew(gguf_of):
    path = gguf_of("Q8_0")
    plain = load_backbone(path, "llama", read_config(path))
    loaded = load_backbone(path, "llama", read_config(path), quantize="int4")
    assert_equal(loaded.params, quantize_params(plain.params, "int4"))
    assert loaded.report.requantized == 2 * 7 + 2  # layers, and both tables
