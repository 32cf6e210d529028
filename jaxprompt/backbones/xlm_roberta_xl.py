"""XLM-R XL and XXL: RoBERTa with the norms before the blocks and at the end (Goyal et al. 2021)."""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn

from jaxprompt.backbones import bert, roberta
from jaxprompt.backbones.bert import EncoderConfig
from jaxprompt.layers.attention import Attention, prepend_prefix, select_queries
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.mlp import Mlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.types import AttentionMask


class Layer(nn.Module):
    """One pre-norm transformer layer. [B, T, H] -> [B, T, H]"""

    cfg: EncoderConfig

    @nn.compact
    def __call__(
        self, x, prefix, mask: AttentionMask, bias=None, *, deterministic, output_positions=None
    ):
        """Runs the layer, only at the positions `output_positions` [B, M] if given; no bias."""
        cfg = self.cfg
        attention = Attention(
            cfg.width,
            cfg.heads,
            cfg.width // cfg.heads,
            cfg.attention_dropout,
            cfg.attention,
            cfg.dtype,
            name="attention",
        )
        y = LayerNorm(cfg.eps, name="attention_norm")(x)
        k, v = attention.keys(y)
        k, v, mask = prepend_prefix(prefix, k, v, mask)
        mask, x, y = select_queries(output_positions, mask, x, y)
        y = attention(y, k, v, mask, deterministic=deterministic)
        x = x + Dropout(cfg.dropout)(y, deterministic=deterministic)
        mlp = Mlp(cfg.mlp, cfg.activation, cfg.dtype, recomputed=cfg.remat == "mlp", name="mlp")
        # As in transformers, without dropout behind the feed-forward block.
        return x + mlp(LayerNorm(cfg.eps, name="mlp_norm")(x)), None


class Embed(bert.Embed):
    """Word, slot, position and any segment embeddings. -> [B, T, H]"""

    def normalize(self, x):
        """Returns the embeddings as they are: the first layer normalises them."""
        return x


class Backbone(bert.Encoder):
    """The encoder with every head in its checkpoint."""

    EMBED = Embed
    LAYER = Layer

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        self.norm = LayerNorm(self.cfg.eps)

    def _run(self, *args: Any, last: int | None = None, **options: Any):
        x = super()._run(*args, last=last, **options)
        # The result of `enter` is the input of a layer, without the last norm.
        return self.norm(x) if last is None else x


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads a config. Its first pad_token_id + 1 position rows are never used."""
    defaults = {"layer_norm_eps": 1e-5, "type_vocab_size": 1}
    # A null counts as an absent field.
    return roberta.make_config(
        defaults | {name: value for name, value in hf.items() if value is not None}, **changes
    )
