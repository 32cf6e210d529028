"""An exported prompt injects its constants."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal, draw_params, make_batch

from jaxprompt.errors import InputError
from jaxprompt.prompts import make_prompt
from jaxprompt.types import Dims, Injection

DIMS = Dims(vocab=53, width=16, embed=12, layers=4, heads=2, head_dim=8, max_len=40)
ARGS = make_batch(rows=3), jnp.zeros((53, 12))


def make(dims=DIMS, **fields):
    prompt = make_prompt("constant", dims, **fields)
    params = draw_params(prompt, *ARGS, deterministic=True)
    return prompt, params, prompt.apply({"params": params}, *ARGS, deterministic=True)


@pytest.mark.parametrize("first, last", [(0, 4), (1, 3), (3, 4)])
def test_prefix_stands_in_its_layers(first, last):
    prompt, params, injection = make(length=3, first=first, last=last, shift=2)
    assert {n: x.shape for n, x in params.items()} == dict.fromkeys("kv", (last - first, 3, 2, 8))
    prefix = injection.encoder.prefix
    inside = np.arange(first, last)
    for actual, stored in ((prefix.k, params["k"]), (prefix.v, params["v"])):
        assert actual.shape == (4, 1, 3, 2, 8)
        assert_equal(actual[inside, 0], stored)
    np.testing.assert_array_equal(np.flatnonzero(prefix.mask.all((1, 2))), inside)
    np.testing.assert_array_equal(np.flatnonzero(prefix.mask.any((1, 2))), inside)
    assert injection.encoder.slots is None
    assert prompt.position_shift() == 2 and prompt.num_slots() == 0


@pytest.mark.parametrize("shift_decoder", [0, 2])
def test_each_stream_of_an_encoder_decoder_has_its_own(shift_decoder):
    prompt, params, injection = make(
        DIMS._replace(decoder_layers=5), slots=1, length=3, first=1, last=4, decoder_slots=4,
        decoder_length=2, decoder_first=0, decoder_last=2, shift_decoder=shift_decoder,
        cross_length=5, cross_first=4, cross_last=5,
    )  # fmt: skip
    assert {name: leaf.shape for name, leaf in params.items()} == {
        "slots": (1, 12), "k": (3, 3, 2, 8), "v": (3, 3, 2, 8), "decoder_slots": (4, 12),
        "decoder_k": (2, 2, 2, 8), "decoder_v": (2, 2, 2, 8),
        "cross_k": (1, 5, 2, 8), "cross_v": (1, 5, 2, 8),
    }  # fmt: skip
    assert_equal(injection.decoder.slots, params["decoder_slots"][None])
    decoder_prefix, cross = injection.decoder.prefix, injection.cross.prefix
    assert decoder_prefix.k.shape == (5, 1, 2, 2, 8) and cross.v.shape == (5, 1, 5, 2, 8)
    assert_equal(decoder_prefix.k[:2, 0], params["decoder_k"])
    assert_equal(cross.v[4:, 0], params["cross_v"])
    assert decoder_prefix.mask.all((1, 2)).tolist() == [1, 1, 0, 0, 0]
    assert cross.mask.all((1, 2)).tolist() == [0, 0, 0, 0, 1]
    assert injection.encoder.prefix.positions is None and cross.positions is None
    assert (decoder_prefix.positions is not None) == (shift_decoder > 0)
    assert (prompt.num_decoder_slots(), prompt.decoder_shift()) == (4, shift_decoder)


def test_nothing_is_nothing():
    _, params, injection = make()
    assert not params and injection == Injection()


@pytest.mark.parametrize("field", ["length", "slots", "shift_decoder", "rows"])
def test_a_negative_count_is_refused(field):
    """Of an edited export; shapes would be negative."""
    with pytest.raises(InputError, match=f"prompt.{field}=-1 "):
        make_prompt("constant", DIMS, **{field: -1})
