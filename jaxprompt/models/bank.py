"""Several prompts on one backbone: each example of a batch has its prompt and its head.

The backbone runs once for all of them. The injections of the prompts are computed before: an
example selects soft tokens, keys and values by `Batch.prompt`, and shorter prompts are masked up to
the longest.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.layers.reading import separate_arrays
from jaxprompt.models.model import EqualByKey, Model, positions_read, renumber_reads
from jaxprompt.prompts import Method
from jaxprompt.tree import Params
from jaxprompt.types import Batch, Injection, Prefix, Stream

_STREAMS = ("encoder", "decoder", "cross")
# A batch gathers the parameters of its heads if they are no more than those of all heads together,
# or no more than this number, 16 MiB.
_MAX_GATHERED = 2**22


class HeadParams(NamedTuple):
    """The parameters of one kind of head, for all prompts that have it."""

    params: Any  # leaves [G, ...]
    rows: Any  # float32 [G, R, E] label vectors, or None
    index: Any  # int32 [prompts], position of each prompt in G; 0 if its head is of another kind


@dataclasses.dataclass(frozen=True, eq=False)
class Bank(EqualByKey):
    """A backbone and the kinds of heads of the prompts on it; their parameters are arguments."""

    backbone: nn.Module
    heads: tuple[nn.Module, ...]
    choices: int = 1  # rows of an example

    def _key(self) -> tuple[Any, ...]:
        return (self.backbone, self.choices, *map(separate_arrays, self.heads))

    def scores(
        self, params: Params, stacked: Injection, head_params: Sequence[HeadParams], batch: Batch
    ) -> tuple[Any, ...]:
        """Scores a batch with every kind of head. -> for each kind [B, ...], as the head returns it

        `params` has "backbone", and `stacked` is the result of `stack_injections`.
        """
        # The prompt is chosen per example, and the backbone has K rows of each, example-major.
        prompt: Any = batch.prompt
        injection = select_injections(stacked, jnp.repeat(prompt, self.choices))
        variables = {"params": params["backbone"]}
        reads = None if any(head.reads_all for head in self.heads) else positions_read(batch)
        hidden = self.backbone.apply(
            variables, batch, injection, deterministic=True, output_positions=reads
        )
        batch = batch if reads is None else renumber_reads(batch)
        bound = self.backbone.bind(variables)
        pairs = zip(self.heads, head_params, strict=True)
        return tuple(_score(head, bound, group, hidden, batch) for head, group in pairs)


class StackedPrompts(Method):
    """Returns the injection of each row's prompt.

    Its only parameter, `stacked`, is the result of `stack_injections`. The positions of the rows
    are already shifted, since prompts may shift them by different numbers.
    """

    reads: ClassVar[tuple[str, ...]] = ("prompt",)

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Selects the injections of the rows."""
        return select_injections(self.get_variable("params", "stacked"), batch.prompt)


def writing_model(backbone: nn.Module) -> Model:
    """Returns the model of prompts that generate texts; its parameters: `writing_params`."""
    return Model(backbone, StackedPrompts(backbone.dims), {})


def writing_params(params: Params, stacked: Injection) -> dict[str, Any]:
    """Adds the result of `stack_injections` to the parameters of the backbone."""
    return {"backbone": params["backbone"], "prompt": {"stacked": stacked}}


def _score(
    head: nn.Module, backbone: nn.Module, group: HeadParams, hidden: Any, batch: Batch
) -> Any:
    """Scores each example with its own parameters of one kind of head. -> [B, ...]"""

    def apply(params: tuple[Any, Any], hidden: Any, batch: Batch):
        rows = Injection(rows=params[1])
        return head.apply({"params": params[0]}, hidden, batch, rows, backbone, deterministic=True)

    examples = len(batch.labels)
    params = group.params, group.rows
    leaves = jax.tree.leaves(params)
    if not leaves:  # without parameters, all prompts share one pass
        return apply(({}, None), hidden, batch)
    index, total = group.index[batch.prompt], sum(leaf.size for leaf in leaves)
    if examples * (total // len(leaves[0])) <= max(total, _MAX_GATHERED):
        # Each example has its own parameters: the work of one head, however many there are.
        gathered = jax.tree.map(lambda leaf: leaf[index], params)
        per_example = jax.tree.map(  # [B*K, ...] -> [B, K, ...]
            lambda x: x.reshape(examples, -1, *x.shape[1:]), (hidden, batch)
        )
        outputs = jax.vmap(lambda params, inputs: apply(params, *inputs))(gathered, per_example)
        return outputs[:, 0]  # [B, 1, ...] -> [B, ...]
    # The heads are few and large: each scores all examples, and those of its prompt are selected.
    # One after another, not by jax.vmap: the activations of one head are in memory at a time.
    outputs = jax.lax.map(lambda params: apply(params, hidden, batch), params)  # [G, B, ...]
    index = index.reshape(1, -1, *[1] * (outputs.ndim - 2))
    return jnp.take_along_axis(outputs, index, axis=0)[0]


def stack_injections(injections: Sequence[Injection]) -> Injection:
    """Stacks the injections of prompts, padded to the longest and masked.

    Each has a batch axis of 1. -> slots [prompts, S, E], k, v [L, prompts, P, N, D], no rows
    """
    streams = {name: [getattr(x, name) for x in injections] for name in _STREAMS}
    return Injection(**{name: _stack_streams(parts) for name, parts in streams.items()})


def select_injections(stacked: Injection, prompt: Any) -> Injection:
    """Returns the injection of each row's prompt. prompt int32 [rows] -> an injection of rows"""
    return Injection(**{name: _select(getattr(stacked, name), prompt) for name in _STREAMS})


def prefix_positions(injection: Injection) -> tuple[bool, ...]:
    """Returns which prefixes of a prompt have relative positions: equal ones can be stacked.

    The length does not matter: a prefix begins at position 0, and the text follows it.
    """
    prefixes = [getattr(injection, name).prefix for name in _STREAMS]
    return tuple(p is not None and p.positions is not None for p in prefixes)


def without_positions(injection: Injection) -> Injection:
    """Removes the positions of prefixes, for a backbone that does not use them."""

    def remove(stream: Stream) -> Stream:
        prefix = stream.prefix
        return stream if prefix is None else stream._replace(prefix=prefix._replace(positions=None))

    return injection._replace(**{name: remove(getattr(injection, name)) for name in _STREAMS})


def _stack_streams(streams: Sequence[Stream]) -> Stream:
    slots, prefix = None, None
    with_slots = [stream.slots for stream in streams if stream.slots is not None]
    if with_slots:
        longest = max(part.shape[1] for part in with_slots)
        # Slots need no mask: a shorter prompt's template has no slot numbers beyond its length.
        zeros = np.zeros((1, longest, with_slots[0].shape[2]), np.float32)
        padded = [zeros if x.slots is None else _pad(x.slots, 1, longest) for x in streams]
        slots = jnp.concatenate(padded)
    prefixes = [stream.prefix for stream in streams if stream.prefix is not None]
    if prefixes:
        first, longest = prefixes[0], max(part.k.shape[2] for part in prefixes)
        shape = (first.k.shape[0], 1, longest, *first.k.shape[3:])
        # Masked, since a key of zeros has a share of the softmax.
        empty = Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32), False)
        padded = []
        for part in (stream.prefix or empty for stream in streams):
            k, v = _pad(part.k, 2, longest), _pad(part.v, 2, longest)
            mask = np.broadcast_to(np.asarray(part.mask), (shape[0], 1, part.k.shape[2]))
            padded.append((k, v, _pad(mask, 2, longest)))  # with False
        k, v, masks = (jnp.concatenate(parts, 1) for parts in zip(*padded, strict=True))
        # All have positions or none has, since `prefix_positions` are equal.
        prefix = Prefix(k, v, masks, None if first.positions is None else jnp.arange(longest))
    return Stream(slots, prefix)


def _pad(x: Any, axis: int, size: int) -> Any:
    """Pads an axis to a size with zeros."""
    widths = [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(jnp.asarray(x), widths)


def _select(stream: Stream, prompt: Any) -> Stream:
    slots = None if stream.slots is None else stream.slots[prompt]
    prefix = stream.prefix
    if prefix is not None:
        k, v, mask = (x[:, prompt] for x in prefix[:3])
        prefix = Prefix(k, v, mask, prefix.positions)
    return Stream(slots, prefix)


def group_heads(
    heads: Sequence[nn.Module], params: Sequence[Mapping[str, Any]], rows: Sequence[Any]
) -> tuple[tuple[nn.Module, ...], list[HeadParams], list[int]]:
    """Groups the heads of prompts by kind.

    `params` are the parameters of each, `rows` its label vectors or None. Returns the kinds, their
    parameters, and the kind of each prompt.
    """
    groups: list[list[int]] = []
    kinds: list[Any] = []
    kind_of = []
    for number, (head, vectors) in enumerate(zip(heads, rows, strict=True)):
        # Label vectors of different shapes cannot be stacked.
        kind = (*separate_arrays(head), None if vectors is None else vectors.shape)
        if kind not in kinds:
            kinds.append(kind)
            groups.append([])
        kind_of.append(kinds.index(kind))
        groups[kind_of[-1]].append(number)
    head_params = []
    for members in groups:
        index = np.zeros(len(heads), np.int32)
        index[members] = np.arange(len(members))
        vectors = None if rows[members[0]] is None else jnp.stack([rows[i] for i in members])
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[params[i] for i in members])
        head_params.append(HeadParams(stacked, vectors, jnp.asarray(index)))
    return tuple(heads[members[0]] for members in groups), head_params, kind_of
