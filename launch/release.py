"""Builds the source distribution and the wheel of the last commit in dist/, and checks them.

usage: python launch/release.py     (needs: pip install build twine)

The links of README.md become absolute, as relative ones lead nowhere on the package index.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "jaxprompt/jaxprompt"
PAGES = f"https://github.com/{REPOSITORY}/blob/main/"
PICTURES = f"https://raw.githubusercontent.com/{REPOSITORY}/main/"
FILES = ("jaxprompt", "configs", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff")


def absolute_links(text: str) -> str:
    """Returns Markdown with the address of the repository in front of its relative links."""

    def replace(match: re.Match[str]) -> str:
        return match[0] + (PICTURES if match[0].startswith("!") else PAGES)

    return re.sub(r"!?\[[^\]]*\]\((?!https?:|#)", replace, text)


def main() -> None:
    """Builds in a temporary folder, so that nothing of the checkout gets in."""
    with tempfile.TemporaryDirectory() as folder:
        archive, source = Path(folder, "files.tar"), Path(folder, "source")
        command = ["git", "archive", f"--output={archive}", "HEAD", *FILES]
        subprocess.run(command, cwd=ROOT, check=True)
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        readme = source / "README.md"
        readme.write_text(absolute_links(readme.read_text("utf-8")), "utf-8")
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)  # of an earlier version
        subprocess.run([sys.executable, "-m", "build", "--outdir", dist, source], check=True)
        files = sorted(dist.iterdir())
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


if __name__ == "__main__":
    main()
