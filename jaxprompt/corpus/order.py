"""The order in which documents are read: permutations without tables, and the held-out part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from jaxprompt.errors import InputError

# 4 rounds are enough with ideal round functions (Luby & Rackoff 1988); the mixer below is none.
_ROUNDS = 8
_MASK = 2**32 - 1


class Shuffle(Sequence[int]):
    """A random permutation of range(n) from `seeds`: constant time per element, no memory.

    A Feistel network over the next power of 4, iterated until it falls into the range (Black &
    Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """

    def __init__(self, n: int, *seeds: int):
        """Samples the keys; `seeds` are whole numbers from 0."""
        self._n = n
        # Over fewer than 2 x 4 bits the rounds cannot reach most permutations.
        self._bits = max(4, -(-max(n - 1, 0).bit_length() // 2))
        # Their number counts too: to SeedSequence itself (3,) and (3, 0) are the same.
        bits = np.random.SeedSequence((len(seeds), *seeds))
        self._keys = bits.generate_state(_ROUNDS).tolist()

    def __len__(self) -> int:
        """The n of range(n)."""
        return self._n

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        """The number at `place`, or those of a slice."""
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        if not 0 <= place < self._n:
            raise IndexError(f"place {place} of a shuffle of {self._n}")
        # For more than 256 numbers the range holds over a quarter of the network's, so that a walk
        # takes fewer than 4 steps on average.
        bits = self._bits
        low = (1 << bits) - 1
        number = place
        while True:
            left, right = number >> bits, number & low
            for key in self._keys:
                # The first two primes of xxHash32, as multipliers modulo 2^32.
                mixed = (right ^ key) * 0x9E3779B1 & _MASK
                mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & _MASK
                left, right = right, left ^ ((mixed ^ mixed >> 13) & low)
            number = left << bits | right
            if number < self._n:
                return number


@dataclass(frozen=True)
class Share(Sequence[int]):
    """The document numbers of one side of a divided corpus."""

    order: Shuffle
    start: int
    stop: int

    def __len__(self) -> int:
        """Returns the number of documents on this side."""
        return self.stop - self.start

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        """The document at `place`, or those of a slice."""
        places = range(self.start, self.stop)[place]
        return self.order[places] if isinstance(places, int) else [self.order[i] for i in places]


def divide(documents: int, held_out: float, seed: int) -> tuple[Share, Share]:
    """Divides range(documents) by `seed` into the training and the held-out part.

    `held_out` is the held-out share, 0 to 1; a share over 0 gives at least one document.
    """
    if not 0 <= held_out < 1:
        raise InputError(f"corpus.held_out={held_out} must be at least 0 and below 1, e.g. 0.01")
    kept = max(1, round(held_out * documents)) if held_out else 0
    if kept >= documents:
        raise InputError(
            f"corpus.held_out={held_out} holds out {kept} of {documents} documents, which leaves "
            "none to train on; add text, or split a .txt into more documents by "
            "corpus.documents=line or blank"
        )
    order = Shuffle(documents, seed)
    return Share(order, kept, documents), Share(order, 0, kept)
