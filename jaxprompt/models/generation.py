"""Text generation: greedily, by sampling or by beam search, over a cache of static shape."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.errors import InputError, at_least
from jaxprompt.layers.cache import iterate_layers, select_beams, widen_cache
from jaxprompt.layers.capping import logit_cap, soft_cap
from jaxprompt.layers.quantized import score_table
from jaxprompt.models.model import KeyValues, Model, without_absent_slots
from jaxprompt.models.sampling import (
    RowKeys,
    Sampling,
    derive_keys,
    draw_tokens,
    filter_scores,
    penalize_repetition,
    read_tokens,
)
from jaxprompt.tree import Params
from jaxprompt.types import NO_LIMIT, Array, Batch, Cache


class Generated(NamedTuple):
    """The best continuation of each row, without the input."""

    ids: Array  # int32 [B, max_new_tokens], the end id included, the pad id behind it
    lengths: Array  # int32 [B], the end id included
    scores: Array  # float32 [B], the sum of log-probabilities / length ** length_penalty
    # float32 [B, max_new_tokens] of the tokens, before temperature, filters and penalty; None with
    # beams
    logprobs: Array | None


@dataclasses.dataclass(frozen=True)
class Search:
    """How continuations are searched for: the arguments of `generate`."""

    max_new_tokens: int
    ends: tuple[int, ...]
    pad: int
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    sampling: Sampling = Sampling()

    @property
    def room(self) -> int:
        """The number of new tokens of a row that are read: nothing follows the last one."""
        return max(self.max_new_tokens - 1, 1)


class Rows(NamedTuple):
    """Rows that are being continued."""

    chosen: Any  # _Sequences or _Beams
    start: Array  # int32 [B], the position of each row's first new token
    cache: Cache
    num_steps: Array  # int32 scalar, steps of all rows so far


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
    sampling: Sampling = Sampling(),  # noqa: B008, immutable
    row_keys: RowKeys | None = None,
    shared_kv: KeyValues | None = None,
    checked: bool = False,
) -> Generated:
    """Continues each row of `batch.read` from its last token, by samples or the best tokens.

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
      num_beams: the number of beams, 1 = no beam search.
      length_penalty: of beam search.
      early_stopping: what an open continuation may reach: False is its current score, "never" its
        score over `max_new_tokens` tokens if longer is better; True ends the row without this
        comparison.
      sampling: how a token is chosen; by default the best one, which is greedy search.
      row_keys: the origin of the rows' random keys, if the temperature is above 0.
      shared_kv: the result of `Model.run_shared_prefix` with these parameters, if any.
      checked: whether `check_new_tokens` has checked the batch. Under jit only the padded length is
        known.

    Raises:
      InputError: if beams, sampling or length are invalid, if a row has several documents, or,
        unless `checked`, if the texts do not fit.
    """
    ends = tuple(np.atleast_1d(eos).tolist())
    search = Search(max_new_tokens, ends, pad, num_beams, length_penalty, early_stopping, sampling)
    if not checked:
        check_new_tokens(model, batch, max_new_tokens)
    rows = start_rows(
        model, params, batch, search, search.room, shared_kv=shared_kv, row_keys=row_keys
    )
    return best_texts(model, continue_rows(model, params, rows, search), search)


def start_rows(
    model: Model,
    params: Params,
    batch: Batch,
    search: Search,
    room: int,
    *,
    shared_kv: KeyValues | None = None,
    row_keys: RowKeys | None = None,
) -> Rows:
    """Processes the input, chooses the first token of each row, and has room for `room` more.

    Raises InputError like `check_search`.
    """
    check_search(model, batch, search)
    batch, states, cache = read_input(
        model, params, batch, room, search.num_beams, shared_kv=shared_kv
    )
    tokens = batch.read
    columns = jnp.arange(tokens.mask.shape[1])
    # Padding may be on either side.
    last = jnp.where(tokens.mask, columns, 0).max(1)[:, None]  # [B, 1]
    # Positions already include the shift of a prefix.
    start = jnp.take_along_axis(jnp.asarray(tokens.positions), last, axis=1)[:, 0] + 1
    state = jnp.take_along_axis(states, last[:, :, None], axis=1)[:, 0]  # [B, H]
    backbone = model.backbone.bind({"params": params["backbone"]})
    idle = jnp.asarray(batch.weights) == 0  # [B]
    if search.num_beams > 1:
        chosen: _Sequences | _Beams = _Beams.empty(idle, search)
    else:
        chosen = _Sequences.empty(idle, search, model, batch, row_keys)
    scores = _next_scores(model, backbone, state, chosen, search)
    chosen = chosen.choose(scores, search, _penalties(model, search))
    return Rows(chosen, start, cache, jnp.int32(0))


def continue_rows(
    model: Model,
    params: Params,
    rows: Rows,
    search: Search,
    max_running: int | Array = 0,
    max_steps: int | Array = NO_LIMIT,
    *,
    layers: Any = None,
) -> Rows:
    """Continues rows by up to `max_steps` tokens, until at most `max_running` are not finished.

    `layers` are the backbone's `reading_layers`, if they were computed before.
    """
    layers = layers or model.backbone.bind({"params": params["backbone"]}).reading_layers()
    penalties = _penalties(model, search)

    def step(rows: Rows) -> Rows:
        chosen, start, cache, num_steps = rows
        inner = model.backbone.bind({"params": params["backbone"]})
        # A row that started later than others overwrites the columns of the row before it.
        column = num_steps % search.room * search.num_beams
        weights = iterate_layers(layers, column)
        if isinstance(chosen, _Beams):
            # Before the token is read, since it sees the tokens of the beam that it extends.
            cache = select_beams(cache, chosen.parents)
        ids = chosen.last_tokens()  # [B, K]
        positions = jnp.broadcast_to((start + chosen.lengths - 1)[:, None], ids.shape)
        x, cache = inner.extend(weights, ids.ravel(), positions.ravel(), cache, column)
        scores = _next_scores(model, inner, x, chosen, search)
        return Rows(chosen.choose(scores, search, penalties), start, cache, num_steps + 1)

    last_step = rows.num_steps + jnp.minimum(max_steps, search.max_new_tokens)

    def goes_on(rows: Rows) -> Array:
        return ((~rows.chosen.done).sum() > max_running) & (rows.num_steps < last_step)

    return jax.lax.while_loop(goes_on, step, rows)


def replace_rows(rows: Rows, new: Rows, sources: Array, search: Search) -> Rows:
    """Replaces row i by row `sources[i]` of `new`, which has no room yet, unless that is -1."""
    new = add_room(new, search, like=rows)

    def replace(old, leaf):
        is_replaced = jnp.reshape(sources >= 0, (-1, *[1] * (leaf.ndim - 1)))
        return jnp.where(is_replaced, leaf[jnp.maximum(sources, 0)], old)

    chosen, start, cache = jax.tree.map(replace, rows[:3], new[:3])
    # The number of steps stays that of the rows that go on.
    return Rows(chosen, start, cache, rows.num_steps)


def add_room(rows: Rows, search: Search, like: Rows | None = None) -> Rows:
    """Adds columns for new tokens, and empty ones up to the shapes of `like`."""
    num_free = search.room * search.num_beams
    return rows._replace(cache=widen_cache(rows.cache, num_free, like and like.cache))


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


class _Sequences(NamedTuple):
    ids: Array  # [B, max_new_tokens]
    lengths: Array  # [B], tokens chosen so far
    logprobs: Array  # [B, max_new_tokens]
    done: Array  # bool [B]
    keys: Array | None  # uint32 [B, 2], None = nothing is random
    seen: Array | None  # bool [B, V], tokens of the input and the output; None = no penalty

    @classmethod
    def empty(
        cls,
        idle: Array,
        search: Search,
        model: Model,
        batch: Batch,
        row_keys: RowKeys | None,
    ) -> "_Sequences":
        shape = len(idle), search.max_new_tokens
        ids = jnp.full(shape, search.pad, jnp.int32)
        none = jnp.zeros(len(idle), jnp.int32)
        keys = seen = None
        if search.sampling.temperature:
            assert row_keys is not None, "sampling needs row_keys"
            numbers = batch.index if batch.number is None else batch.number
            keys = derive_keys(row_keys, numbers)
        if search.sampling.repetition_penalty != 1:
            seen = read_tokens(batch.read, model.shared_prefix, model.backbone.dims.vocab)
        return cls(ids, none, jnp.zeros(shape), idle, keys, seen)

    def last_tokens(self) -> Array:
        return jnp.take_along_axis(self.ids, self.lengths[:, None] - 1, axis=1)  # [B, 1]

    def choose(self, scores, search: Search, penalties) -> "_Sequences":
        sampling, seen, penalized = search.sampling, self.seen, scores
        if seen is not None:
            penalized = penalize_repetition(scores, seen, sampling.repetition_penalty)
        if self.keys is None:
            token = jnp.argmax(penalized, axis=-1)
        else:
            token = draw_tokens(self.keys, self.lengths, filter_scores(penalized, sampling))
        if seen is not None:
            seen |= jnp.arange(seen.shape[1]) == token[:, None]
        logprob = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
        logprob -= jax.nn.logsumexp(scores, axis=-1)
        is_next = jnp.arange(search.max_new_tokens) == self.lengths[:, None]
        is_next &= ~self.done[:, None]
        lengths = self.lengths + ~self.done
        return _Sequences(
            jnp.where(is_next, token[:, None], self.ids),
            lengths,
            jnp.where(is_next, logprob[:, None], self.logprobs),
            self.done | _is_end(token, search.ends) | (lengths == search.max_new_tokens),
            self.keys,
            seen,
        )

    def best(self, search: Search, penalties) -> Generated:
        scores = self.logprobs.sum(1) / penalties[self.lengths]
        return Generated(self.ids, self.lengths, scores, self.logprobs)


class _Beams(NamedTuple):
    ids: Array  # [B, K, max_new_tokens] of the open continuations, best first
    lengths: Array  # [B], tokens chosen so far
    sums: Array  # [B, K] of their log-probabilities
    parents: Array  # [B, K] index of the open continuation that each extends
    ended: Array  # [B, K, max_new_tokens] the best that ended
    scores: Array  # [B, K] of those, -inf = none yet
    done: Array  # bool [B]

    @classmethod
    def empty(cls, idle: Array, search: Search) -> "_Beams":
        shape = len(idle), search.num_beams
        ids = jnp.full((*shape, search.max_new_tokens), search.pad, jnp.int32)
        none = jnp.zeros(shape)
        lengths = jnp.zeros(len(idle), jnp.int32)
        return cls(ids, lengths, none, none.astype(int), ids, none - jnp.inf, idle)

    def last_tokens(self) -> Array:
        return jnp.take_along_axis(self.ids, self.lengths[:, None, None] - 1, axis=2)[..., 0]

    def choose(self, scores, search: Search, penalties) -> "_Beams":
        """Selects the K best open continuations and the K best that ended."""
        rows, num_beams, max_new_tokens = self.ids.shape
        vocab, num_ranked = scores.shape[-1], _num_ranked(num_beams, search.ends)

        def take_beams(x, index):
            return jnp.take_along_axis(x, index[:, :, None], axis=1)

        logp = jax.nn.log_softmax(scores).reshape(rows, -1, vocab)  # [B, K, V], at first [B, 1, V]
        # At first all beams are equal, so only one of them is continued.
        total = (self.sums[:, : logp.shape[1], None] + logp).reshape(rows, -1)
        # At least K of these are open.
        sums, index = jax.lax.top_k(total, num_ranked)
        parents, tokens = index // vocab, index % vocab  # [B, ranked]
        is_next = jnp.arange(max_new_tokens) == self.lengths[:, None, None]
        ids = jnp.where(is_next, tokens[:, :, None], take_beams(self.ids, parents))
        lengths = self.lengths + 1
        is_last = (lengths == max_new_tokens)[:, None]
        is_end = _is_end(tokens, search.ends) | is_last
        open_sums, open_index = jax.lax.top_k(jnp.where(is_end, -jnp.inf, sums), num_beams)
        # A continuation that ends must be among the best K; the others only replace those.
        is_new_end = is_end & (jnp.arange(num_ranked) < num_beams) & ~self.done[:, None]
        new_scores = jnp.where(is_new_end, sums / penalties[lengths][:, None], -jnp.inf)
        best, ended_index = jax.lax.top_k(
            jnp.concatenate([self.scores, new_scores], axis=1), num_beams
        )
        done = (best > -jnp.inf).all(1)
        if search.early_stopping is not True:
            is_never = search.early_stopping == "never" and search.length_penalty > 0
            final_lengths = max_new_tokens if is_never else lengths
            done &= open_sums[:, 0] / penalties[final_lengths] <= best[:, -1]
        return _Beams(
            take_beams(ids, open_index),
            jnp.where(self.done, self.lengths, lengths),
            open_sums,
            jnp.take_along_axis(parents, open_index, axis=1),
            take_beams(jnp.concatenate([self.ended, ids], axis=1), ended_index),
            best,
            self.done | done | is_last[:, 0],
        )

    def best(self, search: Search, penalties) -> Generated:
        ids, idle = self.ended[:, 0], self.lengths == 0
        # The pad id may be an end id, too, so the first one counts.
        is_end = _is_end(ids, search.ends)
        first_end = jnp.argmax(is_end, axis=1) + 1
        lengths = jnp.where(is_end.any(1), first_end, search.max_new_tokens)
        lengths = jnp.where(idle, 0, lengths).astype(jnp.int32)
        return Generated(ids, lengths, jnp.where(idle, 0.0, self.scores[:, 0]), None)


def best_texts(model: Model, rows: Rows, search: Search) -> Generated:
    """Returns the best continuation of each finished row."""
    return rows.chosen.best(search, _penalties(model, search))


def _penalties(model: Model, search: Search) -> Array:
    """Returns what scores are divided by, for each length from 0 on. -> [max_new_tokens + 1]"""
    # Computed on the host in float64. A forced first token counts, as in transformers.
    first = 1 + _forces_first(model.backbone.cfg)
    lengths = np.arange(first, search.max_new_tokens + first, dtype=np.float64)
    penalties = jnp.float32(lengths**search.length_penalty)
    # Length 0 is that of rows that only fill the batch.
    return jnp.concatenate([jnp.ones(1), penalties])


def _is_end(tokens: Array, ends: Sequence[int]) -> Array:
    return jnp.isin(tokens, jnp.array(ends, jnp.int32))


def _num_ranked(num_beams: int, ends: Sequence[int]) -> int:
    """Returns how many continuations are ranked: each beam may have one for every end id."""
    return (1 + max(1, len(ends))) * num_beams


def _forces_first(cfg: Any) -> bool:
    return getattr(cfg, "first", -1) >= 0


def _next_scores(model: Model, backbone, x, chosen: _Sequences | _Beams, search: Search):
    """Scores the next token of each sequence or beam by its last state. [R, H] -> float32 [R, V]"""
    scores = _score(backbone, x)
    if search.sampling != Sampling():
        scores = scores[:, : model.backbone.dims.vocab]  # without the padding of a mesh
    return _force_end(model.backbone.cfg, scores, chosen, search)


def _force_end(cfg: Any, scores, chosen: _Sequences | _Beams, search: Search):
    """Leaves only the token that the config forces at the maximum length, if there is one."""
    token = getattr(cfg, "last", -1)
    if token < 0:
        return scores
    only_end = jnp.where(jnp.arange(scores.shape[-1]) == token, 0.0, -jnp.inf)
    is_last = chosen.lengths == search.max_new_tokens - 1
    is_last = jnp.repeat(is_last, len(scores) // len(is_last))  # B -> B*K
    return jnp.where(is_last[:, None], only_end, scores)


def _score(backbone, x):
    """Multiplies states by the whole output table. [R, H] -> float32 [R, V]"""
    features, (table, bias) = backbone.lm_features(x), backbone.lm_table()
    # In float32, since close scores would be equal when rounded to 16 bits.
    scores = soft_cap(score_table(features, table), logit_cap(backbone))
    return scores if bias is None else scores + bias.astype(jnp.float32)


def check_generation(model: Model, batch: Batch, search: Search) -> None:
    """Raises InputError like `check_search` and `check_new_tokens`."""
    check_search(model, batch, search)
    check_new_tokens(model, batch, search.max_new_tokens)


def check_search(model: Model, batch: Batch, search: Search) -> None:
    """Raises InputError if arguments are out of range or rows have several documents."""
    num_beams = search.num_beams
    at_least("max_new_tokens", search.max_new_tokens, 1)
    at_least("num_beams", num_beams, 1)
    search.sampling.check()
    if num_beams > 1 and search.sampling != Sampling():
        raise InputError(
            f"num_beams={num_beams} ranks the most likely texts, so it excludes a temperature and "
            "a repetition penalty; set num_beams=1, or temperature=0 and repetition_penalty=1"
        )
    vocab = model.backbone.dims.vocab
    per_beam = _num_ranked(1, search.ends)
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
