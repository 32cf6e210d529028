"""An exported prompt injects its constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal, fill, make_batch

from jaxprompt.prompts import make_prompt
from jaxprompt.types import Dims

DIMS = Dims(vocab=53, width=16, embed=12, layers=4, heads=2, head_dim=8, max_len=40)
ARGS = make_batch(rows=3), jnp.zeros((53, 12))


def make(**fields):
    prompt = make_prompt("fixed", DIMS, **fields)
    init = lambda: prompt.init(jax.random.key(0), *ARGS, deterministic=True)
    params = fill(jax.eval_shape(init).get("params", {}))
    return prompt, params, prompt.apply({"params": params}, *ARGS, deterministic=True)


@pytest.mark.parametrize("first, last", [(0, 4), (1, 3), (3, 4)])
def test_prefix_stands_in_its_layers(first, last):
    prompt, params, injection = make(length=3, first=first, last=last, shift=2)
    assert {n: x.shape for n, x in params.items()} == dict.fromkeys("kv", (last - first, 3, 2, 8))
    prefix = injection.encoder.prefix
    inside = np.arange(first, last)
    for found, held in ((prefix.k, params["k"]), (prefix.v, params["v"])):
        assert found.shape == (4, 1, 3, 2, 8)
        assert_equal(found[inside, 0], held)
    np.testing.assert_array_equal(np.flatnonzero(prefix.mask.all((1, 2))), inside)
    np.testing.assert_array_equal(np.flatnonzero(prefix.mask.any((1, 2))), inside)
    assert injection.encoder.slots is None
    assert prompt.position_shift() == 2 and prompt.num_slots() == 0


def test_slots_are_its_rows():
    prompt, params, injection = make(slots=5)
    assert params["slots"].shape == (5, 12)
    assert_equal(injection.encoder.slots, params["slots"][None])
    assert injection.encoder.prefix is None
    assert prompt.num_slots() == 5 and prompt.position_shift() == 0


def test_nothing_is_nothing():
    _, params, injection = make()
    assert not params and injection.encoder == (None, None)
