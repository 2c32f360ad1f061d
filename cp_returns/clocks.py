"""The three clocks of a mask: which tokens are steps of the process, and after which of them the discount applies.

token      every response token is a step, and ticks                     REINFORCE++ of slime and OpenRLHF
trainable  valid tokens are steps, and tick                              GAE of verl, NeMo-RL and miles
turn       valid tokens are steps; the last of a run of them ticks       one discount a turn
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int8
from torch import Tensor

from cp_returns.arrays import Array, library, like, native, tensor
from cp_returns.exchange import cut
from cp_returns.layout import Layout
from cp_returns.masks import Prefix, turn_ends
from cp_returns.scan import as_bits

CLOCKS = ("token", "trainable", "turn")


def clock(layout: Layout, rank: int, full_mask: Prefix, kind: str, keep: Int8[Tensor, " local"]) -> "Clock":
    """One rank's clock; `keep` is its own part of the mask."""
    if kind == "token":
        return Clock(layout, rank, full_mask, keep)
    if kind == "trainable":
        return Clock(layout, rank, full_mask, keep, keep, keep, full_mask)
    full_tick = turn_ends(full_mask.mask, layout.response_lengths)
    return Clock(layout, rank, full_mask, keep, keep, as_bits(cut(full_tick, layout, rank)), Prefix(full_tick))


@dataclass(frozen=True)
class Clock:
    """`keep`: this rank's valid tokens. `step` and `tick`: its steps and ticks, None for every token.

    Of each piece of each sample, on any rank, the counts are known from layout and mask alone: [N, K] arrays.
    """

    layout: Layout
    rank: int
    full_mask: Prefix
    keep: Int8[Tensor, " local"]
    step: Int8[Tensor, " local"] | None = None
    tick: Int8[Tensor, " local"] | None = None
    full_tick: Prefix | None = None

    @cached_property
    def _cuts(self) -> Array:
        """[N, K + 1] the cuts in the full pack."""
        return like(self.layout.cuts + self.layout.starts[:, None], native(self.keep))

    @cached_property
    def _valid(self) -> Array:
        """[N, K] valid tokens of each piece."""
        return self._counts(self.full_mask)

    def _counts(self, prefix: Prefix) -> Array:
        upto = prefix.before(self._cuts.reshape(-1)).reshape(self._cuts.shape)
        return upto[:, 1:] - upto[:, :-1]

    @cached_property
    def ticks(self) -> Array:
        """[N, K] how often the decay applies within each piece, its last step included."""
        if self.full_tick is None:
            return self._lengths
        return self._valid if self.full_tick is self.full_mask else self._counts(self.full_tick)

    @property
    def _lengths(self) -> Array:
        return self._cuts[:, 1:] - self._cuts[:, :-1]

    @cached_property
    def has_step(self) -> Array:
        """[N, K] does the piece hold a step?"""
        return (self._lengths if self.step is None else self._valid) > 0

    @cached_property
    def last_tick(self) -> Array:
        """[N, K] 1 where the decay applies after the piece's last step; 0 without a step."""
        if self.full_tick is None or self.full_tick is self.full_mask:
            return self.has_step * 1
        before = self.full_mask.before(self._cuts[:, 1:].reshape(-1))
        last = self.full_mask.place(before)
        ticks = self.full_tick.before(last + 1) - self.full_tick.before(last)
        return ticks.reshape(self.has_step.shape) * self.has_step

    @cached_property
    def inner_tick(self) -> Int8[Tensor, " local"]:
        """The ticks without those of each piece's last step: what enters the piece there has been decayed already."""
        lengths = self.layout.piece_lengths[:, self.layout.pieces(self.rank)].ravel()
        lengths = lengths[lengths > 0]
        ends = like(np.cumsum(lengths), native(self.keep))
        starts = ends - like(lengths, native(self.keep))
        if self.step is None or self.tick is None:
            ticks, last = torch.full_like(self.keep, -1), ends - 1
        else:
            prefix, ticks = Prefix(self.keep.bool()), self.tick.clone()
            before = prefix.before(ends)
            some = before > prefix.before(starts)
            # A piece without steps has no tick either: its first token changes nothing.
            last = library(ends).where(some, prefix.place(before), starts)
        return ticks.index_fill_(0, tensor(last), 0)
