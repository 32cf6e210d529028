"""How many runs fit in memory at once."""

import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxprompt.runs.grid.batched_steps import PerRun, Programs
from jaxprompt.tree import Flat
from jaxprompt.types import Batch

USABLE_SHARE = 0.9  # of the free memory; evaluation and the allocator need the rest


def free_bytes(mesh: Mesh) -> int:
    """Returns the free bytes on one device of a mesh; CPU devices share the RAM."""
    devices = mesh.local_mesh.devices.flatten()
    stats = devices[0].memory_stats() or {}  # None of a CPU
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _free_ram() // len(devices)


def _free_ram() -> int:
    try:
        sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_needed(
    programs: Programs, runs: int, batch: Batch, per_run: PerRun, *, shares_states: bool = False
) -> int | None:
    """Returns the bytes per device to train `runs` runs, without frozen parameters of all.

    `batch` and `per_run` are those of one run; with `shares_states` cached states count once for
    all runs. Returns None if the device cannot compile such a large program.
    """

    # A view, so that the batches of many runs take no memory on the host.
    def repeat(x):
        return np.broadcast_to(x, (runs, *np.shape(x)))

    state, best = programs.template(runs)
    batches = jax.tree.map(repeat, batch)
    placed = programs.put_batch(
        batches._replace(cached=batch.cached) if shares_states else batches, runs
    )
    try:
        program = programs.compile(state, placed, programs.put_per_run([per_run] * runs))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    analysis = program.memory_analysis()
    # Donated arguments also count as outputs, where they are aliases.
    step_bytes = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    # The best parameters of the runs are in memory too, but are no argument of the step.
    return step_bytes - local_bytes(programs.frozen) + local_bytes(best)


def local_bytes(tree: Flat) -> int:
    """Returns the bytes of a tree on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in leaves)


def max_runs_in_memory(
    programs: Programs,
    num_runs: int,
    batch: Batch,
    per_run: PerRun,
    free_bytes: int,
    *,
    shares_states: bool = False,
) -> int:
    """Returns how many of `num_runs` runs can train at once in `free_bytes`; at least 1.

    The step of all runs is compiled first, because it is used if it fits. Otherwise the bytes per
    run are the difference between the steps of two runs and of one.
    """
    limit = USABLE_SHARE * free_bytes
    all_bytes = bytes_needed(programs, num_runs, batch, per_run, shares_states=shares_states)
    # One run is always tried, because there is nothing smaller.
    if num_runs == 1 or (all_bytes is not None and all_bytes <= limit):
        return num_runs
    one_run, two_runs = (
        bytes_needed(programs, runs, batch, per_run, shares_states=shares_states) for runs in (1, 2)
    )
    if one_run is None or two_runs is None or two_runs > limit:
        return 1
    bytes_per_run = max(two_runs - one_run, 1)
    return min(num_runs - 1, programs.round(2 + int((limit - two_runs) / bytes_per_run)))
