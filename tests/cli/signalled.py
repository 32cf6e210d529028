"""Runs a command whose process group gets a signal: `signalled.py MOMENT NUMBER COMMAND ...`.

MOMENT: jax (as it is imported), indexing (as the first part of a corpus is written).
"""

import importlib.abc
import os
import sys

from jaxprompt.__main__ import entry


class AsJaxIsImported(importlib.abc.MetaPathFinder):
    """Finds nothing, and sends the signal as somebody looks for jax."""

    def find_spec(self, name, _path, _target=None):
        if name == "jax":
            os.killpg(0, number)
        return None


if __name__ == "__main__":
    moment, number = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    os.setpgrp()
    if moment == "jax":
        sys.meta_path.insert(0, AsJaxIsImported())
    else:
        from jaxprompt.corpus.store import StoreWriter

        StoreWriter.add = lambda *_: os.killpg(0, number)
    entry()
