"""The whole call, lists in and lists out, against one all-reduce a sample; on gloo processes, one thread a rank.

    python scripts/bench_exchange.py [--quick] [--out DIR]

Every call gets a batch that was never seen before, made outside the clock; agreement is on; a round is as slow as its
slowest rank. All contenders have passed the gate: the serial float64 oracle's numbers on a batch of the same kind.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import bench_common as common
import numpy as np
import torch
import torch.distributed as dist
from bench_common import Row, at_least, at_most
from bench_scan import EXACT, SINGLE, chunked_matmul
from count_messages import Echo
from torch import Tensor

from cp_returns import ContextParallelReturns, CPContext, ReturnsConfig, reference, reverse_scan, zigzag
from cp_returns.blocks import plan
from cp_returns.simulate import RankFailure, in_processes, in_threads

GAMMA, LAM, KL_COEF = 0.999, 0.95, 0.01
STRATEGIES = ("carry", "gather")
WHOLE_CALL = {  # W: times today's practice, at least, and what is hoped for
    2: {"carry": (12, 15), "gather": (8, None)},
    4: {"carry": (25, 32), "gather": (14, None)},
}
CPU_MS = {2: {"carry": 2.5, "gather": 3.5}, 4: {"carry": 1.7, "gather": 3.5}}
PLAN_MS = 0.2


@dataclass(frozen=True)
class Inputs:
    """What one rank's actor holds: shards of per-token tensors, whole masks, one reward a sample."""

    total: list[int]
    response: list[int]
    masks: list[Tensor]
    rewards: list[float]
    kl: list[Tensor]
    values: list[Tensor]

    @property
    def shared(self) -> dict[str, Any]:
        lengths = {"total_lengths": self.total, "response_lengths": self.response}
        return {"kl": self.kl, "rewards": self.rewards, "loss_masks": self.masks, **lengths}


@dataclass(frozen=True)
class Kind:
    """A kind of batch; each seed makes one, the same on every rank."""

    samples: int
    longest: int
    equal: bool = False  # all of the longest length

    def __str__(self) -> str:
        return f"{self.samples} x {self.longest:,}" if self.equal else f"{self.samples} ragged to {self.longest:,}"

    def make(self, seed: int, rank: int, cp_size: int) -> Inputs:
        r = common.rng(seed)
        response = [self.longest] * self.samples if self.equal else common.ragged(self.samples, self.longest, seed)
        total = (np.array(response) + r.integers(10, 500, self.samples)).tolist()
        tokens, layout = sum(response), zigzag(total, response, cp_size)
        own, sizes = layout.index(rank), layout.lengths(rank).tolist()
        shard = lambda full: [x.clone() for x in torch.from_numpy(full[own]).split(sizes)]
        kl, values = (r.standard_normal(tokens, dtype=np.float32) for _ in range(2))
        mask = common.gaps(tokens, seed)
        mask[torch.from_numpy(layout.starts)] = True  # today's practice fails on a response without a valid token
        masks = [x.clone() for x in mask.split(response)]
        return Inputs(total, response, masks, r.standard_normal(self.samples).tolist(), shard(kl), shard(values))


Call = Callable[[Inputs], Any]


@cache
def config_of(strategy: str, estimator: str, whiten: bool) -> ReturnsConfig:
    """As an actor builds it: once."""
    options = {"gamma": GAMMA, "kl_coef": KL_COEF, "strategy": strategy, "whiten": whiten}
    return ReturnsConfig(estimator=estimator, **options, **({"lam": LAM} if estimator == "gae" else {}))


def our_call(group: Any, strategy: str, *, estimator: str = "reinforce_plus_plus", whiten: bool = False) -> Call:
    """The call of an actor. group: a process group, or a stand-in for one."""
    gae = estimator == "gae"
    returns_fn = ContextParallelReturns(config_of(strategy, estimator, whiten), cp_group=group, dp_cp_group=group)

    def call(inputs: Inputs):
        out = returns_fn(**inputs.shared, **({"values": inputs.values} if gae else {}))
        return out.advantages if gae or whiten else out.returns

    return call


def practice(group: dist.ProcessGroup, rank: int, cp_size: int) -> Call:
    """Today's whole step: each response zero-padded to its whole length and all-reduced on its own, rewards, a padded
    rectangle, the chunked matmul, and this rank's two slices of every response.
    """

    def call(inputs: Inputs) -> list[Tensor]:
        spans, rewards = [], []
        for i, (total, n) in enumerate(zip(inputs.total, inputs.response, strict=True)):
            piece = -(-total // (2 * cp_size))
            cut = lambda p, prompt=total - n, n=n, piece=piece: min(max(p * piece - (prompt - 1), 0), n)
            own = [(cut(p), cut(p + 1)) for p in (rank, 2 * cp_size - 1 - rank)]
            (a, b), (c, d) = own
            x, zeros = inputs.kl[i], lambda size: torch.zeros(size)
            whole = torch.cat([zeros(a), x[: b - a], zeros(c - b), x[b - a :], zeros(n - d)])
            dist.all_reduce(whole, group=group)
            reward = -KL_COEF * whole * inputs.masks[i]
            reward[inputs.masks[i].nonzero()[-1]] += inputs.rewards[i]
            rewards.append(reward)
            spans.append(own)
        returns = chunked_matmul(torch.cat(rewards), inputs.response).split(inputs.response)
        return [torch.cat([g[a:b] for a, b in own]) for g, own in zip(returns, spans, strict=True)]

    return call


# ---- the gate


def expected(kind: Kind, seed: int, rank: int, cp_size: int, *, gae: bool, whiten: bool) -> Tensor:
    """This rank's tokens of the serial float64 oracle's result, packed."""
    batch = kind.make(seed, 0, 1)
    out = []
    for i, mask in enumerate(batch.masks):
        given = (batch.kl[i].tolist(), batch.rewards[i])
        if gae:
            values = batch.values[i].tolist()
            numbers = {"gamma": GAMMA, "lam": LAM, "kl_coef": KL_COEF}
            out += reference.gae(*given, values, mask.tolist(), **numbers)[0]
        else:
            out += reference.reinforce_plus_plus(*given, mask.tolist(), gamma=GAMMA, kl_coef=KL_COEF)
    if whiten:
        out = reference.whiten(out, torch.cat(batch.masks).tolist())
    layout = zigzag(batch.total, batch.response, cp_size)
    return torch.tensor(out, dtype=torch.float64)[torch.from_numpy(layout.index(rank))]


@dataclass(frozen=True)
class Contender:
    """make(group, rank, cp_size) -> its call."""

    name: str
    make: Callable[[Any, int, int], Call]
    gae: bool = False
    whiten: bool = False
    bits: float = EXACT - 1  # two roundings, or carry's bound


def of_library(strategy: str, **options: Any) -> Contender:
    make = lambda group, rank, cp_size: our_call(group, strategy, **options)
    whiten, gae = options.get("whiten", False), options.get("estimator") == "gae"
    name = f"{'GAE' if gae else 'REINFORCE++'}, {strategy}" if whiten else strategy
    # Whitening compares numbers near 0 with the largest of the sample: 1e-6 of it.
    return Contender(name, make, gae, whiten, bits=20 if whiten else EXACT - 1)


PRACTICE = Contender("one all-reduce a sample", practice, bits=SINGLE)


def gate(contender: Contender, call: Call, kind: Kind, seed: int, rank: int, cp_size: int) -> None:
    inputs = kind.make(seed, rank, cp_size)
    got = torch.cat(call(inputs))
    layout = zigzag(inputs.total, inputs.response, cp_size)
    mask = torch.cat(inputs.masks)[torch.from_numpy(layout.index(rank))]
    exact = expected(kind, seed, rank, cp_size, gae=contender.gae, whiten=contender.whiten)
    got = torch.where(mask, got, 0.0)  # today's practice leaves numbers at masked tokens
    sizes = [int(layout.lengths(rank).sum())]  # the largest number of the rank, not of a shard of a few tokens
    common.check(f"{contender.name} on rank {rank} of {cp_size}", got, exact, sizes, contender.bits)


# ---- the parts


def race(contenders: list[Contender], kind: Kind, cp_size: int, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every contender in each round, that of the slowest rank: strictly alternating, on gloo processes."""
    few = Kind(min(kind.samples, 16), kind.longest, kind.equal)
    common.say(f"{', '.join(c.name for c in contenders)} on {kind}, W = {cp_size}")

    def of_rank(rank: int, all_gather) -> list[list[float]]:
        group = all_gather.cp_group
        calls = [contender.make(group, rank, cp_size) for contender in contenders]
        for contender, call in zip(contenders, calls, strict=True):
            gate(contender, call, few, 10**6, rank, cp_size)
        seconds = [[] for _ in calls]
        with common.quiet():
            for i in range(rounds + 1):
                for k, call in enumerate(calls):
                    inputs = kind.make(i * len(calls) + k, rank, cp_size)
                    dist.barrier(group)
                    seconds[k].append(common.timed(partial(call, inputs)))
        return [times[1:] for times in seconds]

    try:
        results = np.array(in_processes(of_rank, cp_size, timeout=600.0))
    except RankFailure as failure:
        error = failure.outcomes[failure.first].error
        raise error if isinstance(error, common.Red) else failure from None
    return dict(zip([c.name for c in contenders], results.max(axis=0), strict=True))


def ratio(slow: np.ndarray, fast: np.ndarray) -> float:
    return float(np.median(slow / fast))


def whole_call(kind: Kind, cp_size: int, rounds: int) -> list[Row]:
    seconds = race([PRACTICE, *map(of_library, STRATEGIES)], kind, cp_size, rounds)
    part = f"whole call, {kind}, W = {cp_size}"
    rows = [Row(part, name, 1e3 * common.median(s), "ms", note=common.noisy(s)) for name, s in seconds.items()]
    for name in STRATEGIES:
        least, hope = WHOLE_CALL[cp_size][name]
        note = f"stretch {hope}" if hope else ""
        times = ratio(seconds[PRACTICE.name], seconds[name])
        rows.append(Row(part, f"{PRACTICE.name} / {name}", times, "times", at_least(least), note))
    return rows


def whitened(kind: Kind, rounds: int) -> list[Row]:
    """GAE on the trainable clock against REINFORCE++ on the token clock."""
    contenders = [
        of_library(strategy, estimator=estimator, whiten=True)
        for strategy in STRATEGIES
        for estimator in ("reinforce_plus_plus", "gae")
    ]
    seconds = race(contenders, kind, 2, rounds)
    part = f"with whitening, {kind}, W = 2"
    rows = [Row(part, name, 1e3 * common.median(s), "ms", note=common.noisy(s)) for name, s in seconds.items()]
    for strategy in STRATEGIES:
        times = ratio(seconds[f"GAE, {strategy}"], seconds[f"REINFORCE++, {strategy}"])
        rows.append(Row(part, f"GAE / REINFORCE++, {strategy}", times, "times", at_most(2)))
    return rows


@dataclass
class Recording:
    """An all-gather that keeps what it returned."""

    all_gather: Any
    returned: list[Tensor] = field(default_factory=list)
    rank = property(lambda self: self.all_gather.rank)
    size = property(lambda self: self.all_gather.size)

    def __call__(self, x: Tensor) -> Tensor:
        self.returned.append(self.all_gather(x))
        return self.returned[-1]


@dataclass
class Replay:
    """Gives back what a recorded all-gather returned: the same call without its collectives."""

    rank: int
    size: int
    returned: list[Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.returned.pop(0)


def without_collective(kind: Kind, cp_size: int, rounds: int) -> list[Row]:
    """CPU time of the slowest rank, on what the other ranks really sent; and of that, the plan."""
    seconds: Mapping[str, list[float]] = {name: [] for name in (*STRATEGIES, "planning")}
    with common.quiet():
        for i in range(rounds + 1):
            for strategy in STRATEGIES:

                def record(rank: int, all_gather, strategy=strategy, i=i) -> tuple[list[Tensor], list[Tensor]]:
                    recording = Recording(all_gather.cp)
                    out = our_call(recording, strategy)(kind.make(i, rank, cp_size))
                    return recording.returned, out

                ranks = []
                for rank, (returned, out) in enumerate(in_threads(record, cp_size)):
                    call, inputs = our_call(Replay(rank, cp_size, [*returned]), strategy), kind.make(i, rank, cp_size)
                    ranks.append(common.timed(partial(call, inputs), time.thread_time))
                    again = our_call(Replay(rank, cp_size, returned), strategy)(inputs)
                    if not torch.equal(torch.cat(again), torch.cat(out)):
                        raise common.Red(f"{strategy}: rank {rank} of {cp_size} is not itself without the collective.")
                seconds[strategy].append(max(ranks))
            batch = kind.make(i, 0, cp_size)
            seconds["planning"].append(common.timed(partial(planned, batch, cp_size), time.thread_time))
    limits = CPU_MS[cp_size] | {"planning": PLAN_MS}
    part = f"CPU of the slowest rank without the collective, {kind}, W = {cp_size}"
    return [
        Row(part, name, 1e3 * common.median(s[1:]), "ms", at_most(limits[name]), common.noisy(s[1:]))
        for name, s in seconds.items()
    ]


def planned(batch: Inputs, cp_size: int):
    """From the lengths to the blocks of the scan: all index arithmetic of a first-seen batch."""
    cp = CPContext(zigzag(batch.total, batch.response, cp_size))
    return cp.layout.lengths(0), cp.layout.starts, list(plan(cp.segments))


def one_rank(kind: Kind, rounds: int, *, scan: bool) -> list[Row]:
    """W = 1 through ContextParallelReturns, everything checked, beside the bare scan of packed tokens."""
    call = our_call(None, "gather")
    gate(of_library("gather"), call, Kind(8, 256, equal=True), 10**6, 0, 1)
    ours, bare = [], []
    with common.quiet():
        for i in range(rounds + 1):
            batch, packed = kind.make(2 * i, 0, 1), torch.cat(kind.make(2 * i + 1, 0, 1).kl)
            ours.append(common.timed(partial(call, batch), time.thread_time))
            bare.append(common.timed(partial(reverse_scan, packed, batch.response, GAMMA), time.thread_time))
    ours, bare = np.array(ours[1:]), np.array(bare[1:])
    part = f"W = 1 through ContextParallelReturns, {kind}"
    if not scan:
        return [Row(part, "whole call", 1e3 * common.median(ours), "ms", at_most(0.5), common.noisy(ours))]
    ns = 1e9 / (kind.samples * kind.longest)
    return [
        Row(part, "whole call", ns * common.median(ours), "ns/token", at_most(9), common.noisy(ours)),
        Row(part, "bare scan", ns * common.median(bare), "ns/token", None, common.noisy(bare)),
        Row(part, "whole call / bare scan", ratio(ours, bare), "times", at_most(1.5)),
    ]


def call_of_one(strategy: str, kind: Kind, cp_size: int) -> Callable[[], Any]:
    """One rank's call, without the others."""
    return partial(our_call(Echo(cp_size), strategy), kind.make(0, 0, cp_size))


def memory(kind: Kind, cp_size: int) -> list[Row]:
    """Most memory that one rank's call adds, its results included; peers that say what it says stand in for them."""
    batch, full = kind.make(0, 0, cp_size), kind.samples * kind.longest
    shard = 4 * sum(len(x) for x in batch.kl)
    peak = {s: common.peak_bytes(call_of_one, s, kind, cp_size) for s in STRATEGIES}
    part = f"peak extra memory, {kind}, W = {cp_size}"
    told = f"{peak['carry'] / 1e6:.2f} MB: a shard is {shard / 1e6:.2f} MB, the full mask {full / 1e6:.2f} MB"
    shards = (peak["carry"] - full) / shard
    return [
        Row(part, "carry, less 1 byte a full token", shards, "local shards", at_most(6), told),
        Row(part, "gather", peak["gather"] / full, "bytes a full token", at_most(24)),
    ]


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    few, rounds = (16, 3) if quick else (1, 31)
    batch = Kind(64 // few, 8192 // few)
    rows = []
    for cp_size in WHOLE_CALL:
        rows += whole_call(batch, cp_size, rounds)
    for cp_size in WHOLE_CALL:
        rows += without_collective(batch, cp_size, rounds)
    rows += one_rank(Kind(512 // few, 4096 // few, equal=True), rounds, scan=True)
    rows += one_rank(Kind(8, 256, equal=True), rounds, scan=False)
    rows += whitened(Kind(64 // few, 8192 // few, equal=True), rounds)
    return rows + memory(Kind(8, 131_072 // few, equal=True), 8)


if __name__ == "__main__":
    raise SystemExit(common.run("bench_exchange", __doc__, measure))
