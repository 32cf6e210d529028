"""What a prompt adds, as constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import draw_params, make_batch

from jaxprompt.models.folding import as_constants
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Dims

DIMS = Dims(
    vocab=53, width=16, embed=12, layers=4, heads=2, head_dim=8, max_len=40, decoder_layers=3
)
ARGS = make_batch(rows=2, family="t5"), jnp.zeros((53, 12))


def constants(name, **fields):
    """-> the params that are drawn, the constant method and its params"""
    prompt = make_prompt(name, DIMS, **fields)
    params = draw_params(prompt, *ARGS, deterministic=True)
    streams = jax.device_get(prompt.apply({"params": params}, *ARGS, deterministic=True))
    return params, *as_constants(prompt, streams)


@pytest.mark.parametrize("shift", [True, False])
def test_each_stream_moves_by_its_own_length(shift):
    """The text by that of the encoder's prefix, what is fed by that of the decoder's."""
    _, constant, _ = constants("prefix", length=2, decoder=3, cross=1, shift=shift)
    assert (constant.shift, constant.shift_decoder) == ((2, 3) if shift else (0, 0))
    assert (constant.position_shift(), constant.decoder_shift()) == ((2, 3) if shift else (0, 0))


def test_a_prefix_is_that_of_its_layers():
    params, constant, arrays = constants(
        "prefix", length=2, layers="2-3", decoder=3, cross=1, cross_layers="3"
    )
    fields = "length first last decoder_length decoder_first decoder_last cross_first cross_last"
    assert [getattr(constant, name) for name in fields.split()] == [2, 1, 3, 3, 0, 3, 2, 3]
    for name in ("", "decoder_", "cross_"):
        k, v = np.moveaxis(np.asarray(params[f"{name}table"]), 1, 0)
        np.testing.assert_array_equal(arrays[f"{name}k"], k)
        np.testing.assert_array_equal(arrays[f"{name}v"], v)
        assert arrays[f"{name}k"].dtype == np.float32


def test_soft_tokens_are_those_of_each_stream():
    params, constant, arrays = constants("soft", length=4, decoder=2)
    assert (constant.slots, constant.decoder_slots, constant.rows) == (4, 2, 0)
    np.testing.assert_array_equal(arrays["slots"], params["table"][:4])
    np.testing.assert_array_equal(arrays["decoder_slots"], params["table"][4:])
