"""DeBERTa's attention against its equation written out, with a prefix in front."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import draw_params

from jaxprompt.layers.attention import prepend_prefix
from jaxprompt.layers.disentangled import Disentangled, align_by_distance, distance_rows
from jaxprompt.types import AttentionMask, Prefix

torch = pytest.importorskip("torch")
deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")

HEADS, SIZE, WIDTH, LENGTH, FRONT, SPAN = 2, 4, 8, 6, 3, 4


@pytest.mark.parametrize("buckets, limit", [(256, 512), (4, 12), (32, 128)])
def test_buckets_are_those_of_transformers(buckets, limit):
    length = 1100
    distance = torch.arange(length - 1, -length, -1)
    actual = deberta.make_log_bucket_position(distance, buckets, limit).long()
    expected = torch.clamp(actual + buckets, 0, 2 * buckets - 1).numpy()
    np.testing.assert_array_equal(distance_rows(length, buckets, buckets, limit)[:-1], expected)


def test_scores_go_to_their_keys():
    scores = np.random.default_rng(0).normal(size=(2, 3, 5, 10)).astype(np.float32)
    actual = align_by_distance(jnp.asarray(scores))
    for i in range(5):
        for j in range(5):
            np.testing.assert_array_equal(actual[..., i, j], scores[..., i, j - i + 4])


@pytest.mark.parametrize("joined, shared, terms", [
    (False, True, ("c2p", "p2c")), (True, False, ("c2p", "p2c")), (False, False, ("p2c",)),
])  # fmt: skip
def test_a_prefix_is_scored_by_content_alone_under_the_same_divisor(joined, shared, terms):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, relative = draw(2, LENGTH, WIDTH), draw(2 * SPAN, WIDTH)
    divisor = np.sqrt(SIZE * (1 + len(terms)))
    module = Disentangled(
        WIDTH, HEADS, SIZE, scale=1 / divisor, terms=terms, joined=joined, shared=shared, span=SPAN,
    )  # fmt: skip
    keep = np.ones((2, LENGTH), bool)
    keep[1, -2:] = False
    prefix = Prefix(draw(1, FRONT, HEADS, SIZE), draw(1, FRONT, HEADS, SIZE), None)

    def attend(module):
        k, v, mask = prepend_prefix(prefix, *module.keys(x), AttentionMask(jnp.asarray(keep)))
        return module(x, k, v, mask, relative, deterministic=True), k, v, module._queries(x)

    params = draw_params(module, method=attend)
    actual, k, v, q = module.apply({"params": params}, method=attend)

    def project(name, of):
        if shared:
            name = name.removeprefix("position_")
        return np.einsum("h,hnd->nd", of, params[name]["kernel"]) + params[name].get("bias", 0.0)

    mixed = np.zeros((2, LENGTH, HEADS, SIZE), np.float32)
    for b in range(2):
        for i in range(LENGTH):
            scores = np.full((HEADS, FRONT + LENGTH), -np.inf)
            for s in range(FRONT + LENGTH):
                j = s - FRONT
                if j >= 0 and not keep[b, j]:
                    continue
                scores[:, s] = np.einsum("nd,nd->n", q[b, i], k[b, s])
                if j < 0:
                    continue
                row = np.clip(i - j + SPAN, 0, 2 * SPAN - 1)
                if "c2p" in terms:
                    r = project("position_key", relative[row])
                    scores[:, s] += np.einsum("nd,nd->n", q[b, i], r)
                if "p2c" in terms:
                    r = project("position_query", relative[row])
                    scores[:, s] += np.einsum("nd,nd->n", k[b, s], r)
            probs = np.exp(scores / divisor)
            probs /= probs.sum(-1, keepdims=True)
            mixed[b, i] = np.einsum("ns,snd->nd", probs, v[b])
    expected = np.einsum("btnd,ndh->bth", mixed, params["out"]["kernel"]) + params["out"]["bias"]
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_v1_takes_queries_keys_and_values_from_one_kernel():
    """Part by part within each head; queries and values have biases of their own, keys none."""
    layer = Disentangled(width=WIDTH, heads=HEADS, head_dim=SIZE, joined=True)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)
    params = draw_params(layer, x, method="keys")
    kernel = np.asarray(params["in_proj"]["kernel"])  # [H, N, 3, D]
    params["query"] = {"bias": jnp.full((HEADS, SIZE), 2.0)}
    k, v = layer.apply({"params": params}, x, method="keys")
    q = layer.apply({"params": params}, x, method="_queries")
    part = lambda number: np.einsum("bth,hnd->btnd", x, kernel[:, :, number])
    np.testing.assert_allclose(k, part(1), atol=1e-5)
    np.testing.assert_allclose(v, part(2) + np.asarray(params["value"]["bias"]), atol=1e-5)
    np.testing.assert_allclose(q, part(0) + 2.0, atol=1e-5)
