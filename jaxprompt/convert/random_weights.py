"""Randomly initialises a backbone as in its paper, straight into the shards."""

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxprompt import rng
from jaxprompt.convert.hf_config import read_id, read_positive, read_tied
from jaxprompt.convert.llama_fields import read_type
from jaxprompt.convert.load import DTYPES, Loaded, Report
from jaxprompt.convert.names.tables import FAMILIES
from jaxprompt.convert.shapes import axis_sizes, family_of, names_of, select
from jaxprompt.convert.tensor_reader import digest
from jaxprompt.convert.tensors import Family, Tensor
from jaxprompt.errors import InputError, with_article
from jaxprompt.parallel.sharding import Placement
from jaxprompt.tree import Flat, flatten, unflatten

# The padding's id, whose rows are zero, where the config does not tell it.
_PAD = {
    "bert": 0,
    "roberta": 1,
    "electra": 0,
    "deberta": 0,
    "albert": 0,
    "modernbert": 50283,
    "deberta_v2": 0,
}
_HEADS = {head for family in FAMILIES.values() for head in family.heads}


class Draw(NamedTuple):
    """How a family is initialised: N(0, deviation^2), constants for biases and norm scales."""

    family: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int]

    def deviation(self, tensor: Tensor) -> float:
        """Returns the standard deviation of a kernel or a table.

        BERT and its variants: one for all, as in the released code. GPT-2 and ModernBERT: weights
        that write into the residual stream are divided by the square root of their number, two a
        layer (Radford et al. 2019, section 2.3). T5: 1 / sqrt(inputs), as in Mesh TensorFlow; its
        attention has no 1 / sqrt(D), so the query's kernel includes it; the word embeddings are
        N(0, 1).
        """
        if self.family != "t5":
            base = self._amount("initializer_range", 0.02)
            writes = ["layers/attention/out/kernel", "layers/mlp/down/kernel"]
            if self.family == "modernbert":
                writes += ["mlm/dense/kernel", "mlm/table"]
            if self.family in ("gpt2", "modernbert") and tensor.path in writes:
                return base / math.sqrt(2 * self.sizes["L"])
            return base
        factor = self._amount("initializer_factor", 1.0)
        if tensor.path == "embed/word/table":
            return factor
        inputs = tensor.file_axes[-1] if tensor.transposed else "H"
        scale = math.prod(self.sizes[axis] for axis in inputs)
        if "/query/" in tensor.path:
            scale *= self.sizes["D"]
        return factor / math.sqrt(scale)

    def zero_row(self, tensor: Tensor) -> int | None:
        """Returns the row of the padding token, which transformers sets to zero."""
        tables = ("embed/word/table",) + ("embed/position/table",) * (self.family == "roberta")
        if self.family not in _PAD or tensor.path not in tables:
            return None
        if "pad_token_id" in self.config and self.config["pad_token_id"] is None:
            return None
        row, rows = read_id(self.config, "pad_token_id", _PAD[self.family]), tensor.axes[0]
        if row >= self.sizes[rows]:
            raise InputError(
                f"config.json has pad_token_id={row}, but {tensor.path} has only "
                f"{self.sizes[rows]} rows; give the config.json of these sizes"
            )
        return row

    def constant(self, tensor: Tensor) -> float | None:
        """Returns the constant value of biases and norm scales, None for random parameters."""
        if tensor.path.endswith("/bias"):
            return 0.0
        if tensor.path.endswith("/scale"):
            # Gemma multiplies by 1 + scale.
            if self.family == "llama" and read_type(self.config)[1].gemma:
                return 0.0
            return self._amount("initializer_factor", 1.0) if self.family == "t5" else 1.0
        return None

    def _amount(self, field: str, default: float) -> float:
        return read_positive(self.config, field, default)


def draw_backbone(
    family: str, config: Mapping[str, Any], heads: Collection[str], *, seed: int,
    placement: Placement, part: str = "backbone", dtype: str = "float32", rescale: float = 1.0,
) -> Loaded:  # fmt: skip
    """Randomly initialises a trunk and heads from a transformers config alone.

    A parameter is the same on every mesh.

    Args:
      family: the backbone family.
      config: a transformers config.json.
      heads: the heads to initialise.
      seed: the random seed.
      placement: where each parameter goes.
      part: the name of the model in the tree, "backbone" or "generator"; models with the same seed
        differ by it.
      dtype: as in load.py.
      rescale: as in load.py.

    Raises:
      InputError: if the config lacks a size or has an invalid deviation, or the family has no such
        head.
    """
    table = check_heads(family, heads)
    sizes = axis_sizes(config, table)
    tied = read_tied(config, family) or not {"mlm", "lm"} & set(heads)
    tensors = select(table, config, sizes, heads, tied=tied)
    draw = Draw(family, config, sizes)
    flat = _draw(
        draw, tensors, seed=seed, placement=placement, part=part, dtype=dtype, rescale=rescale
    )
    report = Report(
        heads=(), fresh=tuple(heads), missing=(), unused=(), tied=tied, bytes=_bytes(flat),
        fingerprint=_mark("drawn", draw, tensors, seed=seed, part=part),
    )  # fmt: skip
    return Loaded(unflatten(flat), report)


def with_heads(
    loaded: Loaded, family: str, config: Mapping[str, Any], heads: Collection[str], *, seed: int,
    placement: Placement, part: str = "backbone", dtype: str = "float32", rescale: float = 1.0,
) -> Loaded:  # fmt: skip
    """Reduces a loaded backbone to the requested heads, and randomly initialises missing ones.

    The report lists what was initialised: `fresh`, and `missing` by the names in a file.

    Raises:
      InputError: if the family has no such head.
    """
    table = check_heads(family, heads)
    sizes, params, old = axis_sizes(config, table), dict(loaded.params), loaded.report
    # Of all families: a BERT's trunk may go on under ELECTRA's names.
    own = _HEADS | table.heads.keys()
    out = [head for head in params if head in own and head not in heads]
    for head in out:
        del params[head]
    # Heads of `always` have no tensors of their own that could be lacking.
    fresh = [head for head in heads if head in table.heads and head not in params]
    tied = old.tied
    tensors = select(table._replace(trunk=()), config, sizes, fresh, tied=True)
    if "mlm" in fresh:
        tied = read_tied(config, family)
        tensors += [] if tied else [table.decoder]
    draw = Draw(family, config, sizes)
    flat, fingerprint = flatten(params), old.fingerprint
    if tensors:
        flat |= _draw(
            draw, tensors, seed=seed, placement=placement, part=part, dtype=dtype, rescale=rescale
        )
        fingerprint = _mark(fingerprint, draw, tensors, seed=seed, part=part)
    report = old._replace(
        heads=tuple(head for head in old.heads if head in heads),
        fresh=tuple(fresh),
        missing=tuple(names_of(tensor, 0, table.prefix)[-1] for tensor in tensors),
        # Without the head, nothing is left that would need a table of its own.
        tied=tied or "mlm" in out,
        bytes=_bytes(flat),
        fingerprint=fingerprint,
    )
    return Loaded(unflatten(flat), report)


def check_heads(family: str, heads: Collection[str]) -> Family:
    """Returns a family. Raises InputError if it lacks one of the heads."""
    table = family_of(family)
    known = (*table.heads, *table.always)
    absent = [head for head in heads if head not in known]
    if absent:
        raise InputError(
            f"{with_article(family)} has no {absent[0]} head; use an objective for "
            f"{' or '.join(known)}, or another backbone"
        )
    return table


def _draw(
    draw: Draw, tensors: Iterable[Tensor], *, seed: int, placement: Placement, part: str,
    dtype: str, rescale: float,
) -> dict[str, jax.Array]:  # fmt: skip
    """Makes parameters, one after the other. -> by flat name"""
    flat: dict[str, jax.Array] = {}
    base = rng.key_for(seed, part)
    for tensor in tensors:
        letters = tensor.stack + tensor.axes
        own = tuple(draw.sizes[axis] for axis in letters)
        shape = tuple(
            placement.padded_vocab(size) if axis == "V" else size
            for axis, size in zip(letters, own, strict=True)
        )
        place = placement.param_sharding(f"{part}/{tensor.path}", shape)
        if (value := draw.constant(tensor)) is not None:
            whole = np.broadcast_to(np.asarray(value, DTYPES[dtype]), shape)
            # Of a view of one number, so that no host makes the whole array.
            flat[tensor.path] = jax.make_array_from_callback(shape, place, whole.__getitem__)
            continue
        pad = draw.zero_row(tensor)
        program = _program(shape, place, DTYPES[dtype])
        deviation = draw.deviation(tensor) / rescale**tensor.residual
        # By its name: a parameter more or less leaves the draws of all others.
        key = rng.for_name(base, tensor.path)
        # Arguments and no constants: tables of one shape share a program whatever their numbers.
        flat[tensor.path] = program(key, deviation, own[0], -1 if pad is None else pad)
    return flat


@functools.cache
def _program(shape: tuple[int, ...], place: NamedSharding, dtype: np.dtype):
    """Compiles the draw of an array, once for all of its shape and place."""

    def make(key, deviation, rows, pad):
        x = deviation * jax.random.normal(key, shape)
        # Numbers are counted row by row: those of a padded table begin with those of the whole.
        at = jnp.arange(shape[0])
        real = ((at < rows) & (at != pad)).reshape(-1, *[1] * (len(shape) - 1))
        return jnp.where(real, x, 0.0).astype(dtype)

    return jax.jit(make, out_shardings=place)


def _mark(start: str, draw: Draw, tensors: Iterable[Tensor], *, seed: int, part: str) -> str:
    """Sums up what was drawn: equal for equal draws. Nothing is read back from the devices."""
    facts = [
        f"{tensor.path} {[draw.sizes[axis] for axis in tensor.stack + tensor.axes]}"
        f" {draw.constant(tensor)} {draw.deviation(tensor)} {draw.zero_row(tensor)}"
        for tensor in tensors
    ]
    return digest(start, draw.family, part, str(seed), *facts)


def _bytes(flat: Flat) -> int:
    return sum(array.nbytes for array in flat.values())
