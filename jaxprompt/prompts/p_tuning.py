"""P-tuning: soft tokens that an LSTM and an MLP compute (Liu et al. 2021, section 3.2)."""

from flax import linen as nn

from jaxprompt.config import kinds
from jaxprompt.layers.recurrent import BiLstm, LinearStack
from jaxprompt.prompts import Method
from jaxprompt.types import Batch, Injection, Stream


class Prompt(Method):
    """Trains `length` pseudo tokens, which the template places with [soft*n] among its words.

    Their embeddings pass through a bidirectional LSTM and linear layers with ReLU between them, or
    only through the linear layers. An export contains the computed vectors without the encoder.

    The released code has hidden=0 and inner=0 with two linear layers; PEFT's LSTM has inner twice
    hidden, its MLP three linear layers and inner=hidden.
    """

    PLAIN = "prompt.encoder=none"
    READ_WITH = {"encoder=lstm": "hidden lstm_layers", "encoder=lstm,mlp": "linear inner"}

    length: int = kinds.option(9, "number of pseudo tokens", "at least 1")
    encoder: str = kinds.option(
        "lstm",
        "encoder that computes the soft tokens from embeddings; none = no encoder",
        ("lstm", "mlp", "none"),
    )
    hidden: int = kinds.option(
        0, "lstm: units per direction; 0 = width of the word embeddings", "at least 0"
    )
    lstm_layers: int = kinds.option(2, "lstm: number of layers", "at least 1")
    linear: int = kinds.option(
        2, "number of linear layers of the MLP, or of the MLP after the LSTM", "at least 1"
    )
    inner: int = kinds.option(
        0, "width between the linear layers; 0 = width of the word embeddings", "at least 0"
    )
    scale: float = kinds.option(1.0, "standard deviation of the initial embeddings", "at least 0")

    def num_slots(self) -> int:
        """Returns the number of soft tokens in the input."""
        return self.length

    def is_computed(self) -> bool:
        """Returns whether folding saves work, that of the encoder."""
        return self.encoder != "none"

    @nn.compact
    def __call__(self, batch: Batch, embed, *, deterministic: bool) -> Injection:
        """Adds the same vectors to every example. -> slots [1, S, E]"""
        width = self.dims.embed
        init = nn.initializers.normal(self.scale)
        # All examples share one sequence, so the encoder runs once per step.
        rows = self.param("table", init, (self.length, width))[None]  # [1, S, E]
        if self.encoder == "lstm":
            rows = BiLstm(self.hidden or width, self.lstm_layers, name="lstm")(rows)
        if self.encoder != "none":
            inner = (self.inner or width,) * (self.linear - 1)
            rows = LinearStack((*inner, width), name="mlp")(rows)
        return Injection(Stream(slots=rows))
