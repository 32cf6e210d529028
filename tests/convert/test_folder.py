"""Finding a backbone: local folders, pip packages, hub ids without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxprompt.convert.folder import package_folder, resolve
from jaxprompt.errors import InputError

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package on the path that fails when it is imported."""
    (tmp_path / "site" / "tiny_weights" / "model").mkdir(parents=True)
    (tmp_path / "site" / "tiny_weights" / "__init__.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site" / "tiny_weights"


def hub_cache(home: Path, repo: str, files: dict[str, str]) -> Path:
    """Lays files out as the hub's cache does."""
    root = home / "hub" / ("models--" + repo.replace("/", "--"))
    snapshot = root / "snapshots" / HASH
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(HASH)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def resolve_offline(home: Path, repo: str) -> subprocess.CompletedProcess:
    """Resolves in a fresh process, since huggingface_hub reads the environment once."""
    code = f"from jaxprompt.convert.folder import resolve; print(resolve({repo!r}))"
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        env.pop(name, None)
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "repo, weights",
    [("owner/tiny-bert", "model.safetensors"), ("tiny-bert", "pytorch_model.bin")],
)
def test_hub_id_offline_from_the_cache(tmp_path, repo, weights):
    snapshot = hub_cache(tmp_path, repo, {"config.json": "{}", weights: ""})
    done = resolve_offline(tmp_path, repo)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == snapshot


def test_hub_id_offline_not_in_the_cache(tmp_path):
    done = resolve_offline(tmp_path, "owner/absent")
    last = done.stderr.strip().splitlines()[-1]
    assert "InputError: backbone 'owner/absent' is not a local folder" in last
    assert "give the path of a downloaded folder" in last


def test_package_is_found_and_not_imported(package):
    assert resolve("pkg:tiny_weights/model") == package / "model"
    assert resolve("pkg:tiny-weights") == package / "model"
    assert package_folder("tiny_weights") == package / "model"
    assert "tiny_weights" not in sys.modules
    (package / "a.gguf").write_bytes(b"GGUF")
    assert resolve("pkg:tiny_weights/a.gguf") == resolve(package / "a.gguf") == package / "a.gguf"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pkg:no_such_package_here/model", "is its folder 'model'; check the name"),
        ("pkg:tiny_weights/other", "has no folder 'other'; it has: model"),
        ("pkg:tiny_weights/../..", "has no folder"),
        ("pkg:tiny_weights/b.gguf", "has no file 'b.gguf'"),
        ("pkg:os.path/model", "'os.path' is not installed"),
        ("/no/such/folder", "neither a folder nor a Hub id"),
        (__file__, "neither a folder nor a Hub id"),
        ("", "neither a folder nor a Hub id"),
    ],
)
def test_bad_names_say_the_cure(package, spec, message):
    with pytest.raises(InputError, match=message.replace(".", r"\.")) as caught:
        resolve(spec)
    assert "\n" not in str(caught.value)


REPO_FILES = [
    "config.json", "vocab.txt", "tokenizer.json", "sentencepiece.bpe.model", "README.md",
    "tf_model.h5", "onnx/model.onnx", "onnx/model.safetensors", "model.fp16.safetensors",
    "pytorch_model.bin", "training_args.bin", "code.py",
]  # fmt: skip


@pytest.mark.parametrize(
    "weights",
    [
        ["model.safetensors"],
        ["model-00001-of-00002.safetensors", "model.safetensors.index.json"],
        [],
    ],
    ids=["single", "sharded", "torch"],
)
def test_only_needed_files_are_fetched(tmp_path, monkeypatch, weights):
    """Torch files come only where there are no safetensors; code and other formats never."""

    def fetch(repo, revision, allow_patterns, local_files_only):
        assert (repo, revision, local_files_only) == ("owner/tiny", "v1", False)
        for name in filter_repo_objects(REPO_FILES + weights, allow_patterns=allow_patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve("owner/tiny", "v1") == tmp_path
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    text = {"config.json", "vocab.txt", "tokenizer.json", "sentencepiece.bpe.model"}
    assert files == text | set(weights or ["pytorch_model.bin"])
