"""Failure agreement: what one rank cannot use, or holds otherwise, is one text on all ranks."""

import math

import numpy as np
import pytest
import torch

from cp_returns.agreement import DETAILS, ENVELOPE, Facts, Problem, _mixed_sum, agree, agree_ragged, fingerprint
from cp_returns.collectives import Counted
from cp_returns.context import CPContext, carry, gather
from cp_returns.errors import CPInputError
from cp_returns.estimators import reinforce_plus_plus
from cp_returns.layout import zigzag
from cp_returns.simulate import in_threads

F64 = torch.float64


def text_on_all(fn, ranks: int) -> str:
    """The text of the CPInputError that every rank raises, the same one."""

    def catch(rank, all_gather):
        try:
            return "no error: " + repr(fn(rank, all_gather))
        except CPInputError as error:
            return str(error)

    texts = in_threads(catch, ranks)
    assert len(set(texts)) == 1, texts
    return texts[0]


# The fingerprint: the host's, and the GPU's run on the host


def on_device(x):
    return _mixed_sum(x.view(torch.uint8))


@pytest.mark.parametrize("fingerprint", [fingerprint, on_device])
def test_a_fingerprint_sees_every_bit_and_its_place(fingerprint):
    """Rewards of 0 and 1 in another order are the case that a weighted sum of words cannot tell."""
    a, b = torch.tensor([1.0, 0, 0, 1], dtype=F64), torch.tensor([0.0, 1, 1, 0], dtype=F64)
    assert fingerprint(a) != fingerprint(b)
    orders = torch.tensor([[n >> j & 1 for j in range(10)] for n in range(1024)], dtype=F64)
    assert len({int(fingerprint(row)) for row in orders}) == 1024
    masks = torch.rand(500, 333, generator=torch.Generator().manual_seed(0)) < 0.5
    prints = {int(fingerprint(mask)) for mask in masks}
    for mask in masks[:20]:
        for j in range(333):
            flipped = mask.clone()
            flipped[j] ^= True
            prints.add(int(fingerprint(flipped)))
    assert len(prints) == 500 + 20 * 333


@pytest.mark.parametrize("fingerprint", [fingerprint, on_device])
def test_a_moved_gap_is_seen(fingerprint):
    """Two gaps of 8 tokens, moved apart by 8 tokens each: the same number of ones and the same centre."""
    near, far = torch.ones(256, dtype=torch.bool), torch.ones(256, dtype=torch.bool)
    near[64:72] = near[128:136] = False
    far[56:64] = far[136:144] = False
    assert fingerprint(near) != fingerprint(far)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9])
def test_a_fingerprint_is_of_the_bytes_alone(n):
    x = torch.arange(2 * n, dtype=torch.int8)
    assert fingerprint(x[::2]) == fingerprint(x[::2].clone())
    assert 0 <= fingerprint(x) < 2**32


# One envelope


@pytest.mark.parametrize(("numbers", "collectives"), [(0, 1), (2036, 1), (2037, 2), (5000, 2)])
def test_the_payload_rides_in_the_envelope_as_long_as_it_fits(numbers, collectives):
    """2036 float64 fill 16 KiB less 64 bytes of header and 32 of sums."""
    assert ENVELOPE == 8 * 2036 + 96

    def fn(rank, all_gather):
        counted = Counted(all_gather)
        got = agree(counted, Facts(), torch.arange(float(numbers), dtype=F64) + rank, step="s", where="rank")
        return got, counted.collectives, counted.bytes_sent

    for got, calls, sent in in_threads(fn, 3):
        assert torch.equal(got, torch.arange(3.0)[:, None] + torch.arange(float(numbers), dtype=F64))
        assert calls == collectives
        assert sent == ENVELOPE + (8 * numbers if collectives == 2 else 0)


@pytest.mark.parametrize("many", [3, 700])
def test_ranks_may_hold_different_numbers_of_rows(many):
    def fn(rank, all_gather):
        counted = Counted(all_gather)
        rows = torch.full((many * rank, 4), rank, dtype=torch.int64)
        got = agree_ragged(counted, Facts(), rows, step="s", where="rank")
        return [x.tolist() for x in got], counted.collectives

    expected = [[[rank] * 4] * (many * rank) for rank in range(3)]
    assert in_threads(fn, 3) == [(expected, 1 if many == 3 else 2)] * 3


# The text


@pytest.mark.parametrize("rank_at_fault", range(4))
def test_a_problem_of_one_rank_is_raised_by_all(rank_at_fault):
    problem = Problem("kl", math.nan, "a finite number at a valid token", sample=2, token=7)

    def fn(rank, all_gather):
        facts = Facts(problem=problem if rank == rank_at_fault else None)
        return agree(all_gather, facts, torch.zeros(3), step="s", where="CP rank")

    assert text_on_all(fn, 4) == (
        f"CP rank {rank_at_fault} of 4: sample 2, token 7, kl is nan; expected a finite number at a valid token"
    )


def test_the_first_of_two_bad_ranks_is_named():
    def fn(rank, all_gather):
        facts = Facts(problem=Problem("kl", rank, "x") if rank in (1, 3) else None)
        return agree(all_gather, facts, torch.zeros(3), step="s", where="rank")

    assert text_on_all(fn, 4) == "rank 1 of 4: kl is 1; expected x"


@pytest.mark.parametrize("name", ["é" * 5000, "\0" * 5000, "𝄞" * 5000, '"' * 5000])
def test_a_text_of_any_length_and_alphabet_fits(name):
    def fn(rank, all_gather):
        facts = Facts(problem=Problem("clock", name, "a word") if rank == 1 else None)
        return agree(all_gather, facts, torch.zeros(3), step="s", where="rank")

    text = text_on_all(fn, 2)
    assert text.startswith("rank 1 of 2: clock is " + name[:200])
    assert len(text.encode()) < DETAILS


@pytest.mark.parametrize("odd", range(4))
def test_the_rank_that_differs_from_most_is_named(odd):
    """Also when it is rank 0: three ranks with one gamma are not at fault."""

    def fn(rank, all_gather):
        facts = Facts(settings={"gamma": 0.5 if rank == odd else 0.9})
        return agree(all_gather, facts, torch.zeros(3), step="s", where="CP rank")

    right = 1 if odd == 0 else 0
    assert text_on_all(fn, 4) == (
        f"CP rank {odd} of 4: gamma is 0.5; expected 0.9, as on CP rank {right}: all ranks must be given the same"
    )


def test_settings_in_another_order_are_the_same():
    def fn(rank, all_gather):
        settings = {"gamma": 0.9, "clock": None} if rank else {"clock": None, "gamma": 0.9}
        return agree(all_gather, Facts(settings=settings), torch.zeros(3), step="s", where="CP rank").shape

    assert in_threads(fn, 2) == [(2, 3)] * 2


def call(rank, all_gather, *, strategy=gather, lengths=(12, 7, 0, 30), **change):
    """reinforce_plus_plus with 4 samples on this rank; `change` is the whole input with other values."""
    layout = zigzag([n + 5 for n in lengths], lengths, all_gather.size)
    tokens = sum(lengths)
    full = {
        "kl": torch.linspace(0, 1, tokens),
        "rewards": torch.arange(len(lengths), dtype=F64),
        "full_mask": torch.ones(tokens, dtype=torch.bool),
        "gamma": 0.9,
        "kl_coef": 0.1,
    } | change
    if full["kl"] is not None:
        full["kl"] = full["kl"][torch.from_numpy(layout.index(rank))]
    kl, rewards, mask = (full.pop(name) for name in ("kl", "rewards", "full_mask"))
    cp = CPContext(layout, rank, all_gather, strategy)
    return reinforce_plus_plus(kl, rewards, mask, cp=cp, **full)


def differing(strategy=gather, ranks=3, at=1, **change):
    """The text when rank `at` is given something else than the others."""
    return text_on_all(
        lambda rank, all_gather: call(rank, all_gather, strategy=strategy, **(change if rank == at else {})), ranks
    )


@pytest.mark.parametrize("strategy", [gather, carry])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rewards": None}, "sample 0, reward is absent; expected 0.0"),
        ({"rewards": torch.tensor([0, 1, 2, 4.0])}, "sample 3, reward is 4.0; expected 3.0"),
        ({"sample_mask": torch.ones(4)}, "sample 0, sample_mask is True; expected absent"),
        ({"kl": None}, "dtype of kl is absent; expected torch.float32"),
        ({"kl": torch.zeros(49, dtype=F64)}, "dtype of kl is torch.float64; expected torch.float32"),
        ({"clock": "turn"}, "clock is turn; expected token"),
        ({"kl_coef": torch.full((4,), 0.1)}, "kl_coef is 4 numbers; expected 0.1"),
        ({"lengths": (12, 7, 0, 29), "kl": None}, "dtype of kl is absent"),
        ({"lengths": (12, 7, 1, 29)}, "sample 2, response_length is 1; expected 0"),
        ({"lengths": (12, 7, 0)}, "number of samples is 3; expected 4"),
    ],
)
def test_what_differs_is_named(strategy, change, text):
    tokens = sum(change.get("lengths", (12, 7, 0, 30)))
    if "lengths" in change:
        change = {"kl": torch.zeros(tokens), "full_mask": torch.ones(tokens, dtype=torch.bool)} | change
    assert differing(strategy, **change).startswith(f"CP rank 1 of 3: {text}")


def test_masks_that_differ_are_named_by_their_number_of_ones():
    mask = torch.ones(49, dtype=torch.bool)
    mask[13] = False
    text = differing(full_mask=mask)
    assert text.startswith("CP rank 1 of 3: sample 1, loss_mask is 6 ones, digest ")
    assert "; expected 7 ones, digest " in text
    moved = torch.ones(2, 49, dtype=torch.bool)
    moved[0, 13] = moved[1, 14] = False
    text = text_on_all(lambda rank, gather: call(rank, gather, full_mask=moved[rank]), 2)
    assert text.startswith("CP rank 1 of 2: sample 1, loss_mask is 6 ones, digest ")


def test_layouts_that_differ_are_named_by_the_length_of_their_pieces():
    def fn(rank, all_gather):
        layout = zigzag([20, 17], [12, 9], 2, multiple=4 if rank else 1)
        n = int(layout.lengths(rank).sum())
        mask = torch.ones(21, dtype=torch.bool)
        cp = CPContext(layout, rank, all_gather)
        return reinforce_plus_plus(torch.zeros(n), None, mask, cp=cp, gamma=1.0, kl_coef=1.0)

    assert text_on_all(fn, 2).startswith("CP rank 1 of 2: sample 0, length of its pieces is 8; expected 5, as on")


@pytest.mark.parametrize("sample", [0, 20, 300, 499])
def test_the_sample_is_named_however_many_there_are(sample):
    lengths = [1 + i % 5 for i in range(500)]
    rewards = torch.zeros(500, dtype=F64)
    rewards[sample] = 1.0
    common = {"lengths": lengths, "kl": torch.zeros(sum(lengths)), "full_mask": torch.ones(sum(lengths)).bool()}

    def fn(rank, all_gather):
        return call(rank, all_gather, **common, rewards=rewards if rank == 2 else torch.zeros(500, dtype=F64))

    assert text_on_all(fn, 3).startswith(f"CP rank 2 of 3: sample {sample}, reward is 1.0; expected 0.0")


def test_as_many_tokens_as_samples_do_not_confuse_the_samples():
    mask = torch.tensor([True, False])
    text = text_on_all(
        lambda rank, gather: call(
            rank, gather, lengths=(2, 0), kl=torch.zeros(2), full_mask=mask if rank else mask | True
        ),
        2,
    )
    assert text.startswith("CP rank 1 of 2: sample 0, loss_mask is 1 ones")


def test_a_missing_reward_is_missing_whatever_bits_its_nan_has():
    bits = torch.tensor([0x7FF8000000000000, -0x8000000000000, 0x7FF8000000000001, 0x7FF8000000000002]).view(F64)
    assert bits.isnan().all()

    def fn(rank, all_gather):
        rewards = torch.zeros(4, dtype=F64)
        rewards[1] = bits[rank]
        return call(rank, all_gather, rewards=rewards).isnan().any().item()

    assert in_threads(fn, 4) == [False] * 4


@pytest.mark.parametrize("strategy", [gather, carry])
def test_a_false_alarm_costs_one_collective_and_changes_nothing(strategy):
    """The cheap test for NaN is a sum, which finite numbers may overflow."""
    kl = torch.zeros(49, dtype=F64)
    kl[[0, 20, 21, 40]] = -1.7e308

    def fn(rank, all_gather):
        counted = Counted(all_gather)
        layout = zigzag([17, 12, 5, 35], (12, 7, 0, 30), 2)
        index = torch.from_numpy(layout.index(rank))
        cp = CPContext(layout, rank, counted, strategy)
        mask = torch.ones(49, dtype=torch.bool)
        got = reinforce_plus_plus(kl[index], None, mask, cp=cp, gamma=0.0, kl_coef=0.5)
        return torch.equal(got, -0.5 * kl[index]), counted.collectives

    alarmed = 1
    assert in_threads(fn, 2) == [(True, (2 if strategy is gather else 1) + alarmed)] * 2


def test_one_rank_alone_is_told_its_problem_without_a_rank():
    with pytest.raises(CPInputError, match=r"^sample 0, token 1, kl is nan; expected a finite number"):
        reinforce_plus_plus(
            torch.tensor([0.0, math.nan]),
            None,
            torch.ones(2),
            cp=CPContext(zigzag([3], [2], 1)),
            gamma=1.0,
            kl_coef=1.0,
        )


@pytest.mark.parametrize("agreement", ["full", "off"])
def test_with_agreement_off_data_is_trusted_and_nothing_is_compared(agreement):
    def fn(rank, all_gather):
        counted = Counted(all_gather)
        layout = zigzag([13], [8], 2)
        cp = CPContext(layout, rank, counted, carry, agreement)
        kl = torch.full((int(layout.lengths(rank).sum()),), math.nan)
        mask = torch.ones(8, dtype=torch.bool)
        got = reinforce_plus_plus(kl, None, mask, cp=cp, gamma=1.0, kl_coef=1.0, nonfinite="propagate")
        return bool(got.isnan().all()), counted.collectives, counted.bytes_sent

    sent = ENVELOPE if agreement == "full" else 2 * 8  # two pieces
    assert in_threads(fn, 2) == [(True, 1, sent)] * 2


def test_off_still_says_what_the_host_can_see():
    cp = CPContext(zigzag([13], [8], 1), agreement="off")
    with pytest.raises(CPInputError, match=r"shape of kl is \[7\]; expected \[8\]"):
        reinforce_plus_plus(torch.zeros(7), None, torch.ones(8), cp=cp, gamma=1.0, kl_coef=1.0)
    with pytest.raises(CPInputError, match=r"gamma is 1.5; expected a number in \[0, 1\]"):
        reinforce_plus_plus(torch.zeros(8), None, torch.ones(8), cp=cp, gamma=1.5, kl_coef=1.0)


def test_numbers_may_be_numpy_numbers():
    cp = CPContext(zigzag([13], [8], 1))
    one, other = (
        reinforce_plus_plus(torch.ones(8), None, torch.ones(8), cp=cp, gamma=gamma, kl_coef=coef)
        for gamma, coef in ((0.5, 1.0), (np.float32(0.5), np.int64(1)))
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "bad", [{"gamma": torch.zeros(0)}, {"kl_coef": torch.ones(3)}, {"gamma": torch.ones(2, 1)}, {"gamma": "0.5"}]
)
def test_a_number_of_another_shape_or_kind_is_refused_by_all(bad):
    text = differing(ranks=2, **bad)
    name, value = next(iter(bad.items()))
    given = f"shape of {name} is {list(value.shape)}; expected [] or [4]" if isinstance(value, torch.Tensor) else name
    assert text.startswith(f"CP rank 1 of 2: {given}")


@pytest.mark.parametrize("name", ["kl", "rewards", "full_mask", "token_rewards", "sample_mask"])
@pytest.mark.parametrize("kind", ["list", "complex", "matrix"])
def test_what_is_no_tensor_of_numbers_is_refused_by_all(name, kind):
    def fn(rank, all_gather):
        if rank == 0:
            return call(rank, all_gather)
        layout = zigzag([17, 12, 5, 35], (12, 7, 0, 30), 2)
        size = {"full_mask": 49, "rewards": 4, "sample_mask": 4}.get(name, int(layout.lengths(1).sum()))
        x = torch.zeros(size)
        bad = {"list": x.tolist(), "complex": x + 0j, "matrix": x[:, None]}[kind]
        inputs = {"kl": torch.zeros(int(layout.lengths(1).sum())), "rewards": None, "full_mask": torch.ones(49)}
        inputs |= {name: bad}
        kl, rewards, mask = (inputs.pop(key) for key in ("kl", "rewards", "full_mask"))
        return reinforce_plus_plus(
            kl, rewards, mask, cp=CPContext(layout, 1, all_gather), gamma=0.9, kl_coef=0.1, **inputs
        )

    text = text_on_all(fn, 2)
    expected = {
        "list": f"{name} is a list",
        "complex": f"dtype of {name} is torch.complex64",
        "matrix": f"shape of {name}",
    }
    assert text.startswith(f"CP rank 1 of 2: {expected[kind]}")
