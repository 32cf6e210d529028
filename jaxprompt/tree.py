"""Parameter trees by flat name: trainable masks, split and merge, counts, casts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprompt.errors import InputError, nearest

Params = Mapping[str, Any]  # {"prompt": {"table": array}}
Nested = dict[str, Any]  # mutable Params
Flat = dict[str, Any]  # {"prompt/table": array}
# The arrays that a quantized parameter consists of (layers/quantized.py), by the end of the name.
PLANE = re.compile(r"(?<=/)(kernel|table)/(codes|scale|minimum)$")
BLOCK = 32  # weights that share a scale and a minimum


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
        raise InputError("nothing to train, because config.trainable is empty; set it")
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
        plane = PLANE.search("/".join(str(getattr(key, "key", key)) for key in path))
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
