"""Writes the best prompt of a workdir as safetensors and a JSON card."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxprompt.cli.options import Parser, load_run, need
from jaxprompt.errors import InputError, escape


def main(argv: Sequence[str]) -> int:
    """Folds the prompt, writes it and prints the paths and bytes as JSON."""
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
    args, overrides = parser.read(argv)
    need(args, "workdir")
    if args.delta and args.tuned:
        raise InputError("--delta and --tuned are two ways to ship the same weights; give one")
    config = load_run(args, overrides)

    from jaxprompt.api.prompts import Prompt
    from jaxprompt.api.saving import load_own_backbone, save_prompt
    from jaxprompt.build.prompt_artifact import plain_tokens
    from jaxprompt.build.tuned_backbone import tuned_names
    from jaxprompt.config.settings import settings_of
    from jaxprompt.convert.artifact import summary_of, write_artifact, write_npy
    from jaxprompt.convert.hub import check_name, push_prompt
    from jaxprompt.convert.model_card import check_card, check_peft_folder, write_peft_card
    from jaxprompt.convert.peft import outputs_of, write_peft
    from jaxprompt.serving.adapters import as_peft
    from jaxprompt.serving.export import pack_run

    folder = args.output or Path(args.workdir) / "export"
    if args.npy and Path(args.npy).suffix != ".npy":
        raise InputError(f"--npy={args.npy} does not end in .npy; name a file that does")
    if args.push:
        # Before the run is read: a wrong name must not be found out after minutes of work.
        check_name(args.push)
        check_card(folder)
    if args.peft:
        check_peft_folder(args.peft, folder, args.npy)
    if args.stablehlo:
        from jaxprompt.api.stablehlo import check_folder

        check_folder(args.stablehlo)
    scorer, tensors, card = pack_run(config, args.workdir)
    rows = plain_tokens(tensors, card)
    if args.npy and rows is None:
        raise InputError(
            f"--npy: a prompt of {card['method']} has no soft tokens; export it without --npy"
        )
    # Before anything is written: PEFT may have no form for the prompt.
    tuned = tuned_names(tensors) if args.tuned else ()
    plain = {name: x for name, x in tensors.items() if name not in tuned}
    adapter = as_peft(scorer, plain, card) if args.peft else {}
    # First, because --delta and --tuned take weights out that the program holds.
    program = ()
    if args.stablehlo:
        prompt = Prompt(tensors, card, args.workdir)
        backbone = load_own_backbone(prompt, settings_of(config).dtype)
        program = save_prompt(prompt, args.stablehlo, "stablehlo", backbone=backbone)
    if args.delta or args.tuned:
        tensors, card = _ship_backbone(args, Prompt(tensors, card, args.workdir))
    before = summary_of(folder)
    paths = write_artifact(folder, tensors, card)
    if before and before != summary_of(folder):
        line = f"{folder} held another export, which this one replaces: {before}"
        print(escape(line), file=sys.stderr)
    if args.npy:
        write_npy(args.npy, rows)
        paths = (*paths, Path(args.npy))
    if args.peft:
        # The tuned one, where --tuned has written it.
        adapter |= {"base": card["backbone"]["id"], "revision": card["backbone"]["revision"]}
        files = write_peft(args.peft, **adapter)
        paths = (*paths, *files, write_peft_card(args.peft, card, outputs_of(adapter)))
    print(json.dumps({str(path): path.stat().st_size for path in (*paths, *program)}))
    if args.push:
        print(escape(push_prompt(folder, args.push, card)), file=sys.stderr)
    return 0


def _ship_backbone(args: Any, prompt: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes tuned weights out of an export, or makes differences of them. -> (tensors, card)"""
    from jaxprompt.api.backbones import load_backbone
    from jaxprompt.api.saving import load_own_backbone
    from jaxprompt.build.tuned_backbone import as_delta, save_tuned
    from jaxprompt.convert.artifact import check_fingerprint

    whole, card = load_own_backbone(prompt), dict(prompt.card)
    # It may have been replaced since the run was read.
    check_fingerprint(card, whole.loaded.report.fingerprint, force=False)
    if args.tuned:
        tensors = save_tuned(
            args.tuned, prompt.tensors, card, whole,
            f"export of {Path(args.workdir).resolve()}", "--tuned",
        )  # fmt: skip
        place = str(Path(args.tuned).absolute())
        line = f"the prompt stands on {place}, which is to go along with it"
        print(escape(line), file=sys.stderr)
        # Of the folder as others will read it.
        mark = load_backbone(place).loaded.report.fingerprint
        card["backbone"] = card["backbone"] | {"id": place, "revision": "", "fingerprint": mark}
        return tensors, card
    delta = as_delta(prompt.tensors, whole, "--delta")
    line = (
        f"tuned weights: {delta.before:,} bytes, as differences {delta.after:,}; no weight is off "
        f"by more than {delta.error:.1e}"
    )
    print(escape(line), file=sys.stderr)
    return delta.tensors, card
