"""The one recurrence of this library over ragged segments of a packed tensor, on one device:

    y_j = x_j + decay^tick_j * y_{j+1}          (y = 0 past a segment's end, or the value that enters there)

By fours: a segment is cut into blocks of 16 tokens counted from its END, a block into 4 quads of 4 tokens. All quads of
a tile lie side by side as [4, quads] float64, so one elementwise call serves one token of every quad. Three steps, a
multiply and an add each, sum every quad up to its first token, three more every block; the blocks' first values (1/16
of the tokens) are chained by doubling. Then it goes back: what enters a block is handed down to its quads and tokens.
Only elementwise IEEE multiplies and adds, never a matmul or a fused multiply-add: a segment's bits depend on nothing
but its own tokens.

A segment has one decay. Where some tokens have another (the ends of turns), the few quads that hold them are done
apart. Tokens that are no steps are taken out before (`pick`) and put back behind (`put`).

The accumulation is float64 and is rounded once, at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int8, Shaped
from torch import Tensor

from cp_returns.arrays import (
    Array,
    at_index,
    countable,
    empty,
    library,
    like,
    native,
    quiet,
    repeat,
    result_dtype,
    times,
    zeros,
)
from cp_returns.blocks import BLOCK, QUAD, Group, Impulses, OddTokens, PerSegment, impulses_of, odd_tokens, plan
from cp_returns.layout import Lengths
from cp_returns.masks import Prefix, blank, pick, places, put

Odd = tuple[np.ndarray, PerSegment]
"""Ascending places in the pack, on the host, and the decay at these tokens."""


@quiet
def reverse_scan(
    x: Shaped[Tensor, " tokens"],
    lengths: Lengths,
    decay: PerSegment,
    *,
    step: Tensor | None = None,
    tick: Tensor | None = None,
) -> Shaped[Tensor, " tokens"]:
    """y_j = x_j + decay^tick_j * y_next over the steps of each segment of a packed tensor.

    x: any float or int dtype. decay: in [0, 1], one float or one per segment (a tensor's values are not checked). step
    (bool, [tokens]): which tokens are steps of the process; the others are passed over (their x is never used) and come
    out 0. tick (bool): where the decay applies between a step and the next; default everywhere. Returns float32, or
    float64 for float64 x. Raises ValueError when shapes do not fit or a float decay is not in [0, 1].
    """
    tokens = int(np.sum(lengths, dtype=np.int64))
    for name, y in (("x", x), ("step", step), ("tick", tick)):
        if y is not None and (y.dim() != 1 or tokens != len(y)):
            raise ValueError(f"{name} has shape {list(y.shape)}; expected [{tokens}], the sum of lengths")
    if isinstance(decay, Tensor):
        if decay.shape not in ((), (len(lengths),)):
            raise ValueError(f"decay has shape {list(decay.shape)}; expected [] or [{len(lengths)}], one a segment")
        decay = decay.detach().double().expand(len(lengths))
    else:
        decay = float(decay)
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay is {decay}; expected a number in [0, 1]")
    x, steps = x.detach(), None if step is None else step.detach().bool()
    ticks = None if tick is None else places(tick.detach().bool() if steps is None else tick.detach().bool() & steps)
    if steps is not None:
        x, before = pick(x, steps), Prefix(steps).on_host
        lengths = np.diff(before(np.cumsum(lengths, dtype=np.int64)), prepend=0)
        ticks = None if ticks is None else before(ticks)
    rate, odd = (decay, None) if ticks is None else (1.0, (ticks, decay))
    y = scan(x, lengths, rate, odd=odd, dtype=result_dtype(x))
    return y if steps is None else put(y, steps)


@dataclass(frozen=True)
class Tile:
    """One group after its local scan, and what finishing needs, as `native` arrays."""

    group: Group
    rows: Array  # [4, quads] each y as if nothing entered its quad
    decay: Any  # a float or [quads]
    odd: "OddQuads | None"
    through_quads: Any  # [4] floats or [4, blocks], by place: how much of what enters a quad reaches its first y
    through: Any  # a float or [blocks]: the same of a whole block
    first: Array  # [blocks] the first y as if nothing entered the block
    below: Array  # [blocks] the y past each block's end, with nothing entering the segment
    uniform: bool  # no call for odd tokens: what holds for one segment may not hang on whether another has some


@dataclass(frozen=True)
class OddQuads:
    """The quads of a tile that hold a token with a decay of its own, done apart. The tile's rows have only their first
    y.
    """

    quads: Array  # which of the tile's
    y: Array  # [4, odd quads] after the local scan
    through: Array  # [4, odd quads] how much of what enters a quad reaches each of its tokens


@dataclass(frozen=True)
class Scan:
    """A local scan: the first y of each segment is known, the tokens wait for what enters at the segments' ends."""

    tiles: list[Tile]  # from the last group to the first
    keep: Int8[Tensor, " tokens"] | None  # selects the output
    heads: Float64[Tensor, " segments"]


def begin(
    x: Shaped[Tensor, " tokens"],
    lengths: Lengths,
    decay: PerSegment,
    *,
    scale: PerSegment = 1.0,
    impulse: tuple[Tensor, Tensor] | None = None,
    odd: Odd | None = None,
    keep: Int8[Tensor, " tokens"] | None = None,
) -> Scan:
    """Scan every segment with nothing entering at its end.

    The recurrence's x is scale * x plus one `impulse` a segment: (offsets in the segment, float64 values), 0 where
    there is none. `odd`: tokens whose decay is another. `keep` selects the output, by bits as `as_bits` makes them.
    """
    heads = torch.zeros(len(lengths), dtype=torch.float64, device=x.device)
    tiles = list(_scan_tiles(x, lengths, decay, scale, impulse, odd, heads))
    return Scan(tiles, keep, heads)


def finish(begun: Scan, entering: Float64[Tensor, " segments"] | None = None, *, dtype: torch.dtype) -> Tensor:
    """All y, with `entering` (default 0) as the y past each segment's end; rounded to dtype once. Uses it up."""
    out = empty(begun.tiles[0].group.tokens.stop if begun.tiles else 0, dtype=dtype, device=begun.heads.device)
    to, head = native(out), None
    while begun.tiles:
        tile = begun.tiles.pop(0)
        group = tile.group
        if entering is not None:
            _let_in(tile, head if group.continues else native(entering)[group.segments])
        if begun.tiles and begun.tiles[0].group.continues:
            head = _first_of_tile(tile)
        staged = _finish_tile(tile, to)
        del tile  # its rows are twice the output's size, which is not in memory before it is written to
        _write(staged, group, to, begun.keep)
    return out


def scan(
    x: Shaped[Tensor, " tokens"],
    lengths: Lengths,
    decay: PerSegment,
    *,
    scale: PerSegment = 1.0,
    impulse: tuple[Tensor, Tensor] | None = None,
    odd: Odd | None = None,
    keep: Int8[Tensor, " tokens"] | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """finish(begin(..)), tile by tile: each stays in cache, and no more than one is in memory."""
    out = empty(len(x), dtype=dtype, device=x.device)
    to = native(out)
    for tile in _scan_tiles(x, lengths, decay, scale, impulse, odd, heads=None):
        _write(_finish_tile(tile, to), tile.group, to, keep)
    return out


def _scan_tiles(x: Tensor, lengths, decay, scale, impulse, odd: Odd | None, heads: Tensor | None) -> Iterator[Tile]:
    """Each group's tile, last first; fills the heads of the segments if these are wanted."""
    x, size = countable(x), np.asarray(lengths, dtype=np.int64)
    starts = np.cumsum(size) - size
    impulses = None if impulse is None else impulses_of(size, *impulse)
    apart = None if odd is None else odd_tokens(size, *odd)
    head = None
    for group in plan(size, one=x.is_cuda):
        tile = _scan_tile(native(x), group, decay, scale, impulses, apart, head)
        if group.tokens.start > starts[group.segments.start]:
            head = _first_of_tile(tile)
        if heads is not None:
            to = native(heads)[group.segments]
            to[like(group.some, to)] = _first_values(tile)
        yield tile


def _scan_tile(
    x: Array, group: Group, decay, scale, impulses: Impulses | None, odd: OddTokens | None, head: Array | None
) -> Tile:
    quads = QUAD * group.num_blocks
    rows = native(torch.empty(QUAD, quads, dtype=torch.float64, device=getattr(x, "device", None)))
    rows[...] = _stage(x, group).reshape(quads, QUAD).T
    if isinstance(scale, Tensor) or scale != 1.0:
        rows *= _per_quad(scale, group)
    if impulses is not None:
        here = impulses.of(group)
        rows[here.place % QUAD, here.place // QUAD] += here.value
    decay = _per_quad(decay, group)
    apart = None if odd is None else _odd_quads(odd.of(group), decay, rows)
    room, rate = library(rows).empty_like(rows[0]), decay
    for c in range(QUAD - 2, -1, -1):
        rows[c] += times(rows[c + 1], decay, room)
        rate = rate * decay
    rates = [at_index(rate, slice(None, None, QUAD))] * QUAD
    if apart is not None:
        rows[0][apart.quads] = apart.y[0]
        by_place = library(rows).empty_like(rows[:, : group.num_blocks])
        by_place[...] = rates[0]
        by_place[apart.quads % QUAD, apart.quads // QUAD] = apart.through[0]
        rates = by_place
    first, through = _sum_up(rows[0], rates)
    below = _values_below(first, through, group, head if group.continues else None)
    return Tile(group, rows, decay, apart, rates, through, first, below, uniform=odd is None)


def _sum_up(quads: Array, through_quads: Any) -> tuple[Array, Any]:
    """(the first y of each block, how much of what enters the block reaches it), by those of its quads."""
    y = _by_place(quads)
    first, through = y[QUAD - 1] + 0.0, through_quads[QUAD - 1]
    for q in range(QUAD - 2, -1, -1):
        first = times(first, through_quads[q], first)
        first += y[q]
        through = through * through_quads[q]
    return first, through


def _hand_down(quads: Array, through_quads: Any, below: Array) -> Array:
    """[quads] the y past each quad's end, from the y past each block's end, which is used up."""
    y, whole = _by_place(quads), library(quads).empty_like(quads)
    to = _by_place(whole)
    to[QUAD - 1] = below
    for q in range(QUAD - 1, 0, -1):
        below = times(below, through_quads[q], below)
        below += y[q]
        to[q - 1] = below
    return whole


def _by_place(quads: Array) -> Array:
    """[quads] -> a view [4, blocks], by the place of a quad in its block."""
    return quads.reshape(-1, QUAD).T


def _finish_tile(tile: Tile, out: Array) -> Array:
    """Let what lies below each block run through its tokens; [blocks * 16] y, as `_stage` lays out x: where nothing is
    padded, that is the group's part of out. Uses the tile up.
    """
    rows, odd = tile.rows, tile.odd
    staged = out[tile.group.tokens]
    if tile.group.pads.any():
        staged = library(out).empty_like(rows, dtype=out.dtype).reshape(-1)
    to = staged.reshape(-1, QUAD)
    below = _hand_down(rows[0], tile.through_quads, tile.below)
    entering = None if odd is None else below[odd.quads]  # a copy, before it is used up
    for c in range(QUAD - 1, -1, -1):
        below = times(below, tile.decay, below)
        rows[c] += below
        to[:, c] = rows[c]  # written while it is in cache
    if odd is not None:
        ends = library(to).empty_like(to[: len(odd.quads)])
        ends[...] = (odd.y + odd.through * entering).T  # torch does not convert where it writes by an index
        to[odd.quads] = ends
    return staged


def _odd_quads(odd: OddTokens, decay: Any, rows: Array) -> OddQuads | None:
    """The quads of a tile that hold odd tokens; None where there are none."""
    if not len(odd.quads):
        return None
    quads = like(odd.quads, rows)
    y = rows[:, quads]
    rates = library(rows).empty_like(y)
    rates[...] = at_index(decay, quads)
    if odd.pads.any():
        rates[like(np.arange(QUAD)[:, None] < odd.pads, rows)] = 1.0  # so that the first y is that of the first token
    rates[like(odd.row, rows), like(odd.quad, rows)] = odd.decay
    for c in range(QUAD - 2, -1, -1):
        y[c] += rates[c] * y[c + 1]
        rates[c] = rates[c] * rates[c + 1]
    return OddQuads(quads, y, rates)


def _write(staged: Array, group: Group, out: Array, keep: Tensor | None) -> None:
    """The tokens of a group to their place in the pack, those that `keep` selects."""
    _unstage(staged, group, out)
    if keep is not None:
        blank(out[group.tokens], native(keep)[group.tokens])


def _values_below(first: Array, through: Any, group: Group, entering: Array | None) -> Array:
    """[blocks] the y past each block's end: the next block's first, or what enters the segment (default 0)."""
    if library(first) is np:
        below = _chain(first, through, group, entering, None)
        if np.isfinite(below.sum()):
            return below
    # 0 * NaN and 0 * inf are NaN: where some occur, what lies past a segment's end is left out, not multiplied by 0.
    return _chain(first, through, group, entering, like(group.behind, first))


def _chain(first: Array, through: Any, group: Group, entering: Array | None, behind: Array | None) -> Array:
    """By doubling, head_b += gain_b * head_{b+k}; gain_b *= gain_{b+k}, with gain 0 at a segment's end."""
    lib, n, longest = library(first), group.num_blocks, int(group.blocks.max())
    last = like(group.last, first)
    device = getattr(first, "device", None)
    room = native(torch.empty(3, n + longest, dtype=torch.float64, device=device))
    room[:, n:] = 0.0
    heads, gains, other = room
    heads[:n] = first
    gains[:n] = through
    if entering is not None:
        heads[last] += gains[last] * entering
    gains[last] = 0.0
    product = lib.empty_like(first)
    reach = 1
    while reach < longest:
        lib.multiply(gains[:n], heads[reach : reach + n], out=product)
        if behind is not None:
            product = lib.where(behind >= reach, product, 0.0)
        lib.multiply(gains[:n], gains[reach : reach + n], out=other[:n])
        heads[:n] += product
        gains, other = other, gains
        reach *= 2
    below = heads[1 : n + 1] + 0.0  # -0.0 becomes 0.0: its sign must not depend on how often mates make us double
    below[last] = 0.0 if entering is None else entering + 0.0
    return below


def _let_in(tile: Tile, entering: Array) -> None:
    """What enters at the segments' ends, in the y past each block's end."""
    group, below, through = tile.group, tile.below, tile.through
    # Where the segment goes on in the next group, that one's head has come in before anything entered.
    if group.continues or not tile.uniform:
        below[...] = _values_below(tile.first, through, group, entering[like(group.some, below)])
        return
    behind = like(group.behind, below)
    if isinstance(through, float):
        gain = (through ** like(np.arange(group.blocks.max(), dtype=np.float64), below))[behind]
    else:
        gain = through**behind
    below += gain * repeat(entering, group.blocks)


def _first_of_tile(tile: Tile) -> Array:
    """[1] its first y, for the group before, in which its segment goes on: nothing is padded here."""
    return tile.first[:1] + at_index(tile.through, slice(1)) * tile.below[:1]


def _first_values(tile: Tile) -> Array:
    """The y of the first token of each segment that has some."""
    group, quads, lib = tile.group, tile.rows[0], library(tile.rows)
    pads, block = group.pads[group.some], like(group.first, quads)
    row, place = like(pads % QUAD, quads), like(pads // QUAD, quads)
    below = tile.below[block]
    for q in range(QUAD - 1, 0, -1):  # what lies below the quad of the first token
        below = lib.where(place < q, quads[QUAD * block + q] + at_index(tile.through_quads[q], block) * below, below)
    quad, y = QUAD * block + place, below
    rate = at_index(tile.decay, quad)
    for c in range(QUAD - 1, -1, -1):  # runs through the tokens up to it
        y = lib.where(row <= c, rate * y, y)
    y += tile.rows[row, quad]
    if tile.odd is None:
        return y
    odd = lib.zeros_like(quads) > 0
    odd[tile.odd.quads] = True
    return lib.where(odd[quad], quads[quad] + tile.through_quads[place, block] * below, y)


def _stage(x: Array, group: Group) -> Array:
    """[blocks * 16]: the group's tokens, each segment with zeros in front up to a block's border."""
    if not group.pads.any():
        return x[group.tokens]
    if group.place is not None:
        staged = zeros(BLOCK * group.num_blocks, x)
        staged[like(group.place, x)] = x[group.tokens]
        return staged
    fronts = [zeros(pad, x) for pad in range(BLOCK)]
    parts = 2 * len(group.pads) * fronts[:1]
    parts[0::2] = map(fronts.__getitem__, group.pads.tolist())
    parts[1::2] = map(x[group.tokens].__getitem__, group.slices)
    return library(x).concatenate(parts)


def _unstage(staged: Array, group: Group, out: Array) -> None:
    """Write the tokens of the group to their place in the pack."""
    if not group.pads.any():
        return  # they are there
    if group.place is not None:
        out[group.tokens] = staged[like(group.place, staged)]
        return
    library(out).concatenate([*map(staged.__getitem__, group.slices_among_blocks)], out=out[group.tokens])


def _per_quad(value: PerSegment, group: Group) -> Any:
    """A value per segment -> one per quad of the group; a float stays a float."""
    if not isinstance(value, Tensor):
        return float(value)
    return repeat(native(value)[group.segments], QUAD * group.blocks)
