"""What is done with packed 0/1 masks: tokens are selected by them, valid tokens counted and found.

Works on the mask's device; only `on_host`, `places` and `pick` wait for a GPU. Arrays as in `arrays`.
"""

import numpy as np
import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from cp_returns.arrays import Array, library, like, native, tensor, zeros

_WORDS = 16
_LINE = 8 * _WORDS  # tokens; few enough that the bytes of a line's words add up without a carry
_FEW = 2**16  # tokens, below which one number a token costs less
_ONES = 0x0101010101010101  # a valid token in each byte
_AHEAD = np.zeros((_LINE, _LINE), dtype=np.uint8)  # the bytes of a line ahead of each of its positions
_AHEAD[np.tril_indices(_LINE, -1)] = 0xFF
_AHEAD = _AHEAD.view(np.int64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(x: Tensor) -> Array:
    """The bits of x as integers: numpy has not every dtype."""
    return native(x.view(_BITS[x.element_size()]))


def as_bits(mask: Tensor) -> Int8[Tensor, " tokens"]:
    """A 0/1 mask as int8, all bits set where it holds: for `select`, which is blind to NaN and costs least."""
    return mask.bool().view(torch.int8).neg()


def select(x: Tensor, bits: Int8[Tensor, " tokens"] | None) -> Tensor:
    """x where the mask holds, +0 elsewhere, whatever x is there. A new tensor (x itself without a mask)."""
    if bits is None:
        return x
    return tensor(_words(x) & native(bits)).view(x.dtype)


def select_in_place(x: Tensor, bits: Int8[Tensor, " tokens"] | None) -> Tensor:
    """`select`, written over x."""
    if bits is not None:
        blank(_words(x), native(bits))
    return x


def blank(x: Array, bits: Array) -> None:
    """`select` of a native array, written over it."""
    words = x.view(getattr(library(x), f"int{8 * x.itemsize}"))
    words &= bits  # numpy widens the bits as it goes, torch would first make a copy


def pick(x: Tensor, mask: Bool[Tensor, " tokens"]) -> Tensor:
    """The tokens that the mask holds, whatever the others are."""
    return tensor(_words(x)[native(mask)]).view(x.dtype)


def put(x: Tensor, mask: Bool[Tensor, " tokens"]) -> Tensor:
    """The inverse of `pick`: +0 where the mask does not hold."""
    if x.is_cuda:
        return x.new_zeros(len(mask)).masked_scatter_(mask, x)
    words = _words(x)
    whole = np.zeros(len(mask), dtype=words.dtype)
    whole[mask.numpy()] = words
    return tensor(whole).view(x.dtype)


class Prefix:
    """Counts of valid tokens before any position of a packed bool mask, and the places of valid tokens.

    A long mask is not passed over by single tokens: eight are a 64-bit word, 16 words a line. Keeps the mask and one
    number a line, or a token if these are few.
    """

    def __init__(self, mask: Tensor):
        self.mask = mask = mask.contiguous()
        if len(mask) < _FEW:
            through = native(mask).cumsum(0)
            self._each = library(through).concatenate([zeros(1, through), through])
            return
        self._each = None
        apart = len(mask) // _LINE * _LINE
        if mask.storage_offset() % 8:
            mask = mask.clone()  # a word lies at a multiple of its size
        rest = zeros(_LINE, native(mask))  # never full, so that the end of the pack is a position too
        rest[: len(mask) - apart] = native(mask)[apart:]
        lib = library(rest)
        self._rest = rest.view(lib.int64)
        self._words = native(mask)[:apart].view(lib.int64).reshape(-1, _WORDS)
        through = _popcount(_sum_words(self._words)).cumsum(0)
        self._counts = lib.concatenate([zeros(1, through), through])  # before each line

    def before(self, position: Array) -> Array:
        """How many valid tokens lie before each position 0 .. len(mask)."""
        if self._each is not None:
            return self._each[position]
        line, ahead = position // _LINE, like(_AHEAD, position)[position % _LINE]
        return self._counts[line] + _popcount(_sum_words(self._at(line) & ahead))

    def on_host(self, position: np.ndarray) -> np.ndarray:
        """`before`, host numbers in and out."""
        return tensor(self.before(like(position, native(self.mask)))).cpu().numpy()

    def upto(self, lengths: np.ndarray) -> Array:
        """[N + 1] counts before the first of N responses and up to the end of each."""
        return self.before(like(np.append(0, np.cumsum(lengths)), native(self.mask)))

    def place(self, rank: Array) -> Array:
        """Where the rank-th valid token lies, counted from 1; any position for rank 0."""
        lib = library(rank)
        if self._each is not None:
            return lib.searchsorted(self._each[1:], rank)
        line = lib.searchsorted(self._counts[1:], rank)
        words, within = self._at(line), rank - self._counts[line]
        through = _popcount(words).cumsum(1)  # valid tokens of the line up to each word's end
        at = (through < within[:, None]).sum(1)
        row = like(np.arange(len(rank)), rank)
        word = words[row, at]
        within = within - through[row, at] + _popcount(word)
        byte = ((word * _ONES).view(lib.uint8).reshape(-1, 8) < within[:, None]).sum(1)
        return line * _LINE + at * 8 + byte

    def _at(self, line: Array) -> Array:
        """[n, 16] the words of lines, a new array."""
        words, past = self._words[line.clip(0, len(self._words) - 1)], line >= len(self._words)
        if isinstance(words, Tensor):
            return torch.where(past[:, None], self._rest, words)
        words[past] = self._rest
        return words


def _popcount(words: Array) -> Array:
    """The sum of each word's bytes, up to 255."""
    return ((words * _ONES) >> 56) & 0xFF


def _sum_words(words: Array) -> Array:
    """[n, 16] -> [n]; numpy's own sum takes four times as long for rows so short."""
    return np.einsum("ij->i", words) if isinstance(words, np.ndarray) else words.sum(1)


def last_valid(mask: Tensor, lengths: np.ndarray) -> Array:
    """[N] which token of each response of a packed bool mask is the last valid one, -1 where none is."""
    return _by_counts(mask, lengths) if mask.is_cuda else _by_looking(mask.numpy(), lengths)


def _by_counts(mask: Tensor, lengths: np.ndarray) -> Array:
    """`last_valid` without a read of the device."""
    counts, starts = Prefix(mask), like(np.cumsum(lengths) - lengths, native(mask))
    upto = counts.upto(lengths)
    return library(upto).where(upto[1:] > upto[:-1], counts.place(upto[1:]) - starts, -1)


def _by_looking(valid: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`last_valid` of a mask on the host: most responses end with a valid token, the others are searched."""
    ends, last = np.cumsum(lengths), lengths - 1
    some = np.flatnonzero(lengths)
    for i in some[~valid[ends[some] - 1]].tolist():
        last[i] = _last(valid[ends[i] - lengths[i] : ends[i]])
    return last


def _last(valid: np.ndarray) -> int:
    """Where the last True is, -1 without one. Looks for it from the end, in windows that grow."""
    stop, window = len(valid), 256
    while stop > 0:
        start = max(0, stop - window)
        at = valid[start:stop].tobytes().rfind(1)
        if at >= 0:
            return start + at
        stop, window = start, 8 * window
    return -1


def places(mask: Tensor) -> np.ndarray:
    """Where a bool mask holds, ascending; on the host."""
    return mask.nonzero()[:, 0].cpu().numpy() if mask.is_cuda else np.flatnonzero(mask.numpy())


def turn_ends(mask: Tensor, response_lengths: np.ndarray) -> Tensor:
    """The last token of each run of valid tokens of a response, in a packed bool mask."""
    following = torch.zeros_like(mask)
    following[:-1] = mask[1:]
    ends = np.cumsum(response_lengths)[response_lengths > 0] - 1
    following.index_fill_(0, torch.from_numpy(ends).to(mask.device), False)
    return mask & ~following
