"""Exchanges rows of a batch between processes: each sends the rows that it has."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxprompt.parallel.sharding import DATA, MODEL, Placement, put_global

_ROOM_STEPS = 4  # the rows per device grow in this fraction of an even share: few programs compile


class RowExchange:
    """Moves rows from the process that has them to the devices that need them."""

    def __init__(self, placement: Placement):
        """Takes a mesh on which every process has the same number of devices."""
        mesh = placement.mesh
        holders = np.array([device.process_index for device in mesh.devices.reshape(-1)])
        self._device_indices = np.stack(
            [np.flatnonzero(holders == p) for p in sorted(set(holders))]
        )
        self._replicated = placement.replicated
        # Over all devices, because processes may share a part of the data axis.
        self._exchange_sharding = NamedSharding(mesh, PartitionSpec((DATA, MODEL)))
        self._pick = jax.jit(_pick, out_shardings=placement.batch)

    def join(self, owners: np.ndarray, read: Callable[[np.ndarray], np.ndarray]) -> jax.Array:
        """Joins the rows of a batch from all processes, which all call this.

        Args:
          owners: process that has each row, int [B], equal on all processes; -1 = none, the row is
            0.
          read: returns this process's rows by their indices; the row of index -1 is ignored.

        Returns:
          [B, ...], sharded over the data axis.
        """
        processes, devices = self._device_indices.shape
        counts = np.bincount(owners[owners >= 0], minlength=processes)
        room_step = max(1, len(owners) // (_ROOM_STEPS * processes * devices))
        room = max(1, -(-counts.max() // devices))  # rows per device
        room = -(-room // room_step) * room_step
        indices = np.full(len(owners), -1, np.int32)
        rows_by_process = [np.flatnonzero(owners == process) for process in range(processes)]
        for device_indices, rows in zip(self._device_indices, rows_by_process, strict=True):
            positions = np.arange(len(rows))
            indices[rows] = device_indices[positions // room] * room + positions % room
        rows = rows_by_process[jax.process_index()]
        values = read(np.pad(rows, (0, devices * room - len(rows)), constant_values=-1))
        local_devices = self._device_indices[jax.process_index()]
        offsets = {device: n * room for n, device in enumerate(local_devices)}

        def part(index):
            start = offsets[(index[0].start or 0) // room]
            return values[start : start + room]

        shape = (processes * devices * room, *values.shape[1:])
        exchanged = jax.make_array_from_callback(shape, self._exchange_sharding, part)
        return self._pick(exchanged, put_global(indices, self._replicated))


def _pick(exchanged: jax.Array, indices: jax.Array) -> jax.Array:
    picked = jnp.take(exchanged, indices, axis=0, mode="clip")
    is_present = (indices >= 0).reshape(-1, *[1] * (exchanged.ndim - 1))
    return jnp.where(is_present, picked, jnp.zeros((), exchanged.dtype))
