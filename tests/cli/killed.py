"""Runs a command that ends itself with SIGKILL: `python killed.py MOMENT STEP COMMAND ...`.

MOMENT: taken (STEP is, and not saved), saved (after STEP is saved), saving (its files are half
written), result (before the result is).
"""

import os
import signal
import sys

from jaxprompt.__main__ import main
from jaxprompt.training import checkpoint_folders
from jaxprompt.training.checkpoint import Checkpoints
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog


def kill(*_args, **_kwargs) -> None:
    """Ends this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(function, step: int):
    """Calls `function`, then kills where its step is `step`; what it has saved is complete."""

    def call(self, at: int, *args, **kwargs):
        function(self, at, *args, **kwargs)
        if at == step:
            if isinstance(self, CheckpointWriter):
                self.wait_for_saves()
            kill()

    return call


def half(function, step: int):
    """Kills in the middle of the writing of `step`: orbax is done, the seal is not."""

    def call(path):
        if path.name == f"{step}{checkpoint_folders.TEMPORARY}":
            kill()
        return function(path)

    return call


if __name__ == "__main__":
    moment, step = sys.argv[1], int(sys.argv[2])
    if moment == "taken":
        RunLog.progress = after(RunLog.progress, step)
    elif moment == "saved":
        CheckpointWriter.save = after(CheckpointWriter.save, step)
    elif moment == "result":
        Checkpoints.restore_best = kill
    else:
        sums = checkpoint_folders.folder_checksums
        checkpoint_folders.folder_checksums = half(sums, step)
    sys.exit(main(sys.argv[3:]))
