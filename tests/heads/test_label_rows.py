"""Classes by trained label rows: what is capped, what is added, what is normalised."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprompt.errors import InputError
from jaxprompt.heads.label_rows import Head, LabelRows
from jaxprompt.types import Batch, Injection

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(4, 5, 6)).astype(np.float32)  # [B, T, H]
ROWS = RNG.normal(size=(3, 6)).astype(np.float32)  # [R, E]
TABLE = RNG.normal(size=(7, 6)).astype(np.float32)  # [V, E]
TABLE_BIAS = RNG.normal(size=7).astype(np.float32)
LABEL_POS = np.array([[1], [0], [4], [2]], np.int32)
BIAS = np.array([0.5, -2.0, 1.0], np.float32)
CAP = 1.5


def cap(x):
    return CAP * np.tanh(x / CAP)


def score(module, bias):
    backbone = SimpleNamespace(
        cfg=SimpleNamespace(logit_cap=CAP), lm_features=lambda x: x,
        lm_table=lambda: (jnp.asarray(TABLE), jnp.asarray(TABLE_BIAS)),
    )  # fmt: skip
    batch = Batch(None, LABEL_POS, None, None, None)
    arguments = HIDDEN, batch, Injection(rows=jnp.asarray(ROWS)), backbone
    return module.apply({"params": {"bias": bias}}, *arguments, deterministic=True)


@pytest.mark.parametrize("scores", ["restricted", "full"])
def test_the_bias_is_added_behind_the_cap(scores):
    """Gemma caps its logits; a bias that trains here is beside these, and so is the table's."""
    features = HIDDEN[np.arange(4), LABEL_POS[:, 0]]
    reference = cap(features @ ROWS.T) + BIAS
    words = cap(features @ TABLE.T) + TABLE_BIAS
    whole = reference if scores == "restricted" else np.concatenate([reference, words], axis=1)
    expected = reference - np.log(np.exp(whole).sum(1, keepdims=True))
    actual = score(LabelRows((1, 1, 1), scores), BIAS)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_class_is_the_mean_of_its_words():
    """Class 0 has two rows and class 1 one; a class's bias is that of each of its words."""
    features = HIDDEN[np.arange(4), LABEL_POS[:, 0]]
    logits = cap(features @ ROWS.T) + BIAS[[0, 0, 1]]
    each = np.asarray(jax.nn.log_softmax(logits))
    expected = np.stack([(each[:, 0] + each[:, 1]) / 2, each[:, 2]], axis=1)
    np.testing.assert_allclose(score(LabelRows((2, 1)), BIAS[:2]), expected, rtol=1e-5, atol=1e-5)


def test_an_answer_of_several_tokens_is_refused():
    """As a BART's; the message names what it supports of DART."""
    with pytest.raises(InputError, match="task.form=text .*prompt.labels=False"):
        Head().check_form("text", "seq2seq")
