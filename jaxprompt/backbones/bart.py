"""BART: T5's structure with post-norm layers and learned positions (Lewis et al. 2020)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import linen as nn

from jaxprompt.backbones import read_width
from jaxprompt.backbones.gpt2 import DecoderConfig
from jaxprompt.backbones.t5 import EncoderDecoder
from jaxprompt.convert.hf_config import (
    read_dropout,
    read_flag,
    read_id,
    read_size,
    read_word,
    refuse_flags,
)
from jaxprompt.errors import InputError
from jaxprompt.layers.attention import Attention
from jaxprompt.layers.dropout import Dropout
from jaxprompt.layers.embed import Table, output_bias, write_slots
from jaxprompt.layers.mlp import ACTIVATIONS, GatedMlp
from jaxprompt.layers.norm import LayerNorm
from jaxprompt.layers.quantized import scale_table
from jaxprompt.parallel.sharding import constrain

OFFSET = 2  # row of position 0 in the position tables, whatever the padding id is


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(DecoderConfig):
    """The dimensions of a BART; `layers` are the encoder's, and both stacks are equally wide."""

    decoder_layers: int
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    scale: float = 1.0  # of the word embeddings in the input
    start: int = 2  # id of the decoder's first input
    first: int = -1  # id of the first token of every output, -1 = any
    last: int = -1  # id of the last token of an output of maximum length, -1 = any
    pre_norm: ClassVar[bool] = False

    def norm(self) -> LayerNorm:
        """Makes a norm."""
        return LayerNorm(1e-5)

    def make_attention(self) -> Attention:
        """Makes an attention."""
        return Attention(
            self.width,
            self.heads,
            self.width // self.heads,
            self.attention_dropout,
            self.attention,
            self.dtype,
        )

    def make_mlp(self) -> GatedMlp:
        """Makes a feed-forward block."""
        return GatedMlp(
            self.mlp,
            self.activation,
            False,
            self.activation_dropout,
            self.dtype,
            use_bias=True,
            recomputed=self.remat == "mlp",
        )


class Embed(nn.Module):
    """Word, slot and position embeddings of both streams, normalised. -> [B, T, H]"""

    cfg: BartConfig

    def setup(self):
        """Declares the tables and norms."""
        cfg = self.cfg
        self.word = Table(cfg.rows or cfg.vocab, cfg.width, cfg.dtype)
        rows = cfg.positions + OFFSET
        self.position = Table(rows, cfg.width, cfg.dtype)
        self.decoder_position = Table(rows, cfg.width, cfg.dtype)
        self.norm, self.decoder_norm = cfg.norm(), cfg.norm()
        self.drop = Dropout(cfg.dropout)

    def __call__(self, tokens, slots, *, deterministic: bool, decodes: bool = False):
        """Embeds the tokens of the encoder or the decoder, with slot vectors at their positions."""
        x = write_slots(self.word(tokens.ids) * self.cfg.scale, tokens.slot, slots)
        x = constrain(self._add_positions(x, tokens.positions, decodes), "act_batch", None, None)
        return self.drop(x, deterministic=deterministic)

    def embed_token(self, ids, positions):
        """Embeds one token of each row of the decoder. int [B] x 2 -> [B, H]"""
        return self._add_positions(self.word(ids) * self.cfg.scale, positions, True)

    def _add_positions(self, x, positions, decodes: bool):
        table = self.decoder_position if decodes else self.position
        norm = self.decoder_norm if decodes else self.norm
        return norm(x + table(positions + OFFSET))


class Backbone(EncoderDecoder):
    """The encoder, the decoder and the output table of a BART."""

    cfg: BartConfig
    EMBED = Embed

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        if "lm_bias" in self.cfg.model_heads:
            shape = (1, self.cfg.rows or self.cfg.vocab)
            self.lm_bias = self.param("lm_bias", nn.initializers.zeros, shape)

    def words(self):
        """Returns the word embeddings as they enter the first layer. -> [V, H]"""
        return scale_table(self.embed.word.table, self.cfg.scale)

    def lm_table(self):
        """Returns the output table and its bias. -> [V, H], [V] or None"""
        table, bias = super().lm_table()
        if "lm_bias" in self.cfg.model_heads:
            bias = output_bias(table, self.lm_bias[0], self.cfg.vocab)
        return table, bias


def make_config(hf: Mapping[str, Any], **changes: Any) -> BartConfig:
    """Reads a BART config. Raises InputError if it needs an unsupported feature."""
    refuse_flags(hf, "is_decoder")
    if not read_flag(hf, "is_encoder_decoder", True):
        raise InputError("is_encoder_decoder=false is not supported; use a full BART")
    width, heads = read_width(hf, "d_model", "encoder_attention_heads")
    mlp = read_size(hf, "encoder_ffn_dim")
    for field, size in (("attention_heads", heads), ("ffn_dim", mlp)):
        if (decoder_size := read_size(hf, f"decoder_{field}")) != size:
            raise InputError(
                f"encoder_{field}={size} and decoder_{field}={decoder_size} are not supported; "
                "they must be equal"
            )
    activation_dropout = read_dropout(hf, "activation_dropout", 0.0)
    config = BartConfig(
        vocab=read_size(hf, "vocab_size"),
        width=width,
        layers=read_size(hf, "encoder_layers"),
        decoder_layers=read_size(hf, "decoder_layers"),
        heads=heads,
        mlp=mlp,
        positions=read_size(hf, "max_position_embeddings"),
        activation=read_word(hf, "activation_function", "gelu", ACTIVATIONS),
        dropout=read_dropout(hf, "dropout", 0.1),
        attention_dropout=read_dropout(hf, "attention_dropout", 0.0),
        # 0 turns all dropout off, as in `make_backbone`.
        activation_dropout=0.0 if changes.get("dropout") == 0.0 else activation_dropout,
        scale=width**0.5 if read_flag(hf, "scale_embedding", False) else 1.0,
        start=read_id(hf, "decoder_start_token_id", 2),
        first=_read_forced_id(hf, "forced_bos_token_id", None),
        last=_read_forced_id(hf, "forced_eos_token_id", 2),
        tied=read_flag(hf, "tie_word_embeddings", True),
    )
    return dataclasses.replace(config, **changes)


def _read_forced_id(hf: Mapping[str, Any], field: str, default: int | None) -> int:
    """Reads the id of a forced token, -1 if it is null."""
    return -1 if hf.get(field, default) is None else read_id(hf, field, default)
