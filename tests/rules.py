"""What the rules for files share: one test walks all files and names every place that breaks it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def label(path: Path, line: int = 1) -> str:
    """Names a place as editors open it: jaxprompt/tree.py:12."""
    return f"{path.relative_to(ROOT)}:{line}"


def report(offenders: list[str]):
    """Fails with one line for each offender."""
    assert not offenders, "\n".join(["", *offenders])
