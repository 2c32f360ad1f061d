"""Where the segments of a scan lie among its blocks: a plan of host integers, made of the lengths alone.

A segment is cut into blocks of 16 tokens counted from its END, so that zeros pad it in front; a block is 4 quads.
Neighbouring segments are worked on together, as many blocks as a tile holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from cp_returns.arrays import Array, at_index, like, native
from cp_returns.layout import Lengths

QUAD = 4
BLOCK = QUAD**2
TILE = 12288  # blocks: 1.5 MiB of float64 rows. Fewer cost more calls a token, more leave the cache
SHORT = 200  # tokens of a segment or piece, below which an index of tokens costs less than slices
PerSegment = float | Float64[Tensor, " segments"]


@dataclass(frozen=True)
class Group:
    """Host plan for neighbouring segments that are worked on together: where their blocks lie."""

    tokens: slice  # of the pack
    segments: slice
    lengths: np.ndarray
    pads: np.ndarray  # zeros in front of a segment, so that its blocks are full
    blocks: np.ndarray  # blocks of each segment
    some: np.ndarray  # the segments that have blocks, counted in the group
    first: np.ndarray  # their first block
    last: np.ndarray  # their last block
    num_blocks: int
    blocks_before: int  # in the groups before
    continues: bool  # part of one long segment, which goes on in the next group

    @cached_property
    def place(self) -> np.ndarray | None:
        """Where each token lies among the blocks; None where it is cheaper to move whole segments."""
        if self.tokens.stop - self.tokens.start >= SHORT * len(self.lengths):
            return None
        return np.arange(self.lengths.sum()) + np.repeat(np.cumsum(self.pads), self.lengths)

    @cached_property
    def behind(self) -> np.ndarray:
        """[blocks] how many blocks of its segment lie behind each."""
        return np.repeat(self.last, self.blocks[self.some]) - np.arange(self.num_blocks)

    @cached_property
    def slices(self) -> list[slice]:
        """Each segment's tokens, counted in the group."""
        ends = np.cumsum(self.lengths)
        return list(map(slice, (ends - self.lengths).tolist(), ends.tolist()))

    @cached_property
    def slices_among_blocks(self) -> list[slice]:
        """Each segment's tokens among the blocks, behind its pad."""
        fronts = _fronts(self.lengths)
        return list(map(slice, fronts.tolist(), (fronts + self.lengths).tolist()))


def _fronts(lengths: np.ndarray) -> np.ndarray:
    """Where each segment's first token lies among the blocks."""
    return BLOCK * np.cumsum(-(-lengths // BLOCK)) - lengths


def plan(lengths: Lengths, *, one: bool = False) -> Iterator[Group]:
    """Groups of neighbouring segments of at most TILE blocks, last group first (`one`: all in one, as a GPU wants it).

    A longer segment is a group of its own, or several, cut from its end.
    """
    size = np.asarray(lengths, dtype=np.int64)
    blocks = -(-size // BLOCK)
    ends, block_ends = np.cumsum(size), np.cumsum(blocks)
    stop = len(size)
    while stop > 0:
        before = block_ends[stop - 1] - TILE
        start = 0 if one else min(stop - 1, int(np.searchsorted(block_ends - blocks, before)))
        part = slice(start, stop)
        begin = int(ends[start] - size[start])
        if stop - start > 1 or one or blocks[start] <= TILE:
            if blocks[part].any():
                tokens = slice(begin, int(ends[stop - 1]))
                yield _group(tokens, part, size[part], int(block_ends[stop - 1]), continues=False)
        else:
            step = TILE * BLOCK
            for end in range(int(ends[start]), begin, -step):
                tokens = slice(max(begin, end - step), end)
                last = int(block_ends[start]) - (int(ends[start]) - end) // BLOCK
                yield _group(tokens, part, np.array([tokens.stop - tokens.start]), last, continues=end < ends[start])
        stop = start


def _group(tokens: slice, segments: slice, lengths: np.ndarray, last_block: int, *, continues: bool) -> Group:
    blocks = -(-lengths // BLOCK)
    some = np.flatnonzero(blocks)
    ends = np.cumsum(blocks)
    first, last = (ends - blocks)[some], (ends - 1)[some]
    pads = blocks * BLOCK - lengths
    n = int(ends[-1])
    return Group(tokens, segments, lengths, pads, blocks, some, first, last, n, last_block - n, bool(continues))


@dataclass(frozen=True)
class Impulses:
    """One number for a token of each segment, by where that lies among the blocks of a pack: ascending."""

    place: Array  # counted in tokens
    value: Array

    def of(self, group: Group) -> "Impulses":
        """Those in the group, places counted in it."""
        if isinstance(self.place, Tensor):  # on a GPU, which has one group
            return self
        start = BLOCK * group.blocks_before
        part = slice(*map(self.place.searchsorted, (start, start + BLOCK * group.num_blocks)))
        return Impulses(self.place[part] - start, self.value[part])


@dataclass(frozen=True)
class OddTokens:
    """Where tokens with a decay of their own lie among the quads of a pack: ascending host integers."""

    quads: np.ndarray  # [odd quads]
    pads: np.ndarray  # [odd quads] zeros in front of the segment's first token, where that is in the quad
    quad: np.ndarray  # [odd tokens] which of the odd quads
    row: np.ndarray  # [odd tokens] place in the quad
    decay: Any  # [odd tokens] or a float

    def of(self, group: Group) -> "OddTokens":
        """Those in the group, quads counted in it."""
        start = QUAD * group.blocks_before
        low, high = map(self.quads.searchsorted, (start, start + QUAD * group.num_blocks))
        part = slice(*map(self.quad.searchsorted, (low, high)))
        quads, pads = self.quads[low:high] - start, self.pads[low:high]
        return OddTokens(quads, pads, self.quad[part] - low, self.row[part], at_index(self.decay, part))


def impulses_of(size: np.ndarray, offsets: Tensor, values: Tensor) -> Impulses:
    """One value a segment, at an offset."""
    some = np.flatnonzero(size)
    offset, value = (native(x)[like(some, native(x))] for x in (offsets, values))
    return Impulses(like(_fronts(size)[some], offset) + offset, value)


def odd_tokens(size: np.ndarray, places: np.ndarray, decay: PerSegment) -> OddTokens:
    """The tokens at ascending places of the pack, each with the decay of its segment."""
    starts, fronts = np.cumsum(size) - size, _fronts(size)
    segment = np.searchsorted(starts + size, places, side="right")
    quad, row = np.divmod(fronts[segment] + places - starts[segment], QUAD)
    new = np.diff(quad, prepend=-1) > 0
    quads, front = quad[new], fronts[segment[new]]
    pads = np.where(front // QUAD == quads, front % QUAD, 0)
    own = native(decay)[like(segment, native(decay))] if isinstance(decay, Tensor) else decay
    return OddTokens(quads, pads, np.cumsum(new) - 1, row, own)
