"""The scan against what is used in its place, on one thread: ns a token, ratios, memory.

    python scripts/bench_scan.py [--quick] [--out DIR]

All contenders take packed float32 tokens and give packed float32 tokens, and have passed the gate on that very batch:
within float32 rounding of the serial float64 oracle. gamma is .999.
"""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import bench_common as common
import numpy as np
import torch
from bench_common import Row, Target, at_least, at_most
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cp_returns import reverse_scan
from cp_returns.masks import turn_ends
from cp_returns.reference import clock_of, discounted

GAMMA = 0.999
CHUNK = 128
EXACT = 23  # bits: accumulated in float64 and rounded once
SINGLE = 13  # bits: some 1 / (1 - gamma) roundings to float32 add up


@dataclass(frozen=True)
class Batch:
    """Packed responses, and for the clocks a mask with gaps."""

    name: str
    lengths: list[int]
    seed: int = 0

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def x(self) -> Tensor:
        return torch.from_numpy(common.rng(self.seed).standard_normal(self.tokens, dtype=np.float32))

    @cached_property
    def mask(self) -> Tensor:
        return common.gaps(self.tokens, self.seed)

    @cached_property
    def padded_over_real(self) -> float:
        return len(self.lengths) * max(self.lengths) / self.tokens

    def head(self, tokens: int) -> "Batch":
        """The first responses, of that many tokens together at most (a first one that is longer is cut)."""
        kept = [n for n, upto in zip(self.lengths, np.cumsum(self.lengths), strict=True) if upto <= tokens]
        part = Batch(self.name, kept or [tokens], self.seed)
        part.__dict__["x"] = self.x[: part.tokens]
        return part

    def exact(self, clock: str = "token") -> list[float]:
        """The serial float64 oracle."""
        out = []
        for x, mask in zip(self.x.split(self.lengths), self.mask.split(self.lengths), strict=True):
            # Of ten million tokens `clock_of` takes a minute to say that each is a step.
            how = ([True] * len(x), [1] * len(x)) if clock == "token" else clock_of(mask.tolist(), clock)
            out += discounted(x.tolist(), GAMMA, *how)
        return out


# ---- contenders


def ours(x: Tensor, lengths: list[int]) -> Tensor:
    return reverse_scan(x, lengths, GAMMA)


def masked(x: Tensor, lengths: list[int]) -> Tensor:
    """On the trainable clock, a mask with gaps."""
    return reverse_scan(x, lengths, GAMMA, step=common.gaps(len(x)))


def loop_over_tokens(x: Tensor, lengths: list[int]) -> Tensor:
    """A Python loop over tensor elements, sample by sample."""
    out = torch.empty_like(x)
    for row, to in zip(x.split(lengths), out.split(lengths), strict=True):
        y = row.new_zeros(())
        for j in range(len(row) - 1, -1, -1):
            y = row[j] + GAMMA * y
            to[j] = y
    return out


def loop_over_floats(x: Tensor, lengths: list[int]) -> Tensor:
    """The same loop on Python floats."""
    out = []
    for row in x.split(lengths):
        values, y = row.tolist(), 0.0
        for j in range(len(values) - 1, -1, -1):
            y = values[j] + GAMMA * y
            values[j] = y
        out += values
    return torch.tensor(out)


def loop_over_steps(x: Tensor, lengths: list[int]) -> Tensor:
    """One vector operation a time step for all samples of a right-padded rectangle."""
    rows = pad_sequence(list(x.split(lengths)))  # [T, N]
    out, y = torch.empty_like(rows), torch.zeros_like(rows[0])
    for t in range(len(rows) - 1, -1, -1):
        y = rows[t] + GAMMA * y
        out[t] = y
    return unpad(out.T, lengths)


def lfilter(x: Tensor, lengths: list[int]) -> Tensor:
    """scipy's serial filter in float64, sample by sample, on the reversed tokens."""
    from scipy.signal import lfilter as filtered

    rows = [filtered([1.0], [1.0, -GAMMA], row.numpy()[::-1].astype(np.float64))[::-1] for row in x.split(lengths)]
    return torch.from_numpy(np.concatenate(rows).astype(np.float32))


def chunked_matmul(x: Tensor, lengths: list[int]) -> Tensor:
    """Today's practice: the reversed, right-padded rectangle in chunks of 128; a float32 matmul with the matrix of
    gamma powers scans every chunk, a loop over the chunks carries the last value on.
    """
    rows = pad_sequence(list(x.split(lengths)), batch_first=True)
    width = rows.shape[1]
    rows = torch.nn.functional.pad(rows.flip(1), (0, -width % CHUNK)).view(len(lengths), -1, CHUNK)
    steps = torch.arange(CHUNK)
    ahead = steps[None, :] - steps[:, None]
    powers = torch.where(ahead >= 0, GAMMA ** ahead.clamp(min=0).float(), 0.0)
    scanned = rows @ powers
    decays = GAMMA ** (steps + 1).float()
    y = scanned.new_zeros(len(lengths), 1)
    for c in range(scanned.shape[1]):
        scanned[:, c] += y * decays
        y = scanned[:, c, -1:]
    return unpad(scanned.view(len(lengths), -1)[:, :width].flip(1), lengths)


def torchrl_gae(x: Tensor, lengths: list[int]) -> Tensor:
    """torchrl's vectorised GAE on the right-padded rectangle, with lambda 1 and no values: rewards to go."""
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    rewards = pad_sequence(list(x.split(lengths)), batch_first=True)[..., None]
    values, done = torch.zeros_like(rewards), torch.zeros(rewards.shape, dtype=torch.bool)
    advantages, _ = vec_generalized_advantage_estimate(GAMMA, 1.0, values, values, rewards, done, done)
    return unpad(advantages[..., 0], lengths)


def unpad(rows: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])


@dataclass(frozen=True)
class Contender:
    """cap: tokens that it is given at most, so that a slow one ends; its cost a token does not depend on more."""

    name: str
    fn: Callable[[Tensor, list[int]], Tensor]
    bits: int = SINGLE
    cap: int = 10**9


CONTENDERS = [
    Contender("128-chunk matmul, padded", chunked_matmul),
    Contender("scipy lfilter, float64", lfilter, EXACT),
    Contender("per-step loop, padded", loop_over_steps),
    Contender("per-token loop, floats", loop_over_floats, EXACT, 500_000),
    Contender("per-token loop, tensors", loop_over_tokens, cap=8192),
]
TORCHRL = Contender("torchrl vectorised GAE, padded", torchrl_gae, cap=32_768)


# ---- the parts

# The processor's time of the one thread: what else the machine does disturbs it least.
alternate = partial(common.alternate, clock=time.thread_time)


@dataclass(frozen=True)
class Case:
    """A batch and its targets: ns a token of ours, and others' time over ours."""

    batch: Batch
    ns: Target | None = None
    matmul: Target | None = None
    loop: Target | None = None


def cases(quick: bool) -> list[Case]:
    few = 64 if quick else 1
    return [
        Case(Batch("1 x 1,024", [1024]), loop=at_least(22)),
        Case(Batch("8 x 4,096", [4096 // few] * 8), loop=at_least(357)),
        Case(Batch("8 x 1,024", [1024] * 8), matmul=at_least(1.5)),
        Case(Batch("256 ragged to 8,192", common.ragged(256 // few, 8192 // few)), matmul=at_least(3)),
        Case(Batch("8 ragged to 131,072", common.ragged(8, 131_072 // few)), matmul=at_least(6)),
        Case(
            Batch("512 skewed to 32,768", common.skewed(512 // few, 32_768 // few)),
            ns=at_most(6),
            matmul=at_least(10),
        ),
    ]


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    budget = 0.0 if quick else 1.0
    rows = [row for case in cases(quick) for row in compare(case, budget, cap=1024 if quick else 10**9)]
    return rows + clocks(cases(quick)[-1].batch, budget) + long_response(10_000 if quick else 1_000_000, budget)


def compare(case: Case, budget: float, cap: int) -> list[Row]:
    """Ours and every contender on one batch; contenders get `cap` tokens at most."""
    batch = case.batch
    common.say(batch.name)
    exact = batch.exact()
    common.check("reverse_scan", ours(batch.x, batch.lengths), exact, batch.lengths, EXACT)
    check_mates(batch)
    found = importlib.util.find_spec("torchrl") is not None
    rows, own, ratios = [], [], {}
    for contender in [*CONTENDERS, *([TORCHRL] if found else [])]:
        part = batch.head(min(contender.cap, cap))
        theirs = partial(contender.fn, part.x, part.lengths)
        wanted = exact if part.tokens == batch.tokens else part.exact()
        common.check(contender.name, theirs(), wanted, part.lengths, contender.bits)
        pairs = alternate(partial(ours, batch.x, batch.lengths), theirs, budget=budget)
        own += pairs.ours
        ratio = ratios[contender] = pairs.ratio * batch.tokens / part.tokens
        some = f", on {part.tokens:,} tokens" if part.tokens < batch.tokens else ""
        note = f"{common.number(ratio)}x ours{some} {common.noisy(pairs.theirs)}"
        rows.append(per_token(batch.name, contender.name, pairs.theirs, part.tokens, note=note))
    if not found:
        rows.append(Row(batch.name, TORCHRL.name, None, "ns/token", note="torchrl is not installed"))
    room = torch.empty_like(batch.x)
    copies = alternate(partial(ours, batch.x, batch.lengths), partial(room.copy_, batch.x), budget=budget)
    rows.append(per_token(batch.name, "floor: one copy of the tokens", copies.theirs, batch.tokens))
    rows.insert(0, per_token(batch.name, "cp_returns.reverse_scan", own, batch.tokens, case.ns, common.noisy(own)))
    for contender, target in ((CONTENDERS[0], case.matmul), (CONTENDERS[-1], case.loop)):
        if target:
            rows.append(Row(batch.name, f"{contender.name} / ours", ratios[contender], "times", target))
    rows.append(Row(batch.name, "padded / real tokens", batch.padded_over_real, "times"))
    return rows + memory(batch)


def per_token(part: str, what: str, seconds: list[float], tokens: int, target=None, note: str = "") -> Row:
    return Row(part, what, 1e9 * common.median(seconds) / tokens, "ns/token", target, note.strip())


def call_of(fn: Callable[[Tensor, list[int]], Tensor], name: str, lengths: list[int]) -> Callable[[], Tensor]:
    """fn on a batch that is made where this runs: in the child whose memory is measured."""
    return partial(fn, Batch(name, lengths).x, lengths)


def memory(batch: Batch) -> list[Row]:
    """Most memory that one call adds, its result included, beside the input's size."""
    rows = []
    if batch.tokens < 100_000:
        return rows  # too small to be told from the interpreter's own
    for name, fn in (("cp_returns.reverse_scan", ours), ("128-chunk matmul", chunked_matmul)):
        peak = common.peak_bytes(call_of, fn, batch.name, batch.lengths)
        size = 4 * batch.tokens
        note = f"{peak / 1e6:.2f} MB beside {size / 1e6:.2f} MB"
        rows.append(Row(batch.name, f"peak extra memory, {name}", peak / size, "times the input", note=note))
    return rows


def check_mates(batch: Batch) -> None:
    """A response has the same bits alone and in its batch: the first, the longest and the last."""
    whole = ours(batch.x, batch.lengths).split(batch.lengths)
    xs = batch.x.split(batch.lengths)
    for i in (0, int(np.argmax(batch.lengths)), len(xs) - 1):
        if not torch.equal(ours(xs[i], batch.lengths[i : i + 1]), whole[i]):
            raise common.Red(f"{batch.name}: the bits of sample {i} depend on its batch mates. Not timed.")


def clocks(batch: Batch, budget: float) -> list[Row]:
    """Every clock, and a decay of each sample's own, beside the token clock."""
    token = partial(ours, batch.x, batch.lengths)
    turn = turn_ends(batch.mask, np.array(batch.lengths))
    variants = {
        "trainable": ({"step": batch.mask}, GAMMA, at_most(1.5)),
        "turn": ({"step": batch.mask, "tick": turn}, GAMMA, at_most(1.5)),
        "a decay a sample": ({}, torch.full((len(batch.lengths),), GAMMA, dtype=torch.float64), None),
    }
    rows = []
    for name, (how, decay, target) in variants.items():
        fn = partial(reverse_scan, batch.x, batch.lengths, decay, **how)
        exact = batch.exact(name if how else "token")
        common.check(name, fn(), exact, batch.lengths, EXACT)
        pairs = alternate(token, fn, budget=budget)
        rows.append(per_token("clocks, " + batch.name, name, pairs.theirs, batch.tokens))
        rows.append(Row("clocks, " + batch.name, f"{name} / token clock", pairs.ratio, "times", target))
    return rows


def long_response(tokens: int, budget: float) -> list[Row]:
    """Ten times the length of one response, at the same cost a token."""
    batches = [Batch(f"1 x {n:,}", [n]) for n in (tokens, 10 * tokens)]
    for batch in batches:
        common.check(batch.name, ours(batch.x, batch.lengths), batch.exact(), batch.lengths, EXACT)
    calls = [partial(ours, batch.x, batch.lengths) for batch in batches]
    pairs = alternate(*calls, budget=budget)
    rows = [
        per_token("one response", batch.name, seconds, batch.tokens)
        for batch, seconds in zip(batches, (pairs.ours, pairs.theirs), strict=True)
    ]
    what = f"{10 * tokens:,} / {tokens:,} tokens, a token"
    return [*rows, Row("one response", what, pairs.ratio / 10, "times", at_most(1.3))]


if __name__ == "__main__":
    raise SystemExit(common.run("bench_scan", __doc__, measure))
