"""Several prompts on one backbone: each example of a batch has its prompt and its head.

The backbone runs once for all of them. The injections of the prompts are computed before: an
example selects soft tokens, keys and values by `Batch.prompt`, and shorter prompts are masked up to
the longest.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.reading import separate_arrays
from jaxprompt.models.model import count_reads, few_reads
from jaxprompt.tree import Params
from jaxprompt.types import Batch, Injection, Prefix, Stream

_STREAMS = ("encoder", "decoder", "cross")
_PICKED = 2**22  # numbers of heads, 16 MiB, that a batch may pick beyond as many as all heads have


class Held(NamedTuple):
    """The parameters of one kind of head, for all prompts that have it."""

    params: Any  # leaves [G, ...]
    rows: Any  # float32 [G, R, E] label rows, or None
    number: Any  # int32 [prompts], which of these is a prompt's; 0 where it has another kind


@dataclasses.dataclass(frozen=True, eq=False)
class Bank:
    """A backbone and the kinds of heads of the prompts on it; their parameters are arguments."""

    backbone: nn.Module
    heads: tuple[nn.Module, ...]
    choices: int = 1  # rows of an example

    # As a Model's: arrays of heads have no hash.
    def __hash__(self) -> int:
        """Returns the same hash for equal banks, which are the same program."""
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        """Compares the parts, arrays of heads by value."""
        return isinstance(other, Bank) and self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        return (self.backbone, self.choices, *map(separate_arrays, self.heads))

    def scores(self, params: Params, added: Injection, held: Sequence[Held], batch: Batch):
        """Scores a batch with every kind of head. -> for each kind [B, ...], as the head returns it

        `added` is the output of `stack`, `params` has "backbone".
        """
        # A prompt is chosen by example, and the backbone sees K rows of each, example-major.
        prompt = batch.prompt
        if prompt is None:
            raise ValueError("the batch has no `prompt`, the index of each example's prompt")
        injection = pick(added, jnp.repeat(prompt, self.choices))
        variables = {"params": params["backbone"]}
        reads = None if any(head.reads_all for head in self.heads) else few_reads(batch)
        hidden = self.backbone.apply(
            variables, batch, injection, deterministic=True, output_positions=reads
        )
        batch = batch if reads is None else count_reads(batch)
        bound = self.backbone.bind(variables)

        def judge(head: nn.Module, own: tuple[Any, Any], hidden: Any, batch: Batch):
            given = Injection(rows=own[1])
            return head.apply({"params": own[0]}, hidden, batch, given, bound, deterministic=True)

        found, rows = [], prompt.shape[0]
        for head, own in zip(self.heads, held, strict=True):
            numbers = own.params, own.rows
            leaves = jax.tree.leaves(numbers)
            if not leaves:  # it has none: one pass serves all
                found.append(judge(head, ({}, None), hidden, batch))
                continue
            mine, total = own.number[prompt], sum(leaf.size for leaf in leaves)
            if rows * (total // len(leaves[0])) <= max(total, _PICKED):
                # Each example by its own numbers: the work is that of one head, however many.
                picked = jax.tree.map(lambda leaf, at=mine: leaf[at], numbers)
                apart = lambda x: x.reshape(rows, -1, *x.shape[1:])  # [B*K, ...] -> [B, K, ...]
                each = jax.tree.map(apart, (hidden, batch))
                one = lambda n, given, head=head: judge(head, n, *given)
                found.append(jax.vmap(one)(picked, each)[:, 0])  # [B, 1, ...] -> [B, ...]
                continue
            # Few and large: every prompt's numbers see every row, which keeps what its own give.
            # In turn and not by jax.vmap: one prompt's activations of a head are held at a time.
            every = jax.lax.map(lambda n, head=head: judge(head, n, hidden, batch), numbers)
            mine = mine.reshape(1, -1, *[1] * (every.ndim - 2))  # of [G, B, ...]
            found.append(jnp.take_along_axis(every, mine, axis=0)[0])
        return tuple(found)


def stack(added: Sequence[Injection]) -> Injection:
    """Stacks the injections of prompts, padded to the longest and masked.

    Each has a batch axis of 1. -> slots [prompts, S, E], k, v [L, prompts, P, N, D], no rows
    """
    parts = {name: _stack_streams([getattr(own, name) for own in added]) for name in _STREAMS}
    return Injection(**parts)


def pick(added: Injection, prompt: Any) -> Injection:
    """Returns the injection of each row's prompt. prompt int32 [rows] -> an injection of rows"""
    return Injection(**{name: _pick_stream(getattr(added, name), prompt) for name in _STREAMS})


def places_of(added: Injection) -> tuple[bool, ...]:
    """Returns which prefixes of a prompt have relative positions: equal ones can be stacked.

    The length does not matter: a prefix begins at position 0, and the text follows it.
    """
    prefixes = [getattr(added, name).prefix for name in _STREAMS]
    return tuple(p is not None and p.positions is not None for p in prefixes)


def without_places(added: Injection) -> Injection:
    """Removes the positions of prefixes, for a backbone that does not use them."""

    def forget(stream: Stream) -> Stream:
        prefix = stream.prefix
        return stream if prefix is None else stream._replace(prefix=prefix._replace(positions=None))

    return added._replace(**{name: forget(getattr(added, name)) for name in _STREAMS})


def _stack_streams(streams: Sequence[Stream]) -> Stream:
    slots, prefix = None, None
    rows = [own.slots for own in streams if own.slots is not None]
    if rows:
        most = max(own.shape[1] for own in rows)
        # Slots need no mask: a shorter prompt's template places no number beyond its own rows.
        nothing = np.zeros((1, most, rows[0].shape[2]), np.float32)
        filled = [nothing if own.slots is None else _fill(own.slots, 1, most) for own in streams]
        slots = jnp.concatenate(filled)
    known = [own.prefix for own in streams if own.prefix is not None]
    if known:
        first, most = known[0], max(own.k.shape[2] for own in known)
        shape = (first.k.shape[0], 1, most, *first.k.shape[3:])
        # Masked, since a key of zeros still takes its share of a softmax.
        none = Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32), False)
        padded = []
        for own in streams:
            mine = own.prefix or none
            k, v = (_fill(x, 2, most) for x in (mine.k, mine.v))
            mask = np.broadcast_to(np.asarray(mine.mask), (shape[0], 1, mine.k.shape[2]))
            # A mask is filled up with False.
            padded.append((k, v, _fill(mask, 2, most)))
        k, v, masks = (jnp.concatenate(parts, 1) for parts in zip(*padded, strict=True))
        # All have them or none has, since what is stacked has equal `places_of`.
        prefix = Prefix(k, v, masks, None if first.positions is None else jnp.arange(most))
    return Stream(slots, prefix)


def _fill(x: Any, axis: int, size: int) -> Any:
    """Fills an axis up to a size with zeros."""
    room = [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(jnp.asarray(x), room)


def _pick_stream(stream: Stream, prompt: Any) -> Stream:
    slots = None if stream.slots is None else stream.slots[prompt]
    prefix = stream.prefix
    if prefix is not None:
        k, v, mask = (x[:, prompt] for x in prefix[:3])
        prefix = Prefix(k, v, mask, prefix.positions)
    return Stream(slots, prefix)


def group_heads(
    heads: Sequence[nn.Module], params: Sequence[Mapping[str, Any]], rows: Sequence[Any]
) -> tuple[tuple[nn.Module, ...], list[Held], list[int]]:
    """Groups the heads of prompts by kind.

    `params` are the parameters of each, `rows` its label vectors or None. Returns the kinds, their
    parameters, and the kind of each prompt.
    """
    owners: list[list[int]] = []
    kinds: list[Any] = []
    of = []
    for number, (head, own) in enumerate(zip(heads, rows, strict=True)):
        # The number of label rows is part of the kind: those of different shapes do not stack.
        kind = (*separate_arrays(head), None if own is None else own.shape)
        if kind not in kinds:
            kinds.append(kind)
            owners.append([])
        of.append(kinds.index(kind))
        owners[of[-1]].append(number)
    held = []
    for own in owners:
        join = lambda *leaves: jnp.stack(leaves)
        numbers = np.zeros(len(heads), np.int32)
        numbers[own] = np.arange(len(own))
        labels = None if rows[own[0]] is None else jnp.stack([rows[i] for i in own])
        joined = jax.tree.map(join, *[params[i] for i in own])
        held.append(Held(joined, labels, jnp.asarray(numbers)))
    return tuple(heads[own[0]] for own in owners), held, of
