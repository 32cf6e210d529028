"""One tiny backbone and one tiny task for all tests of the command line."""

import shutil
from pathlib import Path

import jax
import pytest
from spoil import BASE
from tiny_run import ROOT, changed, flags, make_backbone, make_data, make_dropping, tiny_fields

from jaxprompt.__main__ import main


@pytest.fixture(scope="session", autouse=True)
def devices_have_started():
    """Starts JAX: else a test of `plan` would simulate its devices for all tests behind it."""
    jax.devices()


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """A BERT folder with pooler and MLM head."""
    return make_backbone(tmp_path_factory.mktemp("backbone") / "bert")


@pytest.fixture(scope="session")
def dropping(backbone, tmp_path_factory):
    """The same with dropout."""
    return make_dropping(tmp_path_factory.mktemp("dropping") / "bert", backbone)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of train, dev and test rows."""
    return make_data(tmp_path_factory.mktemp("data"))


# -- bad input ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def configs_are_found(monkeypatch):
    """A config in a temporary folder imports the repository's `configs`."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="session")
def other_backbone(tmp_path_factory):
    """A folder of the same shape with other weights."""
    return make_backbone(tmp_path_factory.mktemp("other") / "bert", seed=1)


@pytest.fixture(scope="session")
def trained(backbone, data, tmp_path_factory):
    """A finished run's folder, exported. Copy it before you change it."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    words = flags(tiny_fields(backbone, data))
    assert main(["train", f"--config={BASE}", f"--workdir={workdir}", *words]) == 0
    assert main(["export", f"--config={workdir / 'config.json'}", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def model(backbone, tmp_path):
    """A copy of the backbone to spoil."""
    return shutil.copytree(backbone, tmp_path / "model")


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused. Returns its message, without "jaxprompt COMMAND: ".

    With `started` the run may have logged lines before.
    """

    def call(*argv: object, started: bool = False) -> str:
        argv = [str(word) for word in argv]
        capsys.readouterr()
        code = main(argv)
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert code == 2, f"exit code {code}, stderr {err!r}"
        assert out == ""
        messages = [line for line in lines if line.startswith(f"jaxprompt {argv[0]}: ")]
        assert messages == lines[-1:], err
        assert started or len(lines) == 1, err
        return messages[0].removeprefix(f"jaxprompt {argv[0]}: ")

    return call


@pytest.fixture
def refused_config(refused, tmp_path):
    """Runs a whole config that must be refused. Returns its message."""

    def call(run_config, command: str = "validate") -> str:
        config = tmp_path / "refused.json"
        config.write_text(run_config.to_json())
        place = [] if command == "validate" else [f"--workdir={tmp_path / 'refused'}"]
        line = refused(command, f"--config={config}", *place, started=True)
        assert not (tmp_path / "refused/checkpoints").exists()
        return line

    return call


@pytest.fixture
def train(refused, backbone, data, tmp_path):
    """Starts a tiny run, some fields changed, that must be refused. Returns its message."""

    def call(config: Path = BASE, workdir: Path = tmp_path / "new", **changes: object) -> str:
        changes = {name.replace("__", "."): value for name, value in changes.items()}
        words = flags(changed(tiny_fields(backbone, data), changes))
        line = refused("train", f"--config={config}", f"--workdir={workdir}", *words)
        assert not (workdir / "config.json").exists() or workdir != tmp_path / "new"
        return line

    return call


@pytest.fixture
def no_reading(monkeypatch):
    """Makes reading data, a tokenizer or weights an error; called, opening the backbone too."""

    def forbid(*_args, **_kwargs):
        raise AssertionError("read before the config was checked")

    for name in ("data.sources.splits.read_split", "build.backbone.load_weights"):
        monkeypatch.setattr(f"jaxprompt.{name}", forbid)
    monkeypatch.setattr("jaxprompt.build.scorer.load_tokenizer", forbid)
    return lambda: monkeypatch.setattr("jaxprompt.build.backbone.folder.resolve", forbid)
