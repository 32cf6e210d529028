"""Flags of `predict` and `evaluate` for one prompt or several, and loading these."""

import os
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxprompt.cli.options import Parser, path, whole
from jaxprompt.config.load import override_generation
from jaxprompt.config.run import BackboneConfig, GenerateConfig
from jaxprompt.errors import InputError, at_least, brief

if TYPE_CHECKING:
    from jaxprompt.build.backbone import LoadedBackbone
    from jaxprompt.build.prompt_artifact import Export, LoadedPrompt
    from jaxprompt.parallel.sharding import Placement
    from jaxprompt.serving.bank import PromptBank

# Flags beside the prompts.
SERVING = ("input", "route", "backbone", "dtype", "batch", "mesh", "force")
_PROMPT_FLAG = "--prompt=NAME=PATH"


def add_serving_flags(parser: Parser, default: str = "") -> None:
    """Adds the flags for prompts, their backbone and an input.

    `default` is shown in the help.
    """
    shown_default = f" (default: {default})" if default else ""
    add_prompt_flags(
        parser,
        f"folder of an export, or hub:owner/name{shown_default}; may be repeated, also as "
        "NAME=PATH: --column or --route then selects the prompt of each row",
    )
    parser.add_argument(
        "--input",
        type=path,
        help="JSONL, CSV, TSV, JSON or Parquet file; - reads stdin: JSON lines, or a text per line",
    )
    parser.add_argument("--column", default="", help="column with the name of each row's prompt")
    parser.add_argument(
        "--route",
        type=path,
        help="folder of a router, which chooses the prompts of rows that name none; auto = the one "
        "that `jaxprompt router` wrote beside the first prompt",
    )


def add_prompt_flags(parser: Parser, prompt_help: str) -> None:
    """Adds the flags for prompts and their backbone."""
    parser.add_argument("--prompt", type=path, action="append", help=prompt_help)
    parser.add_argument(
        "--backbone", type=path, help="path of the backbone (default: as in the export)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="dtype of the frozen weights and the activations (default: float32)",
    )
    parser.add_argument("--batch", type=whole, default=64, help="examples per batch (default: 64)")
    parser.add_argument("--mesh", default="1x1", help="device mesh, data x model (default: 1x1)")
    parser.add_argument(
        "--force",
        action="store_true",
        help="accept backbone weights other than those that the prompt was trained on",
    )


def check_serving_flags(args: Namespace) -> None:
    """Raises InputError for flags that cannot be combined."""
    if len(args.prompt or ()) > 1 and not selecting_flag(args):
        raise InputError(
            f"--prompt is given {len(args.prompt)} times, and --column is missing; give the column "
            "with the name of each row's prompt, or a router with --route"
        )
    if selecting_flag(args) and not args.prompt:
        raise InputError(
            f"{selecting_flag(args)} selects one of several prompts; give them with --prompt"
        )
    at_least("--batch", args.batch, 1)


def selecting_flag(args: Namespace) -> str:
    """Returns the flag, with its value, that selects the prompts of rows; "" if there is none."""
    names = (name for name in ("column", "route") if getattr(args, name))
    return next((f"--{name}={getattr(args, name)}" for name in names), "")


def read_exports(args: Namespace) -> "dict[str, Export]":
    """Reads the exports of --prompt, by name."""
    from jaxprompt.build.prompt_artifact import Export, read_export
    from jaxprompt.serving.bank import check_names, name_of

    pairs = [_split_name(value) for value in args.prompt]
    paths = [path for _, path in pairs]
    names = [name or name_of(path) for name, path in pairs]
    check_names(names, paths, _PROMPT_FLAG)
    return {name: Export(path, *read_export(path)) for name, path in zip(names, paths, strict=True)}


def router_path(args: Namespace) -> str:
    """Returns the path of the router beside the first prompt.

    Raises InputError for a prompt of the hub.
    """
    from jaxprompt.convert.hub import SCHEME

    _, first = _split_name(args.prompt[0])
    if first.startswith(SCHEME):
        raise InputError(
            f"--prompt={first} is on the hub, where there is no router beside it; give the folder "
            "of the router"
        )
    return str(Path(os.path.abspath(first)).parent / "router")


def read_router(args: Namespace) -> "Export | None":
    """Reads the router of --route."""
    from jaxprompt.build.prompt_artifact import Export, read_export
    from jaxprompt.convert.artifact import METADATA
    from jaxprompt.convert.hub import SCHEME

    if not args.route:
        return None
    folder = router_path(args) if args.route == "auto" else args.route
    if not folder.startswith(SCHEME) and not (Path(folder) / METADATA).exists():
        raise InputError(
            f"--route={args.route}: there is no router in {folder}; train one with `python -m "
            "jaxprompt router`, or give its folder"
        )
    return Export(folder, *read_export(folder))


def load_shared_backbone(
    args: Namespace, exports: "Mapping[str, Export]", *, writes: bool = False
) -> "LoadedBackbone":
    """Loads the backbone of exports; `writes`: it generates texts."""
    from jaxprompt.build.backbone import LoadedBackbone, load_weights, open_backbone
    from jaxprompt.build.layers import separates_layers
    from jaxprompt.build.prompt_artifact import backbone_from_metadata
    from jaxprompt.parallel.compilation import enable_compilation_cache

    config = backbone_config(args)
    enable_compilation_cache()
    placement = make_mesh(args.mesh, args.batch)
    # One prompt names the backbone, and make_bank refuses those of other weights.
    first = next(iter(exports.values()))
    opened = open_backbone(backbone_from_metadata(first.metadata.backbone, config))
    separate_layers = separates_layers(opened, placement, writes=writes)
    weights = load_weights(opened, placement, separate_layers=separate_layers)
    return LoadedBackbone(*weights, placement)


def open_bank(
    args: Namespace,
    overrides: Sequence[tuple[str, str]],
    *,
    generate: bool = False,
    router: "Export | None" = None,
) -> "PromptBank":
    """Loads the backbone and the prompts of a command line.

    Args:
      args: the flags.
      overrides: fields of --config.generate, for all prompts that generate texts.
      generate: whether all prompts do, whatever their heads.
      router: the result of `read_router`.
    """
    from jaxprompt.build.method import cached_head
    from jaxprompt.serving.bank import make_bank

    check_overrides(overrides, "an export")
    exports = read_exports(args)
    heads = [cached_head(export.metadata.head) for export in exports.values()]
    writes = generate or any(head.WRITES for head in heads)
    generations = [
        read_generation(
            export.metadata.generate, overrides, f"prompt {name}", "" if writes else head.OF
        )
        for (name, export), head in zip(exports.items(), heads, strict=True)
    ]
    backbone = load_shared_backbone(args, exports, writes=writes)
    prompts = make_bank(backbone, exports, batch=args.batch, force=args.force, router=router)
    return prompts.writing(generations, every=generate)


def open_export(
    args: Namespace, path: str, **dependencies: str
) -> "tuple[LoadedPrompt, Placement]":
    """Loads one export with its backbone.

    Args:
      args: the flags.
      path: the export.
      **dependencies: other paths of what the export depends on, see `load_prompt_export`.

    Returns:
      The result of `load_prompt_export`, and the placement.
    """
    from jaxprompt.build.prompt_artifact import load_prompt_export
    from jaxprompt.parallel.compilation import enable_compilation_cache

    enable_compilation_cache()
    placement = make_mesh(args.mesh, args.batch)
    exported = load_prompt_export(
        path,
        backbone=backbone_config(args),
        batch=args.batch,
        placement=placement,
        force=args.force,
        **dependencies,
    )
    return exported, placement


def chunk_size(args: Namespace) -> int:
    """Returns the number of rows that are read, answered and written at a time."""
    from jaxprompt.serving.stream import CHUNK_BATCHES

    return CHUNK_BATCHES * args.batch


def _split_name(value: str) -> tuple[str, str]:
    """Splits NAME=PATH. Without a name, also for paths such as runs/seed=0/export, it is ""."""
    name, equals, path = value.partition("=")
    # A name has no slash, so a = after a slash belongs to a path.
    is_path = not equals or "/" in name or os.path.exists(value)
    return ("", value) if is_path else (name, path)


def check_overrides(overrides: Sequence[tuple[str, str]], prompt: str) -> None:
    """Raises InputError for a field that is not of --config.generate."""
    for field, value in overrides:
        if not field.startswith("generate."):
            raise InputError(
                f"--config.{field}={value}: {prompt} contains its config, of which only fields of "
                "--config.generate can be changed; remove it"
            )


def read_generation(
    generation: GenerateConfig, overrides: Sequence[tuple[str, str]], prompt: str, answers: str = ""
) -> GenerateConfig:
    """Returns the generation config of an export with --config.generate.* applied.

    `answers` is what the prompt predicts if that is no text; then there may be no overrides.
    """
    check_overrides(overrides, prompt)
    for field, value in overrides:
        if answers:
            raise InputError(
                f"--config.{field}={value} is only valid for generated texts, and {prompt} "
                f"predicts {answers}; remove it"
            )
    return override_generation(generation, overrides)


def refuse_flags(parser: Parser, args: Namespace, names: Sequence[str], reason: str) -> None:
    """Raises InputError, with the reason, for the first flag that is not at its default."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag}={getattr(args, name)} {reason}; remove it")


def backbone_config(args: Namespace) -> BackboneConfig:
    """Returns the config block of the backbone that the flags name."""
    return BackboneConfig.from_dict({"path": args.backbone or "", "dtype": args.dtype}, "backbone.")


def make_mesh(mesh: str, batch: int) -> "Placement":
    """Returns the placement of --mesh.

    Raises:
      InputError: if it is malformed, or `batch` is not a multiple of its data axis.
    """
    from jaxprompt.parallel.sharding import make_placement

    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", mesh)
    if not match:
        raise InputError(f"--mesh={brief(mesh)} must be DATAxMODEL, e.g. 2x4")
    data, model = map(int, match.groups())
    placement = make_placement(data, model)
    if batch % data:
        raise InputError(
            f"--batch={batch} must be a multiple of {data}, the data axis of --mesh={mesh}"
        )
    return placement
