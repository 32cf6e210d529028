"""A package that is hidden is not installed to anyone, and breaks nobody who asks."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

HIDING = """
import importlib.metadata, importlib.util, sys
from jaxprompt import hidden

hidden.hide("torch")
hidden.hide("torch")
assert importlib.util.find_spec("torch") is None and "torch" not in sys.modules
assert importlib.util.find_spec("numpy") and importlib.metadata.version("numpy")
try:
    import torch
except ModuleNotFoundError as error:
    print(error)
import scipy.stats  # looks into sys.modules for it
import sklearn.manifold
from transformers.utils import is_torch_available
assert not is_torch_available()
hidden.show("torch")
import torch
hidden.hide("torch")  # too late
import torch.nn.functional
print(importlib.util.find_spec("torch") is not None)
"""


def test_others_find_nothing_until_it_is_shown():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", HIDING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["No module named 'torch'", "True"]
