"""The three clocks of a mask: which tokens are steps of the process, and after which of them the discount applies.

token      every response token is a step, and ticks                     REINFORCE++ of slime and OpenRLHF
trainable  valid tokens are steps, and tick                              GAE of verl, NeMo-RL and miles
turn       valid tokens are steps; the last of a run of them ticks       one discount a turn

Where only valid tokens are steps, the others are left out of the pack before anything is exchanged or summed: the
trainable clock is the token clock of what is left. How many are left, and where turns end, is read from a GPU.
"""

from dataclasses import dataclass

import numpy as np

from cp_returns.blocks import PerSegment
from cp_returns.layout import Layout
from cp_returns.masks import Prefix, places, turn_ends
from cp_returns.scan import Odd

CLOCKS = ("token", "trainable", "turn")


@dataclass(frozen=True)
class Clock:
    """When the decay applies between a step and the next: always, or at the end of a turn only.

    turns: where turns end in the pack of all steps, ascending host integers; None: every step ticks. The layouts are
    those of the steps.
    """

    turns: np.ndarray | None = None

    def ticks(self, layout: Layout) -> np.ndarray:
        """[N, K] how often the decay applies within each piece, its last step included."""
        if self.turns is None:
            return layout.piece_lengths
        return np.diff(np.searchsorted(self.turns, layout.bounds))

    def last_ticks(self, layout: Layout) -> np.ndarray:
        """[N, K] 1 where the decay applies after the piece's last step; 0 without a step."""
        some = layout.piece_lengths > 0
        if self.turns is None:
            return some * 1
        ends = layout.bounds[:, 1:]
        return (np.searchsorted(self.turns, ends) - np.searchsorted(self.turns, ends - 1)) * some

    def decays(
        self, decay: PerSegment, layout: Layout, rank: int, *, inner: bool = False
    ) -> tuple[PerSegment, Odd | None]:
        """(decay, odd) of this rank's steps, for the scan. inner: without that of a piece's last step, where what
        enters has been decayed already.
        """
        if self.turns is None and not inner:
            return decay, None
        first, lengths = layout.segments(rank)
        ends = np.cumsum(lengths)
        if self.turns is None:
            return decay, (ends[lengths > 0] - 1, 1.0)
        low = np.searchsorted(self.turns, first)
        count = np.searchsorted(self.turns, first + lengths - inner * (lengths > 0)) - low
        nth = np.arange(count.sum()) + np.repeat(low - (np.cumsum(count) - count), count)
        return 1.0, (self.turns[nth] - np.repeat(first - (ends - lengths), count), decay)


def valid_steps(layout: Layout, full_mask: Prefix, kind: str) -> tuple[Layout, Clock]:
    """The layout of the valid tokens alone, and their clock (trainable or turn)."""
    cuts, ends = layout.bounds, np.zeros(0, dtype=np.int64)
    if kind == "turn":
        ends = places(turn_ends(full_mask.mask, layout.response_lengths))
    before = full_mask.on_host(np.concatenate([cuts.ravel(), ends]))
    upto = before[: cuts.size].reshape(cuts.shape)
    return layout.of_steps(upto - upto[:, :1]), Clock(before[cuts.size :] if kind == "turn" else None)
