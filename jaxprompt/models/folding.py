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
    # Checked whatever the method says: a dependence that it hides would be frozen into the export
    # at the values of this batch.
    found = reads_of(model, params, batch)
    if secret := set(found) - set(model.prompt.reads):
        name = type(model.prompt).__module__
        raise TypeError(f"{name} reads {', '.join(sorted(secret))}; add them to `reads`")
    if model.prompt.reads:
        own = jax.device_get(params.get("prompt", {}))
        own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), own)
        return _fold_parts(model, own, params, batch)
    # On the host, where `as_constants` asks the masks in which layers the prefix stands.
    return as_constants(model.prompt, jax.device_get(_injection(model)(params, batch)))


@cached_factory
def _injection(model: Model) -> Callable[..., Injection]:
    """Compiles what a prompt adds, once: a run folds its prompt in every evaluation."""
    return jax.jit(model.inject)


@cached_factory
def _part_of(method: Method) -> Callable[..., Injection]:
    """Compiles what a part adds, once."""
    return jax.jit(functools.partial(method.apply, deterministic=True))


def _fold_parts(
    model: Model, own: dict[str, Any], params: Params, batch: Batch
) -> tuple[Method, dict[str, Any]]:
    """Puts constants in the place of parts that compute them. -> method, its params"""
    parts = model.prompt.components()
    if not any(part.method.folds() for part in parts):
        return model.prompt, own
    embed = model.backbone.bind({"params": params["backbone"]}).words()
    methods, numbers = [], []
    for name, method, _ in parts:
        held = own.get(name, {})
        if method.folds():
            made = _part_of(method)({"params": held}, batch, embed)
            method, held = as_constants(method, jax.device_get(made))
        methods.append(method)
        numbers.append(held)
    prompt = model.prompt.clone(parts=write_parts(methods))
    # What went together as computed need not as constants.
    prompt.check()
    names = [part.name for part in prompt.components()]
    return prompt, {name: held for name, held in zip(names, numbers, strict=True) if held}


def reads_of(model: Model, params: Params, batch: Batch) -> tuple[str, ...]:
    """Returns the fields of a batch that the injection depends on; nothing is computed."""
    leaves, form = jax.tree.flatten_with_path(batch)
    places, leaves = [path[0].name for path, _ in leaves], [leaf for _, leaf in leaves]
    # Read off the data flow, not off two batches compared: these may differ in nothing that the
    # method reads.
    traced = jax.make_jaxpr(lambda own: model.inject(params, jax.tree.unflatten(form, own)))(leaves)
    needed = {var for var in traced.jaxpr.outvars if isinstance(var, Var)}
    # An inner program, as of a scan, counts as a whole: a field too many may be found, never one
    # too few.
    for equation in reversed(traced.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed |= {var for var in equation.invars if isinstance(var, Var)}
    own = zip(places, traced.jaxpr.invars, strict=True)
    return tuple(dict.fromkeys(name for name, var in own if var in needed))


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
            # Rows behind those that the template places serve heads and views of objectives, which
            # an export does not have in its slots.
            arrays[f"{name}slots"] = np.asarray(slots[0, : counts[stream]], np.float32)
        if prefix is not None:
            # Layers outside of the prefix hold padding. It stands in one interval, which parts that
            # are side by side have alike.
            inside = np.flatnonzero(prefix.mask.any(axis=(1, 2)))
            first, last = int(inside[0]), int(inside[-1]) + 1
            span = {"length": prefix.k.shape[2], "first": first, "last": last}
            fields |= {name + field: value for field, value in span.items()}
            arrays[f"{name}k"] = np.asarray(prefix.k[first:last, 0], np.float32)  # [L, P, N, D]
            arrays[f"{name}v"] = np.asarray(prefix.v[first:last, 0], np.float32)
    constant = Constant(dims=prompt.dims, **fields)  # type: ignore[arg-type]  # flax adds `name`
    return constant, arrays


def unfold(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns params that fold to these constants, for a prompt without an encoder."""
    slots = [arrays[name] for name in ("slots", "decoder_slots") if name in arrays]
    if slots or "rows" in arrays:
        more = {"rows": arrays["rows"]} if "rows" in arrays else {}
        # One table holds the decoder's rows behind the input's, see `soft`.
        return ({"table": np.concatenate(slots)} if slots else {}) | more
    prefixes = [name for name in PARTS.values() if f"{name}k" in arrays]
    pair = lambda name: np.stack([arrays[f"{name}k"], arrays[f"{name}v"]], axis=1)
    return {f"{name}table": pair(name) for name in prefixes}  # [L, 2, P, N, D]


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
