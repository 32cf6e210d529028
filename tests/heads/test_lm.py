"""The verbalizer: words of one and several pieces, both normalisations, no [B, T, V] logits."""

import functools
import re

import jax
import numpy as np
import pytest
from scipy import special
from tiny import assert_close, make_batch, make_params, make_tiny

from jaxprompt.data.tasks.registry import custom_task
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encoded import Split
from jaxprompt.data.text.overview import MANY
from jaxprompt.heads import make_head as make_kind
from jaxprompt.heads.verbalizer import LabelWords as Head
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import make_loss
from jaxprompt.types import ABSENT, Injection

log_softmax = functools.partial(special.log_softmax, axis=-1)
VOCAB = 211  # a size that no other axis has
ROWS = np.array([17, 5, 40, 23, 8])
SINGLE = np.array([[[0]], [[3]], [[2]]])  # three classes of one word of one piece
# Two words: pieces (17, 5), piece 40. One word: pieces (23, 5). One word: piece 8.
SEVERAL = np.array([[[0, 1], [2, -1]], [[3, 1], [-1, -1]], [[4, -1], [-1, -1]]])


@functools.cache
def backbone(family="bert"):
    return make_tiny(family, vocab_size=VOCAB)


def make_head(where, scores):
    """Makes a head whose piece j stands at mask j."""
    return Head(ROWS, where, np.broadcast_to(np.arange(where.shape[2]), where.shape), scores)


def run(where, scores, masks, family="bert"):
    """Gives the head's scores and the logits [B, M, V] worked out in numpy from its features."""
    module, weights = backbone(family)
    batch = make_batch(masks=masks)
    hidden = module.apply({"params": weights}, batch, Injection(), deterministic=True)
    bound = module.bind({"params": weights})
    actual = make_head(where, scores).apply(
        {}, hidden, batch, Injection(), bound, deterministic=True
    )
    at_masks = np.take_along_axis(np.asarray(hidden), batch.label_pos[..., None], 1)
    features = np.asarray(bound.lm_features(at_masks), np.float64)
    table = np.asarray(weights["embed"]["word"]["table"], np.float64)
    return np.asarray(actual), features @ table.T + np.asarray(weights["mlm"]["bias"], np.float64)


@pytest.mark.long
@pytest.mark.parametrize("where", [SINGLE, SEVERAL])
def test_choices_that_an_example_lacks(where):
    """Restricted: they are absent, in the loss too. Full: scores are as they were."""
    module, weights = backbone()
    batch = make_batch(masks=where.shape[2])
    hidden = module.apply({"params": weights}, batch, Injection(), deterministic=True)
    bound = module.bind({"params": weights})
    counts = np.array([1, 2, 3, 1, 2, 3, 2, 2], np.int32)
    some = batch._replace(counts=counts, labels=counts - 1)
    score = lambda kind, batch: np.asarray(
        make_head(where, kind).apply({}, hidden, batch, Injection(), bound, deterministic=True)
    )
    np.testing.assert_array_equal(score("full", some), score("full", batch))
    whole, actual = score("restricted", batch).astype(np.float64), score("restricted", some)
    there = np.arange(3) < counts[:, None]
    np.testing.assert_array_equal(actual, np.where(there, whole, ABSENT).astype(np.float32))
    for smoothing in (0.0, 0.2):
        total, n = make_loss("restricted", smoothing)(actual, some.labels, some.weights)
        expected = 0.0
        for row, count in zip(whole, counts, strict=True):
            logp = log_softmax(row[:count])
            expected -= (1 - smoothing) * logp[-1] + smoothing * logp.mean()
        assert float(total) == pytest.approx(expected, rel=1e-5) and float(n) == 8


@pytest.mark.default_cases("roberta")
@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_restricted_is_a_softmax_over_the_words(family):
    rows = ROWS[SINGLE[:, 0, 0]]
    module, weights = backbone(family)
    actual, logits = run(SINGLE, "restricted", 1, family)
    assert actual.shape == (8, 3)
    assert_close(actual, log_softmax(logits[:, 0, ROWS])[:, SINGLE[:, 0, 0]].astype(np.float32))
    # The words' own softmax: what stands besides them in the verbalizer shifts all alike.
    shares = np.exp(log_softmax(actual.astype(np.float64)))
    expected = np.exp(log_softmax(logits[:, 0, rows]))
    np.testing.assert_allclose(shares, expected, rtol=1e-4)


def several(logp, column):
    """Averages pieces, then words, by hand. [B, M, *] -> [B, C]"""
    one = lambda mask, row: logp[:, mask, column(row)]
    first = (0.5 * (one(0, 0) + one(1, 1)) + one(0, 2)) / 2
    return np.stack([first, 0.5 * (one(0, 3) + one(1, 1)), one(0, 4)], axis=1)


def test_pieces_then_words_are_averaged():
    actual, logits = run(SEVERAL, "restricted", 2)
    expected = several(log_softmax(logits[:, :, ROWS]), lambda row: row)
    assert_close(actual, expected.astype(np.float32))


@pytest.mark.parametrize("where, masks", [(SINGLE, 1), (SEVERAL, 2)])
def test_full_normalises_over_the_vocabulary(where, masks):
    actual, logits = run(where, "full", masks)
    logp = log_softmax(logits)
    if masks == 1:
        expected = logp[:, 0, ROWS[where[:, 0, 0]]]
    else:
        expected = several(logp, lambda row: ROWS[row])
    outside = np.delete(logp[:, 0], ROWS, axis=1).max(1)
    assert actual.shape == (8, 4)
    assert_close(actual, np.concatenate([expected, outside[:, None]], 1).astype(np.float32))


def test_no_class_is_scored_where_the_first_piece_is_read():
    """A T5 with "[mask] {label} [mask]" reads its sentinel at 0 and the word behind it."""
    module, weights = backbone()
    batch = make_batch(masks=2)
    hidden = module.apply({"params": weights}, batch, Injection(), deterministic=True)
    bound = module.bind({"params": weights})
    _, logits = run(SINGLE, "full", 2)
    logp = log_softmax(logits)
    for at in (0, 1):
        head = Head(ROWS, SINGLE, np.full_like(SINGLE, at), "full")
        actual = head.apply({}, hidden, batch, Injection(), bound, deterministic=True)
        outside = np.delete(logp[:, at], ROWS, axis=1).max(1)
        assert_close(actual[:, 3], outside.astype(np.float32))
        assert_close(actual[:, :3], logp[:, at, ROWS[SINGLE[:, 0, 0]]].astype(np.float32))


def shapes_of(text):
    """Lists the shapes that name the vocabulary in a program's text."""
    actual = {tuple(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", text)}
    return {shape for shape in actual if VOCAB in shape}


@pytest.mark.long_cases("full-allowed1")
@pytest.mark.parametrize("scores, allowed", [("restricted", set()), ("full", {(5, 2, VOCAB)})])
def test_logits_of_every_position_are_never_built(scores, allowed):
    module, weights = backbone()
    prompt = make_prompt("soft", module.dims, length=3)
    model = Model(module, prompt, {"main": make_head(SEVERAL, scores)})
    params = make_params(model, weights)
    batch = make_batch(rows=5, length=13, slots=3, masks=2)

    def loss(prompt, params, batch):
        actual = model.forward(params | {"prompt": prompt}, batch)
        return make_loss(scores, 0.1)(actual, batch.labels, batch.weights)[0]

    grad = jax.jit(jax.grad(loss))
    args = params["prompt"], params, batch
    for text in (str(grad.trace(*args).jaxpr), grad.lower(*args).compile().as_text()):
        shapes = shapes_of(text)
        assert (VOCAB, 16) in shapes  # the word table: the pattern does find shapes
        assert shapes >= allowed
        large = {s for s in shapes if np.prod(s) > 2 * 5 * VOCAB and sorted(s) != [16, VOCAB]}
        assert not large, large
        if scores == "restricted":
            assert {s for s in shapes if 5 in s or 10 in s} == set()


@pytest.mark.parametrize("head", ["verbalizer", "discriminator"])
@pytest.mark.parametrize("classes", [MANY, MANY + 1])
def test_answers_give_the_scores_of_the_best(head, classes):
    """Of thousands of words a prediction would else hold every one."""
    task = custom_task(fields=["text"], labels=[f"word{i}" for i in range(classes)])
    actual = np.random.default_rng(0).normal(size=(2, classes)).astype(np.float32)
    split = Split([], np.zeros(2), np.full(2, classes), [])
    for row, answer in zip(
        actual,
        make_kind(head).answers(task, [Example({})] * 2, split, actual, classes),
        strict=True,
    ):
        assert len(answer["scores"]) == MANY
        assert set(answer["scores"]) == {f"word{i}" for i in np.argsort(-row)[:MANY]}
        assert (
            answer["score"]
            == max(answer["scores"].values())
            == answer["scores"][answer["prediction"]]
        )
