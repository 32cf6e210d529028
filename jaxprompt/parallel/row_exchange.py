"""Exchanges rows of a batch between processes: each sends the rows that it has."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxprompt.parallel.sharding import DATA, MODEL, Placement, put

_PARTS = 4  # the room per device grows by this part of an even share: few programs are compiled


class RowExchange:
    """Moves rows from the process that has them to the devices that need them."""

    def __init__(self, placement: Placement):
        """Takes a mesh on which every process has the same number of devices."""
        mesh = placement.mesh
        holders = np.array([device.process_index for device in mesh.devices.reshape(-1)])
        self._slots = np.stack([np.flatnonzero(holders == p) for p in sorted(set(holders))])
        self._replicated = placement.replicated
        # Over all devices, for processes may share a part of the data axis.
        self._laid = NamedSharding(mesh, PartitionSpec((DATA, MODEL)))
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
        processes, devices = self._slots.shape
        counts = np.bincount(owners[owners >= 0], minlength=processes)
        step = max(1, len(owners) // (_PARTS * processes * devices))
        room = max(1, -(-counts.max() // devices))  # rows per device
        room = -(-room // step) * step
        places = np.full(len(owners), -1, np.int32)
        for slots, own in zip(self._slots, self._lists(owners), strict=True):
            number = np.arange(len(own))
            places[own] = slots[number // room] * room + number % room
        own = self._lists(owners)[jax.process_index()]
        values = read(np.pad(own, (0, devices * room - len(own)), constant_values=-1))
        first = {slot: n * room for n, slot in enumerate(self._slots[jax.process_index()])}

        def part(index):
            start = first[(index[0].start or 0) // room]
            return values[start : start + room]

        shape = (processes * devices * room, *values.shape[1:])
        laid = jax.make_array_from_callback(shape, self._laid, part)
        return self._pick(laid, put(places, self._replicated))

    def _lists(self, owners: np.ndarray) -> list[np.ndarray]:
        """Lists the row indices of each process."""
        return [np.flatnonzero(owners == process) for process in range(len(self._slots))]


def _pick(laid: jax.Array, places: jax.Array) -> jax.Array:
    found = jnp.take(laid, places, axis=0, mode="clip")
    held = (places >= 0).reshape(-1, *[1] * (laid.ndim - 1))
    return jnp.where(held, found, jnp.zeros((), laid.dtype))
