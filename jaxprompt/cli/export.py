"""Writes the best prompt of a workdir as safetensors, and its metadata as JSON."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxprompt.cli.options import Parser, load_run, need
from jaxprompt.errors import InputError, escape

if TYPE_CHECKING:
    import numpy as np

    from jaxprompt.api.prompts import Prompt
    from jaxprompt.convert.prompt_metadata import PromptMetadata


def main(argv: Sequence[str]) -> int:
    """Folds the prompt, writes it and prints the paths and bytes as JSON."""
    args, overrides = _make_parser().read(argv)
    need(args, "workdir")
    if args.delta and args.tuned:
        raise InputError("--delta and --tuned are two ways to ship the same weights; give one")
    config = load_run(args, overrides)
    folder = args.output or Path(args.workdir) / "export"
    _check_paths(args, folder)

    from jaxprompt.api.prompts import Prompt
    from jaxprompt.convert.artifact import write_npy
    from jaxprompt.convert.hub import push_prompt
    from jaxprompt.serving.export import pack_run

    scorer, tensors, metadata = pack_run(config, args.workdir)
    prompt = Prompt(tensors, metadata.to_json(), args.workdir)
    # Before anything is written: an array or PEFT may have no form for the prompt.
    tokens = _soft_tokens(prompt) if args.npy else None
    adapter = _make_adapter(scorer, prompt, bool(args.tuned)) if args.peft else {}
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
    print(json.dumps({str(path): path.stat().st_size for path in (*paths, *program)}))
    if args.push:
        print(escape(push_prompt(folder, args.push, prompt.metadata)), file=sys.stderr)
    return 0


def _make_parser() -> Parser:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--output", help="folder to write (default: WORKDIR/export)")
    parser.add_argument("--npy", help="also write the soft tokens as a plain .npy array [P, E]")
    parser.add_argument("--peft", help="also write a folder that PEFT loads")
    parser.add_argument(
        "--stablehlo",
        help="also write a folder that scores texts without jaxprompt, the backbone included",
    )
    parser.add_argument(
        "--delta", action="store_true",
        help="write tuned weights of the backbone as float16 differences from it",
    )  # fmt: skip
    parser.add_argument(
        "--tuned", metavar="FOLDER",
        help="write the tuned backbone as a folder that transformers loads; the prompt names it",
    )  # fmt: skip
    parser.add_argument("--push", metavar="OWNER/NAME", help="also push it to the hub")
    return parser


def _check_paths(args: Any, folder: str | Path) -> None:
    """Raises InputError for what cannot be written, before minutes of work on the run."""
    from jaxprompt.convert.hub import check_name
    from jaxprompt.convert.model_card import check_card, check_peft_folder

    if args.npy and Path(args.npy).suffix != ".npy":
        raise InputError(f"--npy={args.npy} does not end in .npy; name a file that does")
    if args.push:
        check_name(args.push)
        check_card(folder)
    if args.peft:
        check_peft_folder(args.peft, folder, args.npy)
    if args.stablehlo:
        from jaxprompt.api.stablehlo import check_folder

        check_folder(args.stablehlo)


def _soft_tokens(prompt: "Prompt") -> "np.ndarray":
    """Returns the soft tokens that --npy writes. Raises InputError where there are none. [P, E]"""
    from jaxprompt.build.prompt_artifact import plain_tokens

    tokens = plain_tokens(prompt.tensors, prompt.metadata.backbone.rescale)
    if tokens is None:
        raise InputError(
            f"--npy: a prompt of {prompt.metadata.method} has no soft tokens; export it without "
            "--npy"
        )
    return tokens


def _make_adapter(scorer: Any, prompt: "Prompt", is_backbone_tuned: bool) -> dict[str, Any]:
    """Returns the arguments of `write_peft`, without the weights that --tuned puts elsewhere."""
    from jaxprompt.build.tuned_backbone import tuned_names
    from jaxprompt.serving.adapters import as_peft

    names = set(tuned_names(prompt.tensors)) if is_backbone_tuned else set()
    tensors = {name: x for name, x in prompt.tensors.items() if name not in names}
    return as_peft(scorer, tensors, prompt.metadata)


def _write_program(folder: str, prompt: "Prompt", dtype: str) -> tuple[Path, ...]:
    """Writes what --stablehlo asks for. Returns its files."""
    from jaxprompt.api.saving import load_own_backbone, save_prompt

    backbone = load_own_backbone(prompt, dtype)
    return save_prompt(prompt, folder, "stablehlo", backbone=backbone)


def _write_tuned_backbone(folder: str, prompt: "Prompt") -> "Prompt":
    """Writes what --tuned asks for. Returns the prompt of that backbone, without its weights."""
    from jaxprompt.api.backbones import load_backbone
    from jaxprompt.api.prompts import Prompt
    from jaxprompt.build.tuned_backbone import save_tuned

    metadata = prompt.metadata
    tensors = save_tuned(
        folder, prompt.tensors, metadata, _load_backbone(prompt),
        f"export of {Path(prompt.path).resolve()}", "--tuned",
    )  # fmt: skip
    path = str(Path(folder).absolute())
    print(escape(f"the prompt stands on {path}, which is to go along with it"), file=sys.stderr)
    # Of the folder as others will read it.
    fingerprint = load_backbone(path).loaded.report.fingerprint
    backbone = dataclasses.replace(metadata.backbone, id=path, revision="", fingerprint=fingerprint)
    metadata = dataclasses.replace(metadata, backbone=backbone)
    return Prompt(tensors, metadata.to_json(), prompt.path)


def _with_differences(prompt: "Prompt") -> "Prompt":
    """Returns the prompt with float16 differences in the place of tuned weights, as of --delta."""
    from jaxprompt.api.prompts import Prompt
    from jaxprompt.build.tuned_backbone import as_delta

    delta = as_delta(prompt.tensors, _load_backbone(prompt), "--delta")
    message = (
        f"tuned weights: {delta.before:,} bytes, as differences {delta.after:,}; no weight is off "
        f"by more than {delta.error:.1e}"
    )
    print(escape(message), file=sys.stderr)
    return Prompt(delta.tensors, prompt.card, prompt.path)


def _load_backbone(prompt: "Prompt") -> Any:
    """Loads the backbone of the prompt. Raises InputError where it was replaced since the run."""
    from jaxprompt.api.saving import load_own_backbone
    from jaxprompt.convert.artifact import check_fingerprint

    backbone = load_own_backbone(prompt)
    check_fingerprint(prompt.metadata.backbone, backbone.loaded.report.fingerprint, force=False)
    return backbone


def _write_prompt(folder: str | Path, prompt: "Prompt") -> tuple[Path, ...]:
    """Writes the export, and says where it replaces another. Returns its files."""
    from jaxprompt.convert.artifact import summary_of, write_artifact

    before = summary_of(folder)
    paths = write_artifact(folder, prompt.tensors, prompt.metadata)
    if before and before != summary_of(folder):
        message = f"{folder} held another export, which this one replaces: {before}"
        print(escape(message), file=sys.stderr)
    return paths


def _write_adapter(
    folder: str, adapter: dict[str, Any], metadata: "PromptMetadata"
) -> tuple[Path, ...]:
    """Writes what --peft asks for. Returns its files."""
    from jaxprompt.convert.model_card import write_peft_card
    from jaxprompt.convert.peft import outputs_of, write_peft

    # The tuned one, where --tuned has written it.
    adapter = adapter | {"base": metadata.backbone.id, "revision": metadata.backbone.revision}
    files = write_peft(folder, **adapter)
    return (*files, write_peft_card(folder, metadata, outputs_of(adapter)))
