"""Locates the folder or file of a pre-trained backbone: a path, a pip package or a Hub id."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxprompt.convert.gguf.config import read_gguf_config
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.data.text.tokenizer import is_unnamed_bert
from jaxprompt.errors import InputError
from jaxprompt.files import read_json, user_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GENERATION_CONFIG = "generation_config.json"
_FORCED_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")  # BART's
TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    _GENERATION_CONFIG,  # copied with the tokenizer, though it is not part of it
]
# What huggingface_hub raises if an answer is JSON of another structure.
_NO_ANSWERS = (TypeError, LookupError, AttributeError, AssertionError, RecursionError)
_SAFETENSORS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
_TORCH_FILES = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"]


def resolve(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a backbone; downloads it if it is a Hub id that is not cached.

    Args:
      path_or_id: a folder, "pkg:PACKAGE[/SUBFOLDER]" (an installed pip package, which is not
        imported), or a Hub id ("name" or "owner/name"). A path, also one in a package, may point
        to a .gguf file, which is then returned.
      revision: the Hub revision.

    With HF_HUB_OFFLINE=1 only the cache is used.
    """
    text = str(path_or_id)
    if text.startswith("pkg:"):
        package, _, sub = text.removeprefix("pkg:").partition("/")
        return package_folder(package, sub or "model")
    path = user_path(text)
    if text and (os.path.isdir(path) or (os.path.isfile(path) and is_gguf(path))):
        return path  # not by Path.is_dir, which raises without permission
    if not is_hub_id(text) or is_gguf(path) or os.path.isfile(path):
        raise InputError(
            f"backbone {text!r} is neither a folder nor a Hub id; give the folder with "
            "config.json, a .gguf file, 'owner/name' or 'pkg:package/folder'"
        )
    return _hub_folder(text, revision)


def is_hub_id(text: str) -> bool:
    """Returns whether a string has the form of a Hub id, "name" or "owner/name"."""
    return bool(_HUB_ID.fullmatch(text))


def package_folder(package: str, sub: str = "model") -> Path:
    """Returns a folder or .gguf file of an installed pip package, which is not imported."""
    module = package.replace("-", "_")
    # find_spec would import the parent of a dotted name.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    kind = "file" if is_gguf(sub) else "folder"
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"package {package!r} is not installed, and pkg:{package}/{sub} is its {kind} {sub!r}; "
            "check the name, or install the package that contains the weights"
        )
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (root / sub).resolve()
    # Resolved, because `sub` could leave the package by dots or a link.
    if not _is_backbone_path(path) or not path.is_relative_to(root):
        names = sorted(
            p.name for p in root.iterdir() if _is_backbone_path(p) and p.name[0] not in "_."
        )
        raise InputError(
            f"package {package!r} has no {kind} {sub!r}; it has: {', '.join(names) or 'none'}"
        )
    return path


def _is_backbone_path(path: Path) -> bool:
    return os.path.isfile(path) if is_gguf(path) else os.path.isdir(path)


def read_config(folder: str | Path) -> dict:
    """Reads config.json of a backbone folder, or builds it from the metadata of a .gguf file.

    The forced tokens of an encoder-decoder are those of generation_config.json if it has them.
    """
    if is_gguf(folder):
        return read_gguf_config(folder)
    path = Path(folder) / "config.json"
    config = read_json(path, "a backbone folder as save_pretrained writes it")
    if config.get("is_encoder_decoder"):
        generation = _read_generation_config(path.parent)
        config |= {name: generation[name] for name in _FORCED_TOKENS if name in generation}
    if "model_type" not in config and is_unnamed_bert(path.parent):
        return config | {"model_type": "bert"}
    return config


def end_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Returns the token ids that end a text, from generation_config.json or else the config.

    Raises:
      InputError: if the file cannot be read.
    """
    value = _read_generation_config(folder).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _read_generation_config(folder: Path) -> dict:
    path = folder / _GENERATION_CONFIG
    return read_json(path, "what save_pretrained writes") if os.path.isfile(path) else {}


def _hub_folder(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download

    def download(weights: list[str]) -> Path:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=["config.json", *TOKENIZER_FILES, *weights],
            # Explicit, because the library may request a list of files even if it is offline.
            local_files_only=constants.HF_HUB_OFFLINE,
        )
        return Path(folder)

    at = f" at revision {revision!r}" if revision else ""
    advice = (
        "check the name and the network, or give the path of a downloaded folder: --backbone if a "
        "prompt names the backbone, otherwise backbone.path"
    )
    failure = f"backbone {repo!r}{at} is not a local folder and could not be downloaded"
    with hub_errors(failure, advice):
        # Many repositories have both formats; torch's is downloaded only if it is the only one.
        folder = download(_SAFETENSORS)
        if not any(folder.glob("*.safetensors")):
            folder = download(_SAFETENSORS + _TORCH_FILES)
    return folder


@contextlib.contextmanager
def hub_errors(failure: str, advice: str) -> Iterator[None]:
    """Turns an exception of huggingface_hub into an InputError: failure (reason); advice."""
    try:
        yield
    except Exception as error:  # any class, if a proxy answers instead of the hub
        # The first line says what failed; the details of a refused card, a ValueError, are on the
        # others.
        text = str(error).strip()
        message = text if isinstance(error, ValueError) else text.partition("\n")[0]
        reason = " ".join(message.split())[:400].rstrip(".")
        if isinstance(error, _NO_ANSWERS):
            reason = f"unexpected answer, {type(error).__name__}: {reason}"
        raise InputError(f"{failure} ({reason}); {advice}") from error
