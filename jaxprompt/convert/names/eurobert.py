"""EuroBERT's table of names (Boizard et al. 2025): Llama's, with a masked-LM head."""

from jaxprompt.convert.names.llama import LLAMA
from jaxprompt.convert.tensors import Tensor, make_decoder

EUROBERT = LLAMA._replace(
    # Without a bias the head is the output table alone.
    heads={"mlm": (Tensor("mlm/bias", ("lm_head.bias",), "V", ("V",), when="mlp_bias"),)},
    decoder=make_decoder("lm_head.weight"),
    always=(),
    classes={"mlm": "ForMaskedLM"},
)
