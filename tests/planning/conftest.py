"""Small runs of published shapes: nothing is read and nothing is downloaded."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `configs`


@pytest.fixture(scope="session")
def make_run():
    """Makes the abstract run of base.py with fields changed ("data__batch")."""
    from configs.base import get_config
    from configs.parts import methods
    from configs.parts.heads import HEADS
    from jaxprompt.planning.abstract import open_run

    def make(path, method="soft", **fields):
        c = get_config()
        HEADS[fields.pop("head__name", "linear")](c)
        getattr(methods, method)(c)
        c.backbone.path, c.backbone.dropout = path, 0.0
        c.mesh.data = 1
        for name, value in fields.items():
            block, field = name.split("__")
            c[block][field] = value
        return open_run(c)

    return make
