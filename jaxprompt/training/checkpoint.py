"""Reads checkpoints: the state of a run, its best parameters and its position.

`checkpoint_writer` saves them, `checkpoint_folders` defines their paths. Several processes call
every function together: each reads its part of sharded arrays, process 0 decides.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path

from jaxprompt.errors import InputError, first_line, list_differences
from jaxprompt.training.checkpoint_folders import (
    BEST,
    POSITION,
    STATE,
    agreed_steps,
    checkpoint_folder,
    find_checkpoint,
)

Tree = Any
Result = TypeVar("Result")
MIN_SLICE_BYTES = 1 << 20  # minimum bytes per device when a replicated array is written in slices


class Checkpoints:
    """The checkpoints of one workdir, read-only.

    A run that trains there may delete a step while it is read; if no step was requested, the newest
    one is read instead.
    """

    def __init__(self, workdir: str | os.PathLike):
        """Opens `<workdir>/checkpoints`, which need not exist."""
        self.folder = checkpoint_folder(workdir)

    def latest(self) -> int | None:
        """Returns the newest step with a state, None if there is none."""
        return max(agreed_steps(self.folder, STATE), default=None)

    def best(self) -> int | None:
        """Returns the newest step with best parameters, None if there is none."""
        return max(agreed_steps(self.folder, BEST), default=None)

    def steps(self) -> list[int]:
        """Returns the steps with saved trainable parameters, in order."""
        items = (STATE, BEST)
        return sorted({step for item in items for step in agreed_steps(self.folder, item)})

    def restore(self, template: Tree, step: int | None = None) -> tuple[Tree, dict]:
        """Restores (state, position) of `step`, the newest by default, bit for bit.

        `template` is a tree of arrays or jax.ShapeDtypeStruct; names, shapes and dtypes must match
        the checkpoint, and a leaf with a sharding is restored into it.
        Raises InputError for a checkpoint that is missing, damaged or of another model.
        """
        return self._read(STATE, step, lambda path: _restore(path, STATE, template))

    def position(self) -> dict:
        """Reads only the newest position; errors as in `restore`."""
        return self._read(STATE, None, _restore_position)

    def restore_best(
        self, template: Tree, step: int | None = None, *, or_newer: bool = False
    ) -> tuple[Tree, dict]:
        """Restores the best parameters up to `step`, by default the newest, and their dev result.

        With `or_newer` better ones of a later step are accepted. Errors as in `restore`.
        """
        if or_newer and step is not None and (self.best() or 0) >= step:
            step = None
        return self._read(BEST, step, lambda path: _restore_best(path, template))

    def restore_trainable(self, template: Tree, step: int) -> Tree:
        """Restores the trainable parameters of one of `steps`, without optimizer state.

        Errors as in `restore`.
        """
        # Best parameters have no optimizer state, so there is less to verify and read.
        if step in agreed_steps(self.folder, BEST):
            return self.restore_best(template, step)[0]
        return self._read(STATE, step, lambda p: _restore(p, STATE, template, "trainable/"))[0]

    def find_best(self, step: int | None = None) -> int:
        """Returns the step of the best parameters up to `step`, by default the newest.

        Raises InputError if they are missing or damaged.
        """
        return self._read(BEST, step, lambda path: int(path.name))

    def _read(self, item: str, step: int | None, read: Callable[[Path], Result]) -> Result:
        """Reads one item of a step, the newest by default."""
        while True:
            newest = max(agreed_steps(self.folder, item), default=None)
            path = self.folder
            try:
                path = find_checkpoint(self.folder, item, step)
                return read(path)
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                # With several processes, the others do not know of this error.
                is_last = newest == max(agreed_steps(self.folder, item), default=None)
                if step is None and jax.process_count() == 1 and not is_last:
                    continue
                if isinstance(error, InputError):
                    raise
                # The files are those that were saved, so another version may have saved them.
                raise InputError(
                    f"checkpoint {path} cannot be read ({first_line(error)}); use the versions of "
                    "jaxprompt and orbax that saved it, or another workdir"
                ) from error


def handlers() -> dict[str, ocp.CheckpointHandler]:
    """Returns orbax handlers for the items of a step."""
    # Orbax divides replicated arrays among the devices for writing, and compiles a program for each
    # slice: too slow for small arrays.
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))

    def make_handler() -> ocp.CheckpointHandler:
        # OCDBT: few files; plain zarr has a folder and two files per array.
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=True, type_handler_registry=registry
        )

    return {STATE: make_handler(), BEST: make_handler(), POSITION: ocp.JsonCheckpointHandler()}


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Returns the leaves of a tree by the names under which they are saved."""
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an array."""
    sharding = getattr(leaf, "sharding", None)
    # Without a sharding orbax uses the saved one, whose devices may not exist here.
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _restore_position(path: Path) -> dict:
    with ocp.Checkpointer(handlers()[POSITION]) as checkpointer:
        return checkpointer.restore(path / POSITION, args=ocp.args.JsonRestore())


def _restore(path: Path, item: str, template: Tree, prefix: str = "") -> tuple[Tree, dict]:
    """Restores the position and one item of a step: the leaves with this prefix, without it."""
    expected = {prefix + name: abstract_leaf(leaf) for name, leaf in named_leaves(template).items()}
    handler: Any = handlers()[item]
    with ocp.Checkpointer(handler) as checkpointer:
        saved = handler.metadata(path / item).tree
        _check_same(path, {n: leaf for n, leaf in saved.items() if n.startswith(prefix)}, expected)
        restore_args = ocp.checkpoint_utils.construct_restore_args(expected)
        args = ocp.args.PyTreeRestore(
            item=expected, restore_args=restore_args, partial_restore=bool(prefix)
        )
        restored = checkpointer.restore(path / item, args=args)
    leaves = [restored[name] for name in expected]
    return jax.tree.unflatten(jax.tree.structure(template), leaves), _restore_position(path)


def _restore_best(path: Path, template: Tree) -> tuple[Tree, dict]:
    """Restores the best parameters of a step and their dev result."""
    best, position = _restore(path, BEST, template)
    return best, position["best"]


def _check_same(path: Path, saved: dict, expected: dict) -> None:
    shapes = [
        {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}
        for leaves in (saved, expected)
    ]
    if differing := list_differences(*shapes):
        raise InputError(
            f"checkpoint {path} belongs to a different model or optimizer: {differing}; "
            "use the config that it was saved with, or another workdir"
        )
