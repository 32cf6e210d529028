"""Exports on the Hugging Face hub: fetched as hub:owner/name[@revision], and pushed."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxprompt.convert.artifact import CARD, TENSORS
from jaxprompt.convert.model_card import README, write_model_card
from jaxprompt.errors import InputError, brief

SCHEME = "hub:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def fetch_prompt(place: str) -> Path:
    """Fetches an export, `place` as in "hub:owner/name" or "hub:owner/name@revision". -> its folder

    HF_HUB_OFFLINE=1 answers from the cache alone. Raises InputError where the hub does not give it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, revision = place.removeprefix(SCHEME).partition("@")
    check_name(name)
    try:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=[TENSORS, CARD, README]
        )
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise InputError(
            f"{place} cannot be fetched ({reason}); check the name and the network, or log in with "
            "`hf auth login` where it is private"
        ) from error
    return Path(found)


def push_prompt(folder: str | Path, name: str, card: Mapping[str, Any]) -> str:
    """Pushes an export to the repository `name`, "owner/name", which is made if needed. -> its URL

    A README.md that says what the prompt is goes along. Raises InputError where the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    check_name(name)
    write_model_card(folder, card, f"{SCHEME}{name}")
    api = HfApi()
    try:
        url = api.create_repo(name, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=[TENSORS, CARD, README],
            commit_message=f"Add a {card['method']} prompt for {card['task']['name']}",
        )  # fmt: skip
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise InputError(
            f"--push={name}: the hub refused it ({reason}); log in with `hf auth login`, and give "
            "a repository that is yours. The export itself is written"
        ) from error
    return str(url)


def check_name(name: str) -> None:
    """Raises InputError for what is no owner/name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{brief(name)} is no name on the hub; give owner/name")
