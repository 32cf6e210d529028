"""Exports on the Hugging Face Hub: download of hub:owner/name[@revision], and upload."""

import re
from pathlib import Path

from jaxprompt.convert import adapterhub, peft
from jaxprompt.convert.artifact import METADATA, TENSORS
from jaxprompt.convert.folder import hub_errors
from jaxprompt.convert.model_card import README, write_model_card
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError, brief

SCHEME = "hub:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def fetch_prompt(place: str) -> Path:
    """Downloads an export, or an adapter of PEFT or `adapters`.

    Args:
      place: hub:owner/name or hub:owner/name@revision.

    Returns:
      The local folder. With HF_HUB_OFFLINE=1 only the cache is used.

    Raises:
      InputError: if it cannot be downloaded.
    """
    from huggingface_hub import constants, snapshot_download

    name, _, revision = place.removeprefix(SCHEME).partition("@")
    check_repo_name(name)
    advice = "check the name and the network, or log in with `hf auth login` if it is private"
    with hub_errors(f"{place} could not be downloaded", advice):
        folder = snapshot_download(
            name,
            revision=revision or None,
            local_files_only=constants.HF_HUB_OFFLINE,
            allow_patterns=[TENSORS, METADATA, README, *peft.FILES, *adapterhub.FILES],
        )
    return Path(folder)


def push_prompt(folder: str | Path, name: str, metadata: PromptMetadata) -> str:
    """Uploads an export with a model card to the repository `name`, "owner/name".

    Creates a private repository if there is none.

    Returns:
      The URL.

    Raises:
      InputError: if the upload fails.
    """
    from huggingface_hub import HfApi

    check_repo_name(name)
    write_model_card(folder, metadata, f"{SCHEME}{name}")
    api = HfApi()
    advice = "log in with `hf auth login`, and use a repository that you can write to"
    with hub_errors(f"--push={name}: the export is written, but the upload failed", advice):
        # Private, because demonstrations are training examples; an existing repository keeps its
        # visibility.
        url = api.create_repo(name, exist_ok=True, private=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=[TENSORS, METADATA, README],
            commit_message=f"Add a {metadata.method} prompt for {metadata.task.name}",
        )
    return str(url)


def check_repo_name(name: str) -> None:
    """Raises InputError if `name` is not owner/name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{brief(name)} is not a Hub repository; use owner/name")
