"""Applies a config to the tables of names: the size of each axis, the tensors of the model."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxprompt.convert.hf_config import read_size
from jaxprompt.convert.names.tables import FAMILIES
from jaxprompt.convert.tensors import Family, Tensor
from jaxprompt.errors import InputError, nearest
from jaxprompt.registry import BACKBONES

_MAX_PARAMETERS = 10**13  # the largest published dense model has 5.4 * 10**11 (PaLM)
_UNPREFIXED_HEADS = ("mlm/", "rtd/", "lm/")


def get_family(name: str) -> Family:
    """Returns the table of a family; for a backbone of another package, its `FAMILY`.

    Raises:
      InputError: if the family is unknown, or the package has no such table.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    plugin = BACKBONES.plugin(name)
    if plugin is None:
        raise InputError(f"unknown backbone family {name!r}; {nearest(name, FAMILIES)}")
    table = getattr(BACKBONES.load(name), "FAMILY", None)
    if not isinstance(table, Family):
        raise InputError(
            f"the package {plugin} has no table FAMILY for the backbone {name!r}; define it as a "
            "jaxprompt.convert.tensors.Family in its module"
        )
    return table


def axis_sizes(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    """Returns the size of every axis letter."""
    sizes: dict[str, int] = {"1": 1, "3": 3}
    for letter, field in family.sizes.items():
        # `field` may be another letter with the same size.
        if field in sizes:
            sizes[letter] = sizes[field]
            continue
        value = config.get(field)
        if value is None:
            # The defaults of transformers.
            value = {
                "relative_attention_num_buckets": 32,
                "num_decoder_layers": sizes.get("L"),
                "n_inner": 4 * sizes.get("H", 0),
                "embedding_size": sizes.get("H"),
            }.get(field)
        sizes[letter] = read_size(config if value is None else {field: value}, field)
    derived = family.derive(config, sizes)
    # Most configs do not contain the size of a head.
    if "D" not in sizes | derived:
        width, heads = sizes["H"], sizes["N"]
        if width % heads:
            fields = f"{family.sizes['H']}={width}", f"{family.sizes['N']}={heads}"
            raise InputError(f"{fields[0]} must be divisible by {fields[1]}")
        sizes["D"] = width // heads
    return sizes | derived


def feed_forward_type(config: Mapping[str, Any]) -> str:
    """Returns the type of a T5's feed-forward block, e.g. "relu" or "gated-gelu"."""
    # The defaults of transformers' config classes.
    default = "gated-gelu" if config.get("model_type") == "mt5" else "relu"
    return str(config.get("feed_forward_proj", default))


def gate_activation(config: Mapping[str, Any]) -> str:
    """Returns the activation of a T5's gated feed-forward block, "" if it is not gated."""
    return feed_forward_type(config).rpartition("-")[0]


def model_traits(family: Family, config: Mapping[str, Any]) -> set[str]:
    """Returns the traits of a model, see `Tensor.when`, except those that follow from sizes."""
    return {"", "gated" if gate_activation(config) else "ungated", *family.traits(config)}


def select_tensors(
    family: Family,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
    heads: Collection[str],
    *,
    tied: bool,
) -> list[Tensor]:
    """Lists the tensors of a model: trunk, heads, and the output table if it is not tied."""
    traits = model_traits(family, config)
    if sizes["E"] != sizes["H"]:
        traits.add("projected")
    tensors = [*family.trunk, *(tensor for head in heads for tensor in family.heads.get(head, ()))]
    tensors = [tensor for tensor in tensors if tensor.when in traits]
    return tensors if tied else [*tensors, family.decoder]


def check_num_parameters(family: Family, config: Mapping[str, Any], heads: Collection[str]) -> None:
    """Raises InputError for a model that no memory holds, before its shapes overflow in XLA."""
    sizes = axis_sizes(config, family)
    tensors = select_tensors(family, config, sizes, heads, tied=False)
    count = sum(math.prod(sizes[axis] for axis in tensor.stack + tensor.axes) for tensor in tensors)
    if count > _MAX_PARAMETERS:
        raise InputError(
            f"the config describes a model of {count:,} parameters, but {_MAX_PARAMETERS:,} is the "
            "limit; give the config.json that was saved with the weights"
        )


def num_copies(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """Returns how often a tensor is in the file: once per layer, or layer and expert, or once."""
    return math.prod(sizes[axis] for axis in tensor.stack)


def copy_index(tensor: Tensor, copy: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the place of one of these copies on the leading axes of a parameter."""
    index: list[int] = []
    for axis in reversed(tensor.stack):
        copy, place = divmod(copy, sizes[axis])
        index.insert(0, place)
    return tuple(index)


def file_names(tensor: Tensor, layer: int, prefix: str, group_size: int = 1) -> list[str]:
    """Lists the possible names of a layer of a tensor in a file, the current name last.

    `group_size` is that of `Tensor.name`.
    """
    is_unprefixed = tensor.outside or tensor.path.startswith(_UNPREFIXED_HEADS)
    prefix = "" if is_unprefixed else prefix
    return [prefix + tensor.name(source, layer, group_size) for source in tensor.sources]


def file_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of the tensor in the file, with all of its parts."""
    shape = [math.prod(sizes[axis] for axis in axes) for axes in tensor.file_axes]
    shape[0 if tensor.transposed else -1] = sum(tensor.part_sizes(sizes))
    return tuple(shape)
