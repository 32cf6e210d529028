"""P-tuning v2: intervals, masked layers, reparameterisation, dropout, shift."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, draw_params, make_batch

from jaxprompt.errors import InputError
from jaxprompt.layers.prefix import parse_layers
from jaxprompt.prompts import InitSource, make_prompt
from jaxprompt.types import Dims

DIMS = Dims(vocab=53, width=16, embed=16, layers=4, heads=2, head_dim=8, max_len=40)
BATCH = make_batch(rows=5, shift=3)


def inject(prompt, params, **options):
    options = {"deterministic": True} | options
    return prompt.apply({"params": params}, BATCH, jnp.zeros((53, 16)), **options).encoder.prefix


def draw(prompt):
    return draw_params(prompt, BATCH, jnp.zeros((53, 16)), deterministic=True)


@pytest.mark.parametrize(
    "text, interval",
    [("", (0, 24)), ("17-24", (16, 24)), ("1-24", (0, 24)), ("3-3", (2, 3)), ("7", (6, 7))],
)
def test_intervals(text, interval):
    assert parse_layers(text, 24) == interval


@pytest.mark.parametrize(
    "text", ["0-3", "3-2", "1-25", "25", "a-b", "1-", "-4", "-", "1-2-3", "1,2", " 1-2", "²"]
)
def test_intervals_that_leave_the_model_are_errors(text):
    with pytest.raises(InputError) as error:
        parse_layers(text, 24)
    assert f"{text!r} must be FIRST-LAST" in str(error.value)


@pytest.mark.parametrize("layers, first, last", [("", 0, 4), ("2-3", 1, 3)])
def test_prefix_is_the_table_and_masked_in_other_layers(layers, first, last):
    prompt = make_prompt("prefix", DIMS, length=3, layers=layers)
    params = draw(prompt)
    assert params["table"].shape == (last - first, 2, 3, 2, 8)
    injection, inside = inject(prompt, params), np.arange(4)
    inside = (inside >= first) & (inside < last)
    assert injection.mask.shape == (4, 1, 3)
    np.testing.assert_array_equal(injection.mask.all((1, 2)), inside)
    np.testing.assert_array_equal(injection.mask.any((1, 2)), inside)
    assert_equal(injection.k[inside, 0], params["table"][:, 0])
    assert_equal(injection.v[inside, 0], params["table"][:, 1])


def test_reparameterisation_is_a_two_layer_tanh_mlp():
    """Dense rows give [K_0 | V_0 | K_1 | V_1 | ...] for each prompt token."""
    prompt = make_prompt("prefix", DIMS, length=3, hidden=6, layers="2-4")
    params = draw(prompt)
    shapes = jax.tree.map(jnp.shape, params["mlp"])
    assert shapes == {
        "rows": (3, 16),
        "down": {"kernel": (16, 6), "bias": (6,)},
        "up": {"kernel": (6, 3 * 2 * 16), "bias": (3 * 2 * 16,)},
    }
    injection = inject(prompt, params)
    p = jax.tree.map(np.asarray, params["mlp"])
    inner = np.tanh(p["rows"] @ p["down"]["kernel"] + p["down"]["bias"])
    flat = inner @ p["up"]["kernel"] + p["up"]["bias"]  # [P, L * 2 * H]
    for layer in range(3):
        for which, part in enumerate((injection.k, injection.v)):
            start = (2 * layer + which) * 16
            for head in range(2):
                expected = flat[:, start + 8 * head : start + 8 * head + 8]
                assert_close(part[layer + 1, 0, :, head], expected)


@pytest.mark.long_cases("6")
@pytest.mark.parametrize("hidden", [0, 6])
def test_initial_values(hidden):
    prompt = make_prompt("prefix", DIMS, length=200, hidden=hidden, scale=0.05)
    params = prompt.init(jax.random.key(0), BATCH, jnp.zeros((53, 16)), deterministic=True)[
        "params"
    ]
    table = params["mlp"]["rows"] if hidden else params["table"]
    assert abs(float(table.std()) - 0.05) < 0.003
    assert abs(float(table.mean())) < 0.003


def test_a_prefix_of_zeros():
    """It takes its share of the attention, and gives nothing for it."""
    prompt = make_prompt("prefix", DIMS, length=3, start="zero")
    params = prompt.init(jax.random.key(0), BATCH, jnp.zeros((53, 16)), deterministic=True)
    injection = inject(prompt, params["params"])
    assert not injection.k.any() and not injection.v.any() and injection.mask.all()


def keys_of(ids):
    """The key of a token is its id, negative in layer 1; its value is ten times that."""
    k = np.array(ids, np.float32)[:, None, None] * np.ones((len(ids), 2, 8))
    k = np.stack([k, -k, k, -k])
    return {stream: (k, 10 * k) for stream in ("encoder", "decoder", "cross")}


def test_a_prefix_starts_from_the_first_tokens_of_its_text(bert):
    """In each attention by its length and its layers, one key after the other."""
    source = InitSource(bert, 0, *[None] * 7, keys_of)
    prompt = make_prompt(
        "prefix", DIMS._replace(vocab=2000, decoder_layers=4), length=2, layers="2-3", decoder=3,
        start="text", text="the film was not a success",
    )  # fmt: skip
    params = prompt.begin({"table": None, "decoder_table": None}, source)
    the, film, was = bert.convert_tokens_to_ids(["the", "film", "was"])
    assert params.keys() == {"table", "decoder_table"}
    assert params["table"].shape == (2, 2, 2, 2, 8)
    assert params["table"][..., 0, 0].tolist() == [
        [[-the, -film], [-10 * the, -10 * film]], [[the, film], [10 * the, 10 * film]]
    ]  # fmt: skip
    assert params["decoder_table"][:, 0, :, 0, 0].tolist() == [
        [the, film, was], [-the, -film, -was], [the, film, was], [-the, -film, -was]
    ]  # fmt: skip


def test_behind_a_short_text_a_prefix_starts_from_words_drawn_by_the_seed(bert):
    tokens = bert.convert_ids_to_tokens(range(2000))
    words = [i for i, token in enumerate(tokens) if not token.startswith("[")]
    words += [tokens.index("[")]  # [PAD], [CLS] and [unused0] are no words
    dims, ids = DIMS._replace(vocab=2000), {}
    for seed in (0, 1):
        source = InitSource(bert, seed, *[None] * 7, keys_of)
        prompt = make_prompt("prefix", dims, length=4, start="text", text="the film")
        ids[seed] = prompt.begin({"table": None}, source)["table"][0, 0, :, 0, 0].tolist()
        chosen = np.random.RandomState(seed).choice(np.sort(words), 2, replace=False)
        assert ids[seed] == [*bert.convert_tokens_to_ids(["the", "film"]), *chosen]
    assert ids[0] != ids[1]


@pytest.mark.long
def test_dropout_is_drawn_for_every_example():
    prompt = make_prompt("prefix", DIMS, length=3, layers="1-3", dropout=0.25)
    params = draw(prompt)
    run = functools.partial(inject, prompt, params, deterministic=False)
    actual, again, other = (run(rngs={"dropout": jax.random.key(seed)}) for seed in (0, 0, 1))
    assert actual.k.shape == (4, 5, 3, 2, 8) and actual.mask.shape == (4, 1, 3)
    assert_equal(actual, again)
    assert (actual.k != other.k).any()
    for which, part in enumerate((actual.k, actual.v)):
        table = np.asarray(params["table"])[:, which, None]
        nonzero = np.asarray(part[:3]) != 0
        np.testing.assert_allclose(part[:3], np.where(nonzero, table / 0.75, 0), rtol=1e-6)
        assert abs(nonzero.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / nonzero.size)
        rows = {nonzero[:, row].tobytes() for row in range(5)}
        assert len(rows) == 5
    assert inject(prompt, params).k.shape[1] == 1


def test_shift():
    assert make_prompt("prefix", DIMS, length=7).position_shift() == 7
    assert make_prompt("prefix", DIMS, length=7, shift=False).position_shift() == 0
    assert make_prompt("prefix", DIMS, length=7).num_slots() == 0
