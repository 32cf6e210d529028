"""Objectives on rows of several documents: the losses and steps of the documents, each alone."""

import jax
import numpy as np
import optax
import pytest
from tiny import assert_close, jit, make_tiny

from jaxprompt.corpus.denoise import clm, mlm, prefix_lm, span_corruption
from jaxprompt.corpus.denoise.samples import Sample, TokenStream, encode_sample, sample_rng
from jaxprompt.data.batches.batching import collate
from jaxprompt.layers.reading import TargetScores
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import text_loss
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_train_step
from jaxprompt.tree import split_trainable, trainable_mask
from jaxprompt.types import Objective

pytestmark = pytest.mark.long

LENGTH = 36
OBJECTIVES = {
    "mlm": ("bert", mlm.Denoiser(LENGTH, 3, (1,), (2,), np.arange(4, 53), separate=True)),
    "clm": ("gpt2", clm.Denoiser(LENGTH, (2,), separate=True)),
    "prefix_lm": ("t5", prefix_lm.Denoiser(LENGTH, 0, 1, (1,), separate=True)),
    "span_corruption": (
        "t5", span_corruption.Denoiser(LENGTH, 0, 1, np.arange(52, 45, -1), 0.5, 2.0, separate=True)
    ),
}  # fmt: skip
ROWS = ((9, 14, 3), (20,), (2, 2, 2, 11))  # lengths of documents


def take(text: TokenStream, number: int) -> TokenStream:
    """Takes a document out of a row."""
    in_document = text.segments == number
    return TokenStream(
        text.ids[in_document],
        text.roles[in_document],
        None,
        np.arange(in_document.sum(), dtype=np.int32),
    )


def take_apart(sample: Sample) -> list[Sample]:
    """Makes a row of one text of each document."""
    read, actual = sample.decoder or sample.encoder, []
    for number in range(1, sample.encoder.segments.max() + 1):
        in_document = read.segments[sample.label_pos] == number
        start = np.flatnonzero(read.segments == number)[0]
        decoder = None if sample.decoder is None else take(sample.decoder, number)
        pos = sample.label_pos[in_document] - start
        actual.append(
            Sample(take(sample.encoder, number), pos, sample.targets[in_document], decoder)
        )
    return actual


def lay(samples, objective, size):
    """Lays rows out, and one row more that only fills the batch."""
    rows = [[encode_sample(sample)] for sample in samples]
    return collate(
        rows, [-1] * len(rows), range(len(rows)), batch=size, length=objective.lengths[0],
        pad_id=0, label_width=objective.max_targets, decoder_length=objective.lengths[-1],
    )  # fmt: skip


@pytest.fixture(params=OBJECTIVES)
def case(request):
    """A model, and the same documents packed and alone."""
    family, objective = OBJECTIVES[request.param]
    rng = np.random.default_rng(0)
    pieces = [[np.int32(rng.integers(4, 46, n)) for n in row] for row in ROWS]
    samples = [objective(row, sample_rng(0, i)) for i, row in enumerate(pieces)]
    alone = [part for sample in samples for part in take_apart(sample)]
    backbone, weights = make_tiny(family)
    model = Model(backbone, make_prompt("none", backbone.dims), {"main": TargetScores()})
    params = {"backbone": weights, "prompt": {}, "head": {"main": {}}}
    packed = lay(samples, objective, len(samples) + 1)
    return model, params, packed, lay(alone, objective, len(alone) + 1)


def test_a_step_is_that_of_the_documents(case):
    model, params, packed, alone = case
    rate = 1e-2
    trainable, frozen = split_trainable(params, trainable_mask(params, (r"backbone/.*",)))
    step = jit(make_train_step(model, optax.sgd(rate), [Objective("main", text_loss)]))
    actual, expected = (
        step(make_state(trainable, optax.sgd(rate), jax.random.key(0)), frozen, batch)
        for batch in (packed, alone)
    )
    assert_close(actual[1], expected[1])
    moved = lambda state: {x: state.trainable[x] - trainable[x] for x in trainable}
    gaps = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()), *map(moved, (actual[0], expected[0]))
    )
    assert max(gaps.values()) <= 1e-5 * rate * float(expected[1]["grad_norm"]) + 1e-7


def test_documents_that_see_each_other_have_another_loss(case):
    model, params, packed, _ = case
    blend = lambda tokens: tokens and tokens._replace(segments=None)
    mixed = packed._replace(encoder=blend(packed.encoder), decoder=blend(packed.decoder))
    forward = jit(model.forward)
    actual, other = (np.asarray(forward(params, batch)) for batch in (packed, mixed))
    there = packed.targets >= 0
    assert np.abs(actual - other)[there].max() > 1e-2
    assert np.abs(actual - other)[1].max() < 1e-5  # a row of one document
