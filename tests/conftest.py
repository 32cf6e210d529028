"""The tests run on the CPU as 8 devices, unless JAX_PLATFORMS says otherwise."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _FLAGS:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_force_host_platform_device_count=8".strip()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and weights beside the repository; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    return folder
