"""Who owns which response token: index arithmetic on host integers, no torch and no process group.

Response token j of a sample is predicted by the logit at position prompt - 1 + j, and whoever holds that position owns
j: its log-prob, KL, value and return. A layout cuts the positions of a sample into K pieces and deals them to the
ranks:

    cuts = clip(arange(K + 1) * piece - (prompt - 1), 0, response)
    piece p holds response tokens cuts[p] .. cuts[p+1]

Zigzag (slime; Megatron and Transformer Engine with padding) has K = 2 * cp_size pieces, dealt 0 1 .. W-1 W-1 .. 1 0, so
that every rank gets a cheap and a dear piece of causal attention. Contiguous layouts have K = cp_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cp_returns.errors import CPInputError

Integers = np.ndarray
Lengths = Sequence[int] | Integers


@dataclass(frozen=True, eq=False)
class Layout:
    """How a batch of N responses is cut into K pieces, and which rank owns each piece.

    Build it with `zigzag`, `contiguous` or `contiguous_pack`. The *full pack* is all whole responses one after the
    other; a rank's *local pack* is, sample by sample, the pieces that it owns in the order of their tokens.
    """

    total_lengths: Integers  # [N] prompt + response
    response_lengths: Integers  # [N]
    owners: Integers  # [K] the rank that owns a piece
    cuts: Integers  # [N, K + 1] in response coordinates: 0 .. response_length
    cp_size: int
    piece: Integers  # [N] positions of a piece, padding included; with contiguous_pack of the stream
    begin: Integers  # [N] where the sample begins in what is cut: 0; with contiguous_pack its place in the stream
    grid_begin: Integers  # [N] where its first piece begins among all positions, padding included, that a rank holds
    grid_length: int  # how many positions a rank holds

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def padded_lengths(self) -> Integers:
        """[N] positions of each sample on all ranks together, as in `cu_seqlens_q_padded` (not for contiguous_pack)."""
        return np.diff(self.grid_begin, append=self.grid_length) * self.cp_size

    @cached_property
    def piece_lengths(self) -> Integers:
        """[N, K] tokens of each piece; many are 0."""
        return self.cuts[:, 1:] - self.cuts[:, :-1]

    @cached_property
    def pieces_of_ranks(self) -> Integers:
        """[cp_size, own pieces] the pieces of each rank, ascending: all own equally many."""
        return self.owners.argsort(kind="stable").reshape(self.cp_size, -1)

    @cached_property
    def shares(self) -> Integers:
        """[cp_size, N] tokens of each sample on each rank."""
        return self.piece_lengths[:, self.pieces_of_ranks].sum(axis=2).T

    @cached_property
    def sizes(self) -> list[int]:
        """[cp_size] tokens of each rank, all samples together."""
        return self.shares.sum(axis=1).tolist()

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the full pack."""
        return int(self.response_lengths.sum())

    def pieces(self, rank: int) -> Integers:
        """The pieces that `rank` owns, ascending; the same for every sample."""
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank is {rank}; expected 0 <= rank < cp_size = {self.cp_size}")
        return self.pieces_of_ranks[rank]

    def lengths(self, rank: int) -> Integers:
        """[N] tokens of each sample that `rank` owns."""
        self.pieces(rank)  # raises when there is no such rank
        return self.shares[rank].copy()

    @cached_property
    def starts(self) -> Integers:
        """[N] where each response begins in the full pack."""
        return self.response_lengths.cumsum() - self.response_lengths

    @cached_property
    def bounds(self) -> Integers:
        """[N, K + 1] the cuts, in the full pack."""
        return self.cuts + self.starts[:, None]

    def segments(self, rank: int) -> tuple[Integers, Integers]:
        """[N * own pieces] (where each piece of this rank begins in the full pack, its tokens), by its local pack."""
        pieces = self.pieces(rank)
        return self.bounds[:, pieces].ravel(), self.piece_lengths[:, pieces].ravel()

    @cached_property
    def _slices(self) -> dict[int, list[slice]]:
        return {}

    def slices(self, rank: int) -> list[slice]:
        """This rank's pieces in the full pack, in the order of its local pack."""
        if rank not in self._slices:
            first, lengths = self.segments(rank)
            self._slices[rank] = list(map(slice, first.tolist(), (first + lengths).tolist()))
        return self._slices[rank]

    @cached_property
    def _indices(self) -> dict[int, Integers]:
        return {}

    def index(self, rank: int) -> Integers:
        """This rank's positions in the full pack, in the order of its local pack."""
        return self.kept_index(rank).copy()

    def kept_index(self, rank: int) -> Integers:
        """`index` itself, to be read only."""
        if rank in self._indices:
            return self._indices[rank]
        first, lengths = self.segments(rank)
        index = (first - (lengths.cumsum() - lengths)).repeat(lengths)  # where the local pack would begin
        index += np.arange(len(index))
        self._indices[rank] = index
        return index

    def whole(self) -> "Layout":
        """The same responses in one piece each, on one rank."""
        total, response = self.total_lengths, self.response_lengths
        begin, grid_end = np.zeros_like(total), total.cumsum()
        cuts, one_rank = np.array([begin, response]).T, np.zeros(1, dtype=np.int64)
        return Layout(total, response, one_rank, cuts, 1, total, begin, grid_end - total, int(total.sum()))

    def of_steps(self, cuts: Integers) -> "Layout":
        """The layout of some of the tokens alone, of which `cuts` [N, K + 1] lie before each cut of their response."""
        return replace(self, response_lengths=cuts[:, -1], cuts=cuts)

    def token_owners(self, sample: int) -> Integers:
        """[response_length] the rank that owns each token of one sample."""
        return np.repeat(self.owners, self.piece_lengths[sample])


def zigzag(
    total_lengths: Lengths,
    response_lengths: Lengths,
    cp_size: int,
    *,
    multiple: int = 1,
    padded_lengths: Lengths | None = None,
) -> Layout:
    """Zigzag: 2 * cp_size pieces a sample; rank r owns pieces r and 2 * cp_size - 1 - r.

    `multiple=1` is slime's rule, ceil(total / 2W) tokens a piece. Megatron and Transformer Engine pad each packed
    sequence to a multiple of 2W * a first: give `multiple=a` (the tensor-parallel size with sequence parallelism), or
    the padded lengths themselves (from `cu_seqlens_q_padded`, a BSHD width, an fp8 rule), which must be divisible by
    2W.

    Raises CPInputError naming the sample and both numbers when lengths do not fit.
    """
    size = _count("cp_size", cp_size)
    owners = np.array([*range(size), *reversed(range(size))], dtype=np.int64)
    return _per_sample(total_lengths, response_lengths, owners, size, multiple, padded_lengths)


def contiguous(
    total_lengths: Lengths,
    response_lengths: Lengths,
    cp_size: int,
    *,
    multiple: int = 1,
    padded_lengths: Lengths | None = None,
) -> Layout:
    """Contiguous in each sample: cp_size pieces, rank r owns piece r. Arguments and errors as for `zigzag`."""
    size = _count("cp_size", cp_size)
    owners = np.arange(size, dtype=np.int64)
    return _per_sample(total_lengths, response_lengths, owners, size, multiple, padded_lengths)


def contiguous_pack(
    total_lengths: Lengths,
    response_lengths: Lengths,
    cp_size: int,
    *,
    stream_length: int,
    padded_lengths: Lengths | None = None,
) -> Layout:
    """Contiguous over the pack (slime's `allgather_cp`): samples concatenated to one stream, which is cut in cp_size.

    `stream_length` is the padded length of the stream, divisible by cp_size. `padded_lengths` are the widths that the
    samples take in the stream, where these are wider than `total_lengths`; nothing divides them.
    """
    total, response = _lengths(total_lengths, response_lengths)
    width = total if padded_lengths is None else _padded(padded_lengths, total, divisor=1)
    size = _count("cp_size", cp_size)
    if stream_length % size or stream_length < width.sum():
        raise CPInputError(
            f"stream_length is {stream_length}; expected a multiple of cp_size = {size} that is at least the "
            f"{int(width.sum())} tokens of the pack"
        )
    owners = np.arange(size, dtype=np.int64)
    begin = np.cumsum(width) - width
    piece = np.full(len(total), stream_length // size, dtype=np.int64)
    return _cut(total, response, owners, size, piece, begin, np.zeros_like(total), stream_length // size)


def _per_sample(total_lengths, response_lengths, owners: Integers, size: int, multiple: int, padded_lengths) -> Layout:
    total, response = _lengths(total_lengths, response_lengths)
    multiple = _count("multiple", multiple)
    pieces = len(owners)
    if padded_lengths is None:
        piece = -(-total // (pieces * multiple)) * multiple
        # One rank holds the sample as it is: nothing pads it to two pieces.
        held = -(-total // multiple) * multiple if size == 1 else piece * (pieces // size)
    else:
        padded = _padded(padded_lengths, total, divisor=pieces if size > 1 else 1)
        held, piece = padded // size, -(-padded // pieces)  # one rank's need not be even
    grid_begin = held.cumsum() - held
    return _cut(total, response, owners, size, piece, np.zeros(len(total), np.int64), grid_begin, int(held.sum()))


def _cut(
    total: Integers,
    response: Integers,
    owners: Integers,
    cp_size: int,
    piece: Integers,
    begin: Integers,
    grid_begin: Integers,
    grid_length: int,
) -> Layout:
    first_logit = begin + total - response - 1  # the position that predicts response token 0
    cuts = np.multiply.outer(piece, np.arange(len(owners) + 1)) - first_logit[:, None]
    cuts = np.minimum(np.maximum(cuts, 0), response[:, None])
    return Layout(total, response, owners, cuts, cp_size, piece, begin, grid_begin, grid_length)


def _count(name: str, x: int) -> int:
    if x < 1 or x != int(x):
        raise CPInputError(f"{name} is {x}; expected at least 1, a whole number")
    return int(x)


def _lengths(total_lengths: Lengths, response_lengths: Lengths) -> tuple[Integers, Integers]:
    total, response = _integers("total_lengths", total_lengths), _integers("response_lengths", response_lengths)
    if len(total) != len(response):
        raise CPInputError(
            f"{len(response)} response_lengths for {len(total)} total_lengths; expected one of each a sample"
        )
    bad = (response < 0) | (total - response < (response > 0))
    if bad.any():
        i = int(bad.argmax())
        raise CPInputError(
            f"sample {i}: response_length {response[i]} of total_length {total[i]}; expected 0 <= response < total: "
            "the prompt needs at least one token, whose logit predicts the first response token"
        )
    return total, response


def _padded(padded_lengths: Lengths, total: Integers, *, divisor: int) -> Integers:
    padded = _integers("padded_lengths", padded_lengths)
    if len(padded) != len(total):
        raise CPInputError(f"{len(padded)} padded_lengths for {len(total)} samples; expected one a sample")
    bad = (padded < total) | (padded % divisor != 0)
    if bad.any():
        i = int(bad.argmax())
        raise CPInputError(
            f"sample {i}: padded_length {padded[i]} of total_length {total[i]}; expected at least the total length "
            f"and a multiple of {divisor} (the pieces of a sample)"
        )
    return padded


def _integers(name: str, x: Lengths) -> Integers:
    array = np.asarray(x).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise CPInputError(f"{name} is {x!r:.80}; expected one integer a sample")
    return array.astype(np.int64)
