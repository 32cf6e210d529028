"""Real steps at published sizes, as shapes that lie on devices that are not there."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxprompt import rng, tree
from jaxprompt.build.backbone import backbone_from_config
from jaxprompt.build.optimizer import build_optimizer
from jaxprompt.config.load import load_config
from jaxprompt.config.run import MaskedLM, OnText, PrefixLM, RunConfig, SpanCorruption
from jaxprompt.corpus.denoise.span_corruption import corrupted_lengths, tokens_for
from jaxprompt.heads.pretraining import TargetHead
from jaxprompt.layers.reading import TargetScores
from jaxprompt.models.model import Model, backbone_shapes
from jaxprompt.parallel.devices import DEVICES
from jaxprompt.parallel.sharding import Placement, make_placement, shardings_like, with_placement
from jaxprompt.planning.abstract_run import open_run
from jaxprompt.planning.compilers import Compiled, compile_for, find_devices
from jaxprompt.planning.cost import step_shapes
from jaxprompt.planning.published import published_checkpoints
from jaxprompt.prompts import make_prompt
from jaxprompt.runs.adapt import NEEDS
from jaxprompt.runs.grid.batched_steps import PerRun, make_group_step
from jaxprompt.runs.replaced_tokens import (
    generator_config,
    make_objectives,
    make_pair,
    untie_embeddings,
)
from jaxprompt.scoring.losses import count_hits, target_loss
from jaxprompt.training.loop import Milestones
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_eval_step, make_generate_step, make_train_step
from jaxprompt.tree import is_layer_list
from jaxprompt.types import Batch, Objective, Tokens

WRITES = dict(max_new_tokens=32, eos=1, pad=0, num_beams=4)


def make_place(device: str, data: int, model: int, fsdp: bool) -> Placement:
    """Lays out devices that are not there."""
    devices = find_devices(DEVICES[device], data * model)
    return make_placement(data, model, fsdp=fsdp, devices=devices)


def put(leaves: Any, where: Any) -> Any:
    """Describes leaves that lie somewhere: one place, or one a leaf."""
    where = jax.tree.map(lambda _: where, leaves) if hasattr(where, "mesh") else where
    lay = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(lay, leaves, where)


def open_config(path: str, place: Placement, **fields: Any) -> RunConfig:
    """Loads a config with fields changed ("backbone__path") and the mesh of a placement."""
    mesh = place.mesh.shape
    mesh_fields = {"mesh.data": mesh["data"], "mesh.model": mesh["model"], "mesh.fsdp": place.fsdp}
    mesh_fields |= {name.replace("__", "."): value for name, value in fields.items()}
    return load_config(path, [(name, str(value)) for name, value in mesh_fields.items()])


def compile_train(path: str, place: Placement, **fields: Any) -> tuple[Compiled, Any, Any]:
    """Compiles the train step of a config. -> what it takes, its shapes, the config"""
    config = open_config(path, place, **fields)
    shapes = step_shapes(open_run(config), place, as_it_runs=True)
    return compile_for(place, shapes.step, *shapes[1:], donate_argnums=0), shapes, config


def compile_grid(path: str, place: Placement, runs: int, **fields: Any) -> tuple[Compiled, Any]:
    """Compiles a step of several runs on one device."""
    config = open_config(path, place, **fields)
    run = open_run(config)
    shapes = step_shapes(run, place, as_it_runs=True)
    model = dataclasses.replace(run.model, backbone=_module(run, place))
    tx = build_optimizer(run.config, shapes.state.trainable, Milestones(1000, 100, 0), 100)
    step = make_group_step(model, tx, run.objectives)
    many = lambda x: jax.ShapeDtypeStruct((runs, *x.shape), x.dtype, sharding=place.replicated)
    state, batch = (jax.tree.map(many, part) for part in (shapes.state, shapes.batch))
    over = dataclasses.replace(place, maps_runs=True)
    arguments = state, shapes.frozen, batch, PerRun({}, {})
    return (
        compile_for(place, with_placement(over, step), *arguments, donate_argnums=0),
        shapes,
        config,
    )


def compile_scores(path: str, place: Placement, **fields: Any) -> tuple[Compiled, Any]:
    """Compiles the scoring of a batch, as evaluate and predict do."""
    config = open_config(path, place, **fields)
    run = open_run(config)
    shapes = step_shapes(run, place, as_it_runs=True)
    step = make_eval_step(dataclasses.replace(run.model, backbone=_module(run, place)))
    arguments = shapes.state.trainable, shapes.frozen, shapes.batch
    return compile_for(place, with_placement(place, step), *arguments), shapes, config


def compile_writing(path: str, place: Placement, **fields: Any) -> tuple[Compiled, Any]:
    """Compiles the writing of texts by beam search."""
    config = open_config(path, place, **fields)
    run = open_run(config)
    shapes = step_shapes(run, place, as_it_runs=True)
    model = Model(_module(run, place), run.model.prompt, {"main": TargetScores()})
    step = make_generate_step(model, **WRITES)
    prompt = {n: x for n, x in shapes.state.trainable.items() if n.startswith("prompt/")}
    arguments = prompt, shapes.frozen, shapes.batch
    return compile_for(place, with_placement(place, step), *arguments), shapes, config


def copied_weights(text: str, frozen: Any) -> list[str]:
    """Lists the operations that make an array as large as a layer's matrix of parameters alone.

    A product also reads what a layer computes. `frozen` are shapes, with `LayerList`s.
    """
    lists = [leaf for leaf in frozen.values() if is_layer_list(leaf)]
    sizes = {math.prod(leaf.shape[1:]) for leaf in lists if len(leaf.shape) > 2}
    entry = text[text.index("\nENTRY ") :]
    unchanged, copies = set(), []
    for line in entry.splitlines():
        found = re.match(r"\s+(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)", line)
        if not found:
            continue
        name, kind, operation, rest = found.groups()
        operands = re.findall(r"%[\w.-]+", rest.partition("), ")[0])
        if operation == "constant" or (operation == "parameter" and "layers/" in rest):
            unchanged.add(name)
        elif operands and unchanged.issuperset(operands):
            if operation in ("bitcast", "get-tuple-element"):
                unchanged.add(name)
                continue
            shapes = re.findall(r"\[([\d,]+)\]", kind)
            if sizes.intersection(math.prod(map(int, shape.split(","))) for shape in shapes):
                copies.append(line.strip())
    return copies


def _module(run: Any, place: Placement) -> Any:
    cfg = run.backbone.module.cfg
    cfg = dataclasses.replace(
        cfg, rows=place.padded_vocab(cfg.vocab), attention=run.config.backbone.attention
    )
    return run.backbone.module.clone(cfg=cfg)


def compile_adapt(path: str, place: Placement, name: str, **fields: Any) -> tuple[Compiled, Any]:
    """Compiles a step of a backbone's own pre-training, all weights float32."""
    config = open_config(path, place, backbone__path=name, **fields)
    published, head = published_checkpoints()[name], NEEDS[config.objective.name][1]
    open_as = lambda hf, family, heads: (
        backbone_from_config(
            config.backbone.replace({"family": family}), Path(name), hf, heads
        ).module
    )
    module = open_as(published.hf, "", (head,))
    module = module.clone(
        cfg=dataclasses.replace(module.cfg, rows=place.padded_vocab(module.cfg.vocab))
    )
    wide = lambda module: tree.unflatten(backbone_shapes(module))["backbone"]
    if head == "rtd":
        small = open_as(generator_config(published.hf), "electra", ("mlm",))
        small = small.clone(cfg=dataclasses.replace(small.cfg, rows=module.cfg.rows))
        model, objectives = make_pair(small, module), make_objectives()
        params = {"backbone": wide(module), "generator": untie_embeddings(wide(small))}
    else:
        model = Model(module, make_prompt("none", module.dims), {"main": TargetHead()})
        objectives = [Objective("main", target_loss, sums=count_hits)]
        params = {"backbone": wide(module)}
    trainable = tree.flatten(params)
    tx = build_optimizer(config, trainable, Milestones(1000, 100, 0), 100)
    key = rng.key_for(0, "dropout")
    state = jax.eval_shape(lambda x: make_state(x, tx, key), trainable)
    state = put(state, shardings_like(place, state, place.param_shardings(trainable)))
    batch = put(_rows(config), place.batch)
    step = with_placement(place, make_train_step(model, tx, objectives))
    return compile_for(place, step, state, {}, batch, donate_argnums=0), state


def _reads(objective: OnText, length: int) -> tuple[int, int]:
    """Counts the positions that an objective scores in a row, and those of the decoder."""
    if isinstance(objective, SpanCorruption):
        o = objective
        inner = corrupted_lengths(tokens_for(length, o.rate, o.span), o.rate, o.span)[1]
        return inner, inner
    if isinstance(objective, MaskedLM):
        return round(objective.rate * length), 0
    return (length, length) if isinstance(objective, PrefixLM) else (length - 1, 0)


def _rows(config: RunConfig) -> Batch:
    """Describes a batch of an objective, full rows of text."""
    rows, length = config.data.batch, config.data.max_len
    reads, inner = _reads(config.objective, length)

    def tokens(width: int, has_lengths: bool) -> Tokens:
        ids = np.zeros((rows, width), np.int32)
        lengths = np.full(rows, width, np.int32) if has_lengths else None
        return Tokens(ids, ids == 0, ids, ids, ids, ids.astype(np.int8), None, lengths)

    read, flat = np.zeros((rows, reads), np.int32), np.zeros(rows, np.int32)
    return Batch(
        tokens(length, True), read, flat, flat.astype(np.float32), flat,
        tokens(inner, False) if inner else None, read,
    )  # fmt: skip
