"""Units of a corpus laid out by the template of a trained classifier."""

from collections.abc import Iterable

import numpy as np

from jaxprompt.corpus import Corpus
from jaxprompt.corpus.ppt.forms import Form
from jaxprompt.data.tasks.task import Example
from jaxprompt.data.text.encode import ExampleEncoder
from jaxprompt.data.text.encoded import Encoded, Ints
from jaxprompt.data.text.template import Template
from jaxprompt.data.text.tokenizer import Tokenizer, encode_texts
from jaxprompt.types import Role

# As the released code annotates (tools/infer_roberta.py).
SHORT = 10  # characters of a text that is too short, at most
LONG = 10_000  # characters of a text, behind which it is cut
LEAST = 6  # tokens, special ones counted
CUT = 256  # tokens of a row, soft ones not counted

_PROBE = "a"  # stands for a text


class Reader:
    """Makes rows of units. Units that are too short are skipped."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        encoder: ExampleEncoder,
        template: Template,
        max_len: int,
    ):
        """Takes the classifier's tokenizer, by which the corpus is indexed too, and its layout, of
        one text.
        """
        self._corpus, self._tokenizer, (self._name,) = corpus, tokenizer, template.fields
        self._least = LEAST - tokenizer.num_special_tokens_to_add()
        self._form = Form(encoder, template, max_len)
        (row,) = encoder.encode(Example({self._name: _PROBE}))
        # A corpus has a space before each unit; behind [CLS] a byte-level tokenizer has none.
        spaced = encode_texts(tokenizer, [f" {_PROBE}"])[0]
        self._as_stored = row.ids[row.roles == Role.TEXT].tolist() == spaced

    def rows(self, units: range) -> tuple[list[int], list[list[Encoded]]]:
        """Lays out units; returns those not skipped, counted from units.start, and their rows."""
        ids = [self._corpus.unit(unit) for unit in units]
        chosen = [at for at, own in enumerate(ids) if len(own) >= self._least]
        # To characters and back where needed: the limits are in characters, and the ids stored
        # are those of a text behind a space.
        texts = self._tokenizer.batch_decode(
            [ids[at].tolist() for at in chosen], skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )  # fmt: skip
        known = {at: text.strip() for at, text in zip(chosen, texts, strict=True)}
        known = {at: text[:LONG] for at, text in known.items() if len(text) > SHORT}
        # Of the ids fewer are read than LONG characters have.
        found: Iterable[Ints] = (ids[at] for at in known)
        if not self._as_stored:
            found = encode_texts(self._tokenizer, list(known.values()))
        rows = [[self._form.fill({self._name: np.asarray(own, np.int32)})] for own in found]
        return list(known), rows
