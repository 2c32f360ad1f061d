"""Who owns a token: the table, the oracle's walk over positions, every short length; no token lost or held twice."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st

from cp_returns import exchange, reference
from cp_returns.errors import CPInputError
from cp_returns.layout import Layout, contiguous, contiguous_pack, zigzag
from cp_returns.simulate import in_threads

MAKE = {"zigzag": zigzag, "contiguous": contiguous, "contiguous_pack": contiguous_pack}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def owners(layout: Layout) -> list[list[int]]:
    return [layout.token_owners(i).tolist() for i in range(layout.num_samples)]


# ---- worked by hand: semantics.md section 1, and reports I4, I7, I13, I18


@pytest.mark.parametrize(
    ("total", "response", "cp_size", "how", "expected"),
    [
        (10, 9, 2, {}, [0] * 3 + [1] * 6),
        (13, 3, 2, {}, [1] * 3),
        (5, 2, 4, {}, [2, 3]),
        (33, 4, 4, {}, [2, 2, 1, 1]),
        (10, 9, 2, {"multiple": 2}, [0] * 4 + [1] * 5),  # padded to 16, pieces of 4: positions 0-3 and nothing more
        (10, 9, 2, {"padded_lengths": [16]}, [0] * 4 + [1] * 5),
        (10, 9, 2, {"padded_lengths": [12]}, [0] * 3 + [1] * 6),
        (2, 1, 8, {}, [0]),
        (8, 7, 1, {}, [0] * 7),
        (1, 0, 4, {}, []),
    ],
)
def test_zigzag_by_hand(total, response, cp_size, how, expected):
    assert owners(zigzag([total], [response], cp_size, **how)) == [expected]


def test_the_ten_tokens_that_a_multiple_of_four_pads_to_sixteen():
    layout = zigzag([10], [9], 2, multiple=4)
    assert layout.piece.tolist() == [4]
    # rank 0: positions 0-3 and 12-15, of which no real token; rank 1: positions 4-9
    assert layout.index(0).tolist() == [0, 1, 2, 3]
    assert layout.index(1).tolist() == [4, 5, 6, 7, 8]


def test_position_nine_of_ten_is_on_rank_0_only_by_the_unaligned_rule():
    """I13: whoever holds a position, also of the last token, whose logit predicts nothing of the response."""
    unaligned, aligned = (reference.owners("zigzag", [11], [10], 2, padded_lengths=[p])[0] for p in (12, 16))
    assert (unaligned[9], aligned[9]) == (0, 1)
    assert owners(zigzag([11], [10], 2, padded_lengths=[12])) == [unaligned]
    assert owners(zigzag([11], [10], 2, padded_lengths=[16])) == [aligned]


def test_contiguous_by_hand():
    assert owners(contiguous([13], [12], 2)) == [[0] * 7 + [1] * 5]
    assert owners(contiguous([13], [12], 2, multiple=8)) == [[0] * 8 + [1] * 4]
    # two samples of 5 and 4 in a stream of 12: rank 0 holds positions 0-5, which is one position of the second
    assert owners(contiguous_pack([5, 4], [3, 3], 2, stream_length=12)) == [[0, 0, 0], [0, 1, 1]]
    assert owners(contiguous_pack([5, 4], [3, 3], 2, stream_length=12, padded_lengths=[6, 6])) == [[0] * 3, [1] * 3]


def test_the_order_of_shards_is_that_of_the_layout_asked_for():
    """I7: the same two shards are other responses by another layout."""
    shards = torch.stack([torch.arange(6), torch.arange(6, 12)])
    join = lambda layout: exchange.unpack_bytes(shards.view(torch.uint8), (shards[0],), 6, layout)[0].tolist()
    assert join(contiguous([14], [12], 2)) == list(range(12))
    assert join(contiguous([12], [11], 2)) == list(range(11))
    assert join(zigzag([12], [11], 2)) == [0, 1, 2, 6, 7, 8, 9, 10, 11, 3, 4]


@pytest.mark.parametrize("kind", MAKE)
def test_uneven_lengths_over_four_ranks(kind):
    """I18: 2,999 over 4."""
    how = {"stream_length": 3000} if kind == "contiguous_pack" else {}
    layout = MAKE[kind]([2999], [2998], 4, **how)
    assert owners(layout) == reference.owners(kind, [2999], [2998], 4, **how)
    check_round_trip(layout, torch.float32)


# ---- any batch


@st.composite
def layouts(draw):
    """(layout, its kind and arguments): mixed lengths, one-token responses, prompts only, much padding."""
    kind = draw(st.sampled_from(sorted(MAKE)))
    cp_size = draw(st.integers(1, 8))
    n = draw(st.integers(0, 5))
    total = draw(st.lists(st.integers(1, 90), min_size=n, max_size=n))
    response = [draw(st.integers(0, t - 1) | st.just(min(1, t - 1)) | st.just(t - 1)) for t in total]
    how = {}
    if kind == "contiguous_pack":
        if draw(st.booleans()):
            how["padded_lengths"] = [t + draw(st.integers(0, 9)) for t in total]
        tokens = sum(how.get("padded_lengths", total))
        how["stream_length"] = cp_size * (-(-tokens // cp_size) + draw(st.integers(0, 3)))
    elif draw(st.booleans()):
        how["multiple"] = draw(st.integers(1, 8))
    else:
        unit = cp_size * (2 if kind == "zigzag" else 1)
        how["padded_lengths"] = [unit * (-(-t // unit) + draw(st.integers(0, 3))) for t in total]
    return MAKE[kind](total, response, cp_size, **how), kind, (total, response, cp_size), how


def packed_full(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that tell every token from its neighbours."""
    x = torch.arange(1, 1 + int(layout.response_lengths.sum()))
    return x % 3 == 0 if dtype == torch.bool else x.to(dtype)


def poisoned(x: torch.Tensor, width: int) -> torch.Tensor:
    """The message of one tensor, with every bit of the padding set: NaN, if anyone reads it."""
    message = exchange.pack_bytes((x,), width)
    ones = exchange.pack_bytes((torch.full_like(x.contiguous().view(torch.uint8), 255).view(x.dtype),), width)
    zeros = exchange.pack_bytes((torch.zeros_like(x.contiguous().view(torch.uint8)).view(x.dtype),), width)
    return torch.where(ones == zeros, 255, message)


def check_round_trip(layout: Layout, dtype: torch.dtype) -> None:
    full = packed_full(layout, dtype)
    shards = [exchange.cut(full, layout, rank) for rank in range(layout.cp_size)]
    for rank, shard in enumerate(shards):
        assert_same_bits(shard, full[torch.from_numpy(layout.index(rank))])
    width = max(1, *(len(shard) for shard in shards))
    messages = torch.stack([poisoned(shard, width) for shard in shards])
    (joined,) = exchange.unpack_bytes(messages, (shards[0],), width, layout)
    assert_same_bits(joined, full)


@given(layouts(), st.sampled_from(DTYPES))
def test_ranks_partition_every_response_and_shards_join_bit_for_bit(case, dtype):
    layout, kind, lengths, how = case
    assert owners(layout) == reference.owners(kind, *lengths, **how)
    everyone = [layout.index(rank) for rank in range(layout.cp_size)]
    assert np.array_equal(np.sort(np.concatenate(everyone)), np.arange(sum(lengths[1])))
    for rank, index in enumerate(everyone):
        assert np.array_equal(index, np.sort(index))  # a rank's tokens in the order of the responses
        assert layout.lengths(rank).tolist() == [row.count(rank) for row in owners(layout)]
    assert layout.piece_lengths.sum(axis=1).tolist() == lengths[1]
    assert all(a <= b for row in layout.cuts.tolist() for a, b in pairwise(row))
    check_round_trip(layout, dtype)


@given(layouts())
def test_several_inputs_of_several_dtypes_travel_in_one_message_over_threads(case):
    layout = case[0]
    full = tuple(packed_full(layout, dtype) for dtype in DTYPES)
    width = max(1, *(int(layout.lengths(rank).sum()) for rank in range(layout.cp_size)))

    def rank_of(rank, all_gather):
        own = (None, *(exchange.cut(x, layout, rank) for x in full), None)
        messages = all_gather(exchange.pack_bytes(own, width))
        return exchange.unpack_bytes(messages, own, width, layout)

    for whole in in_threads(rank_of, layout.cp_size):
        assert whole[0] is whole[-1] is None
        for ours, x in zip(whole[1:-1], full, strict=True):
            assert_same_bits(ours, x)


@pytest.mark.parametrize("cp_size", range(1, 9))
def test_every_short_length_exhaustively(cp_size):
    """I3: totals 1..64, every response length, 1..8 ranks, in one batch of 2,080 samples a rank count."""
    total, response = np.array([(t, r) for t in range(1, 65) for r in range(t)]).T
    sample = np.repeat(np.arange(len(total)), response)
    token = np.concatenate([np.arange(r) for r in response])
    position = total[sample] - response[sample] - 1 + token
    for kind in MAKE:
        if kind == "contiguous_pack":
            stream = -(-int(total.sum()) // cp_size) * cp_size
            layout = contiguous_pack(total, response, cp_size, stream_length=stream)
            expected = ((np.cumsum(total) - total)[sample] + position) // (stream // cp_size)
        else:
            pieces = cp_size * (2 if kind == "zigzag" else 1)
            piece = position // np.ceil(total / pieces).astype(int)[sample]
            layout = MAKE[kind](total, response, cp_size)
            expected = np.minimum(piece, 2 * cp_size - 1 - piece) if kind == "zigzag" else piece
        for rank in range(cp_size):
            assert np.array_equal(layout.index(rank), np.flatnonzero(expected == rank))
        check_round_trip(layout, torch.float32)


@pytest.mark.parametrize("as_", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.int32)])
def test_lengths_of_any_integer_kind(as_):
    expected = zigzag([10, 13], [9, 3], 2, padded_lengths=[12, 16])
    layout = zigzag(as_([10, 13]), as_([9, 3]), 2, padded_lengths=as_([12, 16]))
    assert np.array_equal(layout.cuts, expected.cuts)
    assert layout.cuts.dtype == np.int64


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("cp_size", [1, 4])
def test_an_empty_batch(kind, cp_size):
    layout = MAKE[kind]([], [], cp_size, **({"stream_length": 0} if kind == "contiguous_pack" else {}))
    assert layout.num_samples == 0
    for rank in range(cp_size):
        assert layout.index(rank).tolist() == layout.lengths(rank).tolist() == []
    check_round_trip(layout, torch.float32)


# ---- refused at the door


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: zigzag([5, 4], [2, 4], 2),
            "sample 1: response_length 4 of total_length 4; expected 0 <= response < total",
        ),
        (lambda: zigzag([4], [5], 2), "sample 0: response_length 5 of total_length 4"),
        (lambda: contiguous([4], [-1], 2), "sample 0: response_length -1 of total_length 4"),
        (lambda: zigzag([5, 4], [2], 2), "1 response_lengths for 2 total_lengths"),
        (
            lambda: zigzag([5, 9], [2, 4], 2, padded_lengths=[8, 10]),
            "sample 1: padded_length 10 of total_length 9; expected at least the total length and a multiple of 4",
        ),
        (lambda: zigzag([5, 9], [2, 4], 2, padded_lengths=[8, 8]), "sample 1: padded_length 8 of total_length 9"),
        (
            lambda: contiguous([9], [2], 2, padded_lengths=[9]),
            "sample 0: padded_length 9 of total_length 9; .* multiple of 2",
        ),
        (lambda: zigzag([5], [2], 2, padded_lengths=[8, 8]), "2 padded_lengths for 1 samples"),
        (lambda: zigzag([5], [2], 0), "cp_size is 0; expected at least 1"),
        (lambda: zigzag([5], [2], 2, multiple=0), "multiple is 0; expected at least 1"),
        (
            lambda: contiguous_pack([5, 4], [2, 2], 2, stream_length=9),
            "stream_length is 9; expected a multiple of cp_size = 2",
        ),
        (lambda: contiguous_pack([5, 4], [2, 2], 2, stream_length=8), "stream_length is 8; .* at least the 9 tokens"),
        (
            lambda: contiguous_pack([5], [2], 2, stream_length=8, padded_lengths=[4]),
            "padded_length 4 of total_length 5",
        ),
        (lambda: zigzag([5], [2], 2, multiple=1.5), "multiple is 1.5; expected at least 1, a whole number"),
        (lambda: zigzag([5], [2], 2.5), "cp_size is 2.5; expected at least 1, a whole number"),
        (lambda: zigzag([5.5], [2], 2), "total_lengths is .*; expected one integer a sample"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(call, text):
    with pytest.raises(CPInputError, match=text):
        call()


def test_a_rank_that_the_layout_does_not_have():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank is {rank}; expected 0 <= rank < cp_size = 2"):
            zigzag([5], [2], 2).index(rank)
        with pytest.raises(ValueError, match=f"rank is {rank}"):
            zigzag([5], [2], 2).lengths(rank)


def test_what_a_layout_hands_out_is_a_copy():
    layout = zigzag([9], [8], 2)
    for _ in range(2):
        lengths, index = layout.lengths(0), layout.index(0)
        assert lengths.sum() == len(index) > 0
        lengths[:], index[:] = 0, 0
