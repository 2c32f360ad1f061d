"""Counting in a packed 0/1 mask without a pass over single tokens: eight tokens are one 64-bit word.

Works on the mask's device and never reads it back to the host. Arrays as in `arrays`.
"""

import numpy as np
import torch
from torch import Tensor

from cp_returns.arrays import Array, library, native

_ONES = 0x0101010101010101


class Prefix:
    """Counts of valid tokens before any position of a packed bool mask, and the place of the last one."""

    def __init__(self, mask: Tensor):
        padded = mask.new_zeros(-(-(len(mask) + 1) // 8) * 8)  # one more, so that the end of the pack is a position too
        padded[: len(mask)] = mask
        self.words = native(padded.view(torch.int64))
        self.counts = _popcount(self.words).cumsum(0)  # through each word

    def before(self, position: Array) -> Array:
        """How many valid tokens lie before each position 0 .. len(mask)."""
        word = position >> 3
        whole = self.words[word]
        ahead = whole & (-1 << ((position & 7) * 8))  # the bytes from the position on
        return self.counts[word] - _popcount(ahead)

    def last(self, end: Array) -> Array:
        """The position of the last valid token before each `end`; any position when there is none."""
        lib = library(self.words)
        rank = self.before(end)  # it is the rank-th valid token, counted from 1
        word = lib.searchsorted(self.counts, rank)
        whole = self.words[word]
        rank_in_word = rank - self.counts[word] + _popcount(whole)
        through = (whole * _ONES).view(lib.uint8).reshape(-1, 8)  # valid tokens up to each byte (little-endian)
        return word * 8 + (through < rank_in_word[:, None]).sum(1)


def _popcount(words: Array) -> Array:
    return (words * _ONES) >> 56


def turn_ends(mask: Tensor, response_lengths: np.ndarray) -> Tensor:
    """The last token of each run of valid tokens of a response, in a packed bool mask."""
    following = torch.zeros_like(mask)
    following[:-1] = mask[1:]
    ends = np.cumsum(response_lengths)[response_lengths > 0] - 1
    following.index_fill_(0, torch.from_numpy(ends).to(mask.device), False)
    return mask & ~following
