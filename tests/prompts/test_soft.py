"""Soft prompt tuning: starting values, warm starts, the rows it injects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_equal, make_batch

from jaxprompt.errors import InputError
from jaxprompt.prompts import InitSource, make_prompt
from jaxprompt.prompts.soft import warm_start
from jaxprompt.types import Dims

DIMS = Dims(vocab=53, width=16, embed=12, layers=2, heads=2, head_dim=8, max_len=40)
T5_DIMS = DIMS._replace(decoder_layers=3)
EMBED = np.random.default_rng(0).normal(size=(53, 12)).astype(np.float32)


def start(dims=DIMS, **fields):
    prompt = make_prompt("soft", dims, **fields)
    args = make_batch(rows=3), jnp.asarray(EMBED)
    return prompt, prompt.init(jax.random.key(0), *args, deterministic=True)["params"], args


@pytest.mark.parametrize("length, decoder", [(4, 3), (0, 3), (4, 0)])
def test_the_last_rows_are_the_decoders(length, decoder):
    prompt, params, args = start(T5_DIMS, length=length, decoder=decoder)
    assert params["table"].shape == (length + decoder, 12)
    injection = prompt.apply({"params": params}, *args, deterministic=False)
    rows = params["table"][None]
    parts = (injection.encoder, rows[:, :length]), (injection.decoder, rows[:, length:])
    for stream, stream_rows in parts:
        if stream_rows.shape[1]:
            assert_equal(stream.slots, stream_rows)
        else:
            assert stream.slots is None
    assert (prompt.num_slots(), prompt.num_decoder_slots()) == (length, decoder)
    assert prompt.decoder_shift() == 0
    warm = warm_start(params, EMBED, [[i] for i in range(length + decoder)])
    assert_equal(warm["table"], EMBED[: length + decoder])


def test_normal_start():
    table = start(length=1000, scale=0.05)[1]["table"]
    assert abs(float(table.std()) - 0.05) < 0.002 and abs(float(table.mean())) < 0.002


def test_uniform_start_is_symmetric():
    table = start(length=1000, start="uniform")[1]["table"]
    assert -0.5 <= float(table.min()) < -0.49 and 0.49 < float(table.max()) <= 0.5
    assert abs(float(table.std()) - 12**-0.5) < 0.005 and abs(float(table.mean())) < 0.01


def test_the_seed_draws_the_words_that_rows_start_from(bert):
    """From the first `top` of the vocabulary without [PAD], [CLS] and the like."""
    tokens, tables = bert.convert_ids_to_tokens(range(1100)), {}
    words = [i for i, token in enumerate(tokens) if token == "[" or not token.startswith("[")]
    embed = lambda ids: np.float32(ids)[:, None] * np.ones(12, np.float32)
    dims = DIMS._replace(vocab=2000)
    for seed in (0, 1):
        prompt, params, _ = start(dims, length=5, start="vocab", top=1100)
        source = InitSource(bert, seed, None, None, embed, *[None] * 5)
        tables[seed] = prompt.begin(params, source)["table"][:, 0].tolist()
        chosen = np.random.RandomState(seed).choice(words, 5, replace=False)
        assert tables[seed] == chosen.tolist()
    assert tables[0] != tables[1]


def test_warm_start_is_the_mean_of_each_rows_tokens():
    params = start(length=3)[1]
    before = np.array(params["table"])
    init_params = warm_start(params, EMBED, [[5], [7, 9], [1, 1, 4]])
    expected = [EMBED[5], (EMBED[7] + EMBED[9]) / 2, (2 * EMBED[1] + EMBED[4]) / 3]
    np.testing.assert_allclose(init_params["table"], expected, rtol=1e-6)
    assert init_params["table"].dtype == np.float32
    assert_equal(params["table"], before)


def test_warm_start_reads_bfloat16_tables():
    params = start(length=1)[1]
    init_params = warm_start(params, np.asarray(jnp.asarray(EMBED, jnp.bfloat16)), [[5]])
    assert init_params["table"].dtype == np.float32
    np.testing.assert_allclose(init_params["table"][0], EMBED[5], rtol=1e-2)


def test_warm_start_needs_a_row_for_each():
    with pytest.raises(InputError, match="2 lists of tokens for 3 soft tokens"):
        warm_start(start(length=3)[1], EMBED, [[5], [6]])
