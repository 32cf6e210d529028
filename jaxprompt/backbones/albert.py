"""ALBERT: BERT's encoder with narrow embeddings and layers that share parameters (Lan et al. 2020).

Each layer, repeated or not, has a separate prefix: deep prompts count the layers that are run.
"""

from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones.bert import Encoder, EncoderConfig, config_from_hf
from jaxprompt.convert.hf_config import read_dropout, read_size
from jaxprompt.convert.names.albert import EMBED
from jaxprompt.errors import InputError


def make_config(hf: Mapping[str, Any], **changes: Any) -> EncoderConfig:
    """Reads an ALBERT config. Raises InputError if it has more groups than layers."""
    layers, embed = read_size(hf, "num_hidden_layers"), read_size(hf, "embedding_size", EMBED)
    groups, inner = (read_size(hf, x, 1) for x in ("num_hidden_groups", "inner_group_num"))
    if groups > layers:
        raise InputError(
            f"num_hidden_groups={groups} must not exceed num_hidden_layers={layers}; give the "
            "config.json of these weights"
        )
    # As transformers rounds it.
    group_by_layer = [int(layer / (layers / groups)) for layer in range(layers)]
    fields = dict(
        embed=embed,
        # The masked-LM head comes down to the width of the word table, which multiplies it.
        lm_width=embed,
        layers=layers * inner,
        takes=tuple(group * inner + i for group in group_by_layer for i in range(inner)),
        # transformers' ALBERT has no dropout behind its feed-forward block.
        drops_mlp=False,
        # Its checkpoints hold the map even where it keeps the width.
        projects=True,
        dropout=read_dropout(hf, "hidden_dropout_prob", 0.0),
        attention_dropout=read_dropout(hf, "attention_probs_dropout_prob", 0.0),
    )
    # A null counts as an absent field.
    non_null = {"hidden_act": "gelu_new"} | {x: hf[x] for x in hf if hf[x] is not None}
    return config_from_hf(non_null, **(fields | changes))


Backbone = Encoder
