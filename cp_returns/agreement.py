"""Failure agreement: bad input on one rank is the same error on every rank, within one fixed-size all-gather.

The first collective of a call is an *envelope* of 16 KiB, the same size on every rank whatever its input is, so it
cannot
mismatch: a header [status, fingerprints] and, where it fits, the payload of the call. When all headers are well and
equal the call goes on. When not, one more all-gather of 4 KiB a rank carries the details, and every rank builds the
same text from them.

On CUDA reading the headers is the one device-to-host read of a call.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

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

    bad: "Tensor | bool"
    find: Callable[[], Problem | None]


@dataclass(frozen=True)
class Facts:
    """What the ranks of one call must hold alike, and this rank's own problem."""

    settings: Mapping[str, object] = field(default_factory=dict)
    lengths: Mapping[str, np.ndarray] = field(default_factory=dict)  # [N] on the host; response_length first
    data: Mapping[str, Tensor] = field(default_factory=dict)  # [N], or packed whole responses: rewards, loss_mask
    problem: Problem | str | None = None
    checks: Sequence[Check] = ()
    sums: Tensor | None = None  # up to SUMS float64 numbers of this rank; all ranks' are appended to `told`, [W, SUMS]
    told: list[Tensor] = field(default_factory=list)

    def first_problem(self) -> Problem | str | None:
        if self.problem is not None:
            return self.problem
        found = (check.find() for check in self.checks if bool(check.bad))
        return next((problem for problem in found if problem is not None), None)


def fingerprint(x: Tensor) -> Tensor:
    """A 0-dim int64 that depends on every bit and its place: words times odd numbers, summed modulo 2^64, on x's
    device.
    """
    raw = x.detach().contiguous().view(-1).view(torch.uint8)
    tail = -raw.numel() % 8
    words = (torch.cat([raw, raw.new_zeros(tail)]) if tail else raw).view(torch.int64)
    odd = torch.arange(1, 2 * words.numel() + 1, 2, device=x.device).mul_(-7046029254386353131)
    return words.mul(odd).sum()


def agree(
    all_gather: AllGather, facts: Facts, payload: Tensor, *, step: str, where: str, size: int = ENVELOPE
) -> Tensor:
    """[W, *payload.shape]: all ranks' payloads, or the same CPInputError on every rank.

    The payload's shape follows from the lengths, which are compared. It rides in the envelope when it fits, else it
    takes a second collective. `where` names the ranks in errors ("CP rank"). size: of the envelope, the same on all
    ranks of a step.
    """
    data = payload.contiguous().view(-1).view(torch.uint8)
    envelopes, _ = _exchange_headers(all_gather, facts, data, step, where, size)
    if data.numel() <= size - _FRONT:
        received = envelopes[:, _FRONT : _FRONT + data.numel()]
    else:
        received = call(all_gather, data, f"{step}, second part")
    return received.reshape(-1).view(payload.dtype).view(len(received), *payload.shape)


def agree_ragged(all_gather: AllGather, facts: Facts, rows: Tensor, *, step: str, where: str) -> list[Tensor]:
    """As `agree`, for ranks that may hold different numbers of rows (rank r's are the r-th of the list)."""
    data = rows.contiguous().view(-1).view(torch.uint8)
    envelopes, sizes = _exchange_headers(all_gather, facts, data, step, where, ENVELOPE)
    room = max(sizes)
    if room <= CAPACITY:
        received = envelopes[:, _FRONT:]
    else:
        received = call(all_gather, torch.cat([data, data.new_zeros(room - data.numel())]), f"{step}, second part")
    return [r[:n].clone().view(rows.dtype).view(-1, rows.shape[1]) for r, n in zip(received, sizes, strict=True)]


def _exchange_headers(
    all_gather: AllGather, facts: Facts, data: Tensor, step: str, where: str, size: int
) -> tuple[Tensor, list[int]]:
    """All ranks' envelopes and payload sizes; raises on every rank when one is not well or they differ."""
    message = torch.zeros(size, dtype=torch.uint8, device=data.device)
    message[:HEADER] = _header(facts, data).view(torch.uint8)
    if facts.sums is not None:
        message[HEADER : HEADER + 8 * len(facts.sums)] = facts.sums.view(torch.uint8)
    if data.numel() <= size - _FRONT:
        message[_FRONT : _FRONT + data.numel()] = data
    envelopes = call(all_gather, message, step)
    front = envelopes[:, :_FRONT].cpu()  # the one read of a GPU
    headers = front[:, :HEADER].contiguous().view(torch.int64)
    differ = bool((headers[:, _COMPARED:] != headers[0, _COMPARED:]).any())
    if differ or headers[:, _STATUS].any():
        raise_together(all_gather, facts, where=where, differ=differ, device=data.device)
    facts.told.append(front[:, HEADER:].contiguous().view(torch.float64))
    return envelopes, headers[:, _PAYLOAD].tolist()


def refuse(
    all_gather: AllGather, problem: Problem | str, device: torch.device, *, step: str, where: str, size: int = ENVELOPE
) -> None:
    """Join `agree` with nothing but a problem, so that all ranks raise it together."""
    nothing = torch.zeros(0, dtype=torch.uint8, device=device)
    agree(all_gather, Facts(problem=problem), nothing, step=step, where=where, size=size)


def raise_together(
    all_gather: AllGather, facts: Facts, *, where: str, differ: bool = False, device: torch.device | None = None
) -> None:
    """All ranks come here when a check failed somewhere or facts differ: exchange the details and raise one error.

    Returns only if each failed check was a false alarm.
    """
    details = _details(facts)
    box = torch.zeros(DETAILS, dtype=torch.uint8)
    box[: len(details)] = torch.frombuffer(bytearray(details), dtype=torch.uint8)
    boxes = call(all_gather, box.to(device or box.device), "agreement, details").cpu()
    told = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in boxes]
    text = _first_problem(told, where) or _first_difference(told, where)
    if text is None and differ:
        shown = min(len(one["samples"]) for one in told)
        text = f"{where}s were not given the same samples: one after the first {shown}, which are equal, differs"
    if text is not None:
        raise CPInputError(text)


def _header(facts: Facts, data: Tensor) -> Tensor:
    digest = hashlib.blake2b(repr(sorted(_settings(facts).items())).encode(), digest_size=7)
    for value in facts.lengths.values():
        digest.update(np.ascontiguousarray(value).tobytes())
    settings = int.from_bytes(digest.digest(), "little")
    host = [int(facts.problem is not None), data.numel(), _num_samples(facts), settings, 0, 0, 0, 0]
    header = torch.tensor(host).to(data.device)
    for check in facts.checks:
        header[_STATUS] |= check.bad
    for index, value in enumerate(facts.data.values()):
        header[-1] += fingerprint(value) * (2 * index + 1)
    return header


def _num_samples(facts: Facts) -> int:
    return len(next(iter(facts.lengths.values()), ()))


def _settings(facts: Facts) -> dict[str, str]:
    return {key: str(value) for key, value in facts.settings.items()}


def _details(facts: Facts) -> bytes:
    problem = facts.first_problem()
    told = {
        "problem": None if problem is None else str(problem)[:1500],
        "settings": {key: value[:60] for key, value in _settings(facts).items()},
        "number of samples": _num_samples(facts),
        "samples": [],
    }
    room = DETAILS - len(json.dumps(told).encode())
    for row in _samples(facts) if problem is None else ():
        room -= len(json.dumps(row)) + 2
        if room < 0:
            break
        told["samples"].append(row)
    return json.dumps(told).encode()


def _samples(facts: Facts) -> Iterator[dict[str, object]]:
    """What is compared of each sample; a mask as a digest of its bytes, for a mask is too long to show."""
    lengths = next(iter(facts.lengths.values()), np.zeros(0, dtype=np.int64))
    ends = np.cumsum(lengths)
    for i in range(len(lengths)):
        row: dict[str, object] = {key: int(value[i]) for key, value in facts.lengths.items()}
        for key, value in facts.data.items():
            if len(value) == len(lengths):
                row[key] = repr(value[i].item())
            else:
                part = value[ends[i] - lengths[i] : ends[i]].cpu().contiguous().view(torch.uint8)
                digest = hashlib.blake2b(part.numpy().tobytes(), digest_size=3).hexdigest()
                row[key] = f"{int(part.sum())} ones, digest {digest}"
        yield row


def _first_problem(told: list[dict], where: str) -> str | None:
    for rank, one in enumerate(told):
        if one["problem"] is not None:
            return f"{where} {rank} of {len(told)}: {one['problem']}"
    return None


def _first_difference(told: list[dict], where: str) -> str | None:
    """The first thing in which a rank differs from rank 0: a setting, the number of samples, or a sample."""
    for rank, one in enumerate(told):
        pairs = [("", key, told[0]["settings"], one["settings"]) for key in {**told[0]["settings"], **one["settings"]}]
        pairs.append(("", "number of samples", told[0], one))
        for i, (a, b) in enumerate(zip(told[0]["samples"], one["samples"], strict=False)):
            pairs += [(f"sample {i}, ", key, a, b) for key in a]
        for place, key, a, b in pairs:
            if a.get(key) != b.get(key):
                return (
                    f"{where} {rank} of {len(told)}: {place}{key} is {b.get(key)}; expected {a.get(key)}, "
                    f"as on {where} 0: all ranks must be given the same"
                )
    return None
