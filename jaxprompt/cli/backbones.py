"""Lists the families of backbones, or shows one with its published checkpoints and their sizes."""

from collections.abc import Sequence
from typing import Any

from jaxprompt.cli.listing import choose_name, columns, module_line, pairs, read_name


def main(argv: Sequence[str]) -> int:
    """Prints what there is: all families, one of them, or one published checkpoint."""
    from jaxprompt.config.open_blocks import PACKAGE
    from jaxprompt.planning.published import published

    folder = PACKAGE / "backbones"
    families = sorted(path.stem for path in folder.glob("[!_]*.py"))
    name = read_name(__doc__, argv, "backbone")
    if name is None:
        print(columns((own, module_line(folder / f"{own}.py")) for own in families))
        return 0
    known = published()
    choose_name("backbone", name, [*families, *known])
    if name in known:
        print(
            pairs(
                {"backbone": name}
                | _sizes(known[name])
                | {"path": f"--config.backbone.path={name}"}
            )
        )
        return 0
    print(f"{name}: {module_line(folder / f'{name}.py')}\n")
    own = {path: found for path, found in known.items() if "/" in path and family(found) == name}
    sizes = {path: _sizes(found) for path, found in own.items()}
    names = list(next(iter(sizes.values())))
    print(columns([["published as", *names], *([p, *s.values()] for p, s in sizes.items())]))
    return 0


def family(found: Any) -> str:
    """Names the family of a published checkpoint."""
    from jaxprompt.build.backbone import family_of

    return family_of(found.hf["model_type"])


def _sizes(found: Any) -> dict[str, object]:
    hf = found.hf
    first = lambda *names: next((hf[name] for name in names if name in hf), "")
    return {
        "width": first("hidden_size", "d_model", "n_embd"),
        "layers": first("num_hidden_layers", "num_layers", "n_layer"),
        "heads": first("num_attention_heads", "num_heads", "n_head"),
        "vocabulary": hf["vocab_size"],
        "positions": first("max_position_embeddings", "n_positions", "max_sequence_length")
        or "relative",
        "holds": ", ".join(found.heads),
    }
