"""The one collective: over real gloo groups, counted, and named where it fails."""

import os

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits

from cp_returns.collectives import Counted, alone, call, over
from cp_returns.errors import CPCollectiveError
from cp_returns.simulate import RankFailure, in_processes

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def test_alone_is_the_identity_with_a_rank_in_front():
    x = torch.arange(6.0).view(2, 3)
    assert_same_bits(alone(x), x[None])


def gathered(rank, all_gather):
    group = over(dist.group.WORLD)
    assert (group.rank, group.size) == (rank, 3)
    for dtype in DTYPES:
        for shape in ((), (1,), (5,), (2, 3), (2, 1, 4)):
            x = (torch.arange(torch.Size(shape).numel()) + rank * 7).reshape(shape).to(dtype)
            before = x.clone()
            y = group(x)
            expected = [(torch.arange(x.numel()) + r * 7).reshape(shape).to(dtype) for r in range(3)]
            assert_same_bits(y, torch.stack(expected))
            y.zero_()
            assert torch.equal(x, before)
    strided = torch.arange(12.0).view(3, 4).t() + rank
    assert_same_bits(group(strided), torch.stack([torch.arange(12.0).view(3, 4).t() + r for r in range(3)]))
    assert not group(torch.ones(2, requires_grad=True)).requires_grad
    return str(group)


def test_over_a_gloo_group_any_dtype_and_shape():
    assert in_processes(gathered, 3) == ["the gloo group of ranks [0, 1, 2]"] * 3


def sub_groups(rank, all_gather):
    cp = over(all_gather.cp_group)
    return cp.rank, cp.size, cp(torch.tensor([rank])).flatten().tolist(), str(cp)


def test_over_a_sub_group_in_rank_order():
    results = in_processes(sub_groups, 4, cp_size=2)
    assert [r[:3] for r in results] == [(0, 2, [0, 1]), (1, 2, [0, 1]), (0, 2, [2, 3]), (1, 2, [2, 3])]
    assert results[3][3] == "the gloo group of ranks [2, 3]"


def test_counted_counts_calls_and_the_bytes_of_this_rank():
    counted = Counted(lambda x: torch.stack([x, x]))
    counted(torch.zeros(10))
    counted(torch.zeros(3, dtype=torch.float64))
    assert (counted.collectives, counted.bytes_sent) == (2, 64)


def test_one_rank_sends_nothing():
    counted = Counted(alone)
    assert_same_bits(counted(torch.ones(4)), torch.ones(1, 4))
    assert (counted.collectives, counted.bytes_sent) == (0, 0)


def left_alone(rank, all_gather):
    all_gather(torch.zeros(1))  # both have come: gloo connects to its peers when a group is made
    if rank == 1:
        os._exit(0)
    call(over(dist.group.WORLD), torch.zeros(4), "whiten")


def test_a_peer_that_died_is_told_with_the_step_and_the_group():
    with pytest.raises(RankFailure) as failure:
        in_processes(left_alone, 2, timeout=30)
    error = failure.value.outcomes[0].error
    assert isinstance(error, CPCollectiveError)
    assert "the all-gather of step 'whiten' (16 bytes a rank) over the gloo group of ranks [0, 1] did not end" in str(
        error
    )


def test_bad_input_is_not_taken_for_a_dead_peer():
    def refuses(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        call(refuses, torch.zeros(1), "whiten")

    def breaks(x):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(CPCollectiveError, match=r"step 'gather'.*an injected collective.*Connection closed") as error:
        call(breaks, torch.zeros(1), "gather")
    assert isinstance(error.value.__cause__, RuntimeError)
