"""Heads of pre-training: against the free-text head, and against torch."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import assert_close, jit, make_batch, make_tiny

from jaxprompt.heads.pretraining import ReplacedHead, TargetHead
from jaxprompt.layers.reading import TargetScores
from jaxprompt.types import ABSENT, Injection

torch = pytest.importorskip("torch")


def apply(head, family, batch):
    module, weights = make_tiny(family)

    def run(weights, batch):
        hidden = module.apply({"params": weights}, batch, Injection(), deterministic=True)
        bound = module.bind({"params": weights})
        return head.apply({}, hidden, batch, Injection(), bound, deterministic=True), hidden

    return jit(run)(weights, batch)


@pytest.mark.default_cases("electra")
@pytest.mark.parametrize("family", ["bert", "electra", "gpt2", "t5"])
def test_targets_are_scored_as_free_texts_are(family):
    batch = make_batch(family=family, masks=3)
    targets = np.random.default_rng(0).integers(0, 53, (8, 3)).astype(np.int32)
    targets[1, 1:] = targets[5] = -1
    batch = batch._replace(targets=targets)
    expected, _ = apply(TargetScores(), family, batch)
    scored, _ = apply(TargetHead(block=5), family, batch)
    assert_close(scored.logp, expected)
    assert scored.sampled is None and (np.asarray(scored.logp) == ABSENT).sum() == 5


def test_replaced_tokens_are_scored_as_by_torch():
    batch = make_batch(family="electra")
    rng = np.random.default_rng(0)
    targets = np.where(batch.encoder.mask, rng.integers(0, 2, batch.encoder.ids.shape), -1)
    detected, hidden = apply(ReplacedHead(), "electra", batch._replace(targets=targets))
    module, weights = make_tiny("electra")
    logits = torch.tensor(np.asarray(module.apply({"params": weights}, hidden, method="rtd")))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, torch.tensor(targets == 1).float(), reduction="none"
    )
    there = targets >= 0
    assert_close(np.asarray(detected.logp)[there], -losses.numpy()[there])
    assert (np.asarray(detected.logp)[~there] == ABSENT).all() and not there.all()
    called = logits.numpy() > 0
    np.testing.assert_array_equal(detected.hit[there], (called == (targets == 1))[there])
    np.testing.assert_array_equal(detected.replaced, targets == 1)
    assert called[there].any() and not called[there].all()
    assert jnp.asarray(detected.logp).dtype == jnp.float32


def test_both_know_what_they_read():
    assert not TargetHead.reads_all and ReplacedHead.reads_all
