"""Read rollout files: JSONL, one response a line, or a train dump of slime (`.pt`).

A JSONL line is an object with these fields; others are ignored, save one whose name is close to one of these.

| field | value |
|---|---|
| prompt_len | tokens of the prompt, at least 1 |
| response_len | tokens of the response, R >= 0 |
| loss_mask_spans | trained [start, end) pairs within the response, ascending; absent: all of it |
| reward | a finite number; absent: 0; null: missing, so that the sample counts as fully masked |
| group | string or integer shared by the answers to one prompt; absent: a group of its own |
| logp, ref_logp | log-probs of the policy and of the reference, in nats |
| kl | instead of logp and ref_logp: the KL of each token |
| values, token_rewards | optional |
| id | optional name |

Numbers are those that a float32 holds. Every list per token has R of them, or one for each trained token in order (the
others are then 0, and never read). All lines of a file have the same lists. A file with several references calls them
ref_logp_NAME, and `ref=NAME` picks one. Without logp and kl a file holds shapes only: its log-probs come from a seeded
generator, and `Rollouts.note` says so.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cp_returns.layout import Layout

PER_TOKEN = ("log_probs", "ref_log_probs", "kl", "values", "token_rewards")
FLOAT32_MAX = torch.finfo(torch.float32).max
LONGEST = 10**8  # tokens; a longer response is a slip, and would be given memory before anything else could refuse it

_JSON_NAMES = {"log_probs": "logp", "ref_log_probs": "ref_logp"}
_FIELDS = ("prompt_len", "response_len", "loss_mask_spans", "reward", "group", "logp", "ref_logp", "kl", "id")
_MEANT = {name: name for name in (*_FIELDS, "values", "token_rewards")} | {
    **_JSON_NAMES,
    "loss_mask": "loss_mask_spans",
    "group_id": "group",
    "group_index": "group",
}


class RolloutError(ValueError):
    """A rollout file that cannot be read: names the file, the line or sample, the field, and what was expected."""


@dataclass(frozen=True)
class Rollouts:
    """A batch of whole responses: one entry a sample in every list; lists per token hold float32 [response_len]."""

    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: list[Tensor]  # bool
    rewards: list[float]  # NaN: missing
    group_ids: list[int]
    ids: list[str]
    note: str  # where the log-probs are from, for reports
    log_probs: list[Tensor] | None = None
    ref_log_probs: list[Tensor] | None = None
    kl: list[Tensor] | None = None
    values: list[Tensor] | None = None
    token_rewards: list[Tensor] | None = None

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def trained_masks(self) -> list[Tensor]:
        """`loss_masks`, with none of the tokens of a sample whose reward is missing."""
        pairs = zip(self.loss_masks, self.rewards, strict=True)
        return [torch.zeros_like(mask) if math.isnan(reward) else mask for mask, reward in pairs]


def whole(local: Sequence[Sequence[Tensor]], layout: Layout) -> list[Tensor]:
    """Whole responses from the shards of every rank, `local[rank][sample]`: undoes `log_probs.slice_responses`."""
    if not layout.num_samples:
        return []
    pack = torch.cat(list(local[0])).new_empty(layout.num_tokens)
    for rank, of_rank in enumerate(local):
        pack[torch.from_numpy(layout.index(rank))] = torch.cat(list(of_rank))
    return list(pack.split(layout.response_lengths.tolist()))


def read(path: str | Path, *, ref: str | None = None, seed: int = 0) -> Rollouts:
    """Read a JSONL rollout file, or a `.pt` dump that slime wrote with --save-debug-train-data.

    A dump is loaded with `weights_only=True`, so that nothing in it can run.

    Raises:
        RolloutError: what cannot be read, by file, line (or sample) and field.
    """
    path = Path(path)
    if not path.exists():
        raise RolloutError(f"{path}: no such file")
    if path.is_dir():
        raise RolloutError(f"{path}: is a directory; expected a file")
    try:
        rows = list(_slime_rows(path) if path.suffix == ".pt" else _json_rows(path, ref))
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read ({error.strerror})") from None
    if not rows:
        raise RolloutError(f"{path}: holds no sample; expected at least one")
    return _batch(rows, path, seed)


@dataclass(frozen=True)
class _Row:
    """One sample of any format; `at` says where it stands in its file."""

    at: str
    prompt_len: int
    response_len: int
    mask: Tensor
    reward: float
    group: Any
    id: str
    per_token: dict[str, Tensor]
    reference: str = ""


def _batch(rows: list[_Row], path: Path, seed: int) -> Rollouts:
    names = list(rows[0].per_token)
    for row in rows:
        if set(row.per_token) != set(names):
            given, expected = ", ".join(sorted(row.per_token)) or "none", ", ".join(sorted(names)) or "none"
            raise RolloutError(f"{row.at}: has the lists {given}; expected the same as the first sample: {expected}")
    per_token = {name: [row.per_token[name] for row in rows] for name in names}
    if "kl" in per_token:
        note = f"KL from {path.name}"
    elif "log_probs" in per_token:
        note = f"log-probs from {path.name}" + (f", reference {rows[0].reference}" if rows[0].reference else "")
    else:
        note = f"log-probs SEEDED (seed {seed}): {path.name} holds shapes only"
        per_token |= _seeded([row.response_len for row in rows], seed)
    numbers: dict[Any, int] = {}
    return Rollouts(
        total_lengths=[row.prompt_len + row.response_len for row in rows],
        response_lengths=[row.response_len for row in rows],
        loss_masks=[row.mask for row in rows],
        rewards=[row.reward for row in rows],
        group_ids=[numbers.setdefault(row.at if row.group is None else ("", row.group), len(numbers)) for row in rows],
        ids=[row.id for row in rows],
        note=note,
        **per_token,
    )


def _seeded(lengths: list[int], seed: int) -> dict[str, list[Tensor]]:
    """Log-probs of about the size that a language model's have, and a reference half a nat away."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref_log_probs = [], []
    for length in lengths:
        own = -torch.empty(length).exponential_(generator=generator)
        log_probs.append(own)
        ref_log_probs.append((own + 0.5 * torch.randn(length, generator=generator)).clamp(max=0.0))
    return {"log_probs": log_probs, "ref_log_probs": ref_log_probs}


# JSONL


def _json_rows(path: Path, ref: str | None) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_row(line, f"{path}, line {number}", ref, number)
        except UnicodeDecodeError as error:
            raise RolloutError(
                f"{path}: not UTF-8 text ({error.reason}); expected JSONL, or a slime dump named .pt"
            ) from None


def _json_row(line: str, at: str, ref: str | None, number: int) -> _Row:
    try:
        fields = json.loads(line, parse_int=_parsed_int)
    except RecursionError:
        raise RolloutError(f"{at}: is nested too deeply; expected one object a line") from None
    except json.JSONDecodeError as error:
        raise RolloutError(f"{at}, column {error.colno}: not JSON ({error.msg}); expected one object a line") from None
    if not isinstance(fields, dict):
        raise RolloutError(f"{at}: is {_shown(fields)}; expected an object with prompt_len and response_len")
    for name in fields:
        meant = _meant(name)
        if meant not in (None, name):
            raise RolloutError(f"{at}, field '{name}': unknown, and close to '{meant}'; expected that name or another")
    prompt_len = _integer(fields, "prompt_len", 1, at)
    response_len = _integer(fields, "response_len", 0, at)
    mask = _mask(fields.get("loss_mask_spans", [[0, response_len]]), response_len, at)
    per_token = {}
    for name in _lists(fields, ref, at):
        field = f"ref_logp_{ref}" if name == "ref_log_probs" and ref else _JSON_NAMES.get(name, name)
        per_token[name] = _per_token(fields[field], field, mask, at)
    group, own_id = _name(fields, "group", at), _name(fields, "id", at)
    reward = _reward(fields.get("reward", 0.0), at)
    sample_id = str(number if own_id is None else own_id)
    return _Row(at, prompt_len, response_len, mask, reward, group, sample_id, per_token, ref or "")


def _parsed_int(digits: str) -> int | float:
    """As a float where `int` may refuse so many digits: then the check of its field refuses it by name."""
    return int(digits) if len(digits) <= 4000 else float(digits)


@cache  # the names of all lines are the same few
def _meant(name: str) -> str | None:
    """The field that a name is, is close to, or is another format's word for."""
    if name.startswith("ref_logp_"):
        return name
    near = difflib.get_close_matches(name.lower(), _MEANT, n=1, cutoff=0.85)
    return _MEANT[near[0]] if near else None


def _lists(fields: dict, ref: str | None, at: str) -> list[str]:
    """Which per-token lists a line has; checks that they go together."""
    optional = [name for name in ("values", "token_rewards") if name in fields]
    references = sorted(name for name in fields if name.startswith("ref_logp"))
    log_probs = [name for name in ("logp", *references) if name in fields]
    if "kl" in fields:
        if log_probs:
            raise RolloutError(f"{at}, field 'kl': stands beside {', '.join(log_probs)}; expected one or the other")
        return ["kl", *optional]
    if not log_probs:
        return optional
    if "logp" not in fields:
        raise RolloutError(f"{at}, field 'logp': is missing; expected the log-probs that {references[0]} goes with")
    wanted = f"ref_logp_{ref}" if ref else "ref_logp"
    if wanted not in references:
        has = f"the line has {', '.join(references)}" if references else "the line has none"
        names = [name.removeprefix("ref_logp_") for name in references if name != "ref_logp"]
        pick = f", or a choice by ref= (--ref {'|'.join(names)})" if names else ", or kl in place of logp"
        raise RolloutError(f"{at}, field '{wanted}': is missing ({has}); expected the reference of logp{pick}")
    return ["log_probs", "ref_log_probs", *optional]


def _integer(fields: dict, name: str, least: int, at: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LONGEST:
        given = f"is {_shown(value)}" if name in fields else "is missing"
        raise RolloutError(
            f"{at}, field '{name}': {given}; expected an integer of at least {least} and at most {LONGEST:,}"
        )
    return value


def _is_float32(value: Any) -> bool:
    """Whether a number is one, and finite as a float32."""
    return type(value) in (int, float) and abs(value) <= FLOAT32_MAX


def _reward(value: Any, at: str) -> float:
    if value is None:
        return math.nan
    if not _is_float32(value):
        raise RolloutError(
            f"{at}, field 'reward': is {_shown(value)}; expected a finite number (float32), or null where it is missing"
        )
    return float(value)


def _name(fields: dict, field: str, at: str) -> str | int | None:
    """A string or an integer; half a surrogate pair, which JSON can spell, can be neither written nor drawn."""
    value = fields.get(field)
    if value is None or type(value) is int or (isinstance(value, str) and not re.search("[\ud800-\udfff]", value)):
        return value
    raise RolloutError(f"{at}, field '{field}': is {_shown(value)}; expected a string of Unicode text or an integer")


def _mask(spans: Any, response_len: int, at: str) -> Tensor:
    mask = torch.zeros(response_len, dtype=torch.bool)
    end = 0
    for i, span in enumerate(spans if isinstance(spans, list) else [spans]):
        pair = isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)
        if not pair or not end <= span[0] <= span[1] <= response_len:
            raise RolloutError(
                f"{at}, field 'loss_mask_spans': item {i} is {_shown(span)}; expected [start, end) with "
                f"{end} <= start <= end <= response_len = {response_len}"
            )
        mask[span[0] : span[1]] = True
        end = span[1]
    return mask


def _per_token(numbers: Any, field: str, mask: Tensor, at: str) -> Tensor:
    """Full-length float32; numbers for trained tokens only are put at the trained tokens."""
    trained, length = int(mask.sum()), len(mask)
    if not isinstance(numbers, list) or len(numbers) not in (length, trained):
        given = f"has {len(numbers)} numbers" if isinstance(numbers, list) else f"is {_shown(numbers)}"
        raise RolloutError(
            f"{at}, field '{field}': {given}; expected a list of response_len = {length} numbers, "
            f"or of one for each of the {trained} trained tokens"
        )
    for i, number in enumerate(numbers):
        if not _is_float32(number):
            raise RolloutError(
                f"{at}, field '{field}': item {i} is {_shown(number)}; expected a finite number (float32)"
            )
    given = torch.tensor(numbers, dtype=torch.float32)
    return given if len(numbers) == length else torch.zeros(length).masked_scatter_(mask, given)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# slime's train dumps


def _slime_rows(path: Path) -> Iterator[_Row]:
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes fail in many ways
        raise RolloutError(
            f"{path}: not loaded, and nothing in it was run ({_shown(str(error) or type(error).__name__)}); expected a "
            "torch.save file of tensors and plain Python data"
        ) from None
    samples = dump.get("samples") if isinstance(dump, dict) else None
    if samples is None and isinstance(dump, dict) and isinstance(dump.get("rollout_data"), dict):
        samples = _samples(dump["rollout_data"], path)
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RolloutError(f"{path}, field 'samples': expected a list with one dict a sample (slime's train dump)")
    for i, sample in enumerate(samples):
        yield _slime_row(sample, f"{path}, sample {i}", i)


# a dump's columns keep the plural names of slime's batch, hand-made ones use the singular
_SINGULAR = {
    "response_lengths": "response_length",
    "total_lengths": "total_length",
    "rewards": "reward",
    "loss_masks": "loss_mask",
    "group": "group_index",
}
_COLUMNS = (*_SINGULAR, *_SINGULAR.values(), *PER_TOKEN)


def _samples(columns: dict, path: Path) -> list[dict]:
    """One dict a sample from the lists of one rank (the dumps of older versions)."""
    given = {name: columns[name] for name in _COLUMNS if columns.get(name) is not None}
    n = 0
    for i, (name, column) in enumerate(given.items()):
        if not (isinstance(column, (list, tuple)) or (isinstance(column, Tensor) and column.ndim)):
            raise RolloutError(f"{path}, field '{name}': is {_shown(column)}; expected a list with one entry a sample")
        n = n if i else len(column)
        if len(column) != n:
            raise RolloutError(f"{path}, field '{name}': has length {len(column)}; expected one entry a sample, {n}")
    return [{name: column[i] for name, column in given.items()} for i in range(n)]


def _slime_row(sample: dict, at: str, number: int) -> _Row:
    fields = {_SINGULAR.get(name, name): value for name, value in sample.items()}
    for name in ("response_length", "total_length", "reward", "group_index"):
        if isinstance(value := fields.get(name), Tensor) and value.numel() == 1:
            fields[name] = value.item()
    response_len = _integer(fields, "response_length", 0, at)
    total_len = _integer(fields, "total_length", response_len + 1, at)
    mask = torch.ones(response_len)
    if fields.get("loss_mask") is not None:
        mask = _tensor(fields["loss_mask"], "loss_mask", at)
    if mask.shape != (response_len,) or not bool(((mask == 0) | (mask == 1)).all()):
        raise RolloutError(
            f"{at}, field 'loss_mask': has shape {list(mask.shape)}; expected {response_len} numbers 0 or 1"
        )
    per_token = {}
    for name in PER_TOKEN:
        if fields.get(name) is None:
            continue
        given = per_token[name] = _tensor(fields[name], name, at)
        if given.shape != (response_len,):
            raise RolloutError(
                f"{at}, field '{name}': has shape {list(given.shape)}; expected the whole response, [{response_len}] "
                "(a dump of one context-parallel rank holds only its slice)"
            )
        wrong = ((mask == 1) & ~given.isfinite()).nonzero()
        if len(wrong):
            token = int(wrong[0])
            raise RolloutError(
                f"{at}, field '{name}': token {token} is {float(given[token])}; expected a finite number (float32)"
            )
    if "log_probs" in per_token and "ref_log_probs" in per_token:
        per_token.pop("kl", None)
    else:
        own = per_token.pop("log_probs", None)
        per_token.pop("ref_log_probs", None)
        if own is not None:
            per_token.setdefault("kl", torch.zeros(response_len))  # slime's own choice without a reference
    reward = fields.get("reward")
    if isinstance(reward, float) and math.isnan(reward):  # a tensor has no null
        reward = None
    group, prompt_len = _name(fields, "group_index", at), total_len - response_len
    return _Row(at, prompt_len, response_len, mask == 1, _reward(reward, at), group, str(number), per_token)


def _tensor(numbers: Any, field: str, at: str) -> Tensor:
    """float32, from whatever torch takes for real numbers."""
    try:
        given = torch.as_tensor(numbers)
        if given.is_complex() or given.layout != torch.strided:
            raise TypeError
        return given.to("cpu", torch.float32)
    except Exception:  # text, a dict, ragged lists: each fails in its own way
        raise RolloutError(f"{at}, field '{field}': is {_shown(numbers)}; expected numbers, one a token") from None
