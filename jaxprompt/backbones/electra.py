"""ELECTRA, both halves: BERT's encoder with embeddings that may be narrower (Clark et al. 2020)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones.bert import Encoder, EncoderConfig, config_from_hf
from jaxprompt.convert.hf_config import read_size


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads an ELECTRA config. The generator's MLM features are as wide as the embeddings."""
    embed = read_size(hf, "embedding_size")
    # In transformers the generator's head has gelu, whatever hidden_act says.
    fields = {"embed": embed, "lm_width": embed, "lm_activation": "gelu"}
    return config_from_hf(hf, **(fields | changes))


Backbone = Encoder
