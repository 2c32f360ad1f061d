"""Failure agreement: bad input on one rank is the same error on every rank, within one fixed-size all-gather.

The first collective of a call is an *envelope* of 16 KiB, the same size on every rank whatever its input is, so it
cannot mismatch: a header [status, fingerprints] and, where it fits, the payload of the call. When all headers are well
and equal the call goes on. When not, one more all-gather of 4 KiB a rank carries the details, and every rank builds the
same text from them. (When the samples that fit there are equal, the digests of all samples tell which one to look at.)

On CUDA reading the headers is the one device-to-host read of a call on the token clock (but see `clocks`).
"""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cp_returns.arrays import Array, library, native, tensor, zeros
from cp_returns.collectives import AllGather, call
from cp_returns.errors import CPInputError

ENVELOPE = 16 * 1024
HEADER = 64
SUMS = 4  # float64 numbers that ride along, for reports
_FRONT = HEADER + 8 * SUMS
CAPACITY = ENVELOPE - _FRONT
DETAILS = 4 * 1024
_STATUS, _PAYLOAD, _COMPARED = 0, 1, 2  # the words of a header; those from _COMPARED on must be equal on all ranks


@dataclass(frozen=True)
class Problem:
    """The first bad thing of one rank's input: where, what was given, what was expected."""

    what: str
    given: object
    expected: str
    sample: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        where = "" if self.sample is None else f"sample {self.sample}, "
        where += "" if self.token is None else f"token {self.token}, "
        return f"{where}{self.what} is {self.given}; expected {self.expected}"


@dataclass(frozen=True)
class Check:
    """A test of data: `bad` may live on the GPU; `find` looks for the first culprit only when some rank failed.

    `find` may return None: the cheap test was a false alarm.
    """

    bad: "Tensor | np.bool_ | bool"
    find: Callable[[], Problem | None]


def check_each(name: str, x: Array, bad: Array, expected: str, *, of: str = "sample") -> Check:
    """A check of one number a sample, or a token of this rank (`of="token"`)."""

    def find() -> Problem | None:
        first = tensor(bad).nonzero()
        return Problem(name, x[first[0]].item(), expected, **{of: int(first[0])}) if len(first) else None

    return Check(bad.any(), find)


@dataclass(frozen=True)
class Facts:
    """What the ranks of one call must hold alike, and this rank's own problem."""

    settings: Mapping[str, object] = field(default_factory=dict)
    lengths: Mapping[str, np.ndarray] = field(default_factory=dict)  # [N] on the host; response_length first
    data: Mapping[str, Array] = field(default_factory=dict)  # [N], or packed whole responses: rewards, loss_mask
    problem: Problem | str | None = None
    checks: Sequence[Check] = ()
    sums: Array | None = None  # up to SUMS float64 numbers of this rank; all ranks' are appended to `told`, [W, SUMS]
    told: list[np.ndarray] = field(default_factory=list)

    def first_problem(self) -> Problem | str | None:
        if self.problem is not None:
            return self.problem
        found = (check.find() for check in self.checks if bool(check.bad))
        return next((problem for problem in found if problem is not None), None)


def fingerprint(x: Array) -> "int | Tensor":
    """A number that depends on every bit and its place: CRC-32 on the host; on a GPU, 0-dim and left there, the sum
    modulo 2^64 of 64-bit words, each mixed with its index. (The mix is not linear: a weighted sum cannot tell rewards
    1 0 0 1 from 0 1 1 0.)
    """
    if isinstance(x, Tensor):
        x = x.detach()
        if x.is_cuda:
            flat = x.contiguous()
            return _mixed_sum(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8))  # one may keep another stride
        x = native(x.view(torch.int16) if x.dtype == torch.bfloat16 else x)  # numpy has no bfloat16
    if x.dtype == bool:
        x = np.packbits(x)  # an eighth of the bytes, at the cost of one
    return zlib.crc32(np.ascontiguousarray(x).data)


def _mixed_sum(raw: Tensor) -> Tensor:
    tail = -raw.numel() % 8
    words = (torch.cat([raw, raw.new_zeros(tail)]) if tail else raw).view(torch.int64)
    mixed = torch.arange(1, words.numel() + 1, device=raw.device).mul_(-7046029254386353131).bitwise_xor_(words)
    for shift, odd in ((32, -4658895280553007687), (29, -7723592293110705685)):
        mixed = mixed.bitwise_xor_(mixed >> shift).mul_(odd)
    return mixed.sum()


def agree(
    all_gather: AllGather, facts: Facts, payload: Tensor, *, step: str, where: str, size: int = ENVELOPE
) -> Tensor:
    """[W, *payload.shape]: all ranks' payloads, or the same CPInputError on every rank.

    The payload's shape follows from the lengths, which are compared. It rides in the envelope when it fits, else it
    takes a second collective. `where` names the ranks in errors ("CP rank"). size: of the envelope, the same on all
    ranks of a step.
    """
    own = native(payload.contiguous())
    data = own.reshape(-1).view(library(own).uint8)
    envelopes, _ = _exchange_headers(all_gather, facts, data, step, where, size)
    if len(data) <= size - _FRONT:
        received = envelopes[:, _FRONT : _FRONT + len(data)]
    else:
        received = native(call(all_gather, tensor(data), f"{step}, second part"))
    return tensor(received.reshape(-1).view(own.dtype).reshape(len(received), *own.shape))


def agree_ragged(all_gather: AllGather, facts: Facts, rows: Tensor, *, step: str, where: str) -> list[Tensor]:
    """As `agree`, for ranks that may hold different numbers of rows (rank r's are the r-th of the list)."""
    data = rows.contiguous().view(-1).view(torch.uint8)
    envelopes, sizes = _exchange_headers(all_gather, facts, native(data), step, where, ENVELOPE)
    room = max(sizes)
    if room <= CAPACITY:
        received = tensor(envelopes)[:, _FRONT:]
    else:
        received = call(all_gather, torch.cat([data, data.new_zeros(room - data.numel())]), f"{step}, second part")
    return [r[:n].clone().view(rows.dtype).view(-1, rows.shape[1]) for r, n in zip(received, sizes, strict=True)]


def _exchange_headers(
    all_gather: AllGather, facts: Facts, data: Array, step: str, where: str, size: int
) -> tuple[Array, list[int]]:
    """All ranks' envelopes and payload sizes; raises on every rank when one is not well or they differ.

    data: the payload's bytes, which ride along where they fit.
    """
    message, lib = zeros(size, data), library(data)
    _write_header(message[:HEADER].view(lib.int64), facts, len(data))
    if facts.sums is not None:
        message[HEADER:_FRONT].view(lib.float64)[: len(facts.sums)] = facts.sums
    if len(data) <= size - _FRONT:
        message[_FRONT : _FRONT + len(data)] = data
    envelopes = native(call(all_gather, tensor(message), step))
    front = envelopes[:, :_FRONT]
    if isinstance(front, Tensor):
        front = front.cpu().numpy()  # the one read of a GPU here
    words = np.ascontiguousarray(front).view(np.int64)
    headers, sums = words[:, : HEADER // 8], words[:, HEADER // 8 :].view(np.float64)
    compared = headers[:, _COMPARED:].tolist()
    differ = compared.count(compared[0]) < len(compared)
    statuses, sizes = headers[:, :_COMPARED].T.tolist()
    if differ or any(statuses):
        _raise_together(all_gather, facts, where, differ, tensor(data).device)
    facts.told.append(sums)
    return envelopes, sizes


def refuse(
    all_gather: AllGather, problem: Problem | str, device: torch.device, *, step: str, where: str, size: int = ENVELOPE
) -> None:
    """Join `agree` with nothing but a problem, so that all ranks raise it together."""
    nothing = torch.zeros(0, dtype=torch.uint8, device=device)
    agree(all_gather, Facts(problem=problem), nothing, step=step, where=where, size=size)


def _raise_together(all_gather: AllGather, facts: Facts, where: str, differ: bool, device: torch.device) -> None:
    """All ranks come here when a check failed somewhere or facts differ: exchange the details and raise one error.

    Returns only if each failed check was a false alarm.
    """
    told = _tell(all_gather, facts, device)
    text = _first_problem(told, where) or _first_difference(told, where)
    if text is None and differ:
        digests = torch.tensor([_digest(json.dumps(row).encode()) for row in _samples(facts)], dtype=torch.int64)
        if len(digests):  # as many as on all ranks, else that was the first difference
            all_digests = call(all_gather, digests.to(device), "agreement, samples").cpu()
            unequal = (all_digests != all_digests[0]).any(dim=0).nonzero()
            first = int(unequal[0]) if len(unequal) else 0
            text = _first_difference(_tell(all_gather, facts, device, first), where)
        text = text or f"{where}s were not given the same input, in something too long or too small to be shown"
    if text is not None:
        error = CPInputError(text)
        error.usual = _usual([one["settings"] for one in told if "settings" in one])
        raise error


def _tell(all_gather: AllGather, facts: Facts, device: torch.device, first: int = 0) -> list[dict]:
    """All ranks' details; those of samples begin with sample `first`."""
    details = _details(facts, first)
    box = torch.zeros(DETAILS, dtype=torch.uint8)
    box[: len(details)] = torch.frombuffer(bytearray(details), dtype=torch.uint8)
    boxes = call(all_gather, box.to(device), "agreement, details").cpu()
    return [json.loads(row.numpy().tobytes().rstrip(b"\0")) for row in boxes]


def _write_header(header: Array, facts: Facts, payload: int) -> None:
    """[status, payload's bytes, samples, digest of the host's facts, .., fingerprint of the data]."""
    settings = facts.settings
    names = sorted(settings)  # whatever their order
    told = "\0".join([*names, *[str(settings[name]) for name in names], *facts.data])
    digest = _digest(told.encode(), *[value.tobytes() for value in facts.lengths.values()])
    status, prints = int(facts.problem is not None), [fingerprint(value) for value in facts.data.values()]
    known = [status, payload, _num_samples(facts), digest, 0, 0, 0, 0]
    if isinstance(header, np.ndarray):
        known[_STATUS] |= any(bool(check.bad) for check in facts.checks)
        known[-1] = sum(int(value) * (2 * index + 1) for index, value in enumerate(prints)) % 2**63
        header[:] = known
        return
    header.copy_(torch.tensor(known))
    for check in facts.checks:
        header[_STATUS] |= torch.as_tensor(check.bad, device=header.device)
    for index, value in enumerate(prints):
        header[-1] += value * (2 * index + 1)


def _num_samples(facts: Facts) -> int:
    return len(next(iter(facts.lengths.values()), ()))


def _settings(facts: Facts) -> dict[str, str]:
    return {key: str(value) for key, value in facts.settings.items()}


def _digest(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little", signed=True)


def _details(facts: Facts, first: int) -> bytes:
    problem = facts.first_problem()
    if problem is not None:
        text = str(problem)
        while len(json.dumps(text)) > DETAILS - 100:
            text = text[: len(text) * 3 // 4]
        return json.dumps({"problem": text}).encode()
    told = {
        "problem": None,
        "settings": {key: value[:60] for key, value in _settings(facts).items()},
        "number of samples": _num_samples(facts),
        "first": first,
        "samples": [],
    }
    room = DETAILS - len(json.dumps(told).encode())
    for row in _samples(facts, first):
        room -= len(json.dumps(row)) + 2
        if room < 0:
            break
        told["samples"].append(row)
    return json.dumps(told).encode()


def _samples(facts: Facts, first: int = 0) -> Iterator[dict[str, object]]:
    """What is compared of each sample; a mask as a digest of its bytes, for a mask is too long to show."""
    lengths = next(iter(facts.lengths.values()), np.zeros(0, dtype=np.int64))
    ends = np.cumsum(lengths)
    data = {key: tensor(value).cpu() for key, value in facts.data.items()}
    for i in range(first, len(lengths)):
        row: dict[str, object] = {key: int(value[i]) for key, value in facts.lengths.items()}
        for key, value in data.items():
            if key == "loss_mask":
                part = value[ends[i] - lengths[i] : ends[i]].contiguous().view(torch.uint8)
                row[key] = f"{int(part.sum())} ones, digest {_digest(part.numpy().tobytes()) % 2**24:06x}"
            else:
                row[key] = repr(value[i].item())
        yield row


def _first_problem(told: list[dict], where: str) -> str | None:
    for rank, one in enumerate(told):
        if one["problem"] is not None:
            return one["problem"] if len(told) == 1 else f"{where} {rank} of {len(told)}: {one['problem']}"
    return None


def _first_difference(told: list[dict], where: str) -> str | None:
    """The first thing in which a rank differs from most ranks: a setting, the number of samples, or a sample."""
    shown = min(len(one["samples"]) for one in told)
    rows = [_compared(one, shown) for one in told]
    usual = _usual(rows)
    keys = list(usual)
    for rank, row in enumerate(rows):
        for key in keys:
            given = row.get(key, "absent")
            if given != usual[key]:
                other = next(r for r, row in enumerate(rows) if row.get(key, "absent") == usual[key])
                return (
                    f"{where} {rank} of {len(told)}: {key} is {given}; expected {usual[key]}, as on {where} {other}: "
                    "all ranks must be given the same"
                )
    return None


def _usual(rows: list[dict]) -> dict[str, object]:
    """What most ranks hold under each name, rank 0 where there is no majority."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: Counter(row.get(key, "absent") for row in rows).most_common(1)[0][0] for key in keys}


def _compared(one: dict, shown: int) -> dict[str, object]:
    """One rank's details by the name that an error gives them."""
    samples = enumerate(one["samples"][:shown], one["first"])
    rows = {f"sample {i}, {key}": value for i, row in samples for key, value in row.items()}
    return {**one["settings"], "number of samples": one["number of samples"], **rows}
