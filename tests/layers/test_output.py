"""The blockwise softmax against torch: values, gradients, draws, memory and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, assert_equal, jit

from jaxprompt.layers.embed import output_bias
from jaxprompt.layers.output import score_targets
from jaxprompt.parallel.hlo import count_work
from jaxprompt.parallel.sharding import make_placement, with_placement
from jaxprompt.types import ABSENT

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
RNG = np.random.default_rng(0)
B, M, X, V = 8, 7, 6, 53
FEATURES = RNG.normal(size=(B, M, X)).astype(np.float32)
TABLE = RNG.normal(size=(V, X)).astype(np.float32)
BIAS = RNG.normal(size=V).astype(np.float32)
TARGETS = np.where(RNG.random((B, M)) < 0.8, RNG.integers(0, V, (B, M)), -1).astype(np.int32)
SLOPES = RNG.normal(size=(B, M)).astype(np.float32)  # of the positions: a loss weighs them
THERE = TARGETS >= 0


def loss(features, table, bias, targets=TARGETS, slopes=SLOPES, **options):
    scored = score_targets(features, table, bias, targets, **options)
    return jnp.where(targets >= 0, slopes * scored.logp, 0.0).sum(), scored


def gradients(block, features=FEATURES, table=TABLE, bias=BIAS, **options):
    """Gives (loss, scored), and the gradients of all three."""
    function = functools.partial(loss, block=block, **options)
    return jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))(features, table, bias)


@functools.cache
def reference(has_bias):
    """Gives torch's log-probabilities, most likely tokens and gradients."""
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (FEATURES, TABLE, BIAS)]
    features, table, bias = (x.requires_grad_() for x in tensors)
    logits = features @ table.T + (bias if has_bias else 0.0)
    logp = -torch.nn.functional.cross_entropy(
        logits.reshape(-1, V), torch.tensor(TARGETS).long().reshape(-1),
        ignore_index=-1, reduction="none",
    ).reshape(B, M)  # fmt: skip
    (torch.tensor(SLOPES) * logp).sum().backward()
    grads = [features.grad, table.grad] + ([bias.grad] if has_bias else [])
    return logp.detach().numpy(), logits.argmax(-1).numpy(), [g.numpy() for g in grads]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("block", [1, 5, 8, 1000])
def test_values_and_gradients_are_torchs(block, has_bias):
    (total, scored), grads = gradients(block, bias=BIAS if has_bias else None)
    logp, best, expected = reference(has_bias)
    assert_close(np.asarray(scored.logp)[THERE], logp[THERE])
    assert (np.asarray(scored.logp)[~THERE] == ABSENT).all() and not THERE.all()
    assert_equal(scored.hit, (best == TARGETS) & THERE)
    np.testing.assert_allclose(total, (SLOPES * logp).sum(), rtol=1e-5)
    assert_close([g for g in grads if g is not None], expected)
    assert np.abs(grads[0])[~THERE].max() == 0


def test_hits_are_there():
    likely = (FEATURES @ TABLE.T + BIAS).argmax(-1).astype(np.int32)
    assert_equal(score_targets(FEATURES, TABLE, BIAS, likely, block=9).hit, np.ones((B, M), bool))
    least = (FEATURES @ TABLE.T + BIAS).argmin(-1).astype(np.int32)
    assert not score_targets(FEATURES, TABLE, BIAS, least, block=9).hit.any()


def test_bfloat16_is_summed_in_float32():
    """Thousands of equal terms: a sum in bfloat16 would stop growing at 256 of them."""
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16)
    features = jnp.tile(narrow(FEATURES), (60, 12, 1))  # [480, 84, X]
    targets, slopes = np.tile(TARGETS, (60, 12)), np.ones((480, 84), np.float32)
    (_, scored), grads = gradients(999, features, targets=targets, slopes=slopes)
    wide = np.asarray(features, np.float32)
    table = np.asarray(narrow(TABLE), np.float32)
    (_, expected), expected_grads = gradients(999, wide, table, targets=targets, slopes=slopes)
    assert scored.logp.dtype == jnp.float32
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
    assert_close(scored.logp, expected.logp)
    assert_close(grads[2], expected_grads[2])
    assert_close(grads[:2], expected_grads[:2], rtol=5e-3)


# -- draws ----------------------------------------------------------------------------------------


CHANCES = RNG.random((B, M), np.float32)


def draw(features, table, bias, chances, block=9):
    targets = np.zeros(chances.shape, np.int32)
    function = functools.partial(score_targets, block=block)
    return np.asarray(jit(function)(features, table, bias, targets, uniforms=chances).sampled)


@pytest.mark.parametrize("vocab", [5, 53, 128, 300])
def test_a_draw_is_where_the_chance_falls(vocab):
    """Against a running sum in float64, for chances from 0 to just below 1."""
    rng = np.random.default_rng(vocab)
    table, bias = rng.normal(size=(vocab, X)), rng.normal(size=vocab)
    chances = np.linspace(0, 1, 5000, endpoint=False).reshape(50, 100).astype(np.float32)
    chances[-1, -1] = 1 - 2**-24
    features = np.broadcast_to(FEATURES[:1, :1], (50, 100, X))
    sampled = draw(features, np.float32(table), np.float32(bias), chances)
    p = np.exp(table @ np.float64(FEATURES[0, 0]) + bias)
    ends = np.cumsum(p) / p.sum()
    starts = np.concatenate([[0], ends[:-1]])
    assert (starts[sampled] - 1e-6 <= chances).all() and (chances <= ends[sampled] + 1e-6).all()
    assert sampled[0, 0] == 0 and sampled[-1, -1] == vocab - 1


def test_draws_follow_the_distribution():
    """10,000 draws from each of two rows against its probabilities, by the chi-squared test."""
    features = np.broadcast_to(FEATURES[0, :2], (10_000, 2, X))
    chances = jax.random.uniform(jax.random.key(0), (10_000, 2))
    sampled = draw(features, TABLE, BIAS, chances, block=4096)
    for column in range(2):
        logits = np.float64(FEATURES[0, column] @ TABLE.T + BIAS)
        due = 10_000 * np.exp(logits) / np.exp(logits).sum()
        counts, often = np.bincount(sampled[:, column], minlength=V), due >= 5
        rare = [x[~often].sum() for x in (counts, due)]
        distance = ((counts - due) ** 2 / due)[often].sum() + (rare[0] - rare[1]) ** 2 / (
            5 + rare[1]
        )
        assert distance < often.sum() + 4 * np.sqrt(2 * often.sum())  # 4 deviations of chi-squared
    assert (sampled[:, 0] != sampled[:, 1]).any()


def test_what_cannot_be_is_not_drawn():
    """Tokens of bias -inf, as padding has, at the front, between others and at the end."""
    bias = np.where(np.isin(np.arange(300), [7, 8, 130, 140]), 0.0, -np.inf).astype(np.float32)
    chances = np.random.default_rng(0).random((40, 50), np.float32)
    chances[0, :2] = 0, 1 - 2**-24
    sampled = draw(np.zeros((40, 50, X), np.float32), np.zeros((300, X), np.float32), bias, chances)
    assert set(sampled.ravel()) == {7, 8, 130, 140}
    assert sampled[0, 0] == 7 and sampled[0, 1] == 140


def test_drawing_changes_nothing_else():
    plain, drawing = gradients(9), gradients(9, uniforms=CHANCES)
    assert plain[0][1].sampled is None and drawing[0][1].sampled.shape == (B, M)
    assert_equal(drawing[0][1]._replace(sampled=None), plain[0][1])
    assert_equal(drawing[1], plain[1])
    assert_equal(draw(FEATURES, TABLE, BIAS, CHANCES, block=1), np.asarray(drawing[0][1].sampled))


# -- what it costs --------------------------------------------------------------------------------


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def test_memory_is_that_of_a_block():
    """4,096 positions of 2,000 words: 32 MB of logits, or 1 MB a block of 128."""
    rows, width, vocab = 32, 128, 2000
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, width, 32), (vocab, 32))
    ]
    targets = np.zeros((rows, width), np.int32)

    def memory(block):
        total = lambda features, table: score_targets(
            features, table, None, targets, block=block
        ).logp.sum()
        program = compiled(jax.grad(total, argnums=(0, 1)), *shapes)
        return program.memory_analysis().temp_size_in_bytes

    whole, blocks = memory(rows * width), memory(128)
    logits = 4 * rows * width * vocab
    assert whole >= logits
    assert blocks < logits / 5


@pytest.mark.parametrize("trains", [False, True])
def test_a_frozen_table_costs_no_product(trains):
    total = lambda features, table: loss(features, table, BIAS, block=28)[0]
    program = compiled(jax.grad(total, argnums=(0, 1) if trains else 0), FEATURES, TABLE)
    product = 2 * B * M * X * V
    assert count_work(program.as_text()).flops == (3 + trains) * product


# -- meshes ---------------------------------------------------------------------------------------

MESHES = {"data": (8, 1), "model": (1, 4), "both": (2, 4)}


def on_mesh(mesh, block):
    """Compiles the gradient on a mesh, the vocabulary padded. -> the program, its arguments"""
    placement = make_placement(*MESHES[mesh])
    rows = placement.padded_vocab(V)
    pad = lambda x: np.pad(x, [(0, rows - V)] + [(0, 0)] * (x.ndim - 1))
    whole = functools.partial(loss, block=block)

    def padded(features, table, bias, targets, slopes, chances):
        bias = output_bias(table, bias, V)
        return whole(features, table, bias, targets, slopes, uniforms=chances)

    split = lambda x: jax.device_put(x, placement.batch)
    at = [
        placement.param_sharding(f"backbone/mlm/{name}", shape)
        for name, shape in (("table", TABLE.shape), ("bias", BIAS.shape))
    ]
    args = (
        split(FEATURES), jax.device_put(pad(TABLE), at[0]), jax.device_put(pad(BIAS), at[1]),
        split(TARGETS), split(SLOPES), split(CHANCES),
    )  # fmt: skip
    grad = jax.value_and_grad(padded, argnums=(0, 1, 2), has_aux=True)
    return jax.jit(with_placement(placement, grad)).lower(*args).compile(), args


@pytest.mark.long_cases("data-3", "model-3", "both-3")
@pytest.mark.parametrize("block", [3, 100])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_nothing(mesh, block):
    expected = gradients(block, uniforms=CHANCES)
    program, args = on_mesh(mesh, block)
    (total, scored), (dx, dtable, dbias) = program(*args)
    assert_close((total, scored.logp), (expected[0][0], expected[0][1].logp))
    assert_equal((scored.hit, scored.sampled), (expected[0][1].hit, expected[0][1].sampled))
    assert_close((dx, dtable[:V], dbias[:V]), expected[1])
    assert not np.abs(dtable[V:]).any() and not np.abs(dbias[V:]).any()


def test_the_tables_gradient_is_summed_over_the_devices_once():
    programs = [on_mesh("data", block)[0] for block in (1, 100)]
    several, one = (count_work(program.as_text()).sent for program in programs)
    assert several == one and sum(one.values()) > 0
