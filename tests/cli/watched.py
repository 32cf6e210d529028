"""Runs a command as one of several processes: `watched.py FOLDER SIGNAL STEP WHO COMMAND ...`.

Writes which examples every batch of this process holds to FOLDER/batches-PROCESS.jsonl. Process WHO
sends itself SIGNAL after STEP.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from jaxprompt.__main__ import main
from jaxprompt.parallel import sharding
from jaxprompt.training.checkpoint_writer import CheckpointWriter
from jaxprompt.training.log import RunLog

if __name__ == "__main__":
    folder, signal, step, who = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    words = sys.argv[5:]
    process = int(next((w.split("=")[1] for w in words if w.startswith("--process=")), "0"))
    put_batch, progress = sharding.put_batch, RunLog.progress
    init, writers = CheckpointWriter.__init__, []

    def init_and_note(self, *args, **kwargs):
        """Opens a folder of checkpoints."""
        init(self, *args, **kwargs)
        writers.append(self)

    def put_and_note(placement, batch):
        """Notes the examples of a batch of this process."""
        with open(folder / f"batches-{process}.jsonl", "a") as file:
            file.write(json.dumps(np.asarray(batch.index).tolist()) + "\n")
        return put_batch(placement, batch)

    def progress_then_signal(self, at):
        """Ends a step, and perhaps this process."""
        progress(self, at)
        if at == step and process == who:
            # What was begun is complete: how long that takes is none of this test's business.
            for writer in writers:
                writer.wait_for_saves()
            os.kill(os.getpid(), signal)

    sharding.put_batch, RunLog.progress = put_and_note, progress_then_signal
    CheckpointWriter.__init__ = init_and_note
    sys.exit(main(words))
