"""Cost of a train step and of an evaluation: the real steps, compiled but never run.

XLA's CPU compiler widens bfloat16: it keeps float32 copies of weights and activations that no
accelerator has. It does not widen float16, so a bfloat16 backbone is compiled in float16, which has
the same size; only the sizes of arrays matter here. For a device without bfloat16 the backbone
stays in bfloat16, because XLA widens it there as well.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxprompt import rng, tree
from jaxprompt.build.initial_params import split_params
from jaxprompt.build.layers import measure_corpus_work, separates_layers
from jaxprompt.build.optimizer import build_optimizer, config_milestones
from jaxprompt.models.generation import read_input
from jaxprompt.models.model import Model, backbone_shapes
from jaxprompt.parallel.compilation import supported_options
from jaxprompt.parallel.hlo import DeviceWork, count_work
from jaxprompt.parallel.roofline import (
    ATTENTION,
    CAUSAL_SCOPE,
    FUSED_SCOPE,
    INTEGER,
    LAYOUT,
    PRODUCT,
    Kernel,
    read_kernels,
)
from jaxprompt.parallel.sharding import Placement, check_divisible, shardings_like, with_placement
from jaxprompt.planning.abstract_run import AbstractRun
from jaxprompt.planning.compilers import Compiled, compile_for
from jaxprompt.training.evaluation import generation_step, make_search
from jaxprompt.training.refilling import can_refill
from jaxprompt.training.state import TrainState, make_state
from jaxprompt.training.steps import make_eval_step, make_train_step
from jaxprompt.types import Batch

_STEPS_PER_EPOCH = 1000  # an epoch: rates depend on it, shapes do not
# The first is set for training on the CPU too. The others leave out most of LLVM's work, which
# comes after buffers are assigned and whose code never runs.
_OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class StepShapes(NamedTuple):
    """A step and its arguments, each leaf with its shape, dtype and sharding."""

    step: Callable
    state: TrainState
    frozen: tree.Flat
    batch: Batch


class StepSizes(NamedTuple):
    """Numbers of parameters, and bytes on one device before anything is computed."""

    total: int  # parameters
    trained: int  # parameters
    frozen_bytes: int
    trained_bytes: int
    optimizer_bytes: int  # and counters
    batch_bytes: int
    read_bytes: int  # of frozen weights as matrix products read them, gathered over the data axis

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        return self.resident_bytes + self.batch_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes on one device without a batch, which are also needed during evaluation."""
        return self.frozen_bytes + self.trained_bytes + self.optimizer_bytes


class Cost(NamedTuple):
    """Memory and work of one step on one device."""

    sizes: StepSizes
    activations: int  # bytes, XLA's temporary memory at its peak
    results: int  # bytes of results that do not reuse the buffer of an argument
    work: DeviceWork
    kernels: tuple[Kernel, ...]  # estimates of those that the device will run

    @property
    def flops(self) -> float:
        """FLOPs of matrix products, including recomputed ones."""
        return sum(kernel.times * kernel.flops for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes on one device at the peak."""
        return self.sizes.bytes + self.activations + self.results


def step_shapes(
    run: AbstractRun,
    placement: Placement,
    remat: str = "",
    attention: str = "",
    *,
    as_it_runs: bool = False,
) -> StepShapes:
    """Makes the step of a run on a mesh, and the shapes of its arguments.

    Args:
      run: the run.
      placement: the mesh.
      remat: replaces the value in the config.
      attention: replaces the value in the config.
      as_it_runs: whether it is exactly the step of training, for the device's compiler.

    Raises:
      InputError: if the model does not divide over the mesh.
    """
    config, rows = run.config, placement.padded_vocab(run.backbone.module.cfg.vocab)
    module = _module(run, rows, remat or config.backbone.remat, attention, as_it_runs)
    separate_layers = as_it_runs and _separates_layers(run, placement)
    trainable, frozen, state = _param_shapes(run, rows, as_it_runs, separate_layers)
    check_divisible(placement, trainable | frozen)
    step = make_train_step(
        dataclasses.replace(run.model, backbone=module),
        _optimizer(run, trainable),
        run.objectives,
        accumulate=config.optim.accumulate,
    )
    return StepShapes(
        with_placement(placement, step),
        _with_shardings(
            state, shardings_like(placement, state, placement.param_shardings(trainable))
        ),
        _with_shardings(frozen, placement.param_shardings(frozen)),
        jax.tree.map(lambda x: _with_sharding(x, placement.batch), run.batch),
    )


class EvalShapes(NamedTuple):
    """The model for evaluation and the shapes of its arguments, as in `StepShapes`."""

    model: Model
    trainable: tree.Flat
    frozen: tree.Flat
    batch: Batch


def eval_shapes(
    run: AbstractRun, placement: Placement, attention: str = "", *, as_it_runs: bool = False
) -> EvalShapes:
    """Makes the model for evaluation on a mesh, with arguments as in `step_shapes`."""
    rows = placement.padded_vocab(run.backbone.module.cfg.vocab)
    separate_layers = as_it_runs and _separates_layers(run, placement)
    trainable, frozen, _ = _param_shapes(run, rows, as_it_runs, separate_layers)
    module = _module(run, rows, "none", attention, as_it_runs)
    return EvalShapes(
        dataclasses.replace(run.scorer.model, backbone=module),
        _with_shardings(trainable, placement.param_shardings(trainable)),
        _with_shardings(frozen, placement.param_shardings(frozen)),
        jax.tree.map(lambda x: _with_sharding(x, placement.batch), run.eval_batch),
    )


def _module(run: AbstractRun, rows: int, remat: str, attention: str, as_it_runs: bool) -> nn.Module:
    cfg = dataclasses.replace(run.backbone.module.cfg, rows=rows, remat=remat)
    kernel = attention or (run.config.backbone.attention if as_it_runs else cfg.attention)
    cfg = dataclasses.replace(cfg, attention=kernel)
    if not as_it_runs and cfg.dtype == jnp.bfloat16 and not run.widens_bfloat16:
        cfg = dataclasses.replace(cfg, dtype=jnp.float16)
    return run.backbone.module.clone(cfg=cfg)


def _separates_layers(run: AbstractRun, placement: Placement) -> bool:
    """Returns whether a run on a mesh has separate layers, if an epoch has _STEPS_PER_EPOCH steps.

    The CPU's compiler would take minutes for them, so estimates are those of stacked layers.
    """
    config, writes = run.config, run.scorer.generates
    steps = config_milestones(config, _STEPS_PER_EPOCH).total
    work, trainable = measure_corpus_work(config, steps), config.trainable
    return separates_layers(run.backbone, placement, writes=writes, work=work, trainable=trainable)


def _optimizer(run: AbstractRun, trainable: tree.Flat) -> optax.GradientTransformation:
    milestones = config_milestones(run.config, _STEPS_PER_EPOCH)
    return build_optimizer(run.config, trainable, milestones, _STEPS_PER_EPOCH)


# The meshes of a search need few of these: only the padding of the vocabulary differs.
@functools.lru_cache(maxsize=8)
def _param_shapes(
    run: AbstractRun, rows: int, as_it_runs: bool, separate_layers: bool
) -> tuple[tree.Flat, tree.Flat, TrainState]:
    """Returns the shapes of the trainable parameters, the frozen ones, and the train state."""
    # Neither remat nor the attention kernel changes the shape of a parameter.
    module = _module(run, rows, "none", "", as_it_runs)
    model = dataclasses.replace(run.scorer.model, backbone=module)

    def init(key):
        backbone = {
            name: jnp.zeros(leaf.shape, leaf.dtype if tree.is_plane(name) else module.cfg.dtype)
            for name, leaf in backbone_shapes(module, run.backbone.storage).items()
        }
        loaded = tree.unflatten(backbone)["backbone"]
        loaded = tree.split_layers(loaded) if separate_layers else loaded
        params = model.init(key, loaded, choices=run.scorer.layout.num_rows)
        trainable, frozen = split_params(run.config, run.scorer, params)
        return tree.cast(trainable, jnp.float32), frozen

    trainable, frozen = jax.eval_shape(init, jax.random.key(0))
    key = rng.key_for(run.config.seed, "dropout", run.config.rng)
    tx = _optimizer(run, trainable)
    return trainable, frozen, jax.eval_shape(lambda x: make_state(x, tx, key), trainable)


def measure_sizes(shapes: StepShapes, placement: Placement) -> StepSizes:
    """Counts parameters and bytes before anything is computed."""
    trainable, frozen = shapes.state.trainable, shapes.frozen
    # A layer's weights are gathered over the data axis before a matrix product reads them.
    unsharded = dataclasses.replace(placement, fsdp=False)
    return StepSizes(
        tree.count(trainable) + tree.count(frozen),
        tree.count(trainable),
        _local_bytes(frozen),
        _local_bytes(trainable),
        _local_bytes(shapes.state) - _local_bytes(trainable),
        _local_bytes(shapes.batch),
        _local_bytes(_with_shardings(frozen, unsharded.param_shardings(frozen))),
    )


@functools.lru_cache(maxsize=64)
def step_cost(run: AbstractRun, placement: Placement, remat: str = "", attention: str = "") -> Cost:
    """Compiles the step for one device of the mesh. Returns its cost."""
    return measure_step(run, step_shapes(run, placement, remat, attention), placement)


@functools.lru_cache(maxsize=64)
def eval_bytes(run: AbstractRun, placement: Placement, attention: str = "") -> int:
    """Compiles the evaluation of a batch for one device. Returns the peak bytes with the state."""
    resident = measure_sizes(step_shapes(run, placement), placement).resident_bytes
    shapes = eval_shapes(run, placement, attention)
    if run.scorer.generates:
        peak = _generation_bytes(run, shapes, placement)
    else:
        peak = sum(_eval_memory(placement, make_eval_step(shapes.model), shapes))
    return resident + _local_bytes(shapes.batch) + peak


def _generation_bytes(run: AbstractRun, shapes: EvalShapes, placement: Placement) -> int:
    """Returns the bytes on one device for generating text, besides parameters and batch.

    The loop over tokens is not compiled: XLA's CPU compiler would widen all layers before it.
    """
    model, generation = shapes.model, run.config.generate

    def read_prompt(
        trainable: tree.Flat, frozen: tree.Flat, batch: Batch, room: int = 0
    ) -> tuple[Any, Any]:
        params = tree.merge(trainable, frozen)
        _, states, cache = read_input(model, params, batch, room, generation.num_beams)
        return states[:, -1], cache

    def read_layers(trainable: tree.Flat, frozen: tree.Flat) -> Any:
        backbone = tree.merge(trainable, frozen)["backbone"]
        return model.backbone.bind({"params": backbone}).reading_layers()

    temporary, prompt_bytes = _eval_memory(placement, read_prompt, shapes)
    prompts, rows_with_room = (
        jax.eval_shape(
            with_placement(placement, functools.partial(read_prompt, room=room)), *shapes[1:]
        )
        for room in (0, max(generation.max_new_tokens - 1, 1))
    )
    cached = prompt_bytes * _global_bytes(rows_with_room) // _global_bytes(prompts)
    # The rows that wait for the places of finished ones.
    waiting = prompt_bytes if can_refill(placement) else 0
    # The copies of the layers are sharded like the layers, which full fine-tuning trains.
    weights = shapes.frozen or shapes.trainable
    copies = (
        run.copies_layers
        * _global_bytes(jax.eval_shape(read_layers, shapes.trainable, shapes.frozen))
        * _local_bytes(weights)
        // _global_bytes(weights)
    )
    # Each beam has the scores of the whole vocabulary.
    rows = placement.batch.shard_shape(prompts[0].shape)[0] * generation.num_beams
    scores = 2 * 4 * rows * model.backbone.dims.vocab  # float32, as they are and as logarithms
    return copies + cached + waiting + max(temporary, scores)


def _eval_memory(placement: Placement, step: Callable, shapes: EvalShapes) -> tuple[int, int]:
    """Compiles a step of an evaluation. Returns the bytes of temporary arrays and of results."""
    lowered = jax.jit(with_placement(placement, step)).lower(*shapes[1:])
    memory: Any = lowered.compile(compiler_options=supported_options(**_OPTIONS)).memory_analysis()
    return memory.temp_size_in_bytes, memory.output_size_in_bytes


def compile_run(run: AbstractRun, placement: Placement, remat: str, attention: str) -> Compiled:
    """Compiles the step for the devices of a mesh with their compiler."""
    shapes = step_shapes(run, placement, remat, attention, as_it_runs=True)
    return compile_for(placement, shapes.step, *shapes[1:], donate_argnums=0)


def compile_evaluation(run: AbstractRun, placement: Placement, attention: str) -> Compiled:
    """Compiles the evaluation of a batch for the devices of a mesh with their compiler."""
    shapes = eval_shapes(run, placement, attention, as_it_runs=True)
    step = (
        generation_step(shapes.model, make_search(run.config.generate, run.scorer.layout))
        if run.scorer.generates
        else make_eval_step(shapes.model)
    )
    compiled = compile_for(placement, with_placement(placement, step), *shapes[1:])
    # The state of the optimizer is not an argument, but stays in memory.
    optimizer_bytes = measure_sizes(step_shapes(run, placement), placement).optimizer_bytes
    return compiled._replace(bytes=compiled.bytes + optimizer_bytes)


def measure_step(run: AbstractRun, shapes: StepShapes, placement: Placement) -> Cost:
    """Compiles a step of a run. Returns its cost on one device."""
    lowered = jax.jit(shapes.step, donate_argnums=0).lower(*shapes[1:])
    compiled = lowered.compile(compiler_options=supported_options(**_OPTIONS))
    memory: Any = compiled.memory_analysis()
    # Without results that reuse the buffer of an argument.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    text = compiled.as_text() or ""
    return Cost(
        measure_sizes(shapes, placement),
        memory.temp_size_in_bytes,
        results,
        count_work(text),
        _device_kernels(run, text),
    )


def _device_kernels(run: AbstractRun, text: str) -> tuple[Kernel, ...]:
    """Estimates the kernels of a device from the program that XLA compiles for CPUs.

    Devices do not widen or reorder whole arrays as CPUs do, and compute masks and random bits where
    these are used. Their fused kernel for attention, if they have one, replaces the matrix products
    with the scores and all that is in between, and moves no scores.
    """
    module = run.backbone.module
    width = 4 if run.widens_bfloat16 else jnp.dtype(module.cfg.dtype).itemsize
    others, products = [], []
    for kernel in read_kernels(text, width):
        is_causal = CAUSAL_SCOPE in kernel.op
        if is_causal or FUSED_SCOPE in kernel.op:
            if kernel.category == PRODUCT:
                # Each product multiplies by the head's dimension or sums over it.
                scores = width * round(kernel.flops / (2 * module.dims.head_dim))
                flops = kernel.flops / 2 if is_causal else kernel.flops
                read = max(0, kernel.bytes - scores)  # or written
                products.append(kernel._replace(flops=flops, read=read, written=0))
        elif kernel.category not in (LAYOUT, INTEGER):
            others.append(kernel)
    return (*others, *_attention_kernels(products))


def _attention_kernels(products: list[Kernel]) -> list[Kernel]:
    """Merges the matrix products of attention: 2 forward and 5 backward are two kernels."""
    # All are taken as equal, which holds for those that take most of the time.
    count = math.ceil(2 / 7 * sum(product.times for product in products))
    if not count:
        return []
    flops = sum(product.times * product.flops for product in products) / count
    moved = sum(product.times * product.bytes for product in products) // count
    return [Kernel("attention", ATTENTION, flops, moved, 0, 0, count, FUSED_SCOPE)]


def _with_sharding(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _with_shardings(leaves, shardings):
    return jax.tree.map(_with_sharding, leaves, shardings)


def _global_bytes(leaves: Any) -> int:
    """Counts the bytes of a tree on all devices together, without replicas."""
    return sum(x.dtype.itemsize * math.prod(x.shape) for x in jax.tree.leaves(leaves))


def _local_bytes(leaves: Any) -> int:
    """Counts the bytes of a tree on one device."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(leaves)
    )
