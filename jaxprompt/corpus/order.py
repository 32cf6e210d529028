"""The order in which documents are read: permutations without tables, and the held-out part."""

from collections.abc import Iterator

import numpy as np

from jaxprompt.errors import InputError

# 4 rounds are enough for ideal round functions (Luby & Rackoff 1988), which the mixer below is not.
_ROUNDS = 8
_MASK = 2**32 - 1


class Shuffle:
    """A random permutation of range(n) from `seeds`: constant time per element, no memory.

    A Feistel network over the next power of 4, iterated until it falls into the range (Black &
    Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """

    def __init__(self, n: int, *seeds: int):
        """Samples the keys; `seeds` are whole numbers from 0."""
        self._n = n
        # Over fewer than 2 x 4 bits the rounds cannot reach most permutations.
        self._bits = max(4, -(-max(n - 1, 0).bit_length() // 2))
        # With the number of seeds, because SeedSequence gives (3,) and (3, 0) the same state.
        entropy = np.random.SeedSequence((len(seeds), *seeds))
        self._keys = entropy.generate_state(_ROUNDS).tolist()

    def __len__(self) -> int:
        """Returns the n of range(n)."""
        return self._n

    def __iter__(self) -> Iterator[int]:
        """Yields the numbers in order."""
        return map(self.__getitem__, range(self._n))

    def __getitem__(self, index: int) -> int:
        """Returns the number at `index`."""
        if not 0 <= index < self._n:
            raise IndexError(f"place {index} of a shuffle of {self._n}")
        # Above 256 numbers, range(n) is over a quarter of the network's domain, so that the loop
        # takes fewer than 4 steps on average.
        bits = self._bits
        half_mask = (1 << bits) - 1
        number = index
        while True:
            left, right = number >> bits, number & half_mask
            for key in self._keys:
                # The first two primes of xxHash32, as multipliers modulo 2^32.
                mixed = (right ^ key) * 0x9E3779B1 & _MASK
                mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & _MASK
                left, right = right, left ^ ((mixed ^ mixed >> 13) & half_mask)
            number = left << bits | right
            if number < self._n:
                return number


def split_held_out(documents: int, held_out: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits range(documents) by `seed` into the training and the held-out part. int64

    `held_out` is the held-out share, in [0, 1); a share over 0 gives at least one document.
    """
    num_held_out = max(1, round(held_out * documents)) if held_out else 0
    if num_held_out >= documents:
        raise InputError(
            f"corpus.held_out={held_out} holds out {num_held_out} of {documents} documents, "
            "which leaves none to train on; add text, or split a .txt into more documents by "
            "corpus.documents=line or blank"
        )
    order = np.fromiter(Shuffle(documents, seed), np.int64, documents)
    return order[num_held_out:], order[:num_held_out]
