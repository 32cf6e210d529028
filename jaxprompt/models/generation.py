"""Text generation: greedy and beam search over a cache of static shape."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.errors import InputError, at_least
from jaxprompt.layers.cache import iterate_layers, select_beams
from jaxprompt.layers.capping import logit_cap, soft_cap
from jaxprompt.layers.quantized import score_table
from jaxprompt.models.model import KeyValues, Model, without_absent_slots
from jaxprompt.tree import Params
from jaxprompt.types import NO_LIMIT, Array, Batch, Cache


class Generated(NamedTuple):
    """The best continuation of each row, without the input."""

    ids: Array  # int32 [B, max_new_tokens], the end id included, the pad id behind it
    lengths: Array  # int32 [B], the end id included
    scores: Array  # float32 [B], the sum of log-probabilities / length ** length_penalty


def generate(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    max_new_tokens: int,
    eos: int | Sequence[int],
    pad: int,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    shared_kv: KeyValues | None = None,
    checked: bool = False,
) -> Generated:
    """Continues each row of `batch.read` from its last token, greedily or by beam search.

    Shapes are static: jit this function with the keywords bound. The loop ends with the last row.
    Rows of weight 0 are padding and stay empty. A BART's config may force the last of
    `max_new_tokens` tokens, and the first token of every output, which the input ends with.

    Args:
      model: the model.
      params: its parameters.
      batch: the inputs.
      max_new_tokens: the maximum number of new tokens.
      eos: the token id, or several, at which a row ends; with beams, a row ends once it has as many
        finished continuations as beams and no open one is expected to beat the worst of them.
      pad: the padding id.
      num_beams: the number of beams, 1 = greedy.
      length_penalty: of beam search.
      early_stopping: what an open continuation may reach: False is its current score, "never" its
        score over `max_new_tokens` tokens if longer is better; True ends the row without this
        comparison.
      shared_kv: the result of `Model.run_shared_prefix` with these parameters, if any.
      checked: whether `check_new_tokens` has checked the batch. Under jit only the padded length is
        known.

    Raises:
      InputError: if beams or length are invalid, if a row has several documents, or, unless
        `checked`, if the texts do not fit.
    """
    ends = tuple(np.atleast_1d(eos).tolist())
    check_search(model, batch, max_new_tokens, num_beams, ends)
    if not checked:
        check_new_tokens(model, batch, max_new_tokens)
    num_read = max_new_tokens - 1  # the last token is not read, since nothing follows it
    batch, states, cache = read_input(
        model, params, batch, num_read, num_beams, shared_kv=shared_kv
    )
    tokens, backbone = batch.read, model.backbone.bind({"params": params["backbone"]})
    layers = backbone.reading_layers()
    first_column = cache.positions.shape[1] - num_read * num_beams
    columns = jnp.arange(tokens.mask.shape[1])
    # Padding may be on either side.
    last = jnp.where(tokens.mask, columns, 0).max(1)[:, None]  # [B, 1]
    # Positions already include the shift of a prefix.
    start = jnp.take_along_axis(jnp.asarray(tokens.positions), last, axis=1) + 1  # [B, 1]
    cfg = model.backbone.cfg
    state = jnp.take_along_axis(states, last[:, :, None], axis=1)[:, 0]  # [B, H]

    def read(ids, count, cache):
        """Reads new token number `count`. int [B] or [B, K] -> float32 [B or B*K, V], the cache"""
        inner = model.backbone.bind({"params": params["backbone"]})
        where = jnp.broadcast_to(start + count, (len(start), ids.size // len(start)))
        column = first_column + count * num_beams
        weights = iterate_layers(layers, column)
        x, cache = inner.extend(weights, ids.ravel(), where.ravel(), cache, column)
        return _force_end(cfg, _score(inner, x), count + 1 == num_read), cache

    # By length, computed on the host in float64. A forced first token counts, as in transformers.
    lengths = np.arange(1, max_new_tokens + 1, dtype=np.float64) + _forces_first(cfg)
    penalties = jnp.float32(lengths**length_penalty)
    # Length 0 is that of rows that only fill the batch.
    penalties = jnp.concatenate([jnp.ones(1), penalties])
    idle = jnp.asarray(batch.weights) == 0  # [B]
    ids = jnp.full((len(start), max_new_tokens), pad, jnp.int32)
    scores = _force_end(cfg, _score(backbone, state), num_read == 0)
    if num_beams == 1:
        return _greedy(read, scores, cache, ids, idle, ends, penalties)
    # The length by which the scores of open continuations are compared; 0 = their current one,
    # None = they are not compared.
    length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else 0
    final_length = None if early_stopping is True else length
    return _beam_search(read, scores, cache, ids, idle, ends, penalties, num_beams, final_length)


def read_input(
    model: Model,
    params: Params,
    batch: Batch,
    room: int,
    num_beams: int = 1,
    *,
    shared_kv: KeyValues | None = None,
) -> tuple[Batch, Array, Cache]:
    """Processes the input, with room for `room` more tokens of each beam.

    Returns the batch with its positions, the states of its tokens, and the cache.
    """
    injection = model.inject(params, batch)
    batch = without_absent_slots(batch, injection)
    injection = model.add_shared_prefix(params, injection, shared_kv=shared_kv)
    backbone = model.backbone.bind({"params": params["backbone"]})
    return batch, *backbone.prefill(batch, injection, room, num_beams)


class _Row(NamedTuple):
    count: Array  # tokens chosen so far
    ids: Array  # [B, max_new_tokens]
    lengths: Array  # [B]
    sums: Array  # [B] of log-probabilities
    done: Array  # bool [B]


def _greedy(read, scores, cache, ids, idle, ends, penalties) -> Generated:
    def choose(row: _Row, scores) -> _Row:
        best = jnp.argmax(scores, axis=-1)
        logp = scores.max(-1) - jax.nn.logsumexp(scores, axis=-1)
        token = jnp.where(row.done, row.ids[:, row.count], best)  # a pad where it is done
        return _Row(
            row.count + 1,
            row.ids.at[:, row.count].set(token),
            row.lengths + ~row.done,
            row.sums + jnp.where(row.done, 0.0, logp),
            row.done | _is_end(token, ends),
        )

    def step(carry):
        row, cache = carry
        scores, cache = read(row.ids[:, row.count - 1], row.count - 1, cache)
        return choose(row, scores), cache

    none = jnp.zeros(len(ids), jnp.int32)
    row = choose(_Row(jnp.int32(0), ids, none, jnp.zeros(len(ids)), idle), scores)
    row, _ = jax.lax.while_loop(_is_running, step, (row, cache))
    return Generated(row.ids, row.lengths, row.sums / penalties[row.lengths])


class _Beams(NamedTuple):
    count: Array  # tokens chosen so far
    ids: Array  # [B, K, max_new_tokens] of the open continuations, best first
    sums: Array  # [B, K] of their log-probabilities
    parents: Array  # [B, K] index of the open continuation that each extends
    ended: Array  # [B, K, max_new_tokens] the best that ended
    scores: Array  # [B, K] of those, -inf = none yet
    done: Array  # bool [B]


def _beam_search(
    read, scores, cache, ids, idle, ends, penalties, num_beams, final_length
) -> Generated:
    rows, max_new_tokens = ids.shape
    num_ranked = _num_ranked(num_beams, ends)

    def take_beams(x, index):
        return jnp.take_along_axis(x, index[:, :, None], axis=1)

    def choose(beam: _Beams, scores) -> _Beams:
        """Selects the K best open continuations and the K best that ended."""
        vocab = scores.shape[-1]
        logp = jax.nn.log_softmax(scores).reshape(rows, -1, vocab)  # [B, K, V], at first [B, 1, V]
        # At first all beams are equal, so only one of them is continued.
        total = (beam.sums[:, : logp.shape[1], None] + logp).reshape(rows, -1)
        # At least K of these are open.
        sums, index = jax.lax.top_k(total, num_ranked)
        parents, tokens = index // vocab, index % vocab  # [B, ranked]
        ids, count = take_beams(beam.ids, parents).at[:, :, beam.count].set(tokens), beam.count + 1
        is_end = _is_end(tokens, ends) | (count == max_new_tokens)
        open_sums, open_index = jax.lax.top_k(jnp.where(is_end, -jnp.inf, sums), num_beams)
        # A continuation that ends must be among the best K; the others only replace those.
        is_new_end = is_end & (jnp.arange(num_ranked) < num_beams) & ~beam.done[:, None]
        merged = [beam.scores, jnp.where(is_new_end, sums / penalties[count], -jnp.inf)]
        best, ended_index = jax.lax.top_k(jnp.concatenate(merged, axis=1), num_beams)
        done = (best > -jnp.inf).all(1)
        if final_length is not None:
            done &= open_sums[:, 0] / penalties[final_length or count] <= best[:, -1]
        return _Beams(
            count,
            take_beams(ids, open_index),
            open_sums,
            jnp.take_along_axis(parents, open_index, axis=1),
            take_beams(jnp.concatenate([beam.ended, ids], axis=1), ended_index),
            best,
            beam.done | done,
        )

    def step(carry):
        beam, cache = carry
        # Before the token is read, since it sees the tokens of the beam that it extends.
        cache = select_beams(cache, beam.parents)
        scores, cache = read(beam.ids[:, :, beam.count - 1], beam.count - 1, cache)
        return choose(beam, scores), cache

    ids = jnp.repeat(ids[:, None], num_beams, axis=1)
    none = jnp.zeros((rows, num_beams))
    empty = _Beams(jnp.int32(0), ids, none, none.astype(int), ids, none - jnp.inf, idle)
    beam, _ = jax.lax.while_loop(_is_running, step, (choose(empty, scores), cache))
    ids = beam.ended[:, 0]
    # The pad id may be an end id, too, so the first one counts.
    is_end = _is_end(ids, ends)
    lengths = jnp.where(is_end.any(1), jnp.argmax(is_end, axis=1) + 1, max_new_tokens)
    lengths = jnp.where(idle, 0, lengths).astype(jnp.int32)
    return Generated(ids, lengths, jnp.where(idle, 0.0, beam.scores[:, 0]))


def _is_end(tokens: Array, ends: Sequence[int]) -> Array:
    return jnp.isin(tokens, jnp.array(ends, jnp.int32))


def _num_ranked(num_beams: int, ends: Sequence[int]) -> int:
    """Returns how many continuations are ranked: each beam may have one for every end id."""
    return (1 + max(1, len(ends))) * num_beams


def _is_running(carry):
    state, _ = carry
    return (state.count < state.ids.shape[-1]) & ~state.done.all()


def _forces_first(cfg: Any) -> bool:
    return getattr(cfg, "first", -1) >= 0


def _force_end(cfg: Any, scores, is_last):
    """Leaves only the token that the config forces at the maximum length, if there is one."""
    token = getattr(cfg, "last", -1)
    if token < 0:
        return scores
    only_end = jnp.where(jnp.arange(scores.shape[-1]) == token, 0.0, -jnp.inf)
    return jnp.where(is_last, only_end, scores)


def _score(backbone, x):
    """Multiplies states by the whole output table. [R, H] -> float32 [R, V]"""
    features, (table, bias) = backbone.lm_features(x), backbone.lm_table()
    # In float32, since close scores would be equal when rounded to 16 bits.
    scores = soft_cap(score_table(features, table), logit_cap(backbone))
    return scores if bias is None else scores + bias.astype(jnp.float32)


def check_generation(
    model: Model, batch: Batch, max_new_tokens: int, num_beams: int, ends: Sequence[int] = ()
) -> None:
    """Raises InputError like `check_search` and `check_new_tokens`."""
    check_search(model, batch, max_new_tokens, num_beams, ends)
    check_new_tokens(model, batch, max_new_tokens)


def check_search(
    model: Model,
    batch: Batch,
    max_new_tokens: int,
    num_beams: int,
    ends: Sequence[int] = (),
) -> None:
    """Raises InputError if arguments are out of range or rows have several documents."""
    at_least("max_new_tokens", max_new_tokens, 1)
    at_least("num_beams", num_beams, 1)
    vocab = model.backbone.dims.vocab
    per_beam = _num_ranked(1, ends)
    if num_beams > 1 and num_beams * per_beam > vocab:
        raise InputError(
            f"num_beams={num_beams} is too many: the search ranks {per_beam} tokens per beam, from "
            f"a vocabulary of {vocab}; use at most {vocab // per_beam}"
        )
    if batch.encoder.segments is not None:
        raise InputError(
            "the batch has several documents in a row, but a row has one continuation; put each "
            "document in a separate row"
        )


def check_new_tokens(model: Model, batch: Batch, max_new_tokens: int) -> None:
    """Raises InputError if the texts would not fit the model after the longest row.

    Padding has no positions, but it counts under jit, where lengths are unknown.
    """
    limit, mask = model.backbone.dims.max_len, batch.read.mask
    if limit == NO_LIMIT:
        return
    is_traced = isinstance(mask, jax.core.Tracer)
    longest = mask.shape[1] if is_traced else int(np.asarray(mask).sum(1).max())
    shared = len(model.shared_prefix.ids) if model.shared_prefix else 0  # not part of rows
    prompt, num_input = model.prompt, shared + longest
    decodes = model.backbone.dims.decoder_layers > 0
    shift = prompt.decoder_shift() if decodes else prompt.position_shift()
    free = limit - num_input - shift
    if free < max_new_tokens:
        raise InputError(
            f"{num_input} tokens of input + {shift} positions of the prompt + "
            f"max_new_tokens={max_new_tokens} exceed the model's {limit} positions, of which "
            f"{max(free, 0)} are free; reduce max_new_tokens or shorten the input"
        )
