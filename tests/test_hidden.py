"""Hidden packages look uninstalled to other packages, which still work."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

CODE = """
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
import scipy.stats  # reads sys.modules
import sklearn.manifold
from transformers.utils import is_torch_available
assert not is_torch_available()
hidden.unhide("torch")
import torch
hidden.hide("torch")  # too late
import torch.nn.functional
print(importlib.util.find_spec("torch") is not None)
"""


def test_a_package_is_hidden_until_unhide():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["No module named 'torch'", "True"]
