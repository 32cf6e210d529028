"""Data structures shared between modules: NamedTuples, hence pytrees. No logic, no jax.

Shape letters, upper case in comments and lower case in einsum::

    B batch       T tokens        S slot rows     P prefix length    L layers    N heads
    D head dim    H width         E embedding     F mlp              V vocab     C classes
    M scored positions            K rows (choices) of one example    W words of a class
    S keys or columns, in attention and its caches, [B, S, N, D]     J pieces of a word
    X features for the output table                 R trained label vectors, or runs of a grid
    G groups of prompts or runs                     A accumulated parts of a batch
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

Array = Any  # numpy on the host, jax on the device
ABSENT = -1e9  # score of a choice that an example does not have
NO_LIMIT = 2**31 - 1


class Role(IntEnum):
    """What a position of the input contains."""

    PAD = 0
    SPECIAL = 1
    HARD = 2
    SOFT = 3
    TEXT = 4
    LABEL = 5


class Tokens(NamedTuple):
    """One stream of tokens. Arrays are [B, T]."""

    ids: Array  # int32; the pad id at soft tokens
    mask: Array  # bool, True = attend
    slot: Array  # int32, row of Stream.slots written at this position, -1 = none
    positions: Array  # int32, zero-based, pads 0
    types: Array  # int32, BERT's; with causal attention the branch: a token sees branch 0 and its
    # own
    roles: Array  # int8, Role
    segments: Array | None = None  # int32, document from 1 on, pads 0: a token only sees its own
    # document; None = a row is one text
    lengths: Array | None = None  # int32 [B], number of real tokens of each row, if they come first
    # and there are no branches: then kernels need no mask


class SharedPrefix(NamedTuple):
    """Prefix shared by all sequences, constant at compile time; positions count from 0. [T] each"""

    ids: tuple[int, ...]
    slot: tuple[int, ...]
    types: tuple[int, ...]
    roles: tuple[int, ...]


class Batch(NamedTuple):
    """One batch. With K sequences an example (choices) token arrays are [B*K, T], example-major."""

    encoder: Tokens  # the input; the only stream of BERT and of GPT-2
    label_pos: Array  # int32 [B*K, M] positions that the head reads, of the decoder if there is one
    labels: Array  # int32 [B], or [B, M] one per read position; -1 = unknown; float32 [B], numbers
    weights: Array  # float32 [B], 0 = an example that only fills the batch
    index: Array  # int32 [B], example of the split, -1 = filling
    decoder: Tokens | None = None  # the inputs of an encoder-decoder's decoder
    targets: Array | None = None  # int32 [B*K, M] the token to predict at label_pos, -1 = none: the
    # next one in free text, the hidden one in pre-training (after a generator see ReplacedHead)
    cached: Array | None = None  # [B*K, T, H] states of frozen layers, computed before
    counts: Array | None = None  # int32 [B] choices of each example; None = all have all classes
    prompt: Array | None = None  # int32 [B] index of each example's prompt in a bank
    number: Array | None = None  # int32 [B] row's number among those of its prompt, for the keys of
    # samples; None = index

    @property
    def read(self) -> Tokens:
        """The stream whose hidden states the head reads."""
        return self.encoder if self.decoder is None else self.decoder

    @property
    def decoder_tokens(self) -> Tokens:
        """The decoder inputs. Raises ValueError if there are none."""
        if self.decoder is None:
            raise ValueError("the batch has no decoder tokens, which this backbone reads")
        return self.decoder


class Prefix(NamedTuple):
    """Keys and values prepended to those of an attention layer (after the projections)."""

    k: Array  # [L, B|1, P, N, D]
    v: Array  # [L, B|1, P, N, D]
    mask: Array  # bool [L, B|1, P], False = no prompt in that layer or for that row; numpy if it is
    # known when compiling, so that layers without the prompt do not compute it; for the layers of
    # a stack None = all True
    positions: Array | None = None  # int32 [P], 0 to P - 1, for a relative bias or a window; None =
    # it has no positions


class AttentionWindow(NamedTuple):
    """Attention window in columns: backwards, and to both sides if attention is not causal."""

    columns: int  # seen on each side, the query's own included
    local: bool | Array  # False = no window; bool [] if layers of both kinds are one program
    num_global: int = 0  # the first so many columns are seen by every query, too


class AttentionMask(NamedTuple):
    """Which keys each query attends to: a mask, and its structure for attention kernels.

    The mask is `keys` without what `causal`, `segments` and `window` hide; keys = None if these do
    not describe the mask completely.
    """

    mask: Array  # bool [B, S] or [B, T, S], True = seen
    keys: Array | None = None  # bool [B, S]
    causal: bool = False  # hides later keys; the last query sees the last key
    segments: tuple[Array, Array] | None = None  # int32 [B, T], [B, S]: equal ones see each other
    lengths: Array | None = None  # int32 [B], `keys` are the first so many; None if anything but
    # these, `causal` and `window` hides keys
    window: AttentionWindow | None = None
    few_queries: bool = False  # only those that a head reads: no kernel is faster for them


class LayerCache(NamedTuple):
    """Cached keys and values of one layer."""

    k: Array  # [B, N, S, D]
    v: Array  # [B, N, S, D]
    mask: Array  # bool [B, S], of the prefix and the input; False in columns of new tokens


class Cache(NamedTuple):
    """Key-value cache of generation, in arrays of static shape.

    The K beams of a row share its columns: first K for the beams' first new tokens, K for their
    second ones, and so on; then those of the prefix and the input.
    """

    self_attention: tuple[LayerCache, ...]
    positions: Array  # int32 [B, S] of each column, -1 = not in a relative bias
    visible: Array  # bool [B, K, S], the columns of each beam's new tokens
    cross: tuple[LayerCache, ...] | None = None  # the encoder's output, after its prefix


class Stream(NamedTuple):
    """What a method adds to one stream."""

    slots: Array | None = (
        None  # [B|1, S, E] vectors written where Tokens.slot >= 0; those after the
    )
    # slots of the template are the method's `rows`, which a head may put into the input, or serve
    # the views of the method's objectives
    prefix: Prefix | None = None
    slots_mask: Array | None = None  # bool [B|1, S], False = the vector is absent: its position is
    # neither attended to nor pooled; None = all True


class Injection(NamedTuple):
    """What a method adds to a backbone."""

    encoder: Stream = Stream()
    decoder: Stream = Stream()
    cross: Stream = Stream()
    rows: Array | None = None  # [R, E] vectors that it trains for heads, e.g. label vectors


class TaskInfo(NamedTuple):
    """What a method knows about a task."""

    classes: int = 0  # or choices, if these are the classes
    words: tuple[tuple[tuple[int, ...], ...], ...] = ()  # vocabulary ids of each label word's
    # subwords, by class; () if the head reads no words
    mask: int = -1  # id of the mask token; -1 = the task has none


class Dims(NamedTuple):
    """What a method knows about a backbone."""

    vocab: int
    width: int
    embed: (
        int  # width of the word embeddings, where slots are written (ELECTRA: not always `width`)
    )
    layers: int
    heads: int
    head_dim: int
    max_len: int  # positions of the backbone, prompts included; NO_LIMIT if they are relative
    decoder_layers: int = 0  # of a decoder that reads the encoder's output


class Objective(NamedTuple):
    """One term of the loss."""

    name: str
    loss: Callable[..., tuple[Any, Any]]  # (scores, labels, weights) -> (sum, normaliser)
    head: str = "main"
    weight: float = 1.0
    view: Callable[[Batch, Array], Batch] | None = None  # (batch, key) -> the batch that it scores
    sums: Callable[..., dict[str, Any]] | None = None  # called like `loss`: additional counts
    then: Callable[[Batch, Any], Batch] | None = None  # (batch, scores) -> batch of the next terms
