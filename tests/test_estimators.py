"""The estimators against the oracle, against each other, and on real data, for every clock, strategy and cp_size."""

import json
import math

import numpy as np
import pytest
import torch
from batches import STRATEGIES, Batch, function, make, module, run
from helpers import assert_as_good_as_serial, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_returns import reference
from cp_returns.clocks import CLOCKS
from cp_returns.collectives import Counted
from cp_returns.config import ESTIMATORS
from cp_returns.context import CPContext, carry, gather
from cp_returns.errors import CPInputError
from cp_returns.estimators import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from cp_returns.layout import zigzag
from cp_returns.module import ContextParallelReturns, ReturnsConfig
from cp_returns.rollouts import read
from cp_returns.simulate import RankFailure, in_processes, in_threads

NAN = math.nan
KL, TOKEN, REWARD = "kl", "token_rewards", "rewards"
RF = function("rf++", reinforce_plus_plus, KL, TOKEN, REWARD, "sample_mask")
RF_BASELINE = function("rf++ baseline", reinforce_plus_plus_baseline, KL, REWARD, "group_ids", "sample_mask")
REMAX = function("remax", remax, KL, TOKEN, REWARD, "sample_mask", "baselines")
GAE_DOOR = function("gae", gae, KL, TOKEN, REWARD, "sample_mask", "values", "bootstrap")

lengths = st.integers(0, 4).flatmap(lambda big: st.integers(0, 90 if big == 0 else 20))
shapes = st.lists(st.tuples(st.integers(1, 30), lengths), min_size=1, max_size=5)
numbers = st.sampled_from([0.0, 1.0, 0.5, 0.9, 0.99, 0.123])
layouts = st.sampled_from([("zigzag", 1), ("zigzag", 1), ("zigzag", 3), ("contiguous", 1), ("contiguous_pack", 1)])
clocks = st.sampled_from(CLOCKS)


@st.composite
def batches(draw, dtype=torch.float32) -> Batch:
    """Gaps, masked tails, empty responses; now and then a reward that is missing or a sample that is left out."""
    where = draw(shapes)
    batch = make(where, seed=draw(st.integers(0, 2**32 - 1)))
    odd = draw(
        st.lists(st.sampled_from(["", "", "", "", "missing", "left out", "all", "none"]), min_size=5, max_size=5)
    )
    mask, rewards, kept = batch.mask.clone(), batch.samples["rewards"].clone(), torch.ones(len(batch))
    for i, what in enumerate(odd[: len(batch)]):
        if what == "missing":
            rewards[i] = NAN
        elif what == "left out":
            kept[i] = 0
        elif what:
            batch.rows(mask)[i][:] = what == "all"
    token_rewards = torch.where(mask, batch.tokens[TOKEN], 0.0)
    return batch.change(mask=mask, rewards=rewards, sample_mask=kept, token_rewards=token_rewards).to(dtype)


@st.composite
def per_sample(draw, at_most: int = 5):
    """One float for all samples, or one for each."""
    value = draw(st.one_of(numbers, st.lists(numbers, min_size=at_most, max_size=at_most)))
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


def of(value, samples: int):
    """A number of `per_sample`, cut to the batch."""
    return value[:samples] if isinstance(value, torch.Tensor) else value


def at(value, i: int) -> float:
    return float(value[i]) if isinstance(value, torch.Tensor) else value


def serial(door, batch: Batch, **options) -> dict[str, list[list[float]]]:
    """What the oracle gives, sample by sample."""
    tokens = {name: [row.tolist() for row in batch.rows(x)] for name, x in batch.tokens.items()}
    masks = [row.tolist() for row in batch.rows(batch.mask.long())]
    one = {name: x.tolist() for name, x in batch.samples.items()}
    out: dict[str, list[list[float]]] = {"returns": [], "advantages": []}
    if door is RF_BASELINE:
        arguments = tokens[KL], one[REWARD], one["group_ids"], masks
        return {
            "returns": reference.reinforce_plus_plus_baseline(*arguments, sample_mask=one["sample_mask"], **options)
        }
    for i, mask in enumerate(masks):
        values = {k: v if isinstance(v, str) or v is None else at(v, i) for k, v in options.items()}
        common = {"token_rewards": tokens[TOKEN][i], "sample_mask": one["sample_mask"][i], **values}
        head = tokens[KL][i], one[REWARD][i]
        if door is RF:
            out["returns"].append(reference.reinforce_plus_plus(*head, mask, **common))
        elif door is REMAX:
            out["returns"].append(reference.remax(*head, one["baselines"][i], mask, **common))
        else:
            bootstrap = one["bootstrap"][i] if "bootstrap" in one else 0.0
            a, g = reference.gae(*head, tokens["values"][i], mask, bootstrap=bootstrap, **common)
            out["advantages"].append(a)
            out["returns"].append(g)
    return out


def check(door, batch: Batch, cp_size: int, layout, **options) -> None:
    """Every strategy is as good as the serial loop; gather has the bits of one rank, carry is within 2^-23."""
    alone_ = run(door, batch, **options)
    outs = {name: run(door, batch, cp_size, name, layout=layout, **options) for name in STRATEGIES}
    expected = serial(door, batch, **options)
    for name, x in alone_.tokens.items():
        assert_same_bits(outs["gather"].tokens[name], x)
        rows = zip(*(batch.rows(out.tokens[name]) for out in (alone_, outs["carry"])), expected[name], strict=True)
        for i, (row, carried, exact) in enumerate(rows):
            assert_as_good_as_serial(row.tolist(), exact)
            valid = [*batch.rows(batch.tokens["values"] * batch.mask)[i].tolist(), 0.0] if door is GAE_DOOR else [0.0]
            largest = max([abs(v) for v in exact] + [abs(v) for v in valid])
            off = max((carried.double() - row.double()).abs().tolist(), default=0.0)
            assert off <= 2.0**-23 * largest, f"{name} of sample {i} by carry is off by {off:.3g} of {largest:.3g}"


cp_sizes = st.integers(1, 8)


@settings(max_examples=40)
@given(batches(), cp_sizes, layouts, clocks, per_sample(), per_sample())
def test_reinforce_plus_plus_equals_the_oracle(batch, cp_size, layout, clock, gamma, kl_coef):
    n = len(batch)
    check(RF, batch, cp_size, layout, clock=clock, gamma=of(gamma, n), kl_coef=of(kl_coef, n))


@settings(max_examples=60)
@given(
    batches(), cp_sizes, layouts, clocks, per_sample(), per_sample(), st.none() | per_sample(), numbers, st.booleans()
)
def test_gae_equals_the_oracle(batch, cp_size, layout, clock, gamma, lam, lam_value, kl_coef, bootstrapped):
    n = len(batch)
    options = {"clock": clock, "gamma": of(gamma, n), "lam": of(lam, n), "kl_coef": kl_coef}
    options |= {} if lam_value is None else {"lam_value": of(lam_value, n)}
    options |= {"masked_values": "use"} if clock == "token" and bootstrapped else {}
    check(GAE_DOOR, batch if bootstrapped else batch.change(bootstrap=None), cp_size, layout, **options)


@settings(max_examples=15)
@given(batches(), cp_sizes, layouts, per_sample())
def test_remax_equals_the_oracle(batch, cp_size, layout, kl_coef):
    check(REMAX, batch, cp_size, layout, kl_coef=of(kl_coef, len(batch)))


@settings(max_examples=15)
@given(batches(), cp_sizes, layouts, numbers, st.integers(1, 5))
def test_reinforce_plus_plus_baseline_equals_the_oracle(batch, cp_size, layout, kl_coef, groups):
    ids = torch.arange(len(batch)) % groups
    check(RF_BASELINE, batch.change(group_ids=ids), cp_size, layout, kl_coef=kl_coef)


# against each other, in float64


def ticks_to_the_end(batch: Batch, clock: str) -> torch.Tensor:
    """How often the discount applies from each token to past the last step of its sample."""
    out = []
    for row in batch.rows(batch.mask.long()):
        step, tick = reference.clock_of(row.tolist(), clock)
        out += np.cumsum([t if s else 0 for s, t in zip(step, tick, strict=True)][::-1])[::-1].tolist()
    return torch.tensor(out, dtype=torch.float64)


strategies = st.sampled_from(sorted(STRATEGIES))
float64 = batches(dtype=torch.float64)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """A few roundings of float64."""
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-12)


def spread(batch: Batch, x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(torch.tensor(batch.response))


def kept_tokens(batch: Batch) -> torch.Tensor:
    return batch.mask & spread(batch, (batch.samples["sample_mask"] == 1) & ~batch.samples[REWARD].isnan())


@settings(max_examples=40)
@given(float64, cp_sizes, strategies, clocks, numbers)
def test_with_lam_1_gae_is_reinforce_plus_plus(batch, cp_size, strategy, clock, gamma):
    """A + V = G + gamma^(steps left) * bootstrap."""
    common = {"gamma": gamma, "kl_coef": 0.1, "clock": clock}
    a = run(GAE_DOOR, batch, cp_size, strategy, lam=1.0, **common).tokens
    g = run(RF, batch, cp_size, strategy, **common).tokens["returns"]
    valid = kept_tokens(batch)
    ahead = gamma ** ticks_to_the_end(batch, clock) * spread(batch, batch.samples["bootstrap"])
    expected = torch.where(valid, g + ahead, 0.0)
    assert_close(torch.where(valid, a["advantages"] + batch.tokens["values"], 0.0), expected)
    assert_close(a["returns"], expected)


@settings(max_examples=40)
@given(float64, cp_sizes, strategies, clocks, numbers)
def test_with_lam_0_gae_is_delta(batch, cp_size, strategy, clock, gamma):
    """With the turn clock, which lets no lambda in between the tokens of a turn, the sum of delta to the turn's end."""
    a = run(GAE_DOOR, batch, cp_size, strategy, lam=0.0, gamma=gamma, kl_coef=0.1, clock=clock).tokens["advantages"]
    token = run(RF, batch, clock="token", gamma=0.0, kl_coef=0.1).tokens["returns"]  # r_j
    expected = torch.zeros_like(a)
    start = 0
    for i, row in enumerate(batch.rows(kept_tokens(batch))):
        here = slice(start, start + len(row))
        start += len(row)
        if not row.any():
            continue
        steps = range(len(row)) if clock == "token" else row.nonzero()[:, 0].tolist()
        v = torch.where(row, batch.tokens["values"][here], 0.0)
        ahead, later = batch.samples["bootstrap"][i], torch.zeros((), dtype=torch.float64)
        for j in reversed(steps):
            within = clock == "turn" and j + 1 < len(row) and bool(row[j + 1])
            delta = token[here][j] + (1.0 if within else gamma) * ahead - v[j]
            later = delta + (later if within else 0.0)
            ahead = v[j]
            expected[here][j] = torch.where(row[j], later, 0.0)
    assert_close(a, expected)


@settings(max_examples=15)
@given(float64, cp_sizes, strategies, st.integers(1, 3))
def test_rloo_is_n_over_n_minus_1_of_the_centred_reward(batch, cp_size, strategy, groups):
    ids = torch.arange(len(batch)) % groups
    batch = batch.change(group_ids=ids)
    reads = ("rewards", "sample_mask", "group_ids")
    rloo, centred = (
        run(module(name, *reads, estimator=name), batch, cp_size, strategy).tokens["advantages"]
        for name in ("rloo", "dr_grpo")
    )
    counted = torch.tensor([bool(row.any()) for row in batch.rows(kept_tokens(batch))])
    n = torch.tensor([int((counted & (ids == own)).sum()) for own in ids], dtype=torch.float64)
    factor = torch.where(n > 1, n / (n - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(rloo.double(), spread(batch, factor) * centred.double(), rtol=3e-7, atol=1e-30)


@settings(max_examples=25)
@given(batches(), cp_sizes, strategies, clocks, st.lists(st.tuples(numbers, numbers, numbers), min_size=5, max_size=5))
def test_one_number_a_sample_is_the_call_of_that_sample_alone(batch, cp_size, strategy, clock, rows):
    """Bit for bit: gamma, lam, lam_value and kl_coef of row i reach row i only, and nothing else reaches it."""
    gamma, lam, lam_value = torch.tensor(rows, dtype=torch.float64)[: len(batch)].unbind(1)
    alone_ = {"gamma": gamma, "lam": lam, "lam_value": lam_value, "kl_coef": lam}
    got = run(GAE_DOOR, batch, cp_size, strategy, clock=clock, **alone_).tokens
    returns = run(RF, batch, cp_size, strategy, clock=clock, gamma=gamma, kl_coef=lam).tokens["returns"]
    for i in range(len(batch)):
        one, scalars = batch.pick([i]), {name: float(x[i]) for name, x in alone_.items()}
        exact = run(GAE_DOOR, one, cp_size, strategy, clock=clock, **scalars).tokens
        for name in exact:
            assert_same_bits(batch.rows(got[name])[i], exact[name])
        exact = run(RF, one, cp_size, strategy, clock=clock, gamma=scalars["gamma"], kl_coef=scalars["kl_coef"]).tokens
        assert_same_bits(batch.rows(returns)[i], exact["returns"])


@settings(max_examples=20)
@given(float64, cp_sizes, strategies, clocks)
def test_conservation(batch, cp_size, strategy, clock):
    """gamma = 1 and no KL: the first valid token's return is the sum of all rewards."""
    returns = run(RF, batch, cp_size, strategy, clock=clock, gamma=1.0, kl_coef=0.0).tokens["returns"]
    kept = kept_tokens(batch)
    for i, (row, valid) in enumerate(zip(batch.rows(returns), batch.rows(kept), strict=True)):
        if valid.any():
            rewards = batch.rows(batch.tokens[TOKEN])[i][valid].tolist()
            total = math.fsum([*rewards, float(batch.samples[REWARD][i])])
            assert float(row[valid][0]) == pytest.approx(total, rel=1e-13, abs=1e-12)


# lambdas and bootstrap


@settings(max_examples=15)
@given(batches(), cp_sizes, strategies, st.sampled_from([0.0, 1e-3, 0.05, 0.3, 10.0]))
def test_length_adaptive_lambda(batch, cp_size, strategy, lam_alpha):
    lam = [reference.adaptive_lam(row.tolist(), lam_alpha) for row in batch.rows(kept_tokens(batch).long())]
    adaptive = run(GAE_DOOR, batch, cp_size, strategy, gamma=0.9, lam=0.5, lam_alpha=lam_alpha, lam_value=1.0).tokens
    given_ = run(GAE_DOOR, batch, cp_size, strategy, gamma=0.9, lam=torch.tensor(lam).double(), lam_value=1.0).tokens
    assert_same_bits(adaptive["returns"], given_["returns"])
    torch.testing.assert_close(adaptive["advantages"], given_["advantages"], rtol=1e-6, atol=1e-6)


def test_a_second_lambda_that_is_equal_costs_nothing():
    """By carry, without the agreement's envelope, the message shows how many numbers a piece sends."""
    cut = zigzag([40], [33], 2)
    batch = make([(7, 33)])

    def sent(rank, all_gather, **lambdas):
        counted = Counted(all_gather.cp)
        cp = CPContext(cut, rank, counted, carry, agreement="off")
        index = torch.from_numpy(cut.index(rank))
        gae(None, batch.samples[REWARD], batch.tokens["values"][index], batch.mask, cp=cp, gamma=0.9, **lambdas)
        return counted.bytes_sent, counted.collectives

    one, same, two = (
        in_threads(lambda rank, g, more=more: sent(rank, g, lam=0.8, **more), 2)
        for more in ({}, {"lam_value": float("0.8")}, {"lam_value": 0.9})
    )
    assert one == same == [(2 * 2 * 8, 1)] * 2  # two pieces a rank, two float64 numbers each
    assert two == [(2 * 3 * 8, 1)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_a_bootstrap_of_any_dtype(dtype):
    batch = make([(3, 40), (2, 9)], seed=3)
    exact, got = (
        run(GAE_DOOR, batch.change(bootstrap=torch.tensor([2, -1]).to(kind)), 2, "carry", gamma=0.9, lam=0.8).tokens
        for kind in (torch.float64, dtype)
    )
    for name, x in exact.items():
        assert_same_bits(got[name], x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clock", CLOCKS)
def test_bootstrap_nan_and_zero_are_none(clock, strategy):
    batch = make([(3, 40), (2, 9), (5, 0), (1, 21)], seed=3)
    numbers = {"gamma": 0.9, "lam": 0.8, "clock": clock}
    for cp_size in (1, 3):
        none = run(GAE_DOOR, batch.change(bootstrap=None), cp_size, strategy, **numbers).tokens
        for end in (torch.full((4,), NAN), torch.zeros(4)):
            got = run(GAE_DOOR, batch.change(bootstrap=end), cp_size, strategy, **numbers).tokens
            for name in none:
                assert_same_bits(got[name], none[name])
        some = run(GAE_DOOR, batch.change(bootstrap=torch.tensor([NAN, 2.0, 1.0, NAN])), cp_size, strategy, **numbers)
        for name in none:
            rows = list(zip(batch.rows(some.tokens[name]), batch.rows(none[name]), strict=True))
            assert [torch.equal(a, b) for a, b in rows] == [True, False, True, True]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("door", "numbers", "text"),
    [
        (RF, {"gamma": 1.5}, "gamma is 1.5; expected a number in [0, 1]"),
        (RF, {"gamma": -0.1}, "gamma is -0.1; expected a number in [0, 1]"),
        (RF, {"gamma": NAN}, "gamma is nan; expected a number in [0, 1]"),
        (RF, {"gamma": torch.tensor([0.5, 1.25])}, "sample 1, gamma is 1.25; expected a number in [0, 1]"),
        (RF, {"gamma": torch.tensor(2.0)}, "gamma is 2.0; expected a number in [0, 1]"),
        (RF, {"gamma": torch.tensor([0.5])}, "shape of gamma is [1]; expected [] or [2]"),
        (RF, {"kl_coef": math.inf}, "kl_coef is inf; expected a finite number"),
        (RF, {"kl_coef": "0.1"}, "kl_coef is '0.1'; expected a finite number"),
        (GAE_DOOR, {"lam": 1.01}, "lam is 1.01; expected a number in [0, 1]"),
        (GAE_DOOR, {"lam": torch.tensor([NAN, 0.5])}, "sample 0, lam is nan; expected a number in [0, 1]"),
        (GAE_DOOR, {"lam_value": -1e-9}, "lam_value is -1e-09; expected a number in [0, 1]"),
        (GAE_DOOR, {"lam_alpha": -1.0}, "lam_alpha is -1.0; expected a number that is at least 0"),
        (GAE_DOOR, {"clock": "word"}, "clock is 'word'; expected one of 'token', 'trainable', 'turn'"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_the_same_error_on_all_ranks(door, numbers, text, strategy):
    batch = make([(3, 5), (2, 9)])
    usual = {"gamma": 0.9, "kl_coef": 0.1} | ({"lam": 0.8} if door is GAE_DOOR else {})
    with pytest.raises(RankFailure) as caught:
        run(door, batch, 2, strategy, **(usual | numbers))
    errors = [outcome.error for outcome in caught.value.outcomes]
    assert all(isinstance(error, CPInputError) and text in str(error) for error in errors), errors
    assert len({str(error) for error in errors}) == 1


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_not_finite_is_named_for_every_dtype_and_clock(dtype, clock, cp_size):
    """In response coordinates, whatever tokens the clock leaves out before it."""
    batch = make([(3, 9), (2, 9)], masks=[[1] * 9, [1, 0, 0, 1, 1, 0, 1, 1, 1]]).to(dtype)
    kl = batch.tokens[KL].clone()
    kl[9 + 6] = NAN
    with pytest.raises(RankFailure) as caught:
        run(RF, batch.change(kl=kl), cp_size, "carry", gamma=0.9, kl_coef=0.1, clock=clock)
    text = "sample 1, token 6, kl is nan; expected a finite number at a valid token"
    assert all(text in str(outcome.error) for outcome in caught.value.outcomes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_a_samples_bits_do_not_hang_on_the_turns_of_another(estimator, cp_size, seed):
    """One of a single turn, alone and beside one of two: its mate's end of a turn lies in its tile."""
    generator, n = torch.Generator().manual_seed(seed), 900
    x = torch.randn(2 * n, generator=generator, dtype=torch.float64)
    ends = torch.randn(2, generator=generator, dtype=torch.float64)
    masks = torch.ones(2, n, dtype=torch.bool)
    masks[1, 300] = False

    def first(samples: int) -> torch.Tensor:
        layout = zigzag([n + 1] * samples, [n] * samples, cp_size)

        def of_rank(rank, all_gather):
            cp, mine = CPContext(layout, rank, all_gather, carry), x[torch.from_numpy(layout.index(rank))]
            given = (masks[:samples].flatten(),)
            numbers = {"cp": cp, "gamma": 0.9, "kl_coef": 1.0, "clock": "turn"}
            if estimator == "gae":
                out = gae(mine, None, mine * 0, *given, lam=0.9, bootstrap=ends[:samples], **numbers).advantages
            else:
                out = reinforce_plus_plus(mine, ends[:samples], *given, **numbers)
            return out[: layout.lengths(rank)[0]]

        return torch.cat(in_threads(of_rank, cp_size))

    assert_same_bits(first(1), first(2))


@pytest.mark.parametrize("strategy", [gather, carry])
@pytest.mark.parametrize(
    ("door", "bad", "text"),
    [
        ("gae", {"values": None}, "values is absent; expected a tensor, one a token that this rank owns"),
        ("gae", {"full_mask": None}, "full_mask is absent; expected a tensor, one a token of the whole responses"),
        ("gae", {"values": torch.eye(3).to_sparse()}, "values is a torch.sparse_coo tensor; expected a tensor"),
        ("remax", {"baselines": None}, "baselines is absent; expected a tensor, one a sample"),
        ("remax", {"baselines": torch.zeros(3)}, "shape of baselines is [3]; expected [2], one a sample"),
        ("remax", {"baselines": torch.zeros(2, 1)}, "shape of baselines is [2, 1]; expected [2], one a sample"),
        ("remax", {"rewards": [1.0, 2.0]}, "rewards is a list; expected a tensor"),
    ],
)
def test_an_input_that_one_rank_lacks_is_the_same_error_on_all(door, bad, text, strategy):
    layout = zigzag([6, 9], [5, 7], 2)

    def fn(rank, all_gather):
        cp = CPContext(layout, rank, all_gather, strategy)
        given = {"kl": None, "rewards": torch.ones(2), "full_mask": torch.ones(12, dtype=torch.bool)}
        if door == "gae":
            given |= {"values": torch.zeros(int(layout.lengths(rank).sum()))}
            given |= bad if rank == 1 else {}
            return gae(**given, cp=cp, gamma=0.9, lam=0.9)
        given |= {"baselines": torch.zeros(2)} | (bad if rank == 1 else {})
        return remax(**given, cp=cp, kl_coef=0.0)

    with pytest.raises(RankFailure) as caught:
        in_threads(fn, 2)
    texts = {str(outcome.error) for outcome in caught.value.outcomes}
    assert len(texts) == 1
    assert texts.pop().startswith(f"CP rank 1 of 2: {text}")


@pytest.mark.parametrize("strategy", [gather, carry])
@pytest.mark.parametrize("huge", [math.inf, 1e308])
def test_what_is_not_finite_is_propagated_without_a_warning(huge, strategy):
    """Warnings are errors here, and one rank that raises alone leaves the others waiting."""
    layout = zigzag([9], [8], 2)
    values = torch.zeros(8, dtype=torch.float64)
    values[[1, 3, 6]] = torch.tensor([huge, -huge, huge], dtype=torch.float64)

    def fn(rank, all_gather):
        cp = CPContext(layout, rank, all_gather, strategy)
        how = {"cp": cp, "gamma": 1.0, "nonfinite": "propagate"}
        mask = torch.ones(8, dtype=torch.bool)
        gae(None, torch.ones(1), cp.take(values), mask, lam=0.9, **how)
        return reinforce_plus_plus(cp.take(values), None, mask, kl_coef=1.0, **how)

    in_threads(fn, 2)


@pytest.mark.parametrize("strategy", [gather, carry])
@pytest.mark.parametrize("gamma", [0.5, 1e-200, 5e-324])
def test_a_caller_for_whom_numpy_raises_gets_numbers(gamma, strategy):
    """Returns too small for float32, or for float64, are 0: where numpy is told to raise, no rank may raise alone."""
    layout = zigzag([301], [300], 2)
    kl = torch.linspace(-1, 1, 300)

    def fn(rank, all_gather):
        cp, mask = CPContext(layout, rank, all_gather, strategy), torch.arange(300) < 200
        how = {"cp": cp, "gamma": gamma, "kl_coef": 1e-30}
        with np.errstate(all="raise"):
            gae(cp.take(kl), None, cp.take(kl), mask, lam=0.9, lam_alpha=1e-3, **how)
            return reinforce_plus_plus(cp.take(kl), torch.tensor([1e-300]).double(), mask, **how)

    for rank, out in enumerate(in_threads(fn, 2)):
        assert out.isfinite().all(), rank


def test_settings_that_are_shown_alike_but_differ_are_told_apart():
    layout = zigzag([6], [5], 2)

    def fn(rank, all_gather):
        cp, gamma = CPContext(layout, rank, all_gather), (0.9, np.float32(0.9))[rank]
        reinforce_plus_plus(None, torch.ones(1), torch.ones(5, dtype=torch.bool), cp=cp, gamma=gamma, kl_coef=0.0)

    with pytest.raises(RankFailure, match=r"gamma is 0\.8999999"):
        in_threads(fn, 2)


def test_taking_all_tokens_and_positions_gives_copies():
    full, cp = torch.zeros(5), CPContext(zigzag([6], [5], 1))
    cp.take(full).fill_(1)
    cp.layout.index(0).fill(0)
    assert full.tolist() == [0.0] * 5
    assert cp.layout.index(0).tolist() == [0, 1, 2, 3, 4]


# groups over data-parallel ranks


def of_groups() -> tuple[Batch, list[list[int]]]:
    """Three groups over two DP ranks, with 4 and 7 samples; one is left out, one has no reward."""
    batch = make([(3, 9), (2, 14), (4, 0), (1, 20), (2, 5), (6, 11), (1, 7), (3, 8), (2, 2), (5, 13), (2, 31)], seed=5)
    rewards, kept = batch.samples[REWARD].clone(), torch.ones(11)
    rewards[4], kept[9] = NAN, 0
    ids = torch.tensor([0, 0, 1, 2, 0, 1, 2, 2, 1, 0, 5])
    return batch.change(rewards=rewards, sample_mask=kept, group_ids=ids), [[0, 6, 2, 8], [1, 3, 4, 5, 7, 9, 10]]


def grouped(name: str, strategy: str, batch: Batch, rank: int, all_gather, parts) -> tuple[list, list, object]:
    config = {"estimator": name, "strategy": strategy, "whiten": name == "reinforce_plus_plus_baseline"}
    if name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        config |= {"kl_coef": 0.1, "group_center": "mean"}
    own = batch.pick(parts[all_gather.dp_rank])
    cut = zigzag(own.total, own.response, all_gather.cp_size)
    index, sizes = torch.from_numpy(cut.index(all_gather.cp_rank)), cut.lengths(all_gather.cp_rank).tolist()
    kl = {"kl": list(own.tokens[KL][index].split(sizes))} if "kl_coef" in config else {}
    out = ContextParallelReturns(ReturnsConfig(**config))(
        loss_masks=own.rows(own.mask),
        response_lengths=own.response,
        total_lengths=own.total,
        rewards=own.samples[REWARD],
        group_ids=own.samples["group_ids"],
        sample_mask=own.samples["sample_mask"],
        cp_group=all_gather.cp,
        dp_group=all_gather.dp,
        dp_cp_group=all_gather,
        **kl,
    )
    return [x.numpy() for x in out.returns], [x.numpy() for x in out.advantages], out.info


BY_GROUPS = ["reinforce_plus_plus", *(name for name, used in ESTIMATORS.items() if used.get("group_center"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("runner", [in_threads, in_processes], ids=["threads", "gloo"])
def test_groups_over_two_dp_ranks_equal_one_process(runner, strategy):
    batch, parts = of_groups()

    def every(rank, all_gather):
        cp_parts = parts if all_gather.dp_size == 2 else [[*parts[0], *parts[1]]]
        return {name: grouped(name, strategy, batch, rank, all_gather, cp_parts) for name in BY_GROUPS}

    (one,) = in_threads(every, 1)
    ranks = runner(every, 4, cp_size=2)
    for name in BY_GROUPS:
        for which, exact in enumerate(one[name][:2]):
            for dp in (0, 1):
                own = batch.pick(parts[dp])
                cut = zigzag(own.total, own.response, 2)
                whole = torch.empty(sum(own.response))
                for cp in (0, 1):
                    shard = torch.cat([torch.from_numpy(x) for x in ranks[2 * dp + cp][name][which]])
                    whole[torch.from_numpy(cut.index(cp))] = shard
                expected = torch.cat([torch.from_numpy(x) for x in exact[4 * dp : 4 * dp + len(own)]])
                torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-6)
                assert expected.any(), name
        # the agreement, one for the DP-wide baseline, the data of the token estimator, the whitening
        expected = 1 + 1 + (name == "reinforce_plus_plus") + (name == "reinforce_plus_plus_baseline")
        assert {rank[name][2].collectives for rank in ranks} == {expected}, name


# real data


def test_ppo_record(shared_data):
    """kl_coef 0.2 gives the record's own token rewards to 1e-9; then GAE over its own values."""
    record = json.loads(shared_data("ppo_record_12_tokens.json").read_text())
    batch = make([(4, 12)], [[1] * 12]).change(
        log_probs=torch.tensor(record["logprobs"], dtype=torch.float64),
        ref_log_probs=torch.tensor(record["ref_logprobs"], dtype=torch.float64),
        values=torch.tensor(record["values"], dtype=torch.float64),
        rewards=torch.tensor([record["reward"]], dtype=torch.float64),
    )
    reads = ("log_probs", "ref_log_probs", "rewards")
    reward = module("rewards", *reads, estimator="reinforce_plus_plus", kl="k1", kl_coef=0.2, gamma=0.0)
    estimates = module("gae", *reads, "values", estimator="gae", kl="k1", kl_coef=0.2, gamma=0.99, lam=0.95)
    kl = [a - b for a, b in zip(record["logprobs"], record["ref_logprobs"], strict=True)]
    exact = reference.gae(kl, record["reward"], record["values"], [1] * 12, gamma=0.99, lam=0.95, kl_coef=0.2)
    for cp_size in (1, 2, 4):
        for strategy in STRATEGIES:
            got = run(reward, batch, cp_size, strategy)
            assert got.tokens["returns"].tolist() == pytest.approx(record["token_rewards"], abs=1e-9)
            assert all(info.kl_in_reward for info in got.infos)
            assert sum(info.kl_sum for info in got.infos) / cp_size == pytest.approx(math.fsum(kl), abs=1e-6)
            out = run(estimates, batch, cp_size, strategy).tokens
            assert out["advantages"].tolist() == pytest.approx(exact[0], abs=1e-13)
            assert out["returns"].tolist() == pytest.approx(exact[1], abs=1e-13)


def runs(pairs) -> np.ndarray:
    values, counts = zip(*pairs, strict=True)
    return np.repeat(np.array(values, dtype=np.float64), counts)


def test_atropos_token_level_rewards(shared_data):
    rows = [json.loads(line) for line in shared_data("atropos_groups.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    first = [row["first_trained"] for row in rows]
    masks = [runs(row["loss_mask_rle"])[start:] for row, start in zip(rows, first, strict=True)]
    scores = [runs(row["token_scores_rle"])[start:] for row, start in zip(rows, first, strict=True)]
    batch = make([(start, len(mask)) for start, mask in zip(first, masks, strict=True)], masks)
    scores = torch.where(batch.mask, torch.from_numpy(np.concatenate(scores)), 0.0)
    batch = batch.change(token_rewards=scores, rewards=torch.zeros(16))
    assert scores.any()
    for clock in CLOCKS:
        options = {"clock": clock, "gamma": 1.0, "kl_coef": 0.0}
        exact = serial(RF, batch, **options)["returns"]
        for cp_size, strategy in [(1, "gather"), (4, "gather"), (4, "carry")]:
            returns = batch.rows(run(RF, batch, cp_size, strategy, **options).tokens["returns"])
            for row, expected, mask, given_ in zip(returns, exact, masks, batch.rows(scores), strict=True):
                assert_as_good_as_serial(row.tolist(), expected, bits=45)  # float64 rewards
                assert float(row[mask == 1][0]) == pytest.approx(math.fsum(given_.tolist()), rel=1e-12)


CONFIGS = {
    name: module(
        name,
        "rewards",
        *([KL] if "kl_coef" in used else []),
        *(["values"] if "lam" in used else []),
        *(["group_ids"] if used.get("group_center") else []),
        *(["baselines"] if name == "remax" else []),
        estimator=name,
        **({"kl_coef": 0.05} if "kl_coef" in used else {}),
        **({"gamma": 0.9999} if "gamma" in used else {}),
        **({"lam": 0.95} if "lam" in used else {}),
    )
    for name, used in ESTIMATORS.items()
}


@pytest.fixture(scope="module")
def rollouts(shared_data) -> Batch:
    """All 273 shapes, with seeded log-probs and values."""
    data = read(shared_data("rollout_shapes.jsonl"))
    shapes = [(t - r, r) for t, r in zip(data.total_lengths, data.response_lengths, strict=True)]
    kl = torch.cat(data.log_probs) - torch.cat(data.ref_log_probs)
    batch = make(shapes, data.loss_masks, seed=7)
    assert len(batch) == 273
    return batch.change(kl=kl, rewards=torch.tensor(data.rewards), group_ids=torch.tensor(data.group_ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_all_rollout_shapes(name, rollouts):
    door = CONFIGS[name]
    keep = {key: rollouts.tokens[key] for key in door.reads if key in rollouts.tokens}
    batch = Batch(rollouts.total, rollouts.response, rollouts.mask, keep, rollouts.samples)
    exact, gathered, carried = (run(door, batch, *how).tokens for how in [(1,), (4, "gather"), (4, "carry")])
    masked_v = batch.rows(torch.where(batch.mask, keep["values"], 0.0)) if "values" in keep else None
    for part, x in exact.items():
        assert x[batch.mask].isfinite().all()
        assert not x[~batch.mask].any()
        assert_same_bits(gathered[part], x)
        if part == "masks":
            assert_same_bits(carried[part], batch.mask)
            continue
        for i, (row, other) in enumerate(zip(batch.rows(x), batch.rows(carried[part]), strict=True)):
            largest = max(float(v.abs().max()) for v in ([row] if masked_v is None else [row, masked_v[i]]))
            assert float((row.double() - other.double()).abs().max()) <= 2.0**-23 * largest, (part, i)
    if name in ("gae", "reinforce_plus_plus"):  # and one long response against the oracle
        i = int(np.argmax(batch.response))
        one = [batch.rows(batch.tokens[key])[i].tolist() for key in door.reads if key in keep]
        mask, reward = batch.rows(batch.mask.long())[i].tolist(), float(batch.samples[REWARD][i])
        numbers = {"gamma": 0.9999, "kl_coef": 0.05}
        if name == "gae":
            _, expected = reference.gae(one[0], reward, one[1], mask, lam=0.95, **numbers)
        else:
            expected = reference.reinforce_plus_plus(one[0], reward, mask, **numbers)
        assert_as_good_as_serial(batch.rows(exact["returns"])[i].tolist(), expected)
