"""CPContext: what a formula sees of context parallelism (take, spread, scan), and the two strategies that run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float64, Int8, Int64, Shaped
from torch import Tensor

from cp_returns import exchange
from cp_returns.agreement import Facts, agree
from cp_returns.arrays import (
    Array,
    at_index,
    copy,
    countable,
    library,
    like,
    native,
    quiet,
    repeat,
    tensor,
    times,
    zeros,
)
from cp_returns.blocks import PerSegment
from cp_returns.clocks import Clock
from cp_returns.collectives import AllGather, alone, call
from cp_returns.errors import CPInputError
from cp_returns.groups import device_of
from cp_returns.layout import Layout
from cp_returns.masks import select_in_place
from cp_returns.scan import Odd, begin, finish, scan

Formula = Callable[..., tuple[Tensor, ...]]
Inputs = tuple[Tensor | None, ...]
PerSample = float | Float64[Tensor, " samples"]
WHERE = "CP rank"  # what an error calls a rank


def gather(cp: "CPContext", facts: Facts, formula: Formula, inputs: Inputs) -> tuple[Tensor, ...]:
    """All-gather the local inputs, run the formula on whole responses as one rank would, take own tokens back.

    Bit-exact: the same code on the same numbers for every cp_size. 4 bytes a float32 token, padded to the largest
    shard.
    """
    if cp.agreement == "full":
        nothing = torch.zeros(0, dtype=torch.uint8, device=cp.device(facts, inputs))
        agree(cp.all_gather, facts, nothing, step="agreement", where=WHERE)
    width = max(1, *cp.layout.sizes)
    whole: Inputs = inputs
    if any(x is not None for x in inputs):
        messages = call(cp.all_gather, exchange.pack_bytes(inputs, width), "gather")
        whole = tuple(exchange.unpack_bytes(messages, inputs, width, cp.layout))
    return tuple(cp.take(out) for out in formula(cp.whole(), *whole))


def carry(cp: "CPContext", facts: Facts, formula: Formula, inputs: Inputs) -> tuple[Tensor, ...]:
    """Run the formula on own pieces; its scan exchanges one float64 a piece, in the envelope of the agreement (GAE two,
    and three with another `lam_value`).

    Within 2^-23 of the sample's largest |G| of `gather` (the bound is proved in `exchange`).
    """
    return formula(replace(cp, facts=facts), *inputs)


Strategy = Callable[["CPContext", Facts, Formula, Inputs], tuple[Tensor, ...]]


@dataclass(frozen=True)
class CPContext:
    """One rank's place in a context-parallel group.

    layout: who owns which token. rank: this rank. all_gather: over the group, in rank order; default one rank.
    strategy: `gather` (default, bit-exact) or `carry` (one small message). agreement: "full" compares all input first,
    "off" trusts the caller and, on the token clock, reads nothing back from a GPU. settings: anything else that all
    ranks must hold alike.
    """

    layout: Layout
    rank: int = 0
    all_gather: AllGather = alone
    strategy: Strategy = gather
    agreement: str = "full"
    settings: Mapping[str, object] = field(default_factory=dict)
    facts: Facts | None = None  # set while `carry` runs a formula: they travel with its message

    def __post_init__(self):
        self.layout.pieces(self.rank)  # raises when the layout has no such rank
        if self.agreement not in ("full", "off"):
            raise ValueError(f"agreement is {self.agreement!r}; expected 'full' or 'off'")

    @cached_property
    def segments(self) -> np.ndarray:
        """[N * own pieces] tokens of each own piece: what the scan runs over."""
        return self.layout.segments(self.rank)[1]

    @cached_property
    def first_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(which segments have tokens, where the first of each lies in the local pack)."""
        some = np.flatnonzero(self.segments)
        return some, (np.cumsum(self.segments) - self.segments)[some]

    def take(self, full: Shaped[Tensor, " full"]) -> Shaped[Tensor, " local"]:
        """This rank's tokens of packed whole responses; a new tensor."""
        own = exchange.cut(full, self.layout, self.rank)
        return own.clone() if own is full else own

    def spread(self, per_sample: Shaped[Tensor, " samples"]) -> Shaped[Tensor, " local"]:
        """One number a sample -> one a local token."""
        return repeat(per_sample, self.layout.lengths(self.rank))

    def whole(self) -> "CPContext":
        """The context of one rank that holds every whole response as one piece."""
        return CPContext(self.layout.whole(), strategy=carry, agreement="off")

    @quiet
    def run(self, formula: Formula, inputs: Inputs, facts: Facts) -> tuple[Tensor, ...]:
        """formula(context, *inputs) by this context's strategy, after all ranks agree that their facts are well and
        equal.
        """
        if facts.problem is not None or self.layout.cp_size == 1:
            self.agree(facts)  # raises on every rank where there is a problem
        if self.layout.cp_size == 1:
            return formula(self.whole(), *inputs)
        facts = self._with_settings(facts)
        return self.strategy(self, facts, formula, inputs)

    def _with_settings(self, facts: Facts) -> Facts:
        return replace(facts, settings={**self.settings, "strategy": self.strategy.__name__, **facts.settings})

    def device(self, facts: Facts, inputs: Inputs) -> torch.device:
        return device_of(self.all_gather, *inputs, *facts.data.values())

    def scan(
        self,
        reward: "Reward",
        decay: PerSample,
        clock: Clock,
        keep: Int8[Tensor, " local"] | None,
        *,
        dtype: torch.dtype,
    ) -> Shaped[Tensor, " local"]:
        """y_j = x_j + decay^tick_j * y_next over the steps of the clock, through all pieces of all ranks.

        `keep` selects the output, by bits; None keeps all.
        """
        rate, odd = clock.decays(self.by_segment(decay), self.layout, self.rank)
        how = {"scale": self.by_segment(reward.scale), "impulse": reward.terminal, "odd": odd, "keep": keep}
        if self.holds_all:
            return scan(reward.dense, self.segments, rate, dtype=dtype, **how)
        begun = begin(reward.dense, self.segments, rate, **how)
        (first,) = self.exchange([begun.heads])
        gain = exchange.power(decay, like(clock.ticks(self.layout), first))
        entering = tensor(exchange.chain(first, gain))
        return finish(begun, entering[:, self.own].reshape(-1), dtype=dtype)

    @property
    def holds_all(self) -> bool:
        """Each response is one piece, of this rank."""
        return len(self.layout.owners) == 1

    def scan_ahead(
        self,
        reward: Float64[Tensor, " local"],
        values: Shaped[Tensor, " local"],
        decays: "list[PerSample]",
        gamma: PerSample,
        clock: Clock,
        bootstrap: "Float64[Tensor, ' samples'] | None",
        keep: Int8[Tensor, " local"] | None,
    ) -> list[Float64[Tensor, " local"]]:
        """For each decay, y_j = r_j + gamma^tick_j * V_next - V_j + decay^tick_j * y_next over the steps of the clock.

        V_next is the value of the next step, or the bootstrap after the last one. One exchange serves all decays: a
        piece looks ahead to 0, and what its last step misses, decay^tick * y_next + gamma^tick * V_next, is linear and
        arrives as one number. Uses the reward up. `keep` as in `scan`.
        """
        values, layout = countable(values), self.layout
        following = copy(values, torch.float64)
        # Where each response is whole and nothing comes after it, nothing enters anywhere.
        heads = None if self.holds_all and bootstrap is None else self._heads(following)
        own = [self.by_segment(decay) for decay in decays]
        self._discount(following, *clock.decays(self.by_segment(gamma), layout, self.rank))
        delta = native(reward)
        delta[:-1] += native(following)[1:]
        delta -= native(values)
        del following
        if heads is None:
            how = {"keep": keep, "dtype": torch.float64}
            rates = [clock.decays(decay, layout, self.rank) for decay in own]
            return [scan(reward, self.segments, rate, odd=odd, **how) for rate, odd in rates]
        rates = [clock.decays(decay, layout, self.rank, inner=True) for decay in own]
        begun = [begin(reward, self.segments, rate, odd=odd, keep=keep) for rate, odd in rates]
        firsts = [one.heads for one in begun] + [heads]
        *first, value = [native(x)[:, None] for x in firsts] if self.holds_all else self.exchange(firsts)
        end = (
            torch.zeros(layout.num_samples, dtype=torch.float64, device=values.device)
            if bootstrap is None
            else bootstrap
        )
        has_step, ticks, last = (
            like(x, value) for x in (layout.piece_lengths > 0, clock.ticks(layout), clock.last_ticks(layout))
        )
        outs = []
        for one, decay, y in zip(begun, decays, first, strict=True):
            entering = exchange.chain_ahead(
                y,
                value,
                has_step,
                exchange.power(decay, ticks - last),
                exchange.power(decay, last),
                exchange.power(gamma, last),
                native(end),
            )
            outs.append(finish(one, tensor(entering)[:, self.own].reshape(-1), dtype=torch.float64))
        return outs

    def _heads(self, x: Tensor) -> Tensor:
        """Each segment's first x, 0 of an empty one."""
        some, first = self.first_tokens
        heads = zeros(len(self.segments), native(x))
        heads[like(some, heads)] = native(x)[like(first, heads)]
        return tensor(heads)

    def _discount(self, values: Tensor, decay: PerSegment, odd: Odd | None) -> None:
        """values_{j+1} becomes what token j sees of it, decay_j * values_{j+1}; 0 past a segment's end. In place."""
        x = native(values)
        x[like(self.first_tokens[1], x)] = 0.0
        each = lambda rate: repeat(native(rate), self.segments) if isinstance(rate, Tensor) else rate
        times(x, each(decay), out=x)
        if odd is not None:
            at, rate = like(odd[0] + 1, x), each(odd[1])
            at = at[at < len(x)]
            x[at] *= at_index(rate, at)

    def agree(self, facts: Facts) -> None:
        """All ranks raise together when one has a problem or they differ; nothing is exchanged besides."""
        if self.layout.cp_size == 1 or self.agreement == "off":
            problem = facts.first_problem() if self.agreement == "full" else facts.problem
            if problem is not None:
                raise CPInputError(str(problem))
            return
        facts = self._with_settings(facts)
        nothing = torch.zeros(0, dtype=torch.uint8, device=self.device(facts, ()))
        agree(self.all_gather, facts, nothing, step="agreement", where=WHERE)

    @property
    def own(self) -> list[int]:
        return self.layout.pieces(self.rank).tolist()

    def exchange(self, heads: list[Float64[Tensor, " segments"]]) -> list[Array]:
        """All ranks' numbers of all pieces, agreement included."""
        numbers = heads[0] if len(heads) == 1 else torch.stack(heads, dim=-1)
        message = numbers.view(self.layout.num_samples, len(self.own), len(heads))
        if self.agreement == "full" and self.facts is not None:
            messages = agree(self.all_gather, self.facts, message, step="carry", where=WHERE)
        else:
            messages = call(self.all_gather, message, "carry")
        return exchange.by_piece(messages, self.layout)

    def by_segment(self, value: PerSample) -> "float | Tensor":
        """One number a sample -> one an own piece; a float stays a float."""
        if not isinstance(value, Tensor):
            return float(value)
        return value.to(torch.float64).repeat_interleave(len(self.own))

    def terminal(self, last: Int64[Tensor, " samples"], rewards: Float64[Tensor, " samples"]) -> tuple[Tensor, Tensor]:
        """Each sample's reward as an impulse on its `last` valid token, -1 where there is none: (offset, value) per
        own piece, 0 elsewhere.
        """
        x, at, own = native(rewards), native(last)[:, None], self.layout.pieces(self.rank)
        low, high = like(self.layout.cuts[:, own], x), like(self.layout.cuts[:, own + 1], x)
        here = (low <= at) & (at < high)
        offset, value = library(x).where(here, at - low, 0), library(x).where(here, x[:, None], 0.0)
        return tensor(offset.reshape(-1)), tensor(value.reshape(-1))


@dataclass(frozen=True)
class Reward:
    """r_j = scale * dense_j on valid tokens, plus one terminal impulse a sample; float64 where it is used, tile by
    tile.
    """

    dense: Tensor
    scale: PerSample = 1.0
    terminal: tuple[Tensor, Tensor] | None = None

    def tokens(self, cp: CPContext, keep: Int8[Tensor, " local"] | None) -> Float64[Tensor, " local"]:
        """Written out in float64, for a formula that needs it token by token."""
        tokens = copy(self.dense, torch.float64)
        x = native(tokens)
        x *= native(cp.spread(self.scale)) if isinstance(self.scale, Tensor) else self.scale
        select_in_place(tokens, keep)
        if self.terminal is not None:
            offset, value = map(native, self.terminal)
            some, first = (like(index, x) for index in cp.first_tokens)
            x[offset[some] + first] += value[some]  # one a segment: no place twice
        return tokens
