"""Locates the folder or file of a pre-trained backbone: a path, a pip package or a Hub id."""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprompt.convert.gguf.config import read_gguf_config
from jaxprompt.convert.hub import asking
from jaxprompt.data.text.gguf_header import is_gguf
from jaxprompt.data.text.tokenizer import is_unnamed_bert
from jaxprompt.errors import InputError, brief, is_kind
from jaxprompt.files import read_json, user_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GENERATION = "generation_config.json"
TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    _GENERATION,  # no tokenizer's, and goes along as they do
]
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
    if text and os.path.isdir(path):  # not Path's own, which raises where it may not look
        return path
    if os.path.isfile(path):
        if is_gguf(path):
            return path
        raise InputError(
            f"backbone {text!r} is a file; give the folder with config.json, or a .gguf file"
        )
    if is_gguf(path):
        raise InputError(f"backbone {text!r} does not exist; give the path of a .gguf file")
    if not is_hub_id(text):
        raise InputError(
            f"backbone {text!r} is neither a folder nor a Hub id; give an existing folder, "
            "'owner/name' or 'pkg:package/folder'"
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
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"package {package!r} is not installed; run: pip install {package.replace('_', '-')}"
        )
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    found = (root / sub).resolve()
    is_one = lambda path: os.path.isfile(path) if is_gguf(path) else os.path.isdir(path)
    # Resolved, because `sub` could climb out of the package by dots or a link.
    if not is_one(found) or not found.is_relative_to(root):
        inside = sorted(p.name for p in root.iterdir() if is_one(p) and p.name[0] not in "_.")
        what = "file" if is_gguf(sub) else "folder"
        raise InputError(
            f"package {package!r} has no {what} {sub!r}; it has: {', '.join(inside) or 'none'}"
        )
    return found


def read_config(folder: str | Path) -> dict:
    """Reads config.json of a backbone folder, or builds it from the metadata of a .gguf file."""
    if is_gguf(folder):
        return read_gguf_config(folder)
    path = Path(folder) / "config.json"
    config = read_json(path, "a backbone folder as save_pretrained writes it")
    if "model_type" not in config and is_unnamed_bert(path.parent):
        return config | {"model_type": "bert"}
    return config


def end_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Returns the token ids that end a text, from generation_config.json or else the config.

    Raises:
      InputError: if the file cannot be read, or the value is neither an id nor a list of ids.
    """
    path = folder / _GENERATION
    own = read_json(path, "what save_pretrained writes") if os.path.isfile(path) else {}
    found = own.get("eos_token_id")
    if found is None:
        path, found = folder / "config.json", config.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(is_kind(one, int) for one in ids):
        raise InputError(f"{path}: eos_token_id={brief(found)} must be an id or a list of ids")
    return ids


def _hub_folder(repo: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download

    def fetch(weights: list[str]) -> Path:
        patterns = ["config.json", *TOKENIZER_FILES, *weights]
        # Said, since the library may ask the hub for a list of files even where it is offline.
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=patterns,
            local_files_only=constants.HF_HUB_OFFLINE,
        )  # fmt: skip
        return Path(folder)

    at = f" at revision {revision!r}" if revision else ""
    cure = (
        "check the name and the network, or give the path of a downloaded folder: --backbone if a "
        "prompt names the backbone, otherwise backbone.path"
    )
    with asking(f"backbone {repo!r}{at} is not a local folder and could not be downloaded", cure):
        # Many repositories hold both formats; torch's is fetched only where it is the only one.
        folder = fetch(_SAFETENSORS)
        if not any(folder.glob("*.safetensors")):
            folder = fetch(_SAFETENSORS + _TORCH_FILES)
    return folder
