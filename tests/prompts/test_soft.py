"""Soft prompt tuning: starting values, warm starts, the rows it injects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal, make_batch

from jaxprompt.errors import InputError
from jaxprompt.prompts import make_prompt
from jaxprompt.prompts.soft import warm_start
from jaxprompt.types import Dims

DIMS = Dims(vocab=53, width=16, embed=12, layers=2, heads=2, head_dim=8, max_len=40)
EMBED = np.random.default_rng(0).normal(size=(53, 12)).astype(np.float32)


def start(**fields):
    prompt = make_prompt("soft", DIMS, **fields)
    args = make_batch(rows=3), jnp.asarray(EMBED)
    return prompt, prompt.init(jax.random.key(0), *args, deterministic=True)["params"], args


def test_injects_its_rows_as_wide_as_the_embeddings():
    prompt, params, args = start(length=4)
    assert params["table"].shape == (4, 12)
    injection = prompt.apply({"params": params}, *args, deterministic=False)
    assert_equal(injection.encoder.slots, params["table"][None])
    assert injection.encoder.prefix is None
    assert prompt.num_slots() == 4 and prompt.position_shift() == 0


def test_normal_start():
    table = start(length=1000, scale=0.05)[1]["table"]
    assert abs(float(table.std()) - 0.05) < 0.002 and abs(float(table.mean())) < 0.002


def test_uniform_start_is_symmetric():
    table = start(length=1000, start="uniform")[1]["table"]
    assert -0.5 <= float(table.min()) < -0.49 and 0.49 < float(table.max()) <= 0.5
    assert abs(float(table.std()) - 12**-0.5) < 0.005 and abs(float(table.mean())) < 0.01


def test_warm_start_is_the_mean_of_each_rows_tokens():
    params = start(length=3)[1]
    before = np.array(params["table"])
    found = warm_start(params, EMBED, [[5], [7, 9], [1, 1, 4]])
    expected = [EMBED[5], (EMBED[7] + EMBED[9]) / 2, (2 * EMBED[1] + EMBED[4]) / 3]
    np.testing.assert_allclose(found["table"], expected, rtol=1e-6)
    assert found["table"].dtype == np.float32
    assert_equal(params["table"], before)


def test_warm_start_reads_bfloat16_tables():
    params = start(length=1)[1]
    found = warm_start(params, np.asarray(jnp.asarray(EMBED, jnp.bfloat16)), [[5]])
    assert found["table"].dtype == np.float32
    np.testing.assert_allclose(found["table"][0], EMBED[5], rtol=1e-2)


def test_warm_start_needs_a_row_for_each():
    with pytest.raises(InputError, match="2 rows of tokens for a prompt of length 3"):
        warm_start(start(length=3)[1], EMBED, [[5], [6]])
