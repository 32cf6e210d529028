"""Blocks of rotary positions: what transformers computes of them, and one line where it cannot."""

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxprompt.convert.rope import read_rotary
from jaxprompt.errors import InputError

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=100.0)


def read(**fields):
    return read_rotary({"rope_parameters": YARN | fields}, 8, 40)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(mscale="a", mscale_all_dim=1.0), "has mscale='a', which must be above 0"),
        (dict(attention_factor=-1.0), "has attention_factor=-1.0, which must be above 0"),
        (dict(beta_fast=0), "has beta_fast=0, which must be above 0"),
    ],
)
def test_a_yarn_that_cannot_be_computed_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        read(**fields)


def test_a_scale_of_0_is_none():
    assert read(mscale=0, mscale_all_dim=0.0) == read() == read(mscale=0.7)
    assert read(mscale=0.7, mscale_all_dim=1.0) != read()


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=100.0,
    original_max_position_embeddings=1024,
)  # fmt: skip


@pytest.mark.parametrize("block", [LLAMA3, YARN | {"original_max_position_embeddings": 1024}])
def test_the_trained_length_of_the_whole_config_stands_before_that_of_the_block(block):
    fields = dict(max_position_embeddings=2048, original_max_position_embeddings=64)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, rope_parameters=dict(block), **fields
    )
    expected, factor = ROPE_INIT_FUNCTIONS[block["rope_type"]](config, "cpu")
    actual = read_rotary({"rope_parameters": dict(block), **fields}, 16, 2048)
    np.testing.assert_allclose(actual.frequencies, expected, rtol=1e-5)
    assert actual.scale == pytest.approx(factor)
    without = read_rotary({"rope_parameters": dict(block)}, 16, 2048)
    assert np.abs(np.array(actual.frequencies) - without.frequencies).max() > 0.01


@pytest.mark.parametrize(
    "block, message",
    [
        (dict(rope_type="axial"), "rope_type='axial' is not supported"),
        (dict(rope_type="longrope", short_factor=[1.0] * 3), "short_factor=.* a list of 4 numbers"),
        (dict(rope_type="longrope", short_factor=[1.0, 2.0, 3.0, 0]), "a list of 4 numbers above"),
        (dict(rope_type="linear"), "lacks factor, which must be above 0"),
        (dict(rope_type="linear", factor=2.0, beta=1), "rope_type=linear have beta=1, which is no"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 "),
        ("linear", "rope_parameters='linear' must be an object"),
    ],
)
def test_a_block_that_is_not_known_is_refused(block, message):
    with pytest.raises(InputError, match=message):
        read_rotary({"rope_parameters": block}, 8, 40)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("part", [1.0, 0.75])
def test_a_longrope_is_that_of_texts_within_the_trained_length(name, part):
    """Under all names that Phi-3 had for it."""
    pairs = int(16 * part) // 2
    factors = np.linspace(1.0, 3.0, pairs).tolist()
    block = dict(
        type=name, short_factor=factors, long_factor=[9.0] * pairs,
        original_max_position_embeddings=512,
    )  # fmt: skip
    hf = dict(
        model_type="phi3", hidden_size=32, num_attention_heads=2, max_position_embeddings=4096,
        original_max_position_embeddings=512, rope_scaling=block, rope_theta=100.0,
        partial_rotary_factor=part,
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(**(hf | {"rope_scaling": dict(block)}))
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    actual = read_rotary(hf, 16, 4096, part=1.0)
    np.testing.assert_allclose(actual.frequencies, expected, rtol=1e-5)
    assert actual.scale == pytest.approx(scale) and scale > 1.1
    assert actual.limit == 512  # texts beyond it need the long factors


@pytest.mark.parametrize("part", [0.0, 1.5, "a", 0.4])
def test_a_part_of_a_head_that_cannot_rotate_is_refused(part):
    with pytest.raises(InputError, match="partial_rotary_factor=.* in .0, 1. and rotate an even"):
        read_rotary({"partial_rotary_factor": part}, 8, 40, part=0.5)


def test_that_a_yarn_was_tuned_changes_nothing():
    assert read(finetuned=True) == read()


def test_a_block_that_is_for_no_type_of_layer_is_ignored():
    """As transformers loads a Gemma 3 with one block for all."""
    flat = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    for kind in ("full_attention", "sliding_attention"):
        assert read_rotary(flat, 8, 40, kind=kind) == read_rotary({}, 8, 40)
