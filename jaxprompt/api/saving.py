"""Saves prompts in one of five formats."""

from pathlib import Path

from jaxprompt.api.backbones import load_backbone
from jaxprompt.api.prompts import Prompt
from jaxprompt.build.backbone import LoadedBackbone, open_backbone
from jaxprompt.build.prompt_artifact import (
    backbone_from_metadata,
    scorer_from_metadata,
    unscaled_soft_tokens,
)
from jaxprompt.build.tuned_backbone import to_delta
from jaxprompt.config.run import BackboneConfig
from jaxprompt.convert.artifact import check_fingerprint, write_artifact, write_npy
from jaxprompt.convert.model_card import check_peft_folder, write_peft_card
from jaxprompt.convert.peft import num_outputs, write_peft
from jaxprompt.errors import InputError, brief, check_known, check_type
from jaxprompt.files import user_path
from jaxprompt.serving.adapters import make_peft_arguments

FORMATS = ("jaxprompt", "delta", "peft", "npy", "stablehlo")


def save_prompt(
    prompt: Prompt,
    path: str | Path,
    format: str = "jaxprompt",
    *,
    backbone: LoadedBackbone | None = None,
    peft_type: str | None = None,
) -> tuple[Path, ...]:
    """Saves a prompt.

    Args:
        prompt: from `train`, from `load_prompt`, or `attach(...).prompt`.
        path: the output folder or .npy file.
        format: "jaxprompt" = prompt.safetensors and prompt.json, "delta" = the same with tuned
            backbone weights as float16 differences, "peft" = a folder that PEFT can load, "npy" =
            only the soft tokens [S, E]; the last two are scaled for the unmodified backbone.
            "stablehlo" = a folder, with the backbone, that scores texts without jaxprompt.
        backbone: the backbone of the prompt, for "delta", "peft" and "stablehlo"; by default the
            one that the prompt names, in float32.
        peft_type: how PEFT stores it, e.g. "CARTRIDGE"; by default PROMPT_TUNING or PREFIX_TUNING.

    Returns:
        The paths of the files.

    Raises:
        InputError: for a prompt that the format does not support, and for a PEFT folder that
            contains other files.
    """
    check_known("format", format, FORMATS)
    if peft_type and format != "peft":
        raise InputError(
            f"peft_type={brief(peft_type)} needs format='peft'; remove it, or change the format"
        )
    check_type("prompt", prompt, Prompt, "a prompt of train or load_prompt, or attach(...).prompt")
    path = user_path(path)
    if format == "npy":
        # A prompt without metadata is scaled for the unmodified backbone already.
        rescale = prompt.metadata.backbone.rescale if prompt.card else 1.0
        rows = unscaled_soft_tokens(prompt.tensors, rescale)
        if rows is None:
            raise InputError("format='npy': the prompt has no soft tokens; use 'jaxprompt'")
        write_npy(path, rows)
        return (Path(path),)
    if not prompt.card:
        raise InputError(
            f"{prompt.path} has no metadata of its task; save "
            "jp.attach(backbone, prompt, task=...).prompt instead"
        )
    metadata = prompt.metadata
    if format == "jaxprompt":
        return write_artifact(path, prompt.tensors, metadata)
    if format == "delta":
        source = backbone or load_own_backbone(prompt)
        # A difference from other weights would give wrong weights.
        check_fingerprint(metadata.backbone, source.loaded.report.fingerprint, force=False)
        delta = to_delta(prompt.tensors, source, "format='delta'").tensors
        return write_artifact(path, delta, metadata)
    if format == "stablehlo":
        # Imported here, because these modules import this one.
        from jaxprompt.api.models import attach
        from jaxprompt.api.stablehlo import check_folder, write_stablehlo

        check_folder(path)  # before a backbone is loaded
        return write_stablehlo(attach(backbone or load_own_backbone(prompt), prompt), path)
    check_peft_folder(path, path)
    if backbone is None:
        opened = open_backbone(backbone_from_metadata(metadata.backbone, BackboneConfig()))
    else:
        opened = backbone.backbone
    scorer = scorer_from_metadata(opened, metadata, batch=1)
    adapter = make_peft_arguments(scorer, prompt.tensors, metadata, peft_type)
    return (*write_peft(path, **adapter), write_peft_card(path, metadata, num_outputs(adapter)))


def load_own_backbone(prompt: Prompt, dtype: str = "float32") -> LoadedBackbone:
    """Loads the backbone that a prompt was trained on."""
    backbone = prompt.metadata.backbone
    return load_backbone(
        backbone.id,
        revision=backbone.revision,
        rescale=backbone.rescale,
        quantize=backbone.quantize,
        dtype=dtype,
    )
