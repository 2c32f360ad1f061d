"""Log-probs and labels on a rank's grid, against slices made sample by sample with plain Python."""

import pytest
import torch

from cp_returns.layout import contiguous, contiguous_pack, zigzag
from cp_returns.log_probs import (
    at_responses,
    local_grid,
    local_labels,
    response_log_probs,
    slice_responses,
)

# The samples of semantics.md section 1, a response of one token, one of none, and a prompt of one token.
TOTAL, RESPONSE = [10, 13, 5, 33, 4, 6, 9], [9, 3, 2, 4, 1, 0, 8]
VOCAB = 11


def padded(unit):
    return [-(-t // unit) * unit for t in TOTAL]


LAYOUTS = {
    "slime": lambda w: (zigzag(TOTAL, RESPONSE, w), padded(2 * w if w > 1 else 1)),  # one rank needs no padding
    "megatron": lambda w: (zigzag(TOTAL, RESPONSE, w, multiple=2), padded(4 * w if w > 1 else 2)),
    "rows": lambda w: (zigzag(TOTAL, RESPONSE, w, padded_lengths=[48] * len(TOTAL)), [48] * len(TOTAL)),
    "contiguous": lambda w: (contiguous(TOTAL, RESPONSE, w), padded(w)),
}


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (t,), generator=generator) for t in TOTAL]


def responses(samples):
    return [s[len(s) - r :] for s, r in zip(samples, RESPONSE, strict=True)]


def cut(samples, widths, w, rank, kind):
    """What a rank holds of whole samples, by the rule of each layout written out."""
    grid = []
    for sample, width in zip(samples, widths, strict=True):
        sample = torch.cat([sample, sample.new_zeros(width - len(sample), *sample.shape[1:])])
        if w == 1:
            grid.append(sample)
        elif kind == "contiguous":
            piece = width // w
            grid.append(sample[rank * piece : (rank + 1) * piece])
        else:
            piece = width // (2 * w)
            back = 2 * w - 1 - rank
            grid += [sample[rank * piece : (rank + 1) * piece], sample[back * piece : (back + 1) * piece]]
    return torch.cat(grid)


@pytest.mark.parametrize("w", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_grids_labels_and_log_probs(kind, w):
    layout, widths = LAYOUTS[kind](w)
    samples = tokens()
    logits = [torch.randn(t, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(t)) for t in TOTAL]
    expected = [
        torch.stack([logits[i][t - r - 1 + j].log_softmax(-1)[samples[i][t - r + j]] for j in range(r)])
        if r
        else torch.empty(0, dtype=torch.float64)
        for i, (t, r) in enumerate(zip(TOTAL, RESPONSE, strict=True))
    ]
    got = torch.full((sum(RESPONSE),), torch.nan, dtype=torch.float64)
    for rank in range(w):
        assert torch.equal(local_grid(samples, layout, rank), cut(samples, widths, w, rank, kind))
        shifted = [torch.cat([s[1:], s.new_zeros(1)]) for s in samples]
        assert torch.equal(local_labels(samples, layout, rank), cut(shifted, widths, w, rank, kind))
        grid = cut(logits, widths, w, rank, kind)
        log_probs = response_log_probs(grid, responses(samples), layout, rank)
        assert len(grid) == layout.grid_length
        got[torch.from_numpy(layout.index(rank))] = log_probs
        # The model's own loss on labels shifted before the cut is the same thing.
        own = -torch.nn.functional.cross_entropy(grid, local_labels(samples, layout, rank), reduction="none")
        torch.testing.assert_close(at_responses(own, layout, rank), log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("w", [1, 2, 4])
def test_stream_cut_contiguously(w):
    stream = torch.cat(tokens())
    length = -(-len(stream) // w) * w + 8 * w
    layout = contiguous_pack(TOTAL, RESPONSE, w, stream_length=length)
    stream = torch.cat([stream, stream.new_zeros(length - len(stream))])
    for rank, part in enumerate(stream.chunk(w)):
        assert torch.equal(local_grid(tokens(), layout, rank), part)
        # Response token j is predicted one position before it, whatever rank that is on.
        begins = torch.tensor([0, *TOTAL]).cumsum(0)
        positions = [
            b + t - r - 1 + j for b, t, r in zip(begins.tolist(), TOTAL, RESPONSE, strict=False) for j in range(r)
        ]
        mine = [p - rank * length // w for p in positions if p * w // length == rank]
        assert at_responses(torch.arange(length // w), layout, rank).tolist() == mine


def test_labels_shifted_after_the_cut_are_wrong_at_piece_borders():
    layout, _ = LAYOUTS["rows"](2)
    grid = local_grid(tokens(), layout, 0)
    after = torch.cat([grid[1:], grid.new_zeros(1)])
    assert not torch.equal(after, local_labels(tokens(), layout, 0))


@pytest.mark.parametrize("w", [2, 3])
def test_slices_of_whole_tensors(w):
    layout, _ = LAYOUTS["slime"](w)
    full = [torch.arange(r) + 100 * i for i, r in enumerate(RESPONSE)]
    for rank in range(w):
        expected = [
            [100 * i + j for j in range(r) if layout.token_owners(i)[j] == rank] for i, r in enumerate(RESPONSE)
        ]
        assert [shard.tolist() for shard in slice_responses(full, layout, rank)] == expected
    pairs = slice_responses([torch.stack([x, -x], -1) for x in full], layout, 0)
    assert pairs[0].shape[1:] == (2,)


def test_gradients_reach_the_logits_once_and_an_empty_rank_stays_connected():
    layout = zigzag([13], [3], 2, padded_lengths=[16])  # rank 0 owns nothing: semantics.md section 1
    response = [torch.tensor([3, 1, 4])]
    logits = torch.randn(8, VOCAB, requires_grad=True)
    response_log_probs(logits, response, layout, 0).sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))

    logits = torch.randn(8, VOCAB, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: response_log_probs(x, response, layout, 1), logits)


def test_half_precision_is_computed_in_float32():
    layout = zigzag([4], [3], 1)
    logits = torch.randn(4, VOCAB).bfloat16()
    got = response_log_probs(logits, [torch.tensor([1, 2, 3])], layout, 0)
    assert got.dtype == torch.float32
    expected = torch.stack([logits[j].float().log_softmax(-1)[j + 1] for j in range(3)])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_an_injected_cross_entropy_gets_the_rows_and_the_tokens():
    layout = zigzag([4, 3], [2, 1], 1)
    rows = torch.arange(7.0)[:, None].expand(7, 5)

    def cross_entropy(logits, labels):
        assert logits[:, 0].tolist() == [1, 2, 5]  # prompt - 1 + j of each sample
        return 10.0 * labels + logits[:, 0]

    got = response_log_probs(rows, [torch.tensor([7, 8]), torch.tensor([9])], layout, 0, cross_entropy=cross_entropy)
    assert got.tolist() == [-71, -82, -95]


def test_an_empty_batch_is_an_empty_tensor():
    layout = zigzag([], [], 2)
    assert response_log_probs(torch.randn(0, VOCAB), [], layout, 1).shape == (0,)
    assert slice_responses([], layout, 0) == []
    assert local_grid([], layout, 0).shape == (0,)


def test_lengths_that_do_not_fit_are_named():
    layout = zigzag(TOTAL, RESPONSE, 2)
    with pytest.raises(ValueError, match=r"rank 1 was given 3 positions; its grid has 48"):
        at_responses(torch.zeros(3), layout, 1)
    with pytest.raises(ValueError, match=r"sample 1: a tensor of 13 tokens; expected its response length 3"):
        slice_responses([torch.zeros(9), *tokens()[1:]], layout, 0)
    with pytest.raises(ValueError, match=r"sample 0: a tensor of 9 tokens; expected its total length 10"):
        local_grid(responses(tokens()), layout, 0)
    with pytest.raises(ValueError, match="2 tensors for 7 samples"):
        slice_responses(tokens()[:2], layout, 0)
