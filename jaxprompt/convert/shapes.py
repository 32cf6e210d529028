"""What a config makes of the tables of names: the size of each axis, the tensors of the model."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_size
from jaxprompt.convert.names.tables import FAMILIES
from jaxprompt.convert.tensors import Family, Tensor
from jaxprompt.errors import InputError, nearest
from jaxprompt.registry import BACKBONES

HEADS = ("mlm/", "rtd/", "lm/")  # their tensors never follow a prefix


def family_of(name: str) -> Family:
    """Looks a table up, of a backbone of another package its `FAMILY`.

    Raises InputError for an unknown family, and for a package without that table.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    plugin = BACKBONES.plugin(name)
    if plugin is None:
        raise InputError(f"unknown backbone family {name!r}; {nearest(name, FAMILIES)}")
    table = getattr(BACKBONES.load(name), "FAMILY", None)
    if not isinstance(table, Family):
        raise InputError(
            f"the package {plugin}, backbone {name!r}: its module needs FAMILY, the names of its "
            "tensors (jaxprompt.convert.tensors.Family)"
        )
    return table


def axis_sizes(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    """Reads the size of every axis letter from config.json."""
    sizes: dict[str, int] = {"1": 1, "3": 3}
    for letter, field in family.sizes.items():
        # It names another letter, whose size it has.
        if field in sizes:
            sizes[letter] = sizes[field]
            continue
        value = config.get(field)
        if value is None:  # what a config may leave out
            # What transformers takes for a field that is left out.
            value = {
                "relative_attention_num_buckets": 32,
                "num_decoder_layers": sizes.get("L"),
                "n_inner": 4 * sizes.get("H", 0),
                "embedding_size": sizes.get("H"),
            }.get(field)
        sizes[letter] = read_size({field: value}, field)
    derived = family.derive(config, sizes)
    # Most configs do not tell the size of a head.
    if "D" not in sizes | derived:
        width, heads = sizes["H"], sizes["N"]
        if width % heads:
            fields = f"{family.sizes['H']}={width}", f"{family.sizes['N']}={heads}"
            raise InputError(f"{fields[0]} must divide by {fields[1]}.")
        sizes["D"] = width // heads
    return sizes | derived


def feed_forward_of(config: Mapping[str, Any]) -> str:
    """Reads the kind of a T5's feed-forward block, as "relu" or "gated-gelu"."""
    # The defaults of the configuration classes of transformers.
    usual = "gated-gelu" if config.get("model_type") == "mt5" else "relu"
    return str(config.get("feed_forward_proj", usual))


def gate_of(config: Mapping[str, Any]) -> str:
    """Reads how a T5's feed-forward block is gated, "" = not at all."""
    return feed_forward_of(config).rpartition("-")[0]


def traits_of(family: Family, config: Mapping[str, Any]) -> set[str]:
    """Lists what a config says of a model, see `Tensor.when`, save what the sizes tell."""
    return {"", "gated" if gate_of(config) else "ungated", *family.traits(config)}


def select(
    family: Family, config: Mapping[str, Any], sizes: Mapping[str, int], heads: Collection[str],
    *, tied: bool,
) -> list[Tensor]:  # fmt: skip
    """Lists the tensors of a model: its trunk, its heads, its own output table where not tied."""
    known = traits_of(family, config)
    if sizes["E"] != sizes["H"]:
        known.add("projected")
    found = [*family.trunk, *(tensor for head in heads for tensor in family.heads.get(head, ()))]
    found = [tensor for tensor in found if tensor.when in known]
    return found if tied else [*found, family.decoder]


def copies(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """Counts how often a tensor stands in the file: once a layer, or once."""
    return sizes[tensor.stack] if tensor.stack else 1


def names_of(tensor: Tensor, layer: int, prefix: str, inner: int = 1) -> list[str]:
    """Lists the names that a layer of a tensor may have in a file, today's last.

    `inner` layers make up a group of those that are shared.
    """
    prefix = "" if tensor.outside or tensor.path.startswith(HEADS) else prefix
    return [prefix + tensor.name(source, layer, inner) for source in tensor.sources]


def file_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Gives the shape of the file's tensor, all of its parts together."""
    first, *rest = (math.prod(sizes[axis] for axis in axes) for axes in tensor.file_axes)
    if tensor.transposed or not rest:
        return (first * tensor.part[1], *rest)
    return (first, *rest[:-1], rest[-1] * tensor.part[1])
