"""The two strategies of exchange: `gather` gives the bits of one rank, `carry` is within 2^-23 of the largest |G|.

Ranks are threads here. What is promised of messages (their number, their bytes, the same on every rank) is read from
a collective that writes down what passes through it.
"""

from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import assert_as_good_as_serial, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_returns import blocks, exchange, reference
from cp_returns.agreement import ENVELOPE
from cp_returns.clocks import CLOCKS
from cp_returns.config import ReturnsConfig
from cp_returns.context import CPContext, carry, gather
from cp_returns.estimators import gae, reinforce_plus_plus
from cp_returns.layout import Layout, contiguous, contiguous_pack, zigzag
from cp_returns.module import ContextParallelReturns
from cp_returns.simulate import in_threads

F64 = torch.float64


@dataclass(frozen=True)
class Recorder:
    """An all-gather of one rank that notes the bytes of every message; it can be given as a group."""

    gather: object
    rank: int
    size: int
    sent: list[int] = field(default_factory=list)

    def __call__(self, x):
        self.sent.append(x.numel() * x.element_size())
        return self.gather(x)


def layouts(total, response, cp_size: int) -> list[Layout]:
    """Every kind of semantics.md section 1."""
    stream = -(-sum(total) // cp_size) * cp_size
    return [
        zigzag(total, response, cp_size),
        zigzag(total, response, cp_size, multiple=4),
        contiguous(total, response, cp_size, multiple=3),
        contiguous_pack(total, response, cp_size, stream_length=stream),
    ]


def whole(layout: Layout, shards) -> torch.Tensor:
    full = torch.full((int(layout.response_lengths.sum()),), torch.nan, dtype=shards[0].dtype)
    for rank, shard in enumerate(shards):
        full[torch.from_numpy(layout.index(rank))] = shard
    assert not full.isnan().any()
    return full


def largest(x: torch.Tensor, response) -> torch.Tensor:
    """The largest |x| of each sample, one a token."""
    parts = [part.abs().max().expand(len(part)) if len(part) else part for part in x.split(list(response))]
    return torch.cat([x[:0], *parts])


def assert_within_a_unit(carried: torch.Tensor, gathered: torch.Tensor, response, *, of: torch.Tensor | None = None):
    """2^-23 of the sample's largest number: one unit in the last place of float32."""
    allowed = 2.0**-23 * largest(gathered if of is None else of, response).double()
    excess = (carried.double() - gathered.double()).abs() - allowed
    assert not len(excess) or float(excess.max()) <= 0, f"off by {float(excess.max()):.3g} more than allowed"


# Right for every layout, clock, mask and decay


@dataclass(frozen=True)
class Batch:
    total: list[int]
    response: list[int]
    mask: torch.Tensor
    kl: torch.Tensor
    token_rewards: torch.Tensor
    values: torch.Tensor
    rewards: torch.Tensor
    bootstrap: torch.Tensor
    gamma: float | torch.Tensor
    lam: float | torch.Tensor


@st.composite
def batches(draw) -> Batch:
    """Up to 16 samples, each with its own shape, mask, scale of numbers and (or all one) gamma and lam."""
    n = draw(st.integers(0, 16))
    r = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompts = r.choice([1, 2, 17, 40, 300], size=n)
    response = r.integers(0, r.choice([2, 20, 90], size=n))
    tokens = int(response.sum())
    runs = np.repeat(r.random(tokens // 3 + 1), 3)[:tokens]  # runs, so that turns have length
    mask = torch.from_numpy(runs < np.repeat(r.choice([0.0, 0.1, 0.6, 1.0], size=n), response))
    scale = r.choice([1.0, 1e6, 1e-30], size=n)

    def normal(scale):
        return torch.from_numpy(r.normal(size=len(scale)) * scale * 10.0 ** r.integers(-3, 4, size=len(scale)))

    def number(choices):
        return draw(st.sampled_from([*choices, torch.from_numpy(r.choice([*choices, r.random()], size=n))]))

    of_token = np.repeat(scale, response)
    alternating = torch.from_numpy(of_token * draw(st.sampled_from([0.0, 1e3])) * (-1.0) ** np.arange(tokens))
    return Batch(
        (prompts + response).tolist(),
        response.tolist(),
        mask,
        torch.where(mask, normal(of_token), torch.nan).float(),
        torch.where(mask, alternating, 0.0).float(),
        torch.where(mask, normal(of_token), torch.inf).float(),
        normal(scale),
        normal(scale),
        number([0.0, 0.5, 0.9999, 1.0]),
        number([0.0, 0.95, 1.0]),
    )


def returns(b: Batch, cp: CPContext, clock: str) -> torch.Tensor:
    own = torch.from_numpy(cp.layout.index(cp.rank))
    kl, token_rewards = b.kl[own], b.token_rewards[own]
    numbers = {"gamma": b.gamma, "kl_coef": 0.3}
    return reinforce_plus_plus(kl, b.rewards, b.mask, cp=cp, clock=clock, token_rewards=token_rewards, **numbers)


COMBINATIONS: list[int] = []
TILES = st.sampled_from([blocks.TILE, 1])  # blocks; of 1 a piece of 17 tokens goes on in a second tile


@settings(max_examples=40)
@given(b=batches(), cp_sizes=st.lists(st.integers(1, 16), min_size=4, max_size=4), first=st.integers(0, 2), tile=TILES)
def test_carry_is_within_a_unit_of_gather(b, cp_sizes, first, tile):
    """40 batches x 4 layouts, each with a width of its own, x 2 clocks; gather, whose bits must be those of one rank,
    once a batch.
    """
    with patch.object(blocks, "TILE", tile):
        carried_and_gathered(b, cp_sizes, first)


def carried_and_gathered(b, cp_sizes, first):
    clocks = [CLOCKS[first], CLOCKS[first - 1]]
    one = zigzag(b.total, b.response, 1)
    alone = [returns(b, CPContext(one), clock) for clock in clocks]
    for i, cp_size in enumerate(cp_sizes):
        cut = layouts(b.total, b.response, cp_size)[i]
        strategies = [carry, carry, *([gather] if i == sum(cp_sizes) % 4 else [])]

        def rank_fn(rank, all_gather, cut=cut, strategies=strategies):
            each = zip(strategies, [*clocks, clocks[0]], strict=False)
            return [returns(b, CPContext(cut, rank, all_gather, strategy), clock) for strategy, clock in each]

        ranks = in_threads(rank_fn, cp_size)
        got = [whole(cut, [of_rank[j] for of_rank in ranks]) for j in range(len(strategies))]
        for carried, expected in zip(got, alone, strict=False):
            assert_within_a_unit(carried, expected, b.response)
            COMBINATIONS.append(len(b.response))
        if len(got) == 3:
            assert_same_bits(got[2], alone[0])


def test_the_sign_of_a_zero_that_enters_does_not_depend_on_mates():
    """0 * -1 enters the first piece as -0.0, where a mate in the pack makes the reward there 0.0 or leaves it -0.0."""

    def advantages(samples):
        layout = contiguous([4] * samples, [3] * samples, 2)

        def of_rank(rank, all_gather):
            own = torch.from_numpy(layout.index(rank))
            kl, values = (torch.tensor([0.0, 0.0, x] * samples)[own] for x in (1.0, -1.0))
            cp = CPContext(layout, rank, all_gather.cp, carry)
            mask = torch.ones(3 * samples, dtype=torch.bool)
            return gae(kl, None, values, mask, cp=cp, gamma=0.0, lam=1.0, kl_coef=2.0).advantages

        return in_threads(of_rank, 2)[0]

    alone = advantages(1)
    assert torch.equal(advantages(2).signbit(), torch.cat([alone, alone]).signbit())


def test_those_were_thousands_of_combinations():
    """Of a sample's shape, mask and gamma with a width, a layout and a clock."""
    assert not COMBINATIONS or sum(COMBINATIONS) > 2000  # empty: this test was run by itself


@settings(max_examples=20)
@given(b=batches(), cp_size=st.integers(2, 9), lam_value=st.sampled_from([None, 0.0, 0.7]), tile=TILES)
def test_gae_by_carry_is_within_a_unit_of_gather(b, cp_size, lam_value, tile):
    with patch.object(blocks, "TILE", tile):
        gae_carried_and_gathered(b, cp_size, lam_value)


def gae_carried_and_gathered(b, cp_size, lam_value):
    def estimate(cp, clock):
        own = torch.from_numpy(cp.layout.index(cp.rank))
        out = gae(
            b.kl[own],
            b.rewards,
            b.values[own],
            b.mask,
            cp=cp,
            gamma=b.gamma,
            lam=b.lam,
            kl_coef=0.3,
            clock=clock,
            lam_value=lam_value,
            bootstrap=b.bootstrap,
        )
        return out.advantages, out.returns

    cuts = layouts(b.total, b.response, cp_size)
    one = zigzag(b.total, b.response, 1)
    combinations = list(zip(cuts, [*CLOCKS, "trainable"], strict=True))
    ranks = in_threads(
        lambda rank, all_gather: [estimate(CPContext(cut, rank, all_gather, carry), c) for cut, c in combinations],
        cp_size,
    )
    for i, (cut, clock) in enumerate(combinations):
        alone = estimate(CPContext(one), clock)
        got = [whole(cut, [of_rank[i][which] for of_rank in ranks]) for which in (0, 1)]
        value = torch.where(b.mask, b.values, 0.0)
        ends = torch.cat([value[:0], *(x.float().expand(n) for x, n in zip(b.bootstrap, b.response, strict=True))])
        scale = torch.stack([x.abs() for x in (*alone, value, ends)]).amax(0) if len(value) else value
        for carried, gathered in zip(got, alone, strict=True):
            assert_within_a_unit(carried, gathered, b.response, of=scale)


# A million tokens


@pytest.mark.parametrize("cp_size", [8, 64])
def test_alternating_rewards_over_a_million_tokens(cp_size):
    """gamma 1 and rewards +-1e6: every G is 0 or -1e6, sums of a million terms on the way."""
    tokens = 1_000_000
    rewards = torch.from_numpy(1e6 * (-1.0) ** np.arange(tokens)).float()
    mask = torch.ones(tokens, dtype=torch.bool)
    exact = torch.from_numpy(np.cumsum(rewards.double().numpy()[::-1])[::-1].copy())  # integers: exact in float64
    layout = zigzag([tokens + 17], [tokens], cp_size)

    def rank_fn(rank, all_gather):
        own = rewards[torch.from_numpy(layout.index(rank))]
        how = {"gamma": 1.0, "kl_coef": 0.0, "token_rewards": own}
        return [
            reinforce_plus_plus(None, None, mask, cp=CPContext(layout, rank, all_gather, strategy), **how)
            for strategy in (gather, carry)
        ]

    ranks = in_threads(rank_fn, cp_size)
    gathered, carried = (whole(layout, [of_rank[i] for of_rank in ranks]) for i in (0, 1))
    assert float(exact.abs().max()) == 1e6
    assert torch.equal(gathered.double(), exact)
    assert_within_a_unit(carried, gathered, [tokens])


def test_64_ranks_and_a_million_tokens_against_the_oracle():
    response = 999_983
    r = np.random.default_rng(5)
    mask = torch.from_numpy(np.repeat(r.random(response // 50 + 1) < 0.8, 50)[:response].copy())
    mask[-1000:] = False
    kl = torch.from_numpy(r.normal(size=response)).float()
    layout = zigzag([1_000_000], [response], 64)
    gamma, kl_coef, reward = 0.9999, 0.05, torch.tensor([3.0])

    def estimate(cp, own):
        return reinforce_plus_plus(own, reward, mask, cp=cp, gamma=gamma, kl_coef=kl_coef)

    def rank_fn(rank, all_gather):
        own = kl[torch.from_numpy(layout.index(rank))]
        return [estimate(CPContext(layout, rank, all_gather, strategy), own) for strategy in (gather, carry)]

    alone = estimate(CPContext(zigzag([1_000_000], [response], 1)), kl)
    exact = reference.reinforce_plus_plus(kl.tolist(), 3.0, mask.tolist(), gamma=gamma, kl_coef=kl_coef)
    ranks = in_threads(rank_fn, 64)
    gathered, carried = (whole(layout, [of_rank[i] for of_rank in ranks]) for i in (0, 1))
    assert torch.equal(gathered, alone)
    assert_within_a_unit(carried, alone, [response])
    exact = torch.tensor(exact, dtype=F64)
    for got in (gathered, carried):
        assert float((got.double() - exact).abs().max()) <= 1.2e-7 * float(exact.abs().max())


# What is sent


def call(config: dict, lengths, rank: int, size: int, all_gather, dp_cp=None, *, fault=None):
    """The module on one rank with recorded collectives; returns (info, messages of the CP group, of DP x CP)."""
    total = [n + 3 for n in lengths]
    own = zigzag(total, lengths, size).lengths(rank).tolist()
    group, wide = Recorder(all_gather, rank, size), Recorder(dp_cp or all_gather, rank, size)
    inputs = {
        "kl": [torch.full((n,), 0.1) for n in own],
        "loss_masks": [torch.ones(n, dtype=torch.bool) for n in lengths],
        "rewards": [1.0] * len(lengths),
        "response_lengths": list(lengths),
        "total_lengths": total,
    }
    if config.get("estimator") == "gae":
        inputs["values"] = inputs["kl"]
    inputs |= (fault or (lambda rank, inputs: {}))(rank, inputs)
    returns_fn = ContextParallelReturns(ReturnsConfig(kl_coef=0.1, **config), cp_group=group, dp_cp_group=wide)
    try:
        info = returns_fn(**inputs).info
    except ValueError as error:
        info = str(error)
    return info, group.sent, wide.sent


def messages(config, lengths, size=4, **more):
    """What all ranks sent, (CP, DP x CP); asserts that it is the same on every rank and that info counts it."""
    ranks = in_threads(lambda rank, all_gather: call(config, lengths, rank, size, all_gather, **more), size)
    sent = [(cp, wide) for _, cp, wide in ranks]
    assert sent == [sent[0]] * size
    for info, cp, wide in ranks:
        if not isinstance(info, str):
            assert (info.collectives, info.bytes_sent) == (len(cp) + len(wide), sum(cp) + sum(wide))
    return sent[0]


@pytest.mark.parametrize("samples", [1, 500])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("agreement", ["full", "off"])
def test_one_data_collective_whatever_the_number_of_samples(samples, whiten, agreement):
    config = {"whiten": whiten, "agreement": agreement}
    lengths = [1 + 7 * i % 13 for i in range(samples)]
    gathered, wide = messages(config | {"strategy": "gather"}, lengths)
    assert len(gathered) == (2 if agreement == "full" else 1)
    assert len(wide) == whiten
    carried, wide = messages(config | {"strategy": "carry"}, lengths)
    assert carried == [ENVELOPE if agreement == "full" else 16 * samples]
    assert len(wide) == whiten


@pytest.mark.parametrize(
    ("config", "numbers"), [({}, 2), ({"estimator": "gae"}, 4), ({"estimator": "gae", "lam_value": 0.5}, 6)]
)
@pytest.mark.parametrize("response", [1, 1000])
def test_carry_sends_numbers_a_piece_whatever_the_length(config, numbers, response):
    """8 bytes a number: 16 a sample and rank for REINFORCE++ under zigzag, 32 for GAE."""
    sent = messages({"strategy": "carry", "agreement": "off", **config}, [response] * 7)
    assert sent == ([8 * numbers * 7], [])


def test_carries_that_do_not_fit_in_the_envelope_take_a_second_collective():
    """16,384 bytes less 96 of header hold the 16 bytes of 1,018 samples."""
    assert messages({"strategy": "carry"}, [1] * 1018) == ([ENVELOPE], [])
    assert messages({"strategy": "carry"}, [1] * 1019) == ([ENVELOPE, 16 * 1019], [])


def test_64_responses_of_32k_tokens_over_8_ranks():
    lengths = [32_768] * 64
    assert messages({"strategy": "carry"}, lengths, 8) == ([16_384], [])
    gathered, _ = messages({"strategy": "gather"}, lengths, 8)
    assert len(gathered) == 2
    assert sum(gathered) > 1_000_000


def test_gather_sends_the_dtype_it_was_given():
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)):
        config = {"strategy": "gather", "agreement": "off"}
        kl = lambda rank, inputs, dtype=dtype: {"kl": [x.to(dtype) for x in inputs["kl"]]}
        (sent,), _ = messages(config, [64, 5], 2, fault=kl)
        # 67 and 8 positions, in pieces of 17 and 2: the larger shard has 33 + 4 tokens (rank 1), in whole words of 8
        largest_shard = max(int(zigzag([67, 8], [64, 5], 2).lengths(rank).sum()) for rank in (0, 1))
        assert sent == -(-largest_shard * size // 8) * 8


FAULTS = {
    "none": lambda rank, inputs: {},
    "all masked": lambda rank, inputs: {"loss_masks": [x & False for x in inputs["loss_masks"]]},
    "no reward": lambda rank, inputs: {"rewards": [float("nan")] * len(inputs["rewards"])},
}
BAD = {
    "lengths": lambda rank, inputs: {"kl": [torch.zeros(99)] * len(inputs["kl"])} if rank == 2 else {},
    "reward": lambda rank, inputs: {"rewards": [rank] * len(inputs["rewards"])},
    "samples": lambda rank, inputs: {k: v[:-1] for k, v in inputs.items()} if rank == 1 else {},
}


@pytest.mark.parametrize("strategy", ["gather", "carry"])
@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 40, 3], [40] * 30])
def test_what_is_sent_does_not_depend_on_content(strategy, lengths):
    """Also a fault meets the same first collective, then one with the details; nobody leaves early."""
    config = {"strategy": strategy, "whiten": True}
    sent = [messages(config, lengths, fault=fault) for fault in FAULTS.values()]
    assert sent == [sent[0]] * len(FAULTS)
    if lengths:
        for fault in BAD.values():
            cp, wide = messages(config, lengths, fault=fault)
            assert cp == [ENVELOPE, 4096]
            assert wide == [sent[0][1][0], 4096]


def test_the_padding_of_messages_is_never_read():
    lengths, total = [20, 1, 13], [29, 2, 100]
    layout = zigzag(total, lengths, 4)
    kl = torch.linspace(-1, 1, 34)
    mask = torch.arange(34) % 5 != 1

    def rank_fn(rank, all_gather):
        def poisoned(x):
            got = all_gather(x)
            for r in range(4):
                got[r, 4 * int(layout.lengths(r).sum()) :] = 0xFF  # a NaN in float32
            return got

        cp = CPContext(layout, rank, poisoned, agreement="off")
        own = kl[torch.from_numpy(layout.index(rank))]
        return reinforce_plus_plus(own, None, mask, cp=cp, gamma=0.9, kl_coef=1.0)

    assert len({int(layout.lengths(rank).sum()) for rank in range(4)}) > 1
    alone = reinforce_plus_plus(kl, None, mask, cp=CPContext(zigzag(total, lengths, 1)), gamma=0.9, kl_coef=1.0)
    assert_same_bits(whole(layout, in_threads(rank_fn, 4)), alone)


# The pure parts, by hand


LIBRARIES = pytest.mark.parametrize("array", [torch.tensor, np.array], ids=["torch", "numpy"])


@LIBRARIES
def test_chain_by_hand(array):
    """Three pieces: what enters a piece is the next one's first y, plus that piece's gain times what enters it."""
    first = array([[1.0, 2.0, 3.0], [1.0, 0.0, 8.0]])
    gain = array([[0.5, 0.5, 0.5], [1.0, 1.0, 0.0]])  # the second sample: its middle piece is empty
    assert exchange.chain(first, gain).tolist() == [[2 + 0.5 * 3, 3, 0], [8, 8, 0]]


@LIBRARIES
def test_chain_ahead_by_hand(array):
    """GAE of gamma = lam = 0.5, one step a piece: what enters is A/4 + V/2 of the next piece."""
    first, value, bootstrap = array([[0.0, 4.0, 8.0]]), array([[0.0, 6.0, 2.0]]), array([2.0])
    one, quarter, half = (array([[x, x, x]]) for x in (1.0, 0.25, 0.5))
    # past the end A = 0, V = 2: 1. Piece 2: A = 8 + 1, V = 2: 2.25 + 1. Piece 1: A = 4 + 3.25, V = 6: 1.8125 + 3
    steps = array([[True, True, True]])
    entering = exchange.chain_ahead(first, value, steps, one, quarter, half, bootstrap)
    assert entering.tolist() == [[4.8125, 3.25, 1.0]]
    none = exchange.chain_ahead(first, value, array([[False] * 3]), one, quarter, half, bootstrap)
    assert none.tolist() == [[1.0, 1.0, 1.0]]


def test_powers_are_float64_on_a_gpu_too():
    """There ticks are a tensor of integers, which torch would multiply into its default dtype."""
    ticks = torch.tensor([[1000, 3]])
    for decay in (0.999, torch.tensor([0.999], dtype=F64)):
        with patch.object(exchange, "native", lambda x: x):
            on_device = exchange.power(decay, ticks)
        assert on_device.dtype == F64
        on_host = exchange.power(decay, ticks.numpy())
        assert on_device.flatten().tolist() == pytest.approx(on_host.ravel().tolist(), rel=1e-14)


def test_power_of_zero_is_one_where_nothing_ticks():
    ticks = np.array([[0, 1, 2]])
    assert exchange.power(0.0, ticks).tolist() == [[1.0, 0.0, 0.0]]
    assert exchange.power(torch.tensor([0.5], dtype=F64), ticks).tolist() == [[1.0, 0.5, 0.25]]


def test_pieces_come_back_in_their_order():
    layout = zigzag([17, 30], [16, 12], 3)
    sent = torch.stack([
        torch.tensor([[[10.0 * i + p] for p in layout.pieces(rank)] for i in range(2)], dtype=F64) for rank in range(3)
    ])  # fmt: skip
    (numbers,) = exchange.by_piece(sent, layout)
    assert numbers.tolist() == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]


def test_an_oracle_that_knows_no_ranks_agrees_at_every_width():
    """A response of 13 tokens over 1 to 16 ranks, some of which own nothing of it."""
    kl, mask = torch.linspace(0.1, 1.3, 13), torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]).bool()
    exact = reference.reinforce_plus_plus(kl.tolist(), 2.0, mask.tolist(), gamma=0.9, kl_coef=0.1)
    for cp_size in range(1, 17):
        for strategy in (gather, carry):
            layout = zigzag([20], [13], cp_size)

            def rank_fn(rank, all_gather, layout=layout, strategy=strategy):
                cp = CPContext(layout, rank, all_gather, strategy)
                own = kl[torch.from_numpy(layout.index(rank))]
                return reinforce_plus_plus(own, torch.tensor([2.0]), mask, cp=cp, gamma=0.9, kl_coef=0.1)

            assert_as_good_as_serial(whole(layout, in_threads(rank_fn, cp_size)).tolist(), exact)
