"""EuroBERT: a bidirectional Llama (Boizard et al. 2025).

A prefix is like past keys: it is not rotated, and the text follows it. The masked-LM head is the
output table alone, without a transform. There is no pooler, so head.pooler=auto reads the first
token directly.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxprompt.backbones import bert, llama
from jaxprompt.backbones.llama import Layer, LlamaConfig, LlamaLayerInputs
from jaxprompt.layers.attention import bidirectional_mask
from jaxprompt.layers.rotary import make_rotations
from jaxprompt.layers.stack import run_stack, stack_options
from jaxprompt.types import AttentionMask, Batch, Dims, Prefix


class Embed(llama.Embed):
    """Word and slot embeddings. -> [B, T, H]"""

    def __call__(self, tokens, slots, *, deterministic: bool):  # type: ignore[override]
        """Embeds tokens, with slot vectors at their positions."""
        where = tokens.slot, slots
        return super().__call__(tokens.ids, tokens.positions, *where, deterministic=deterministic)


class LmHead(nn.Module):
    """A bias and an untied table if there are any. [..., H] -> [..., H]"""

    cfg: LlamaConfig

    def setup(self):
        """Declares the bias and the table."""
        cfg, self.bias = self.cfg, None
        rows = cfg.rows or cfg.vocab
        if "mlp" in cfg.biases:
            self.bias = self.param("bias", nn.initializers.zeros, (rows,))
        if not cfg.tied:
            self.table = self.param("table", nn.initializers.normal(0.02), (rows, cfg.width))

    def __call__(self, x):
        """Returns the states as they are."""
        return x


class Backbone(bert.Encoder):
    """The encoder with every head in its checkpoint."""

    cfg: LlamaConfig  # type: ignore[assignment]
    EMBED = Embed
    LAYER = Layer
    LM = LmHead

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        self.norm = self.cfg.norm()

    @nn.nowrap
    def num_stored(self) -> int:
        """Returns the number of layers with parameters of their own."""
        return self.cfg.layers

    @nn.nowrap
    def example(self) -> tuple[Any, ...]:
        """Returns the other arguments of a layer, besides its input."""
        positions = jnp.zeros((1, 2), jnp.int32)
        mask = AttentionMask(jnp.ones((1, 2), bool))
        return LlamaLayerInputs(None, False, 0), mask, positions, self._rotations(positions)

    @property
    def dims(self) -> Dims:
        """Returns the dimensions that methods and heads need; heads are key-value heads."""
        cfg = self.cfg
        shape = cfg.width, cfg.width, cfg.layers, cfg.key_heads, cfg.head_dim
        return Dims(cfg.vocab, *shape, cfg.positions)

    @nn.nowrap
    def _rotations(self, positions):
        (rotary,) = self.cfg.rotations.params
        return (make_rotations(positions, np.array(rotary.frequencies), rotary.scale),)

    def _run(
        self,
        x,
        prefix: Prefix | None,
        batch: Batch,
        deterministic: bool,
        *,
        last: int | None = None,
        **options: Any,
    ):
        tokens, of_layer = batch.encoder, self.cfg.rotations.of_layer
        x, _ = run_stack(
            self.layer,
            self.layers,
            x,
            LlamaLayerInputs(prefix, *map(np.array, (self.cfg.is_local, of_layer))),
            bidirectional_mask(tokens, tokens),
            tokens.positions,
            self._rotations(tokens.positions),
            last=last,
            **options,
            **stack_options(self, deterministic),
        )
        # The result of `enter` is the input of a layer, without the last norm.
        return self.norm(x) if last is None else x


def make_config(hf: Mapping[str, Any], **changes: Any) -> LlamaConfig:
    """Reads a EuroBERT config. Raises InputError if it needs an unsupported feature."""
    return llama.make_config({"model_type": "eurobert"} | dict(hf), **changes)
