"""Folding: replaces a trained method by the constants that it computes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var

from jaxprompt.models.model import Model
from jaxprompt.parallel.compilation import cached_factory
from jaxprompt.prompts import Method, write_parts
from jaxprompt.prompts.constant import PARTS
from jaxprompt.prompts.constant import Prompt as Constant
from jaxprompt.tree import Flat, Params, flatten, merge
from jaxprompt.types import Batch, Injection


def fold(model: Model, params: Params, batch: Batch) -> tuple[Method, dict[str, Any]]:
    """Computes the injection once. -> (the `constant` method, its params as float32 numpy arrays)

    A method that depends on the batch stays as it is, with its params; those of its components that
    compute constants are replaced. `batch` is any batch.

    Raises:
      TypeError: if a method depends on undeclared fields of the batch, because constants would be
        wrong for other batches.
    """
    # An undeclared dependence would fix the export to the values of this batch.
    reads = fields_read(model, params, batch)
    if undeclared := set(reads) - set(model.prompt.reads):
        name = type(model.prompt).__module__
        raise TypeError(f"{name} reads {', '.join(sorted(undeclared))}; add them to `reads`")
    if model.prompt.reads:
        prompt_params = jax.device_get(params.get("prompt", {}))
        prompt_params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), prompt_params)
        return _fold_parts(model, prompt_params, params, batch)
    # On the host, where `as_constants` reads the layers of the prefix from its mask.
    return as_constants(model.prompt, jax.device_get(_injection(model)(params, batch)))


@cached_factory
def _injection(model: Model) -> Callable[..., Injection]:
    """Compiles the injection of a prompt once, since every evaluation folds it."""
    return jax.jit(model.inject)


@cached_factory
def _component_injection(method: Method) -> Callable[..., Injection]:
    """Compiles the injection of a component once."""
    return jax.jit(functools.partial(method.apply, deterministic=True))


def _fold_parts(
    model: Model, prompt_params: dict[str, Any], params: Params, batch: Batch
) -> tuple[Method, dict[str, Any]]:
    """Replaces components by constants that they compute. -> method, its params"""
    parts = model.prompt.components()
    if not any(part.method.folds() for part in parts):
        return model.prompt, prompt_params
    embed = model.backbone.bind({"params": params["backbone"]}).words()
    methods, params_by_part = [], []
    for name, method, _ in parts:
        part_params = prompt_params.get(name, {})
        if method.folds():
            injection = _component_injection(method)({"params": part_params}, batch, embed)
            method, part_params = as_constants(method, jax.device_get(injection))
        methods.append(method)
        params_by_part.append(part_params)
    prompt = model.prompt.clone(parts=write_parts(methods))
    # Components that can be combined need not be as constants.
    prompt.check()
    names = [part.name for part in prompt.components()]
    named = zip(names, params_by_part, strict=True)
    return prompt, {name: part_params for name, part_params in named if part_params}


def fields_read(model: Model, params: Params, batch: Batch) -> tuple[str, ...]:
    """Returns the fields of a batch that the injection depends on; nothing is computed."""
    leaves, treedef = jax.tree.flatten_with_path(batch)
    field_names, leaves = [path[0].name for path, _ in leaves], [leaf for _, leaf in leaves]

    def inject(leaves: list[Any]) -> Injection:
        return model.inject(params, jax.tree.unflatten(treedef, leaves))

    # From the data flow: comparing two batches would miss fields that are equal in both.
    traced = jax.make_jaxpr(inject)(leaves)
    needed = {var for var in traced.jaxpr.outvars if isinstance(var, Var)}
    # An inner program, e.g. of a scan, counts as a whole, so that no field is missed.
    for equation in reversed(traced.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed |= {var for var in equation.invars if isinstance(var, Var)}
    inputs = zip(field_names, traced.jaxpr.invars, strict=True)
    return tuple(dict.fromkeys(name for name, var in inputs if var in needed))


def as_constants(prompt: Method, streams: Injection) -> tuple[Method, dict[str, Any]]:
    """Returns the `constant` method of an injection. -> (method, its numpy params)"""
    fields = {"shift": prompt.position_shift(), "shift_decoder": prompt.decoder_shift()}
    arrays: dict[str, Any] = {}
    if streams.rows is not None:
        fields["rows"], arrays["rows"] = len(streams.rows), np.asarray(streams.rows, np.float32)
    counts = {"encoder": prompt.num_slots(), "decoder": prompt.num_decoder_slots(), "cross": 0}
    for stream, name in PARTS.items():
        slots, prefix, slots_mask = getattr(streams, stream)
        if slots_mask is not None:
            raise TypeError(
                f"{type(prompt).__module__} omits the same slots from every text, which a constant "
                "prompt cannot; num_slots must count only the others"
            )
        if slots is not None and counts[stream]:
            fields[f"{name}slots"] = counts[stream]
            # Vectors after those of the template are for heads and views, and are not slots of an
            # export.
            arrays[f"{name}slots"] = np.asarray(slots[0, : counts[stream]], np.float32)
        if prefix is not None:
            # Other layers contain padding. The layers of the prefix are one interval, which is the
            # same for all components.
            layers = np.flatnonzero(prefix.mask.any(axis=(1, 2)))
            first, last = int(layers[0]), int(layers[-1]) + 1
            sizes = {"length": prefix.k.shape[2], "first": first, "last": last}
            fields |= {name + field: value for field, value in sizes.items()}
            arrays[f"{name}k"] = np.asarray(prefix.k[first:last, 0], np.float32)  # [L, P, N, D]
            arrays[f"{name}v"] = np.asarray(prefix.v[first:last, 0], np.float32)
    constant = Constant(dims=prompt.dims, **fields)  # type: ignore[arg-type]  # flax adds `name`
    return constant, arrays


def unfold(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns params that fold to these constants, for a prompt without an encoder."""
    slots = [arrays[name] for name in ("slots", "decoder_slots") if name in arrays]
    if slots or "rows" in arrays:
        rows = {"rows": arrays["rows"]} if "rows" in arrays else {}
        # The decoder's vectors come last in a single table, see `soft`.
        return ({"table": np.concatenate(slots)} if slots else {}) | rows
    prefixes = [name for name in PARTS.values() if f"{name}k" in arrays]
    return {  # [L, 2, P, N, D]
        f"{name}table": np.stack([arrays[f"{name}k"], arrays[f"{name}v"]], axis=1)
        for name in prefixes
    }


def fold_flat(
    model: Model, trainable: Flat, frozen: Flat, batch: Batch
) -> tuple[Model, Flat, Flat]:
    """Folds the prompt of a model with divided parameters. -> (model, trainable, frozen)"""
    prompt, arrays = fold(model, merge(trainable, frozen), batch)
    arrays = flatten(arrays)
    folded = dataclasses.replace(model, prompt=prompt)
    return folded, replace_prompt(trainable, arrays), replace_prompt(frozen, {})


def replace_prompt(flat: Flat, arrays: dict[str, Any]) -> Flat:
    """Replaces the parameters of a prompt."""
    others = {name: leaf for name, leaf in flat.items() if not name.startswith("prompt/")}
    return others | {f"prompt/{name}": array for name, array in arrays.items()}
