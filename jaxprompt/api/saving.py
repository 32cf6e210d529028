"""Writes a prompt in one of five formats."""

from pathlib import Path

from jaxprompt.api.backbones import load_backbone
from jaxprompt.api.prompts import Prompt
from jaxprompt.build.backbone import LoadedBackbone, open_backbone
from jaxprompt.build.prompt_artifact import (
    backbone_from_metadata,
    plain_tokens,
    scorer_from_metadata,
)
from jaxprompt.build.tuned_backbone import as_delta
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.artifact import check_fingerprint, write_artifact, write_npy
from jaxprompt.convert.model_card import check_peft_folder, write_peft_card
from jaxprompt.convert.peft import outputs_of, write_peft
from jaxprompt.errors import InputError, check_type, choose
from jaxprompt.files import user_path
from jaxprompt.serving.adapters import as_peft

FORMATS = ("jaxprompt", "delta", "peft", "npy", "stablehlo")


def save_prompt(
    prompt: Prompt, path: str | Path, format: str = "jaxprompt",
    *, backbone: LoadedBackbone | None = None,
) -> tuple[Path, ...]:  # fmt: skip
    """Writes a prompt. -> the files

    Args:
        prompt: of `train`, of `load_prompt`, or the `prompt` of what `attach` gives.
        path: the folder, or the .npy file, to write.
        format: "jaxprompt" = prompt.safetensors and prompt.json, "delta" = the same with tuned
            weights of the backbone as float16 differences, "peft" = a folder that PEFT loads, "npy"
            = the soft tokens [S, E] alone; these two as the unmodified backbone takes them.
            "stablehlo" = a folder that scores texts without jaxprompt, the backbone included.
        backbone: for "delta", "peft" and "stablehlo", the one that it belongs to; by default the
            one that it names, in float32.

    Raises InputError for a prompt that the format cannot hold, and for a PEFT folder that holds
    other files.
    """
    choose("format", format, FORMATS)
    check_type("prompt", prompt, Prompt, "what train or load_prompt gives, or attach(...).prompt")
    if backbone is not None:
        check_type("backbone", backbone, LoadedBackbone, "what load_backbone gives")
    path = user_path(path)
    if format == "npy":
        # What has no metadata is as the unmodified backbone takes it.
        rescale = prompt.metadata.backbone.rescale if prompt.card else 1.0
        rows = plain_tokens(prompt.tensors, rescale)
        if rows is None:
            raise InputError("format='npy': the prompt has no soft tokens; take 'jaxprompt'")
        write_npy(path, rows)
        return (Path(path),)
    if not prompt.card:
        raise InputError(
            f"{prompt.path} says nothing of its task; save what `attach` gives: "
            "jp.attach(backbone, prompt, task=...).prompt"
        )
    metadata = prompt.metadata
    if format == "jaxprompt":
        return write_artifact(path, prompt.tensors, metadata)
    if format == "delta":
        whole = backbone or load_own_backbone(prompt)
        # Differences from other weights would add up to other numbers.
        check_fingerprint(metadata.backbone, whole.loaded.report.fingerprint, force=False)
        delta = as_delta(prompt.tensors, whole, "format='delta'").tensors
        return write_artifact(path, delta, metadata)
    if format == "stablehlo":
        # These modules import this one.
        from jaxprompt.api.models import attach
        from jaxprompt.api.stablehlo import write_stablehlo

        return write_stablehlo(attach(backbone or load_own_backbone(prompt), prompt), path)
    check_peft_folder(path, path)
    opened = backbone.backbone if backbone else open_backbone(
        backbone_from_metadata(metadata.backbone, BackboneConfig())
    )  # fmt: skip
    scorer = scorer_from_metadata(opened, metadata, batch=1)
    adapter = as_peft(scorer, prompt.tensors, metadata)
    paths = write_peft(path, **adapter)
    return (*paths, write_peft_card(path, metadata, outputs_of(adapter)))


def load_own_backbone(prompt: Prompt, dtype: str = "float32") -> LoadedBackbone:
    """Loads the backbone that a prompt names."""
    backbone = prompt.metadata.backbone
    return load_backbone(
        backbone.id, revision=backbone.revision, rescale=backbone.rescale,
        quantize=backbone.quantize, dtype=dtype,
    )  # fmt: skip
