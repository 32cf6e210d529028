"""T5's relative bias against torch's, number by number."""

import jax
import numpy as np
import pytest
from tiny import assert_equal

from jaxprompt.layers.relpos import RelativeBias, distance_buckets

torch = pytest.importorskip("torch")
t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
DISTANCES = np.arange(-1500, 1501, dtype=np.int32)
# Edges of buckets fall on whole distances: 20 of (4, 200), 80 of (128, 100), 64 of (32, 128).
SHAPES = [(32, 128), (16, 64), (8, 200), (4, 200), (20, 1000), (128, 100), (12, 33), (256, 200)]
B, T, S, N = 2, 5, 7, 3


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("buckets, max_distance", SHAPES)
def test_buckets_are_torchs(buckets, max_distance, both_ways):
    expected = t5.T5Attention._relative_position_bucket(
        torch.tensor(DISTANCES).long(), both_ways, buckets, max_distance
    )
    ours = lambda x: distance_buckets(
        x, buckets=buckets, max_distance=max_distance, both_ways=both_ways
    )
    assert_equal(ours(DISTANCES), expected.numpy())
    assert_equal(jax.jit(ours)(DISTANCES), expected.numpy())
    assert set(np.unique(expected)) <= set(range(buckets)) and expected.max() == buckets - 1


@pytest.mark.long_cases("True")
@pytest.mark.parametrize("both_ways", [True, False])
def test_bias_is_torchs(both_ways):
    config = t5.T5Config(
        d_model=6, d_kv=2, num_heads=N, relative_attention_num_buckets=8,
        relative_attention_max_distance=12, is_decoder=not both_ways,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    params = {"params": {"table": theirs.relative_attention_bias.weight.detach().numpy()}}
    module = RelativeBias(8, 12, N, both_ways)
    for queries, keys in ((40, 40), (3, 40)):
        expected = theirs.compute_bias(queries, keys).detach().numpy()
        actual = module.apply(params, np.arange(queries)[None], np.arange(keys)[None])
        assert actual.dtype == np.float32
        assert_equal(actual, expected)
    shifted = module.apply(params, np.arange(20, 25)[None], np.arange(20, 45)[None])
    assert_equal(shifted, theirs.compute_bias(5, 25).detach().numpy())  # distances alone count


def test_rows_have_positions_of_their_own_and_minus_one_is_outside():
    table = np.random.default_rng(0).normal(size=(8, N)).astype(np.float32)
    module, params = RelativeBias(8, 12, N, True), {"params": {"table": table}}
    queries = np.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    keys = np.array([[-1, -1, 0, 1, 2, 3, 4], [-1, 5, 0, 0, 0, 1, 2]])
    actual = np.array(module.apply(params, queries, keys))
    assert actual.shape == (B, N, T, S)
    for b, t, s in np.ndindex(B, T, S):
        row = distance_buckets(
            keys[b, s] - queries[b, t], buckets=8, max_distance=12, both_ways=True
        )
        expected = table[row] if keys[b, s] >= 0 else np.zeros(N, np.float32)
        assert_equal(actual[b, :, t, s], expected)
    gradient = jax.grad(lambda p: module.apply(p, queries, np.full_like(keys, -1)).sum())(params)
    assert np.abs(gradient["params"]["table"]).max() == 0


def test_bias_is_float32_for_a_bfloat16_table():
    module = RelativeBias(8, 12, N, True)
    table = jax.numpy.ones((8, N), jax.numpy.bfloat16)
    actual = module.apply({"params": {"table": table}}, np.arange(3)[None], np.arange(3)[None])
    assert actual.dtype == np.float32
