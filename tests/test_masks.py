"""Packed masks: what they select, and counts and places in them against looking at every token."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_returns import masks, reference
from cp_returns.masks import Prefix, places, turn_ends

# runs as well as single tokens, so that whole words are 0 and 1, and more than one line of 128 tokens
MASKS = st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=8).map(
    lambda runs: [value for value, n in runs for _ in range(n)]
)

# A long mask is counted by lines of 128 tokens, a short one token by token: the first is asked for where it can be.
ways = pytest.mark.parametrize("few", [128, 2**16], ids=["lines", "tokens"])


def prefix_of(mask: torch.Tensor, few: int) -> Prefix:
    with patch.object(masks, "_FEW", few):
        return Prefix(mask)


@ways
@given(MASKS)
def test_counts_and_last_places_at_every_position(few, mask):
    prefix = prefix_of(torch.tensor(mask, dtype=torch.bool), few)
    positions = np.arange(len(mask) + 1)
    assert prefix.before(positions).tolist() == [sum(mask[:end]) for end in range(len(mask) + 1)]
    last = prefix.place(prefix.before(positions)).tolist()
    for end in range(len(mask) + 1):
        valid = [j for j in range(end) if mask[j]]
        if valid:
            assert last[end] == valid[-1]
        else:
            assert 0 <= last[end] <= len(mask)  # any, but one that can be looked at


@pytest.mark.parametrize("start", range(9))
def test_counts_of_a_mask_that_begins_anywhere_in_memory(start):
    whole = torch.rand(700, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = whole[start:]
    expected = [0, *mask.long().cumsum(0).tolist()]
    with patch.object(masks, "native", lambda x: x):  # as on a GPU, where a word lies at a multiple of its size
        assert prefix_of(mask, 128).before(torch.arange(len(mask) + 1)).tolist() == expected
    assert prefix_of(mask, 128).before(np.arange(len(mask) + 1)).tolist() == expected


@pytest.mark.parametrize("way", ["host", "counts"])
@given(st.lists(MASKS, max_size=6))
def test_last_valid_token_of_each_response(way, responses):
    lengths = np.array([len(mask) for mask in responses], dtype=np.int64)
    packed = torch.tensor([value for mask in responses for value in mask], dtype=torch.bool)
    got = masks.last_valid(packed, lengths) if way == "host" else masks._by_counts(packed, lengths)
    assert got.tolist() == [max((j for j, value in enumerate(mask) if value), default=-1) for mask in responses]


@pytest.mark.parametrize("at", [-1, 0, 1, 255, 256, 2303, 2304, 4743, 4744, 4998, 4999])
def test_last_valid_token_far_from_the_end(at):
    """The search goes back in windows of 256, 2,048, .. tokens; neighbours of the response are valid to its borders."""
    mask = torch.ones(5010, dtype=torch.bool)
    mask[5 + at + 1 : 5005] = False
    assert masks.last_valid(mask, np.array([5, 5000, 5])).tolist() == [4, at, 4]


def test_a_mask_long_enough_for_lines():
    """Its end, 100 tokens past the last whole line, is looked up apart."""
    rng = np.random.default_rng(0)
    mask = torch.from_numpy(rng.random(masks._FEW + 100) < 0.5)
    valid, n = np.flatnonzero(mask.numpy()), len(mask)
    prefix = Prefix(mask)
    positions = np.concatenate([[0, n, n - 1, n - 100, n - 101], rng.integers(0, n, 1000)])
    before = prefix.before(positions)
    assert before.tolist() == np.searchsorted(valid, positions).tolist()
    assert prefix.place(before[1:]).tolist() == valid[before[1:] - 1].tolist()


@ways
@given(MASKS, st.data())
def test_positions_in_any_order_and_number(few, mask, data):
    prefix = prefix_of(torch.tensor(mask, dtype=torch.bool), few)
    positions = data.draw(st.lists(st.integers(0, len(mask)), max_size=9))
    got = prefix.before(np.array(positions, dtype=np.int64))
    assert got.tolist() == [sum(mask[:end]) for end in positions]
    assert got.dtype == np.int64


def test_counts_do_not_saturate():
    """I73: a running sum in a small dtype stops; a byte's holds 255, a bfloat16's 256."""
    prefix = Prefix(torch.ones(100_003, dtype=torch.bool))
    assert prefix.before(np.array([100_003, 1000, 257])).tolist() == [100_003, 1000, 257]
    assert prefix.place(np.array([100_003, 1000])).tolist() == [100_002, 999]


@ways
def test_a_lone_token_at_each_place_of_a_word(few):
    for n in (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 257):
        for at in range(n):
            prefix = prefix_of(torch.arange(n) == at, few)
            assert prefix.place(np.array([1])).item() == at
            assert prefix.before(np.array([at, at + 1])).tolist() == [0, 1]


@ways
@pytest.mark.parametrize("strided", [False, True])
def test_the_mask_is_left_as_it_is(strided, few):
    mask = torch.tensor([True, False] * 200)
    given_ = mask[::2] if strided else mask
    before = given_.clone()
    prefix = prefix_of(given_, few)
    assert prefix.before(np.array([20])).item() == (20 if strided else 10)
    turn_ends(given_, np.array([len(given_)]))
    assert torch.equal(given_, before)


@given(MASKS, st.integers(0, 9))
def test_places(mask, skipped):
    """Also of a part, and of a strided one."""
    some = torch.tensor(mask, dtype=torch.bool)[skipped:]
    assert places(some).tolist() == [j for j, valid in enumerate(mask[skipped:]) if valid]
    assert places(some[::2]).tolist() == [j for j, valid in enumerate(mask[skipped::2]) if valid]


@given(st.lists(MASKS, max_size=5))
def test_turn_ends_are_the_ticks_of_the_turn_clock(masks):
    """Also where one response ends on a valid token and the next begins with one, or has no tokens."""
    pack = torch.tensor([v for mask in masks for v in mask], dtype=torch.bool)
    ends = turn_ends(pack, np.array([len(mask) for mask in masks], dtype=np.int64))
    expected = []
    for mask in masks:
        step, tick = reference.clock_of(mask, "turn")
        expected += [bool(s and t) for s, t in zip(step, tick, strict=True)]
    assert ends.tolist() == expected
    assert ends.dtype == torch.bool


@ways
def test_the_code_path_of_a_gpu_counts_alike(few, monkeypatch):
    mask = torch.tensor([False, True, True, False] * 77)
    positions = np.arange(len(mask) + 1)
    host = prefix_of(mask, few)
    monkeypatch.setattr(masks, "native", lambda x: x)
    device = prefix_of(mask, few)
    ranks = host.before(positions)
    assert device.before(torch.from_numpy(positions)).tolist() == ranks.tolist()
    assert device.place(torch.from_numpy(ranks)).tolist() == host.place(ranks).tolist()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("kept", [0, 1, 30])
def test_put_is_the_inverse_of_pick(dtype, kept):
    x, mask = (torch.arange(30) % 3 > 0).to(dtype), torch.arange(30) < kept
    picked = masks.pick(x, mask)
    assert torch.equal(picked, x[:kept])
    assert torch.equal(masks.put(picked, mask), torch.where(mask, x, torch.zeros((), dtype=dtype)))
