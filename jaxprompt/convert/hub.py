"""Exports on the Hugging Face hub: fetched as hub:owner/name[@revision], and pushed."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from jaxprompt.convert import peft
from jaxprompt.convert.artifact import METADATA, TENSORS
from jaxprompt.convert.model_card import README, write_model_card
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError, brief

SCHEME = "hub:"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def fetch_prompt(place: str) -> Path:
    """Fetches an export or a PEFT adapter, hub:owner/name or hub:owner/name@revision. -> its folder

    HF_HUB_OFFLINE=1 answers from the cache alone. Raises InputError where the hub does not give it.
    """
    from huggingface_hub import constants, snapshot_download

    name, _, revision = place.removeprefix(SCHEME).partition("@")
    check_name(name)
    cure = "check the name and the network, or log in with `hf auth login` where it is private"
    with asking(f"{place} cannot be fetched", cure):
        folder = snapshot_download(
            name, revision=revision or None, local_files_only=constants.HF_HUB_OFFLINE,
            allow_patterns=[TENSORS, METADATA, README, *peft.FILES],
        )  # fmt: skip
    return Path(folder)


def push_prompt(folder: str | Path, name: str, metadata: PromptMetadata) -> str:
    """Pushes an export to the repository `name`, "owner/name". -> its URL

    Where there is none it is made, as a private one. A README.md that says what the prompt is goes
    along. Raises InputError where the hub refuses.
    """
    from huggingface_hub import HfApi

    check_name(name)
    write_model_card(folder, metadata, f"{SCHEME}{name}")
    api = HfApi()
    cure = "log in with `hf auth login`, and give a repository that is yours"
    with asking(f"--push={name}: the export is written, but the hub refused it", cure):
        # Demonstrations are training examples: whoever made the repository says who sees them.
        url = api.create_repo(name, exist_ok=True, private=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=[TENSORS, METADATA, README],
            commit_message=f"Add a {metadata.method} prompt for {metadata.task.name}",
        )  # fmt: skip
    return str(url)


@contextlib.contextmanager
def asking(what: str, cure: str) -> Iterator[None]:
    """Turns what the hub's library raises in a block into an InputError: what failed, and why."""
    # The second is of the library below it, which a failed connection raises.
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    # A ValueError for a card that the hub does not take.
    except (HFValidationError, HTTPError, OSError, ValueError) as error:
        # Of several lines the first says what failed; of a card's, the others what of it.
        text = str(error).strip()
        first = text if isinstance(error, ValueError) else text.partition("\n")[0]
        reason = " ".join(first.split())[:400].rstrip(".")
        raise InputError(f"{what} ({reason}); {cure}") from error


def check_name(name: str) -> None:
    """Raises InputError for what is no owner/name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{brief(name)} is no name on the hub; give owner/name")
