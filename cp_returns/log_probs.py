"""From a rank's logits to the log-probs of its response tokens, and from whole tensors to the rank's part of them.

A rank's *grid* is all positions that it holds, padding included: sample by sample its pieces in order. It is the
flattened token dimension of the rank's model input: [b, s / W] for a padded batch, [t / W] for a packed one. Megatron
cuts tokens and labels to the grid, but leaves RL tensors whole; and labels shifted after the cut are wrong at every
piece border. Here the log-prob of response token j is read at position prompt - 1 + j, and its label is response
token j itself.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cp_returns.layout import Integers, Layout

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, vocab or this rank's part of it], labels [n]) -> -log p(label) [n]."""


def response_log_probs(
    logits: Tensor,
    responses: Sequence[Tensor],
    layout: Layout,
    rank: int,
    *,
    cross_entropy: CrossEntropy | None = None,
) -> Tensor:
    """log p(token) of this rank's response tokens, packed, from its logits; differentiable.

    logp_j = log_softmax(logits[at position prompt - 1 + j])[response token j]

    `logits` are the model's on this rank's grid, [.., vocab], `responses` the whole responses' token ids, one tensor
    a sample, the same on every rank. Megatron's logits are split over the tensor-parallel ranks: the default
    `cross_entropy` is Megatron's vocab-parallel one where its groups exist, else torch's on the whole vocabulary.
    Half precision is computed in float32.

    Raises ValueError when the logits have another number of positions than the grid.
    """
    rows = at_responses(logits.flatten(0, -2), layout, rank)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    labels = (
        torch.cat(slice_responses(responses, layout, rank)).to(rows.device) if len(responses) else rows.new_empty(0)
    )
    return -(cross_entropy or _megatrons_or_torchs())(rows, labels.long())


def at_responses(grid: Tensor, layout: Layout, rank: int) -> Tensor:
    """A tensor on this rank's grid [grid, ..], at the logits of its response tokens [local, ..]; differentiable.

    For the model's own `-loss` (given `local_labels`), for a value head's values, for entropies.

    Raises ValueError when the first dimension is not the length of the grid.
    """
    if len(grid) != layout.grid_length:
        raise ValueError(f"rank {rank} was given {len(grid)} positions; its grid has {layout.grid_length}")
    _, position = _held(layout, rank, layout.total_lengths - layout.response_lengths - 1, layout.response_lengths)
    return grid.index_select(0, torch.from_numpy(position).to(grid.device))


def slice_responses(full: Sequence[Tensor], layout: Layout, rank: int) -> list[Tensor]:
    """This rank's part of tensors over whole responses: masks, old and reference log-probs, values, advantages.

    `full` has one tensor [response_length, ..] a sample, the same on every rank; the result is a list alike.

    Raises ValueError naming the sample when a length is not its response length.
    """
    _check_lengths(full, layout.response_lengths, "response")
    if not full:
        return []
    index = torch.from_numpy(layout.kept_index(rank)).to(full[0].device)
    return list(torch.cat(list(full)).index_select(0, index).split(layout.lengths(rank).tolist()))


def local_grid(full: Sequence[Tensor], layout: Layout, rank: int, *, fill: float = 0) -> Tensor:
    """This rank's part [grid] of tensors over whole samples (tokens, position ids), the padding set to `fill`.

    `full` has one tensor [total_length] a sample, the same on every rank. Give a padded batch `.view(samples, -1)`.

    Raises ValueError naming the sample when a length is not its total length.
    """
    _check_lengths(full, layout.total_lengths, "total")
    packed = torch.cat(list(full)) if full else torch.empty(0, dtype=torch.long)
    source, position = (torch.from_numpy(i).to(packed.device) for i in _held(layout, rank, 0, layout.total_lengths))
    grid = packed.new_full((layout.grid_length, *packed.shape[1:]), fill)
    return grid.index_copy(0, position, packed.index_select(0, source))


def local_labels(tokens: Sequence[Tensor], layout: Layout, rank: int, *, fill: int = 0) -> Tensor:
    """This rank's labels [grid] for the model's own loss: the next token, shifted on the whole sample, then cut."""
    shifted = [torch.cat([t[1:], t.new_full((min(len(t), 1),), fill)]) for t in tokens]
    return local_grid(shifted, layout, rank, fill=fill)


def _held(layout: Layout, rank: int, first: Integers | int, count: Integers) -> tuple[Integers, Integers]:
    """Which of the positions first .. first + count of each sample `rank` holds, and where on its grid they are."""
    sample = np.repeat(np.arange(layout.num_samples), count)
    within = np.arange(len(sample)) - (np.cumsum(count) - count)[sample]
    position = (layout.begin + first)[sample] + within
    piece = layout.piece[sample]
    slot = np.full(len(layout.owners), -1)  # the place of each piece among the rank's own, -1 if another's
    slot[layout.pieces(rank)] = np.arange(len(layout.pieces(rank)))
    mine = slot[position // piece]
    grid = layout.grid_begin[sample] + mine * piece + position % piece
    return np.flatnonzero(mine >= 0), grid[mine >= 0]


def _check_lengths(full: Sequence[Tensor], lengths: Integers, what: str) -> None:
    if len(full) != len(lengths):
        raise ValueError(f"{len(full)} tensors for {len(lengths)} samples")
    given, expected = [tensor.size(0) for tensor in full], lengths.tolist()
    if given != expected:
        i = next(i for i, (n, length) in enumerate(zip(given, expected, strict=True)) if n != length)
        raise ValueError(f"sample {i}: a tensor of {given[i]} tokens; expected its {what} length {expected[i]}")


def _megatrons_or_torchs() -> CrossEntropy:
    try:
        from megatron.core import parallel_state, tensor_parallel
    except ImportError:
        return _torchs
    return tensor_parallel.vocab_parallel_cross_entropy if parallel_state.model_parallel_is_initialized() else _torchs


def _torchs(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")
