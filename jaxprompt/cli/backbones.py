"""Lists the backbone families, or shows one with its published checkpoints and their sizes."""

from collections.abc import Sequence
from typing import Any

from jaxprompt.cli import print_text
from jaxprompt.cli.listing import choose_name, columns, pairs, read_name, registered_line
from jaxprompt.planning.published import published_checkpoints
from jaxprompt.registry import BACKBONES


def main(argv: Sequence[str]) -> int:
    """Prints all families, one family, or one published checkpoint."""
    families = BACKBONES.names()
    name = read_name(__doc__, argv, "backbone")
    if name is None:
        print_text(columns((family, registered_line(BACKBONES, family)) for family in families))
        return 0
    checkpoints = published_checkpoints()
    choose_name("backbone", name, [*families, *checkpoints])
    if name in checkpoints:
        path = {"path": f"--config.backbone.path={name}"}
        print(pairs({"backbone": name} | _sizes(checkpoints[name]) | path))
        return 0
    print(f"{name}: {registered_line(BACKBONES, name)}")
    sizes = {
        path: _sizes(checkpoint)
        for path, checkpoint in checkpoints.items()
        if "/" in path and family_of_checkpoint(checkpoint) == name
    }
    if sizes:
        names = list(next(iter(sizes.values())))
        print()
        print_text(
            columns([["published as", *names], *([p, *s.values()] for p, s in sizes.items())])
        )
    return 0


def family_of_checkpoint(checkpoint: Any) -> str:
    """Returns the family of a published checkpoint."""
    from jaxprompt.build.backbone import model_family

    return model_family(checkpoint.hf["model_type"])


def _sizes(checkpoint: Any) -> dict[str, object]:
    hf = checkpoint.hf

    def first(*names: str) -> object:
        return next((hf[name] for name in names if name in hf), "")

    return {
        "width": first("hidden_size", "d_model", "n_embd", "dim"),
        "layers": first("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"),
        "heads": first(
            "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"
        ),
        "vocabulary": hf["vocab_size"],
        "positions": first("max_position_embeddings", "n_positions", "max_sequence_length")
        or "relative",
        "heads in checkpoint": ", ".join(checkpoint.heads),
    }
