"""What the strategies send and make of what arrives, as pure functions: `pack_bytes` and `unpack_bytes` for gather;
`by_piece`, `chain` and `chain_ahead` for carry.

`gather` moves the tokens: every rank's local inputs in their own dtype, padded for transport to the largest shard.

`carry` moves one number a piece. A piece acts on what enters at its end as an affine map,

    y_first = local + decay^ticks * entering

so a rank scans its own pieces with nothing entering, all ranks exchange the K first values of each sample, and each
chains them right to left. GAE sends a second number, the value of the piece's first step, because its last step looks
ahead to it.

Why the error of `carry` is bounded. Let M be the largest |G| of a sample, with gamma in [0, 1]. Each reward is x_j =
G_j - gamma^tick G_{j+1}, so |x_j| <= 2M; the local y of a piece is G_j minus decay^distance times a true G, so it is at
most 2M too, for every W and every input. All of it is float64: each operation adds at most 2M * 2^-53, over n steps n *
2M * 2^-53, under 2^-29 M for a million tokens. The only other error is the one rounding to float32, 2^-24 M, which
`gather` has as well; two roundings of nearly equal numbers differ by at most one unit of float32, 2^-23 M. Float32
messages would cost another 2^-24 of 2M a piece and break the bound.
"""

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from cp_returns.arrays import Array, library, like, native, tensor
from cp_returns.blocks import SHORT
from cp_returns.layout import Layout


def cut(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """This rank's tokens of a full pack, in the order of its local pack."""
    pieces = layout.pieces(rank)
    if layout.cp_size == 1 or not layout.num_samples:
        return full
    if layout.sizes[rank] < SHORT * layout.num_samples * len(pieces):
        return full[torch.from_numpy(layout.kept_index(rank)).to(full.device)]
    if full.is_cuda or full.requires_grad or full.dtype == torch.bfloat16:
        return torch.cat([*map(full.__getitem__, layout.slices(rank))])
    return tensor(np.concatenate([*map(full.numpy().__getitem__, layout.slices(rank))]))


def pack_bytes(inputs: tuple[Tensor | None, ...], width: int) -> Tensor:
    """One uint8 message of per-token tensors, each padded to `width` tokens and then to 8 bytes."""
    parts = []
    for x in inputs:
        if x is not None:
            raw = x.detach().contiguous().view(torch.uint8)
            parts += [raw, raw.new_zeros(_room(x, width) - raw.numel())]
    return torch.cat(parts)


def unpack_bytes(
    messages: Tensor, inputs: tuple[Tensor | None, ...], width: int, layout: Layout
) -> list[Tensor | None]:
    """[W, bytes] -> the whole responses of each input, in the full pack's order."""
    whole: list[Tensor | None] = []
    at = 0
    for x in inputs:
        if x is None:
            whole.append(None)
            continue
        room = _room(x, width)
        shards = messages[:, at : at + room].reshape(-1).view(x.dtype)
        whole.append(_join(shards.view(len(messages), -1), layout))
        at += room
    return whole


def _room(x: Tensor, width: int) -> int:
    return -(-width * x.element_size() // 8) * 8


def _join(shards: Tensor, layout: Layout) -> Tensor:
    """[W, width] local packs -> the full pack. The padding is never read."""
    lengths, order = layout.piece_lengths, np.empty((layout.num_samples, len(layout.owners)), dtype=np.int64)
    sizes: list[int] = []
    for rank in range(layout.cp_size):
        pieces = layout.pieces(rank)
        order[:, pieces] = len(sizes) + np.arange(layout.num_samples * len(pieces)).reshape(-1, len(pieces))
        own = lengths[:, pieces].ravel().tolist()
        sizes += [*own, shards.shape[1] - sum(own)]
    parts = torch.split(shards.view(-1), sizes)
    pieces_in_order = [parts[k] for k in order[lengths > 0].tolist()]
    return torch.cat(pieces_in_order) if pieces_in_order else shards.new_zeros(0)


def by_piece(messages: Float64[Tensor, "ranks samples own numbers"], layout: Layout) -> list[Array]:
    """[W, N, own pieces, numbers] of all ranks -> one [N, K] per number."""
    x = native(messages)
    ranks, samples, own, numbers = x.shape
    pieces = like(layout.pieces_of_ranks, x)  # [W, own]
    whole = library(x).empty_like(x).reshape(numbers, samples, ranks * own)
    for k in range(numbers):
        whole[k][:, pieces] = library(x).swapaxes(x[..., k], 0, 1)
    return list(whole)


def chain(first: Array, gain: Array) -> Array:
    """[N, K] the y that enters each piece at its end: entering_p = first_{p+1} + gain_{p+1} entering_{p+1}, 0 last."""
    entering = library(first).zeros_like(first)
    for p in range(first.shape[1] - 1, 0, -1):
        entering[:, p - 1] = first[:, p] + gain[:, p] * entering[:, p]
    return entering


def chain_ahead(
    first: Array, value: Array, has_step: Array, inner: Array, last: Array, last_gamma: Array, bootstrap: Array
) -> Array:
    """[N, K] what GAE adds to the last step of each piece: last * A_next + last_gamma * V_next of the next piece with
    steps.

    first: A of the piece's first step, where the last step looked ahead to 0. inner: gain from the last step to the
    first; last and last_gamma: (gamma lam)^tick and gamma^tick of the last step. Past the response A is 0 and V is the
    bootstrap. A piece without steps passes on what it gets.
    """
    lib = library(first)
    advantage, ahead = lib.zeros_like(bootstrap), bootstrap
    entering = lib.zeros_like(first)
    for p in range(first.shape[1] - 1, -1, -1):
        arrives = last[:, p] * advantage + last_gamma[:, p] * ahead
        entering[:, p] = arrives
        advantage = lib.where(has_step[:, p], first[:, p] + inner[:, p] * arrives, advantage)
        ahead = lib.where(has_step[:, p], value[:, p], ahead)
    return entering


def power(decay: float | Tensor, ticks: Array) -> Array:
    """decay^ticks in float64, 0^0 = 1; decay a float or one per sample, ticks [N, K].

    numpy on the host: torch's vector pow rounds the last elements of a tensor otherwise than the rest, and a sample's
    bits must not depend on its place.
    """
    base = native(decay)[:, None] if isinstance(decay, Tensor) else decay
    lib = library(ticks)
    return base ** lib.asarray(ticks, dtype=lib.float64)
