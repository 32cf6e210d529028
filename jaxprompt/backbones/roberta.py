"""RoBERTa and XLM-R: BERT's encoder, positions start after the padding id (Liu et al. 2019)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones.bert import Encoder, EncoderConfig, config_from_hf
from jaxprompt.convert.hf_config import read_id, read_size
from jaxprompt.errors import InputError


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads a RoBERTa config. Its first pad_token_id + 1 position rows are never used."""
    return config_with_offset(hf, read_id(hf, "pad_token_id", 1), **changes)


def config_with_offset(hf: Mapping[str, Any], pad_id: int, **changes: Any) -> EncoderConfig:
    """Reads a config whose positions start after `pad_id`."""
    if pad_id + 1 >= read_size(hf, "max_position_embeddings"):
        raise InputError(
            f"pad_token_id={pad_id} leaves no position for text: max_position_embeddings="
            f"{hf['max_position_embeddings']}; give the config.json of these weights"
        )
    # In transformers RobertaLMHead has gelu, whatever hidden_act says.
    return config_from_hf(hf, **({"offset": pad_id + 1, "lm_activation": "gelu"} | changes))


Backbone = Encoder
