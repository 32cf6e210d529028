"""Parameter trees by flat name: trainable masks, split and merge, counts, casts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprompt.errors import InputError, nearest

Params = Mapping[str, Any]  # {"prompt": {"table": array}}
Nested = dict[str, Any]  # mutable Params
Flat = dict[str, Any]  # {"prompt/table": array}
# The arrays that a quantized parameter consists of (layers/quantized), by the end of the name.
PLANE = re.compile(r"(?<=/)(kernel|table)/(codes|scale|minimum)$")
# Parts of a backbone whose layers can be separate arrays. "later_layers" are a few vectors.
SEPARABLE = ("layers", "decoder_layers")
BLOCK = 32  # weights that share a scale and a minimum


@jax.tree_util.register_pytree_with_keys_class
class LayerList:
    """A parameter of L layers as separate arrays, in place of one array [L, ...].

    A program that runs the layers one after the other reads each array as it is. It would copy a
    layer of a stacked array before most products.
    """

    def __init__(self, layers: Sequence[Any]):
        self.layers = tuple(layers)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Returns the layers with their indices."""
        return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self.layers)], None

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Returns the layers."""
        return self.layers, None

    @classmethod
    def tree_unflatten(cls, _: None, layers: Sequence[Any]) -> "LayerList":
        """Inverts `tree_flatten`."""
        return cls(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.stack([np.asarray(layer) for layer in self.layers])
        return array if dtype is None else array.astype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked array."""
        return (len(self), *self.layers[0].shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the arrays."""
        return self.layers[0].dtype

    @property
    def size(self) -> int:
        """The number of values in all layers."""
        return sum(x.size for x in self.layers)

    @property
    def nbytes(self) -> int:
        """The bytes of all layers."""
        return sum(x.nbytes for x in self.layers)


def is_layer_list(node: Any) -> bool:
    """Returns whether a node of a tree is a `LayerList`."""
    return isinstance(node, LayerList)


def has_layer_lists(tree: Any) -> bool:
    """Returns whether a tree of parameters has the layers of one as separate arrays."""
    return any(map(is_layer_list, jax.tree.leaves(tree, is_leaf=is_layer_list)))


def select_layer(tree: Any, layer: int) -> Any:
    """Returns the parameters of one layer. Leaves [L, ...] or `LayerList` -> [...]"""
    return jax.tree.map(lambda leaf: leaf[layer], tree, is_leaf=is_layer_list)


def stack_layers(tree: Any) -> Any:
    """Stacks the layers of each `LayerList`; other leaves stay."""

    def stack(leaf: Any) -> Any:
        return jnp.stack(leaf.layers) if is_layer_list(leaf) else leaf

    return jax.tree.map(stack, tree, is_leaf=is_layer_list)


def split_layers(backbone: Params) -> Nested:
    """Splits the stacked layers of a backbone into separate arrays, a `LayerList` each."""

    def split(leaf: Any) -> LayerList:
        return LayerList([leaf[i] for i in range(leaf.shape[0])])

    return {
        name: jax.tree.map(split, part) if name in SEPARABLE else part
        for name, part in backbone.items()
    }


def flatten(tree: Params, prefix: str = "") -> Flat:
    """Flattens a nested dict to {"a/b/c": leaf}, sorted by name."""
    flat: Flat = {}
    for key in sorted(tree):
        name = f"{prefix}/{key}" if prefix else key
        flat |= flatten(tree[key], name) if isinstance(tree[key], Mapping) else {name: tree[key]}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverts `flatten`."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def trainable_mask(params: Params, patterns: Sequence[str]) -> dict[str, Any]:
    """Returns an optax mask: True for leaves whose full name matches one of the patterns.

    Raises InputError if a pattern is not a regular expression or matches nothing, and if no
    parameter would train.
    """
    names = list(flatten(params))
    trained: set[str] = set()
    for pattern in patterns:
        try:
            # A pattern names a quantized parameter, not its arrays; other code rejects training it.
            matches = [n for n in names if re.fullmatch(pattern, PLANE.sub(r"\1", n))]
            matches = matches or [n for n in names if re.fullmatch(pattern, n)]
        except re.error as e:
            raise InputError(
                f"trainable pattern {pattern!r} is not a regular expression ({e}); fix it"
            ) from e
        if not matches:
            hint = nearest(pattern.replace(".*", ""), names)
            raise InputError(f"trainable pattern {pattern!r} matches no parameter; {hint}")
        trained.update(matches)
    if not trained:
        raise InputError(
            "nothing to train, because config.trainable is empty; set it, or run `evaluate`, which "
            "needs no training"
        )
    return unflatten({name: name in trained for name in names})


def split_trainable(params: Params, mask: Params) -> tuple[Flat, Flat]:
    """Splits a tree into two flat dicts, (trainable, frozen)."""
    leaves, marks = flatten(params), flatten(mask)
    trainable = {name: leaf for name, leaf in leaves.items() if marks[name]}
    return trainable, {name: leaf for name, leaf in leaves.items() if not marks[name]}


def merge(trainable: Flat, frozen: Flat) -> dict[str, Any]:
    """Inverts `split_trainable`."""
    return unflatten(frozen | trainable)


def count(tree: Any) -> int:
    """Counts the parameters of arrays or shapes in a tree, quantised ones at their full size."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # Without the index of a layer, which has no key.
        plane = PLANE.search("/".join(str(key.key) for key in path if hasattr(key, "key")))
        # Of a quantised parameter the codes of 8 bits with a scale per output, or the minima.
        per_entry = {"minimum": BLOCK, "codes": int(leaf.dtype in ("int8", "float8_e4m3fn"))}
        total += leaf.size * (1 if plane is None else per_entry.get(plane[2], 0))
    return total


def is_plane(name: str) -> bool:
    """Returns whether a flat name belongs to an array of a quantised parameter."""
    return PLANE.search(name) is not None


def cast(tree: Any, dtype: Any) -> Any:
    """Casts the floating leaves to dtype; the others stay."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def parameter_table(trainable: Flat, frozen: Flat) -> str:
    """Returns a table of the trainable parameters, with their total and its percentage."""
    lines = [
        f"  {name:48s} {list(leaf.shape)!s:24s} {leaf.size:,}" for name, leaf in trainable.items()
    ]
    n, total = count(trainable), count(trainable) + count(frozen)
    return "\n".join([*lines, f"trainable {n:,} of {total:,} parameters ({n / total:.4%})"])
