"""Replaced-token detection: a generator and a discriminator in one program (Clark et al. 2020)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxprompt.convert.hf_config import read_size
from jaxprompt.errors import InputError
from jaxprompt.heads.pretraining import ReplacedHead, TargetHead
from jaxprompt.layers.output import VocabScores
from jaxprompt.models.model import Model
from jaxprompt.prompts import make_prompt
from jaxprompt.scoring.losses import count_hits, count_replaced, target_loss
from jaxprompt.tree import Params
from jaxprompt.types import Batch, Objective

HEAD_WIDTH = 64  # of a generator's attention


@dataclasses.dataclass(frozen=True)
class Pair:
    """A generator and a discriminator that share their embeddings, norm included.

    params = {"backbone": the discriminator's, "generator": the generator's without embeddings}.
    Takes the place of a Model in steps; its heads are "generator" and "discriminator".
    """

    generator: Model
    discriminator: Model

    def forward(self, params: Params, batch: Batch, *, head: str, deterministic=True, key=None):
        """Predicts masked tokens (Scored), or which tokens were replaced (Detected)."""
        model, backbone = self.discriminator, params["backbone"]
        if head == "generator":
            model, backbone = self.generator, tie_embeddings(params["generator"], backbone)
        return model.forward({"backbone": backbone}, batch, deterministic=deterministic, key=key)


def make_pair(generator: nn.Module, discriminator: nn.Module, *, block: int = 2048) -> Pair:
    """Returns the pair of two encoders. Raises InputError if their embeddings differ in shape."""
    for name in ("vocab", "embed", "positions", "types", "offset"):
        generator_size, discriminator_size = (
            getattr(encoder.cfg, name) for encoder in (generator, discriminator)
        )
        if generator_size != discriminator_size:
            raise InputError(
                f"generator and discriminator share their embeddings, but {name} is "
                f"{generator_size} and {discriminator_size}; use a generator with the sizes of the "
                "discriminator"
            )

    def model(backbone, head):
        return Model(backbone, make_prompt("none", backbone.dims), {"main": head}, varies=False)

    return Pair(
        model(generator, TargetHead(block, draws=True)), model(discriminator, ReplacedHead())
    )


def untie_embeddings(generator: Params) -> Params:
    """Returns the generator's parameters without those shared with the discriminator."""
    projection = {
        name: value for name, value in generator.get("embed", {}).items() if name == "project"
    }
    other_params = {name: value for name, value in generator.items() if name != "embed"}
    return other_params | {"embed": projection} if projection else other_params


def tie_embeddings(generator: Params, backbone: Params) -> Params:
    """Inverts `untie_embeddings`: inserts the discriminator's embeddings, without a copy."""
    shared = {name: value for name, value in backbone["embed"].items() if name != "project"}
    return {**generator, "embed": {**shared, **generator.get("embed", {})}}


def generator_config(
    hf: Mapping[str, object], *, width: float = 0.25, layers: float = 1.0
) -> dict[str, object]:
    """Returns an ELECTRA config of a generator, scaled from that of its discriminator.

    The paper uses 1/4 to 1/2 of the width and all layers (section 3.2, table 6); head_dim is 64.
    """
    for name, ratio in {"width": width, "layers": layers}.items():
        if not 0 < ratio <= 1:
            raise InputError(
                f"the generator's {name} is {ratio} of the discriminator's, but must be above 0 "
                "and at most 1; use e.g. 0.25 to 0.5 of the width, as in the paper"
            )
    hidden = max(round(read_size(hf, "hidden_size") * width), 1)
    max_heads = max(hidden // HEAD_WIDTH, 1)
    return {
        **hf,
        "model_type": "electra",
        "architectures": ["ElectraForMaskedLM"],
        # The embeddings are shared with the discriminator, so they have its width.
        "embedding_size": hf.get("embedding_size", hf["hidden_size"]),
        "hidden_size": hidden,
        "num_hidden_layers": max(round(read_size(hf, "num_hidden_layers") * layers), 1),
        "intermediate_size": 4 * hidden,
        # The most heads that divide the width into at least 64 each.
        "num_attention_heads": next(n for n in range(max_heads, 0, -1) if hidden % n == 0),
    }


def replace_tokens(batch: Batch, scored: VocabScores) -> Batch:
    """Replaces target tokens by sampled ones, and labels each token as replaced or not.

    A sampled token that equals the original counts as original.
    """
    assert batch.targets is not None and scored.sampled is not None
    tokens = batch.encoder
    # Positions beyond the row are dropped.
    positions = jnp.where(batch.targets >= 0, batch.label_pos, tokens.ids.shape[1])  # [B, M]
    write = jax.vmap(lambda row, positions, values: row.at[positions].set(values, mode="drop"))
    ids = write(jnp.asarray(tokens.ids), positions, scored.sampled)
    differs = scored.sampled != batch.targets
    labels = write(jnp.zeros_like(tokens.ids), positions, differs.astype(tokens.ids.dtype))
    # The discriminator classifies every real token, not only the masked ones (section 2).
    return batch._replace(
        encoder=tokens._replace(ids=ids), targets=jnp.where(tokens.mask, labels, -1)
    )


def make_objectives(weight: float = 50.0) -> list[Objective]:
    """Returns the terms of the loss, L_MLM + weight * L_Disc (section 2).

    The discriminator reads tokens sampled by the generator; sampling has no gradient.
    """
    return [
        Objective("generator", target_loss, head="generator", sums=count_hits, then=replace_tokens),
        Objective(
            "discriminator", target_loss, head="discriminator", weight=weight, sums=count_replaced
        ),
    ]
