"""Collected by `launch/test.sh --accelerators` alone; the table of what was compiled comes last."""

import os
import sys
from pathlib import Path

from jaxprompt.planning.compilers import ENVIRONMENT

os.environ |= ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
COLUMNS = ("work", "backbone", "devices", "mesh", "arguments", "temporary", "collectives", "kernel")


def pytest_terminal_summary(terminalreporter):
    """Prints a Markdown table of the programs, whichever process compiled them."""
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "when")]
    rows = sorted(dict(r.user_properties)["row"] for r in reports if dict(r.user_properties))
    terminalreporter.write_line("| " + " | ".join(COLUMNS) + " |")
    terminalreporter.write_line("|" + "---|" * len(COLUMNS))
    for row in dict.fromkeys(map(tuple, rows)):
        terminalreporter.write_line("| " + " | ".join(row) + " |")
