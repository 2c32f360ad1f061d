"""The one recurrence of this library over ragged segments of a packed tensor, on one device:

    y_j = x_j + decay^tick_j * y_{j+1}          (y = 0 past a segment's end, or the value that enters there)

Blocked: a segment is cut into blocks of 16 counted from its END and laid out as [16, blocks] float64, so one
elementwise call serves one row of every block of every segment. 15 row steps scan all blocks; the block heads (1/16 of
the tokens) are chained by doubling; the value that enters each block then runs through its 16 rows. Only elementwise
IEEE multiplies and adds, never a matmul or a fused multiply-add: a segment's bits depend on nothing but its own tokens.

The accumulation is float64 and is rounded once, at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int8, Shaped
from torch import Tensor

BLOCK = 16
TILE = 16384  # blocks; 2 MiB of float64 rows stay in cache while they are worked on
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ONE = 0x3FF0000000000000  # the bits of 1.0
PerSegment = float | Float64[Tensor, " segments"]


def reverse_scan(
    x: Shaped[Tensor, " tokens"],
    lengths: Sequence[int],
    decay: PerSegment,
    *,
    step: Tensor | None = None,
    tick: Tensor | None = None,
) -> Shaped[Tensor, " tokens"]:
    """y_j = x_j + decay^tick_j * y_next over the steps of each segment of a packed tensor.

    x: any float or int dtype. decay: one float, or one per segment. step (bool, [tokens]): which tokens are steps of
    the process; the others are passed over (their x is never used) and come out 0. tick (bool): where the decay applies
    between a step and the next; default everywhere. Returns float32, or float64 for float64 x. Raises ValueError when
    shapes do not fit.
    """
    if x.dim() != 1 or sum(lengths) != len(x):
        raise ValueError(f"x has shape {list(x.shape)}; expected [{sum(lengths)}], the sum of lengths")
    keep = None if step is None else as_bits(step)
    ticks = as_bits(tick) if tick is not None else keep
    if tick is not None and keep is not None:
        ticks = ticks & keep
    x = select(x.detach(), keep)
    return finish(begin(x, lengths, decay, keep=keep, tick=ticks), dtype=result_dtype(x))


def result_dtype(*inputs: Tensor) -> torch.dtype:
    """float64 if a per-token input is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def as_bits(mask: Tensor) -> Int8[Tensor, " tokens"]:
    """A 0/1 mask as int8, all bits set where it holds: for `select`, which is blind to NaN and costs least."""
    return mask.bool().view(torch.int8).neg()


def select(x: Tensor, bits: Int8[Tensor, " tokens"] | None) -> Tensor:
    """x where the mask holds, +0 elsewhere, whatever x is there. A new tensor (x itself without a mask)."""
    if bits is None:
        return x
    word = _BITS[x.element_size()]
    return (x.view(word) & bits.to(word)).view(x.dtype)


@dataclass(frozen=True)
class Group:
    """Host plan for neighbouring segments that are worked on together: where their blocks lie."""

    tokens: slice  # of the pack
    segments: slice
    lengths: np.ndarray
    pads: np.ndarray  # zeros in front of a segment, so that its blocks are full
    blocks: np.ndarray  # blocks of each segment
    first: np.ndarray  # the first block of each segment

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.sum())


@dataclass(frozen=True)
class Tile:
    """One group after its local scan: rows [16, blocks] and what finishing needs."""

    group: Group
    some: Tensor  # the segments that have tokens, counted in the group
    first: Tensor  # their first block
    last: Tensor  # their last block
    rows: Float64[Tensor, "16 blocks"]
    decay: Any  # a float, [blocks], or [16, blocks] with ticks
    gain: Any  # of a whole block: a float or [blocks]
    below: Float64[Tensor, " blocks"]  # the y past each block's end, with nothing entering the segment
    keep: Tensor | None  # staged bits


@dataclass(frozen=True)
class Scan:
    """A local scan: the first y of each segment is known, the tokens wait for what enters at the segments' ends."""

    tiles: list[Tile]
    heads: Float64[Tensor, " segments"]


def begin(
    x: Shaped[Tensor, " tokens"],
    lengths: Sequence[int],
    decay: PerSegment,
    *,
    scale: PerSegment = 1.0,
    impulse: tuple[Tensor, Tensor] | None = None,
    keep: Int8[Tensor, " tokens"] | None = None,
    tick: Int8[Tensor, " tokens"] | None = None,
) -> Scan:
    """Scan every segment with nothing entering at its end.

    The recurrence's x is scale * x plus one `impulse` a segment: (offsets in the segment, float64 values), 0 where
    there is none. `keep` selects the output; `keep` and `tick` are bits as `as_bits` makes them.
    """
    tiles = []
    heads = torch.zeros(len(lengths), dtype=torch.float64, device=x.device)
    for group in plan(lengths, one=x.is_cuda):
        if group.num_blocks:
            tile = _scan_tile(x, group, decay, scale, impulse, keep, tick)
            tiles.append(tile)
            heads[group.segments] = _first_values(tile)
    return Scan(tiles, heads)


def finish(scan: Scan, entering: Float64[Tensor, " segments"] | None = None, *, dtype: torch.dtype) -> Tensor:
    """All y, with `entering` (default 0) as the y past each segment's end; rounded to dtype once. Uses the scan up."""
    parts = [_finish_tile(tile, entering, dtype) for tile in scan.tiles]
    if not parts:
        return torch.zeros(0, dtype=dtype, device=scan.heads.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan(lengths: Sequence[int], *, one: bool = False) -> Iterator[Group]:
    """Groups of neighbouring segments of at most TILE blocks or one segment (`one`: all in one, as a GPU wants it)."""
    size = np.asarray(lengths, dtype=np.int64)
    blocks = -(-size // BLOCK)
    pads = blocks * BLOCK - size
    ends, block_ends = np.cumsum(size), np.cumsum(blocks)
    start = 0
    while start < len(size):
        before = block_ends[start] - blocks[start]
        stop = len(size) if one else max(start + 1, int(np.searchsorted(block_ends, before + TILE, side="right")))
        part = slice(start, stop)
        tokens = slice(int(ends[start] - size[start]), int(ends[stop - 1]))
        yield Group(tokens, part, size[part], pads[part], blocks[part], block_ends[part] - blocks[part] - before)
        start = stop


def _scan_tile(x: Tensor, group: Group, decay, scale, impulse, keep: Tensor | None, tick: Tensor | None) -> Tile:
    some = np.flatnonzero(group.blocks)
    first, last = group.first[some], (group.first + group.blocks - 1)[some]
    keep = None if keep is None else _stage(keep, group)
    rows = torch.empty(BLOCK, group.num_blocks, dtype=torch.float64, device=x.device)
    rows.copy_(_stage(x, group).view(-1, BLOCK).t())
    if isinstance(scale, Tensor) or scale != 1.0:
        rows.mul_(_per_block(scale, group))
    if impulse is not None:
        offsets, values = (part[group.segments][_to(some, x)] for part in impulse)
        position = offsets + _to((group.first * BLOCK + group.pads)[some], x)
        rows.view(-1).index_add_(0, position % BLOCK * group.num_blocks + position // BLOCK, values)
    decay = _per_block(decay, group)
    if tick is not None:
        decay = _decays(decay, _stage(tick, group))
    for columns in _column_tiles(rows):
        row = rows[:, columns].unbind(0)
        carry = torch.empty_like(row[0])
        for r in range(BLOCK - 2, -1, -1):
            torch.mul(row[r + 1], _row(decay, r, columns), out=carry)
            row[r].add_(carry)
    gain = _block_gain(decay)
    at = [_to(index, x) for index in (some, first, last)]
    return Tile(group, *at, rows, decay, gain, _values_below(rows, gain, at[2], group), keep)


def _finish_tile(tile: Tile, entering: Tensor | None, dtype: torch.dtype) -> Tensor:
    below = tile.below
    if entering is not None:
        below = _values_below(tile.rows, tile.gain, tile.last, tile.group, entering[tile.group.segments][tile.some])
    out = torch.empty(tile.group.num_blocks, BLOCK, dtype=dtype, device=tile.rows.device)
    for columns in _column_tiles(tile.rows):
        carry = below[columns]
        for r, row in reversed(list(enumerate(tile.rows[:, columns].unbind(0)))):
            carry.mul_(_row(tile.decay, r, columns))
            row.add_(carry)
            out[columns, r].copy_(row)
    return _unstage(select(out.view(-1), tile.keep), tile.group)


def _values_below(rows: Tensor, gain, last: Tensor, group: Group, entering: Tensor | None = None) -> Tensor:
    """[blocks] the y past each block's end: the next block's head, or what enters the segment (default 0).

    Chains the block heads by doubling, head_b += gain_b * head_{b+k}; gain_b *= gain_{b+k}, with gain 0 at a segment's
    end.
    """
    n, longest = group.num_blocks, int(group.blocks.max())
    heads, gains, other = (rows.new_zeros(n + longest) for _ in range(3))
    torch.add(
        rows[0], 0.0, out=heads[:n]
    )  # -0.0 becomes 0.0: its sign must not depend on how often mates make us double
    gains[:n] = gain
    if entering is not None:
        heads.index_add_(0, last, gains[last] * entering)
    gains.index_fill_(0, last, 0.0)
    product = rows.new_empty(n)
    reach = 1
    while reach < longest:
        torch.mul(gains[:n], heads[reach : reach + n], out=product)
        torch.mul(gains[:n], gains[reach : reach + n], out=other[:n])
        heads[:n].add_(product)
        gains, other = other, gains
        reach *= 2
    below = heads[1 : n + 1]
    return below.index_fill_(0, last, 0.0) if entering is None else below.index_copy_(0, last, entering)


def _first_values(tile: Tile) -> Float64[Tensor, " segments"]:
    """The y of each segment's first token, 0 for an empty segment."""
    value = tile.rows.new_zeros(len(tile.group.lengths))
    below = tile.below[tile.first]
    if isinstance(tile.decay, Tensor) and tile.decay.dim() == 2:  # front pads do not tick: row 0 is the first token's y
        value[tile.some] = tile.rows[0, tile.first] + tile.gain[tile.first] * below
        return value
    pads = _to(tile.group.pads, tile.rows)[tile.some]
    decay = tile.decay[tile.first] if isinstance(tile.decay, Tensor) else torch.full_like(below, tile.decay)
    powers = torch.cumprod(decay.expand(BLOCK, -1), dim=0)  # decay^1 .. decay^16
    value[tile.some] = (
        tile.rows[pads, tile.first] + powers[BLOCK - 1 - pads, torch.arange(len(pads), device=pads.device)] * below
    )
    return value


def _stage(x: Tensor, group: Group) -> Tensor:
    """[blocks * 16]: the group's tokens, each segment with zeros in front up to a block's border."""
    if not group.pads.any():
        return x[group.tokens]
    zeros = torch.split(x.new_zeros(BLOCK * (BLOCK - 1) // 2), list(range(BLOCK)))
    parts = []
    for pad, part in zip(group.pads.tolist(), torch.split(x[group.tokens], group.lengths.tolist()), strict=True):
        if pad:
            parts.append(zeros[pad])
        parts.append(part)
    return torch.cat(parts)


def _unstage(staged: Tensor, group: Group) -> Tensor:
    if not group.pads.any():
        return staged
    sizes = np.stack([group.pads, group.lengths], axis=1).ravel()
    return torch.cat(torch.split(staged, sizes.tolist())[1::2])


def _per_block(value: PerSegment, group: Group) -> "float | Tensor":
    """A value per segment -> one per block of the group; a float stays a float."""
    if not isinstance(value, Tensor):
        return float(value)
    counts = _to(group.blocks, value)
    return value[group.segments].repeat_interleave(counts, output_size=group.num_blocks)


def _decays(decay: "float | Tensor", ticks: Tensor) -> Tensor:
    """[16, blocks]: decay where the tick's bits are set, 1.0 elsewhere, put together bit by bit."""
    bits = torch.empty(BLOCK, len(ticks) // BLOCK, dtype=torch.int64, device=ticks.device)
    bits.copy_(ticks.view(-1, BLOCK).t())
    word = decay.view(torch.int64) if isinstance(decay, Tensor) else int(np.float64(decay).view(np.int64))
    return bits.bitwise_and_(word ^ _ONE).bitwise_xor_(_ONE).view(torch.float64)


def _block_gain(decay: "float | Tensor") -> "float | Tensor":
    """The product of a block's 16 decays."""
    if isinstance(decay, Tensor) and decay.dim() == 2:
        gain = decay[0].clone()
        for row in decay[1:].unbind(0):
            gain.mul_(row)
        return gain
    for _ in range(4):
        decay = decay * decay
    return decay


def _row(decay: "float | Tensor", row: int, columns: slice) -> "float | Tensor":
    if not isinstance(decay, Tensor):
        return decay
    return decay[row, columns] if decay.dim() == 2 else decay[columns]


def _column_tiles(rows: Tensor) -> Iterator[slice]:
    width = rows.shape[1] if rows.is_cuda else TILE
    for start in range(0, rows.shape[1], width):
        yield slice(start, start + width)


def _to(index: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(index).to(like.device)
