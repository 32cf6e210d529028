"""The types of a table of names: our parameters, and the name of each in the file.

Axes are letters (see types.py): V vocab, E embedding, H width, N heads, D head dim, F mlp, and
here also P positions, S segment types, R distance buckets, X width of the LM features, W width of
a convolution, A all dimensions of the queries, C of the keys, 1 and 3. Parameters under "layers/"
and "decoder_layers/" are in the file once per layer, {i}, and are stacked on a leading axis, L or
K, the decoder's number of layers. Those under "later_layers/" exist for all layers but the first,
on an axis J. Those of experts are in the file once per layer {g} and expert {i}, and have two
leading axes, L and I.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """One parameter and its origin."""

    path: str  # ours, flat
    sources: tuple[str, ...]  # names in the file: the first present is read, the last is written
    axes: str  # ours, without L
    file_axes: tuple[str, ...]  # in the file; the letters of one string are a merged axis
    transposed: bool = False  # torch's Linear weights are [out, in]
    # (i, n): the i-th of n parts of the file's tensor, along its last axis, or its first if
    # transposed.
    part: tuple[int, int] = (0, 1)
    parts: tuple[str, ...] = ()  # the axes of each part; () = all parts have the same size
    per_head: bool = False  # the parts of a head follow each other: [heads, parts, head dim]
    residual: float = 0.0  # power of `rescale` that it is divided by
    when: str = ""  # trait of models that have it: "projected", "gated" or one of its family;
    # "" = all models
    elsewhere: tuple[str, ...] = ()  # names that are read if the file has none of `sources`
    outside: bool = False  # never follows the family's prefix

    @property
    def stack(self) -> str:
        """The leading axes of stacked parameters: "L", "K", "J", "LI"; "" if not stacked."""
        stacks = {"layers": "L", "decoder_layers": "K", "later_layers": "J"}
        is_of_expert = "/experts/" in self.path and "{g}" in self.sources[0]
        return stacks.get(self.path.split("/")[0], "") + "I" * is_of_expert

    def part_sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """Returns the size of each part, along the axis of the file that they share."""
        axes = self.file_axes[0 if self.transposed else -1]
        parts = self.parts or (axes,) * self.part[1]
        return [math.prod(sizes[axis] for axis in part) for part in parts]

    def name(self, source: str, layer: int, group_size: int = 1) -> str:
        """Returns the name of a layer.

        With {g}, `layer` counts the layers of all groups, or the experts of all layers, and
        `group_size` is their number in each.
        """
        if "{g}" in source:
            return source.format(g=layer // group_size, i=layer % group_size)
        # The first of the later layers has the number 1 in the file.
        return source.format(i=layer + (self.stack == "J"))


# (config, sizes so far) -> sizes of axes without a field
Derive = Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, int]]
Traits = Callable[[Mapping[str, Any]], Collection[str]]  # config -> see Tensor.when


def _no_sizes(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    return {}


def _no_traits(config: Mapping[str, Any]) -> Collection[str]:
    return ()


class Family(NamedTuple):
    """The names of one family; only trunk and pooler names may follow `prefix`."""

    prefix: str
    trunk: tuple[Tensor, ...]
    heads: dict[str, tuple[Tensor, ...]]
    decoder: Tensor  # the output table, which the file may contain even if it is the word table
    sizes: dict[str, str]  # axis letter -> field of config.json, or another letter
    always: tuple[str, ...] = ()  # heads without tensors of their own
    bare: bool = False  # current checkpoints omit the prefix
    # head -> suffix of the transformers class that loads it, in order of precedence
    classes: Mapping[str, str] = {}
    # head -> a tensor of files whose tensors with the head's names are not used as this head
    unless: Mapping[str, str] = {}
    derive: Derive = _no_sizes
    traits: Traits = _no_traits


# Buffers of some versions, not weights.
IGNORED = (
    ".position_ids", ".token_type_ids", ".attn.bias", ".attn.masked_bias", ".attention.bias",
    ".attention.masked_bias", ".rotary_emb.inv_freq",
)  # fmt: skip


def make_table(
    path: str, *sources: str, axes: str, residual: float = 0.0, when: str = ""
) -> tuple[Tensor, ...]:
    """Returns the names of a lookup table."""
    names = tuple(f"{source}.weight" for source in sources)
    return (Tensor(f"{path}/table", names, axes, tuple(axes), residual=residual, when=when),)


def make_norm(path: str, source: str, axis: str, when: str = "") -> tuple[Tensor, ...]:
    """Returns the names of a norm's scale and bias."""
    # gamma and beta are the names of checkpoints converted from TensorFlow.
    return (
        Tensor(f"{path}/scale", (f"{source}.gamma", f"{source}.weight"), axis, (axis,), when=when),
        Tensor(f"{path}/bias", (f"{source}.beta", f"{source}.bias"), axis, (axis,), when=when),
    )


def make_linear(path: str, source: str, into: str, out: str, when: str = "") -> tuple[Tensor, ...]:
    """Returns the names of a linear layer's kernel and bias."""
    kernel, bias = f"{path}/kernel", f"{path}/bias"
    return (
        Tensor(kernel, (f"{source}.weight",), into + out, (out, into), transposed=True, when=when),
        Tensor(bias, (f"{source}.bias",), out, (out,), when=when),
    )


def make_mlm(dense: str, norm: str, *bias: str) -> tuple[Tensor, ...]:
    """Returns the names of a masked language modelling head."""
    return (
        *make_linear("mlm/dense", dense, "H", "X"),
        *make_norm("mlm/norm", norm, "X"),
        Tensor("mlm/bias", bias, "V", ("V",)),
    )


def make_decoder(source: str, path: str = "mlm/table") -> Tensor:
    """Returns the name of the output table."""
    return Tensor(path, (source,), "VX", ("V", "X"))
