"""RoBERTa and XLM-R: BERT's encoder, positions counted from the padding index (Liu et al. 2019)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones.bert import Encoder, EncoderConfig, config_from_hf


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads a RoBERTa config. Its first pad_token_id + 1 position rows are never used."""
    pad = hf.get("pad_token_id")
    offset = (1 if pad is None else pad) + 1
    return config_from_hf(hf, **({"offset": offset, "lm_activation": "gelu"} | changes))


Backbone = Encoder
