"""What a train step holds, multiplies and sends: the real step, compiled but never run.

XLA's CPU compiler widens bfloat16: it keeps float32 copies of weights and activations that no
accelerator has. float16 it leaves as it is, so a backbone in bfloat16 is compiled in float16, of
the same size. Nothing of the arrays but their sizes is looked at. For a device without bfloat16 it
stays: XLA widens it there as well.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprompt import rng, tree
from jaxprompt.assembly import from_config
from jaxprompt.assembly.abstract_run import AbstractRun
from jaxprompt.assembly.initial_params import divide
from jaxprompt.models.model import backbone_shapes
from jaxprompt.parallel.compilation import known_options
from jaxprompt.parallel.hlo import DeviceWork, read_work
from jaxprompt.parallel.sharding import Placement, check_divides, like, within
from jaxprompt.planning.compilers import Compiled, compile_for
from jaxprompt.training.state import make_state
from jaxprompt.training.steps import make_train_step

_STEPS = 1000  # an epoch: rates depend on it, shapes do not
# The first is set for training on the CPU too. The others leave out most of LLVM's work, which
# comes after buffers are assigned and whose code never runs.
_OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Shapes(NamedTuple):
    """What a step takes, each leaf with its shape, dtype and sharding."""

    step: Any
    state: Any
    frozen: tree.Flat
    batch: Any


class Sizes(NamedTuple):
    """Numbers in all, and bytes on one device before anything is computed."""

    total: int  # numbers
    trained: int  # numbers
    frozen_bytes: int
    trained_bytes: int
    optimizer_bytes: int  # and counters
    batch_bytes: int
    read_bytes: int  # of frozen weights as products read them, joined over the data axis

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        return self.frozen_bytes + self.trained_bytes + self.optimizer_bytes + self.batch_bytes


class Cost(NamedTuple):
    """What one step takes on one device."""

    sizes: Sizes
    activations: int  # bytes, XLA's temporary memory at its peak
    results: int  # bytes of results that take over the place of no argument
    work: DeviceWork

    @property
    def bytes(self) -> int:
        """Bytes on one device at the peak."""
        return self.sizes.bytes + self.activations + self.results


def make_shapes(
    run: AbstractRun, placement: Placement, remat: str = "", attention: str = "", *,
    as_it_runs: bool = False,
) -> Shapes:  # fmt: skip
    """Makes the step of a run on a mesh, and the shapes that it takes.

    `remat` and `attention` replace the config's. With `as_it_runs` it is the step of training to
    the letter, for the device's own compiler. Raises InputError where the model does not divide
    over the mesh.
    """
    s, rows = run.settings, placement.padded(run.backbone.module.cfg.vocab)
    module = _module(run, rows, remat or s.remat, attention, as_it_runs)
    trainable, frozen, state = _numbers(run, rows, as_it_runs)
    check_divides(placement, trainable | frozen)
    step = make_train_step(
        dataclasses.replace(run.model, backbone=module), _optimizer(run, trainable),
        run.objectives, accumulate=s.accumulate,
    )  # fmt: skip
    return Shapes(
        within(placement, step),
        _placed(state, like(placement, state, placement.parameters(trainable))),
        _placed(frozen, placement.parameters(frozen)),
        jax.tree.map(lambda x: _place(x, placement.batch), run.batch),
    )


def _module(run: AbstractRun, rows: int, remat: str, attention: str, as_it_runs: bool) -> Any:
    cfg = dataclasses.replace(run.backbone.module.cfg, rows=rows, remat=remat)
    asked = attention or (run.settings.attention if as_it_runs else cfg.attention)
    cfg = dataclasses.replace(cfg, attention=asked)
    if not as_it_runs and cfg.dtype == jnp.bfloat16 and not run.widens:
        cfg = dataclasses.replace(cfg, dtype=jnp.float16)
    return run.backbone.module.clone(cfg=cfg)


def _optimizer(run: AbstractRun, trainable: tree.Flat) -> Any:
    plan = from_config.plan_of(run.config, _STEPS)
    return from_config.build_optimizer(run.config, trainable, plan, _STEPS)


# The meshes of a search ask for few of these: only the padding of the vocabulary differs.
@functools.lru_cache(maxsize=8)
def _numbers(run: AbstractRun, rows: int, as_it_runs: bool) -> tuple[tree.Flat, tree.Flat, Any]:
    """Tells the shapes of what trains, of what is frozen, and of the state."""
    # Neither remat nor the kernel of attention changes the shape of a number.
    module = _module(run, rows, "none", "", as_it_runs)
    model = dataclasses.replace(run.scorer.model, backbone=module)

    def draw(key):
        shapes = backbone_shapes(module, run.backbone.block["quantize"])
        backbone = {
            name: jnp.zeros(leaf.shape, leaf.dtype if tree.is_plane(name) else module.cfg.dtype)
            for name, leaf in shapes.items()
        }
        loaded = tree.unflatten(backbone)["backbone"]
        params = model.init(key, loaded, choices=run.scorer.layout.num_rows)
        trainable, frozen = divide(run.config, run.scorer, params)
        return tree.cast(trainable, jnp.float32), frozen

    trainable, frozen = jax.eval_shape(draw, jax.random.key(0))
    own = run.settings
    tx, key = _optimizer(run, trainable), rng.key_for(own.seed, "dropout", own.rng)
    return trainable, frozen, jax.eval_shape(lambda x: make_state(x, tx, key), trainable)


def weigh(shapes: Shapes, placement: Placement) -> Sizes:
    """Counts what is there before anything is computed."""
    trainable, frozen = shapes.state.trainable, shapes.frozen
    # A layer's weights are joined over the data axis before a product reads them.
    whole = dataclasses.replace(placement, fsdp=False)
    joined = _placed(frozen, whole.parameters(frozen))
    return Sizes(
        tree.count(trainable) + tree.count(frozen),
        tree.count(trainable),
        *(_local(part) for part in (frozen, trainable)),
        _local(shapes.state) - _local(trainable),
        _local(shapes.batch),
        _local(joined),
    )


@functools.lru_cache(maxsize=64)
def cost_of(run: AbstractRun, placement: Placement, remat: str = "", attention: str = "") -> Cost:
    """Compiles the step for one device of the mesh and reads what it takes."""
    return measure(make_shapes(run, placement, remat, attention), placement)


def compile_run(run: AbstractRun, placement: Placement, remat: str, attention: str) -> Compiled:
    """Compiles the step for the devices of a mesh by their own compiler."""
    shapes = make_shapes(run, placement, remat, attention, as_it_runs=True)
    return compile_for(placement, shapes.step, *shapes[1:], donate_argnums=0)


def measure(shapes: Shapes, placement: Placement) -> Cost:
    """Compiles a step and reads what it takes on one device."""
    lowered = jax.jit(shapes.step, donate_argnums=0).lower(*shapes[1:])
    compiled = lowered.compile(compiler_options=known_options(**_OPTIONS))
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Cost(
        weigh(shapes, placement), memory.temp_size_in_bytes, results, read_work(compiled.as_text())
    )


def _place(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _placed(leaves, shardings):
    return jax.tree.map(_place, leaves, shardings)


def _local(leaves: Any) -> int:
    """Counts the bytes of a tree on one device."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(leaves)
    )
