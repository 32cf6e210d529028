"""Turns generated token ids into texts, which a stop string may end."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxprompt.data.text.encoded import GeneratedText
from jaxprompt.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDecoder:
    """Decodes the ids of generated texts."""

    tokenizer: Tokenizer
    ends: tuple[int, ...]  # end ids, which are not part of a text
    stop: tuple[str, ...] = ()  # a text is cut before the first of these strings

    def decode(
        self, ids: np.ndarray, lengths: np.ndarray, logprobs: np.ndarray | None = None
    ) -> list[GeneratedText]:
        """Decodes texts.

        Args:
          ids: int [n, T].
          lengths: tokens of each text, the end id included, int [n].
          logprobs: of the tokens, [n, T]; None = the texts do not contain them.
        """
        texts = [self._cut(text) for text in self._decode(ids)]
        if logprobs is None:
            return [GeneratedText(text.strip()) for text, _ in texts]
        written = []
        for (text, is_cut), row, length, values in zip(texts, ids, lengths, logprobs, strict=True):
            length = self._end_of_stop(row[:length]) if is_cut else length
            tokens = self.tokenizer.batch_decode(row[:length, None])
            logs = tuple(map(float, values[:length]))
            written.append(GeneratedText(text.strip(), tuple(tokens), logs))
        return written

    def is_stopped(self, ids: np.ndarray) -> np.ndarray:
        """Returns whether texts contain a stop string. int [n, T] -> bool [n]"""
        return np.array([self._cut(text)[1] for text in self._decode(ids)], bool)

    def final_part(self, ids: np.ndarray, is_done: bool) -> str:
        """Returns the part of a text so far that later tokens cannot change. int [T] -> text"""
        text, is_cut = self._cut(self._decode(ids[None])[0])
        if is_done or is_cut:
            return text.strip()
        text = text.rstrip("\ufffd")  # the first bytes of a character
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            text = text[: text.rfind(" ") + 1]  # decoding may remove the space before a last word
        starts = [stop[:end] for stop in self.stop for end in range(1, len(stop))]
        waiting = max((len(start) for start in starts if text.endswith(start)), default=0)
        return text[: len(text) - waiting].strip()

    def _end_of_stop(self, ids: np.ndarray) -> int:
        """Returns the number of tokens up to the one that completes a stop string. int [T]"""
        ends = range(1, len(ids))
        return 1 + bisect.bisect_left(ends, True, key=lambda n: self.is_stopped(ids[None, :n])[0])

    def _decode(self, ids: np.ndarray) -> list[str]:
        # End tokens are not always special tokens of the tokenizer.
        without_ends = [row[~np.isin(row, self.ends)] for row in ids]
        return self.tokenizer.batch_decode(without_ends, skip_special_tokens=True)

    def _cut(self, text: str) -> tuple[str, bool]:
        """Returns the text before the first stop string, and whether there is one."""
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return (text[: min(places)], True) if places else (text, False)


def stop_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of stop strings that are added tokens, such as <|im_end|>.

    They end a text like an end token; decoded texts do not contain special tokens.
    """
    added = tokenizer.get_added_vocab()
    return tuple(added[text] for text in stop if text in added)
