"""MPNet: BERT's encoder with T5's relative bias in every layer (Song et al. 2020).

A prefix has no relative positions, so its keys get no bias.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxprompt.backbones.bert import Encoder, EncoderConfig
from jaxprompt.backbones.roberta import config_with_offset
from jaxprompt.convert.hf_config import read_size
from jaxprompt.errors import InputError
from jaxprompt.layers.relpos import RelativeBias
from jaxprompt.types import Batch

_PAD_ID = 1  # from which positions count, whatever pad_token_id is
_BUCKETS, _MAX_DISTANCE = 32, 128  # those of transformers' code


class Backbone(Encoder):
    """The encoder with every head in its checkpoint."""

    def setup(self):
        """Declares the parts in the checkpoint."""
        super().setup()
        # One table serves all layers.
        self.bias = RelativeBias(_BUCKETS, _MAX_DISTANCE, self.cfg.heads, True)

    def attention_bias(self, batch: Batch):
        """Returns what is added to the scores of every layer. -> [1, N, T, T]"""
        # Distances in a text are those of columns, so all rows share one bias.
        columns = jnp.arange(batch.encoder.ids.shape[1])[None]
        return self.bias(columns, columns)


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads an MPNet config. Raises InputError for another number of distance buckets."""
    buckets = read_size(hf, "relative_attention_num_buckets", _BUCKETS)
    if buckets != _BUCKETS:
        raise InputError(
            f"relative_attention_num_buckets={buckets} is not supported; use a model with "
            f"{_BUCKETS}, which transformers' MPNet has whatever this field says"
        )
    return config_with_offset(hf, _PAD_ID, **({"types": 0} | changes))
