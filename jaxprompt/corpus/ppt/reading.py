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

# As in the released code (tools/infer_roberta.py).
MAX_SHORT_CHARS = 10  # of a text that is too short
MAX_CHARS = 10_000  # to which a text is truncated
MIN_TOKENS = 6  # with special ones
MAX_TOKENS = 256  # of an input, without soft ones

_PROBE = "a"  # stands for a text


class UnitEncoder:
    """Encodes units for a classifier. Units that are too short are skipped."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        encoder: ExampleEncoder,
        template: Template,
        max_len: int,
    ):
        """Takes the classifier's tokenizer, which also indexed the corpus, and its template, which
        has one text.
        """
        self._corpus, self._tokenizer, (self._field,) = corpus, tokenizer, template.fields
        self._min_tokens = MIN_TOKENS - tokenizer.num_special_tokens_to_add()
        self._form = Form(encoder, template, max_len)
        (row,) = encoder.encode(Example({self._field: _PROBE}))
        # A corpus has a space before each unit; after [CLS] a byte-level tokenizer has none.
        spaced_ids = encode_texts(tokenizer, [f" {_PROBE}"])[0]
        self._uses_stored_ids = row.ids[row.roles == Role.TEXT].tolist() == spaced_ids

    def rows(self, units: range) -> tuple[list[int], list[list[Encoded]]]:
        """Encodes units; returns those not skipped, counted from units.start, and their rows."""
        stored = [self._corpus.unit(unit) for unit in units]
        long_enough = [i for i, ids in enumerate(stored) if len(ids) >= self._min_tokens]
        # Decoded, as the limits are in characters.
        decoded = self._tokenizer.batch_decode(
            [stored[i].tolist() for i in long_enough],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        stripped = {i: text.strip() for i, text in zip(long_enough, decoded, strict=True)}
        texts = {i: text for i, text in stripped.items() if len(text) > MAX_SHORT_CHARS}
        inputs: Iterable[Ints]
        if self._uses_stored_ids:
            # Without the limit of characters: a row has fewer tokens than that.
            inputs = (stored[i] for i in texts)
        else:
            # Encoded again, because the stored ids are those of a text after a space.
            inputs = encode_texts(self._tokenizer, [text[:MAX_CHARS] for text in texts.values()])
        rows = [[self._form.fill({self._field: np.asarray(ids, np.int32)})] for ids in inputs]
        return list(texts), rows
