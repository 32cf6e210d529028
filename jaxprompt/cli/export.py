"""Exports the best prompt of a workdir as safetensors, and its metadata as JSON."""

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxprompt.cli import log
from jaxprompt.cli.options import Parser, choose_mesh, load_run, path, require_flags
from jaxprompt.convert.artifact import check_fingerprint, export_summary, write_artifact, write_npy
from jaxprompt.convert.prompt_metadata import PromptMetadata
from jaxprompt.errors import InputError, check_known, with_article

if TYPE_CHECKING:
    import numpy as np

    from jaxprompt.api.prompts import Prompt
    from jaxprompt.models.scorer import Scorer


def main(argv: Sequence[str]) -> int:
    """Folds and writes the prompt; prints the paths and their sizes in bytes as JSON."""
    args, overrides = _make_parser().read(argv)
    require_flags(args, "workdir")
    if args.delta and args.tuned:
        raise InputError("--delta and --tuned both export the tuned weights; give one of them")
    config = choose_mesh(load_run(args, overrides))
    folder = args.output or Path(args.workdir) / "export"
    _check_paths(args, folder)

    from jaxprompt.api.prompts import Prompt
    from jaxprompt.convert.hub import push_prompt
    from jaxprompt.serving.export import pack_run

    scorer, tensors, metadata = pack_run(config, args.workdir)
    _note_unfinished(args.workdir)
    prompt = Prompt(tensors, metadata.to_json(), args.workdir)
    # Before anything is written: an array or PEFT may have no form for the prompt.
    tokens = _soft_tokens(prompt) if args.npy else None
    adapter = _make_adapter(scorer, prompt, args) if args.peft else {}
    # First, because --delta and --tuned take weights out that the program holds.
    program: tuple[Path, ...] = ()
    if args.stablehlo:
        program = _write_program(args.stablehlo, prompt, config.backbone.dtype)
    if args.tuned:
        prompt = _write_tuned_backbone(args.tuned, prompt)
    elif args.delta:
        prompt = _with_differences(prompt)
    paths = _write_prompt(folder, prompt)
    if tokens is not None:
        write_npy(args.npy, tokens)
        paths = (*paths, Path(args.npy))
    if args.peft:
        paths = (*paths, *_write_adapter(args.peft, adapter, prompt.metadata))
    print(json.dumps({str(file): file.stat().st_size for file in (*paths, *program)}))
    if args.push:
        log(push_prompt(folder, args.push, prompt.metadata))
    return 0


def _make_parser() -> Parser:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--output", type=path, help="output folder (default: WORKDIR/export)")
    parser.add_argument(
        "--npy", type=path, help="also write the soft tokens as a plain .npy array [P, E]"
    )
    parser.add_argument("--peft", type=path, help="also write a folder that PEFT can load")
    parser.add_argument(
        "--peft-type",
        help="its peft_type, e.g. CARTRIDGE (default: PROMPT_TUNING or PREFIX_TUNING)",
    )
    parser.add_argument(
        "--stablehlo",
        type=path,
        help="also write a folder, with the backbone, that scores texts without jaxprompt",
    )
    parser.add_argument(
        "--delta",
        action="store_true",
        help="write tuned backbone weights as float16 differences from the original ones",
    )
    parser.add_argument(
        "--tuned",
        metavar="FOLDER",
        type=path,
        help="write the tuned backbone to a folder that transformers can load; the prompt then "
        "refers to it",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="also push the export to the Hugging Face hub"
    )
    return parser


def _note_unfinished(workdir: str) -> None:
    """Logs that the run in a workdir has not finished."""
    from jaxprompt.training.run_folder import read_result

    if (Path(workdir) / "config.json").exists() and read_result(workdir) is None:
        log(f"{workdir} has not finished; its best parameters so far are exported")


def _check_paths(args: Namespace, folder: str | Path) -> None:
    """Raises InputError for outputs that cannot be written, before minutes of work on the run."""
    from jaxprompt.convert.hub import check_repo_name
    from jaxprompt.convert.model_card import check_model_card, check_peft_folder
    from jaxprompt.convert.peft import TYPES

    if args.peft_type is not None:
        check_known("--peft-type", args.peft_type, TYPES)
        require_flags(args, "peft")
    if args.npy and Path(args.npy).suffix != ".npy":
        raise InputError(f"--npy={args.npy} must end in .npy; give such a file name")
    if args.push is not None:
        check_repo_name(args.push)
        check_model_card(folder)
    if args.peft:
        check_peft_folder(args.peft, folder, args.npy)
    if args.stablehlo:
        from jaxprompt.api.stablehlo import check_folder

        check_folder(args.stablehlo)


def _soft_tokens(prompt: "Prompt") -> "np.ndarray":
    """Returns the soft tokens for --npy, [P, E]. Raises InputError if there are none."""
    from jaxprompt.build.prompt_artifact import unscaled_soft_tokens

    tokens = unscaled_soft_tokens(prompt.tensors, prompt.metadata.backbone.rescale)
    if tokens is None:
        raise InputError(
            f"--npy: {with_article(prompt.metadata.method)} prompt has no soft tokens; export it "
            "without --npy"
        )
    return tokens


def _make_adapter(scorer: "Scorer", prompt: "Prompt", args: Namespace) -> dict[str, Any]:
    """Returns the arguments of `write_peft`, without the weights that --tuned writes."""
    from jaxprompt.build.tuned_backbone import tuned_names
    from jaxprompt.serving.adapters import make_peft_arguments

    names = set(tuned_names(prompt.tensors)) if args.tuned else set()
    tensors = {name: x for name, x in prompt.tensors.items() if name not in names}
    return make_peft_arguments(scorer, tensors, prompt.metadata, args.peft_type)


def _write_program(folder: str, prompt: "Prompt", dtype: str) -> tuple[Path, ...]:
    """Writes the folder of --stablehlo. Returns its files."""
    from jaxprompt.api.saving import load_own_backbone, save_prompt

    backbone = load_own_backbone(prompt, dtype)
    return save_prompt(prompt, folder, "stablehlo", backbone=backbone)


def _write_tuned_backbone(folder: str, prompt: "Prompt") -> "Prompt":
    """Writes the folder of --tuned. Returns the prompt for that backbone, without its weights."""
    from jaxprompt.api.backbones import load_backbone
    from jaxprompt.build.tuned_backbone import save_tuned

    metadata = prompt.metadata
    tensors = save_tuned(
        folder,
        prompt.tensors,
        metadata,
        _load_backbone(prompt),
        f"export of {Path(prompt.path).resolve()}",
        "--tuned",
    )
    absolute = str(Path(folder).absolute())
    log(f"the prompt needs the backbone {absolute}; ship both together")
    # The fingerprint of the folder as others will read it.
    fingerprint = load_backbone(absolute).loaded.report.fingerprint
    backbone = dataclasses.replace(
        metadata.backbone, id=absolute, revision="", fingerprint=fingerprint
    )
    metadata = dataclasses.replace(metadata, backbone=backbone)
    return dataclasses.replace(prompt, tensors=tensors, card=metadata.to_json())


def _with_differences(prompt: "Prompt") -> "Prompt":
    """Returns the prompt with float16 differences instead of tuned weights, for --delta."""
    from jaxprompt.build.tuned_backbone import to_delta

    delta = to_delta(prompt.tensors, _load_backbone(prompt), "--delta")
    log(
        f"tuned weights: {delta.before:,} bytes, as differences {delta.after:,} bytes; maximum "
        f"error of a weight {delta.error:.1e}"
    )
    return dataclasses.replace(prompt, tensors=delta.tensors)


def _load_backbone(prompt: "Prompt") -> Any:
    """Loads the backbone of the prompt. Raises InputError if it has changed since the run."""
    from jaxprompt.api.saving import load_own_backbone

    backbone = load_own_backbone(prompt)
    check_fingerprint(prompt.metadata.backbone, backbone.loaded.report.fingerprint, force=False)
    return backbone


def _write_prompt(folder: str | Path, prompt: "Prompt") -> tuple[Path, ...]:
    """Writes the export, with a message if it replaces another one. Returns its files."""
    before = export_summary(folder)
    paths = write_artifact(folder, prompt.tensors, prompt.metadata)
    if before and before != export_summary(folder):
        log(f"{folder}: replaced another export: {before}")
    return paths


def _write_adapter(
    folder: str, adapter: dict[str, Any], metadata: PromptMetadata
) -> tuple[Path, ...]:
    """Writes the folder of --peft. Returns its files."""
    from jaxprompt.convert.model_card import write_peft_card
    from jaxprompt.convert.peft import num_outputs, write_peft

    # The tuned one, where --tuned has written it.
    adapter = adapter | {"base": metadata.backbone.id, "revision": metadata.backbone.revision}
    files = write_peft(folder, **adapter)
    return (*files, write_peft_card(folder, metadata, num_outputs(adapter)))
