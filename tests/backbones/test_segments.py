"""Several documents in a row: each is read as if it stood alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tiny import QUICK, assert_close, jit, make_tiny

from jaxprompt.backbones import bert, families, gpt2, t5
from jaxprompt.corpus.denoise.samples import Sample, encode_sample, join_documents
from jaxprompt.data.batches.batching import collate
from jaxprompt.parallel.sharding import make_placement, put_batch, put_global, with_placement
from jaxprompt.training.features.cache import _narrow
from jaxprompt.tree import flatten, unflatten
from jaxprompt.types import AttentionMask, Batch, Injection, Prefix, Role, Stream

VOCAB, P, S = 54, 3, 2  # a vocabulary that two devices divide
# Lengths of the documents of each row, in the encoder and in the decoder.
ROWS = (((5, 3), (7, 2), (2, 6)), ((6, 9), (1, 1)), ((4, 4),), ((3, 2), (2, 3), (3, 1), (2, 4)))
RNG = np.random.default_rng(0)
DOCUMENTS = [[[RNG.integers(4, VOCAB, n) for n in pair] for pair in row] for row in ROWS]
TEXTS = [document for row in DOCUMENTS for document in row]


def make_batch(rows, family, *, separate=True, prompt="none", side="right") -> Batch:
    """Lays rows of documents out as batches are; soft tokens stand at the front of each."""
    shift = P if prompt == "prefix" else 0

    def lay(documents):
        encoder, decoder = (
            join_documents([[(d[stream], Role.TEXT)] for d in documents], separate)
            for stream in (0, 1)
        )
        nothing = np.zeros(1, np.int32)
        has_decoder = family in ("t5", "t5gemma", "bart")
        return encode_sample(Sample(encoder, nothing, nothing, decoder if has_decoder else None))

    examples = [[lay(documents)] for documents in rows]
    longest = lambda stream: max(sum(len(d[stream]) for d in documents) for documents in rows)
    batch = collate(
        examples, [0] * len(rows), range(len(rows)), batch=len(rows), length=longest(0),
        pad_id=0, label_width=1, side=side, shift=shift, decoder_length=longest(1),
        decoder_shift=shift,
    )  # fmt: skip
    if prompt == "slots":
        soft = lambda tokens: tokens._replace(
            slot=np.where(tokens.mask & (tokens.positions < S), tokens.positions, -1)
        )
        batch = batch._replace(encoder=soft(batch.encoder))
        if batch.decoder is not None:
            batch = batch._replace(decoder=soft(batch.decoder))
    return batch


def make_injection(dims, prompt) -> Injection:
    """Draws what is added to every stream; the first layer has no prefix."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)

    def stream(layers, inside=True):
        if not layers or prompt == "none":
            return Stream()
        if prompt == "slots":
            return Stream(slots=draw(1, S, dims.embed))
        k, v = draw(2, layers, 1, P, dims.heads, dims.head_dim)
        mask = np.arange(layers)[:, None, None] > np.zeros((1, P))
        return Stream(prefix=Prefix(k, v, mask, np.arange(P) if inside else None))

    cross = stream(dims.decoder_layers, inside=False) if prompt == "prefix" else Stream()
    return Injection(stream(dims.layers), stream(dims.decoder_layers), cross)


@functools.cache
def make_program(family, prompt):
    """Makes (weights, batch) -> ((sum, states), gradients), weights, module and injection.

    The sum is over the tokens that are real, so it is one for documents packed and alone.
    """
    module, params = make_tiny(family, stack="scan", vocab_size=VOCAB)
    injection = make_injection(module.dims, prompt)

    def total(params, batch):
        hidden = module.apply({"params": params}, batch, injection, deterministic=True)
        each = (hidden**2 * jnp.arange(hidden.shape[-1])).sum(-1) / 100
        return jnp.where(batch.read.mask, each, 0.0).sum(), hidden

    return jax.value_and_grad(total, has_aux=True), params, module, injection


@functools.cache
def compiled(family, prompt):
    return jit(make_program(family, prompt)[0])


@functools.cache
def run(family, prompt, which):
    """Runs packed documents, documents alone, or packed ones that see each other."""
    _, params, *_ = make_program(family, prompt)
    batch = batch_of(family, prompt, which)
    (value, hidden), grads = compiled(family, prompt)(params, batch)
    return batch, value, np.asarray(hidden), grads


def batch_of(family, prompt, which):
    if which == "alone":
        return make_batch([[text] for text in TEXTS], family, separate=False, prompt=prompt)
    batch = make_batch(DOCUMENTS, family, prompt=prompt, side=which if which == "left" else "right")
    return blend(batch) if which == "mixed" else batch


def blend(batch: Batch) -> Batch:
    """Lets the documents of a row see each other."""
    streams = dict(encoder=batch.encoder, decoder=batch.decoder)
    return batch._replace(**{name: x and x._replace(segments=None) for name, x in streams.items()})


def take_apart(batch: Batch, hidden):
    """Lists the states of each document, [T, H], in the order of the rows."""
    results = []
    for row, states in zip(batch.read.segments, hidden, strict=True):
        results += [states[row == number] for number in range(1, row.max() + 1)]
    return results


@pytest.fixture(params=families())
def family(request):
    return request.param


# BERT, RoBERTa and ELECTRA have one stack of layers. A decoder's rows are padded on the right,
# whatever stands in the encoder.
CASES = [(family, "prefix", "packed") for family in families()]
CASES += [
    (family, prompt, "packed") for family in ("bert", "gpt2", "t5") for prompt in ("none", "slots")
]
CASES += [(family, prompt, "left") for family in ("bert", "gpt2") for prompt in ("none", "prefix")]


@pytest.mark.default_cases("bert-prefix-left")
@pytest.mark.parametrize("of, prompt, side", CASES)
def test_a_packed_document_reads_as_it_does_alone(of, prompt, side):
    batch, value, hidden, grads = run(of, prompt, side)
    alone, expected_value, expected, expected_grads = run(of, prompt, "alone")
    assert alone.encoder.segments is None and len(hidden) == len(ROWS) < len(expected)
    parts = take_apart(batch, hidden)
    for part, states, mask in zip(parts, expected, alone.read.mask, strict=True):
        assert_close(part, states[mask])
    assert np.isfinite(hidden).all()
    assert_close(value, expected_value)
    assert_close(ravel_pytree(grads)[0], ravel_pytree(expected_grads)[0])


@pytest.mark.default_cases("llama")
def test_without_segments_documents_see_each_other(family):
    batch, _, hidden, _ = run(family, "none", "packed")
    mixed = run(family, "none", "mixed")[2]
    gaps = np.abs(hidden - mixed).max(-1)
    first = batch.read.segments == 1
    visible = ~first & (batch.read.segments > 0)
    assert gaps[visible].min() > 1e-3
    single = [len(row) == 1 for row in ROWS]
    assert gaps[single][batch.read.mask[single]].max() < 1e-5


@pytest.mark.long
def test_a_decoder_reads_the_source_of_its_document_alone():
    """Another second document of the encoder leaves all but its own answer as they are."""
    _, params, *_ = make_program("t5", "none")
    batch, _, hidden, _ = run("t5", "none", "packed")
    ids = np.where(batch.encoder.segments == 2, 9, batch.encoder.ids)
    other = batch._replace(encoder=batch.encoder._replace(ids=ids))
    (_, actual), _ = compiled("t5", "none")(params, other)
    moved = np.abs(hidden - np.asarray(actual)).max(-1)
    segments = batch.decoder.segments
    assert moved[segments == 2].min() > 1e-3
    assert not moved[(segments > 0) & (segments != 2)].any()


@pytest.mark.long
@pytest.mark.parametrize("of", ["bert", "gpt2", "t5"])
def test_a_mesh_changes_nothing(of):
    program, params, *_ = make_program(of, "prefix")
    batch, value, hidden, grads = run(of, "prefix", "packed")
    placement = make_placement(2, 2, fsdp=True)
    flat = flatten({"backbone": params})
    params = unflatten(put_global(flat, placement.param_shardings(flat)))["backbone"]
    step = jax.jit(with_placement(placement, program), compiler_options=QUICK)
    (actual, states), more = step(params, put_batch(placement, batch))
    assert_close((actual, states, more), (value, hidden, grads))
    assert len(put_batch(placement, batch).encoder.segments.sharding.device_set) == 4


@pytest.mark.long_cases("gpt2")
@pytest.mark.parametrize("of", ["bert", "gpt2", "t5"])
def test_layers_go_on_from_kept_states(of):
    _, params, module, injection = make_program(of, "none")
    batch, _, hidden, _ = run(of, "none", "packed")
    weights = {"params": params}
    states = jit(lambda batch: module.apply(weights, batch, 1, method="enter"))(batch)
    upper = module.clone(cfg=dataclasses.replace(module.cfg, skip=1))
    go_on = jit(lambda batch: upper.apply(weights, batch, injection, deterministic=True))
    assert_close(np.asarray(go_on(batch._replace(cached=states))), hidden)
    narrow = _narrow(batch)
    assert narrow.encoder.segments.shape == narrow.encoder.ids.shape == (len(ROWS), 1)


def plainly_before(tokens):
    number, branch = jnp.arange(tokens.mask.shape[1]), tokens.types
    mask = (number[:, None] >= number) & tokens.mask[:, None, :]
    if tokens.lengths is not None:
        return AttentionMask(mask)
    sees = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    return AttentionMask(mask & sees)


@pytest.mark.default_cases("glm")
def test_a_row_that_is_one_text_has_the_program_without_segments(family, monkeypatch):
    """Their absence leaves no trace: neither an array of a batch nor an operation of a step."""
    batch = batch_of(family, "prefix", "alone")
    assert len(jax.tree.leaves(batch.encoder)) == 6 + 1  # lengths
    assert len(jax.tree.leaves(batch_of(family, "prefix", "packed").encoder)) == 7 + 1

    def text():
        program, params, *_ = make_program.__wrapped__(family, "prefix")
        return jax.jit(program).lower(params, batch).as_text()

    actual = text()
    for module in (bert, t5):
        monkeypatch.setattr(
            module, "bidirectional_mask", lambda queries, keys: AttentionMask(keys.mask)
        )
    for module in (gpt2, t5):
        monkeypatch.setattr(module, "causal_mask", plainly_before)
    assert text() == actual
