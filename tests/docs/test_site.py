"""The documentation site: it builds without a warning, and has every page and public name."""

import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import jaxprompt as jp
from jaxprompt.registry import BACKBONES, HEADS, METHODS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    """Builds a folder of pages with the settings of the site, as launch/docs.sh does."""
    for name in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(name)
    flags = ["-q", "-E", "-W", "--keep-going", "-d", target / "doctrees", "-c", DOCS]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *flags, source, target / "site"],
        capture_output=True,
        text=True,
    )


@pytest.mark.long  # a job on GitHub builds the site
def test_the_site_builds(tmp_path):
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    _, _, packed = (tmp_path / "site/objects.inv").read_bytes().partition(b"zlib.\n")
    documented = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    names = {f"jaxprompt.{name}" for name in dir(jp) if name != "__version__"}
    names |= {
        f"jaxprompt.{registry.package}.{name}"
        for registry in (METHODS, HEADS, BACKBONES)
        for name in registry.built_in()
    }
    assert names <= documented, names - documented
    index = (tmp_path / "site/searchindex.js").read_text()
    assert '"api/jaxprompt"' in index and '"config"' in index
    assert 'src="http' not in (tmp_path / "site/search.html").read_text()  # it needs no network


@pytest.mark.long  # a job on GitHub builds the site
def test_a_broken_link_fails(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text(
        "# A\n\n[one](missing.md) [two](#missing) [three](../missing.py) [no](#a)\n\n"
        "```{toctree}\nmissing\n```\n\n```{py:function} f(x: jaxprompt.Missing)\n```\n"
    )
    done = build(tmp_path / "pages", tmp_path)
    assert done.returncode == 1
    assert len(re.findall(r"WARNING: .*\bmissing|WARNING: .*Missing", done.stderr)) == 5


@pytest.mark.parametrize(
    "page, link, target",
    [
        ("quickstart", "../launch/test.sh", "blob/main/launch/test.sh"),
        ("results/speed", "../../README.md#results", "blob/main/README.md#results"),
        ("data", "examples/qa", "blob/main/docs/examples/qa"),
        ("data", "examples/tickets.csv", ""),
        ("results/speed", "../data.md", ""),
        ("data", "missing.md", ""),
    ],
)
def test_links_out_of_the_site_lead_to_the_repository(page, link, target):
    settings = runpy.run_path(str(DOCS / "conf.py"))
    source = [f"see [this]({link})."]
    settings["link_repository"](None, page, source)
    assert source == [f"see [this]({settings['REPOSITORY'] + '/' + target if target else link})."]


def test_every_page_is_in_one_toctree():
    blocks = re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text("utf-8"), re.S)
    entries = [line for block in blocks for line in block.split("\n") if line[:1] not in ("", ":")]
    pages = {path for end in ("md", "ipynb") for path in DOCS.rglob(f"*.{end}")}
    listed = [path for entry in entries for path in DOCS.glob(f"{entry}.*") if path in pages]
    assert sorted(listed) == sorted(pages - {DOCS / "index.md"})
