"""DeBERTa v1: v2's encoder with a joint kernel for queries, keys and values (He et al. 2021)."""

from collections.abc import Mapping
from typing import Any

from jaxprompt.backbones import deberta_v2
from jaxprompt.convert.hf_config import refuse_flags
from jaxprompt.convert.names.deberta import as_v1

Backbone = deberta_v2.Backbone


def make_config(hf: Mapping[str, Any], **changes: Any) -> deberta_v2.DebertaConfig:
    """Reads a DeBERTa v1 config. Raises InputError for talking heads."""
    refuse_flags(hf, "talking_head")
    return deberta_v2.deberta_config(as_v1(hf), **({"joined": True} | changes))
