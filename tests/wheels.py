"""Wheels of packages, built without network."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpack_wheel(source: Path, folder: Path) -> Path:
    """Builds the wheel of the sources in `source` and unpacks it in `folder`. -> site folder"""
    pytest.importorskip("setuptools", minversion="77")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "site")
    return folder / "site"
