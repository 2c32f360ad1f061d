"""Read rollout files: JSONL, one response a line, or a train dump of slime (`.pt`).

A JSONL line is an object with these fields; others are ignored.

| field | value |
|---|---|
| prompt_len | tokens of the prompt, at least 1 |
| response_len | tokens of the response, R >= 0 |
| loss_mask_spans | trained [start, end) pairs within the response, ascending; absent: all of it |
| reward | a finite number; absent: 0; null or NaN: missing, so that the sample counts as fully masked |
| group | string or integer shared by the answers to one prompt; absent: a group of its own |
| logp, ref_logp | log-probs of the policy and of the reference, in nats |
| kl | instead of logp and ref_logp: the KL of each token |
| values, token_rewards | optional |
| id | optional name |

Every list per token has R numbers, or one for each trained token in order (the others are then 0, and never read). All
lines of a file have the same lists. A file with several references calls them ref_logp_NAME, and `ref=NAME` picks one.
Without logp and kl a file holds shapes only: its log-probs come from a seeded generator, and `Rollouts.note` says so.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cp_returns.layout import Layout

PER_TOKEN = ("log_probs", "ref_log_probs", "kl", "values", "token_rewards")
_JSON_NAMES = {"log_probs": "logp", "ref_log_probs": "ref_logp"}


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
    if not path.is_file():
        raise RolloutError(f"{path}: no such file")
    rows = list(_slime_rows(path) if path.suffix == ".pt" else _json_rows(path, ref))
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
    names = list(rows[0].per_token) if rows else []
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
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise RolloutError(f"{at}, column {error.colno}: not JSON ({error.msg}); expected one object a line") from None
    if not isinstance(fields, dict):
        raise RolloutError(f"{at}: is {_shown(fields)}; expected an object with prompt_len and response_len")
    prompt_len = _integer(fields, "prompt_len", 1, at)
    response_len = _integer(fields, "response_len", 0, at)
    mask = _mask(fields.get("loss_mask_spans", [[0, response_len]]), response_len, at)
    per_token = {}
    for name in _lists(fields, ref, at):
        field = f"ref_logp_{ref}" if name == "ref_log_probs" and ref else _JSON_NAMES.get(name, name)
        per_token[name] = _per_token(fields[field], field, mask, at)
    group = fields.get("group")
    if not (group is None or (isinstance(group, (str, int)) and not isinstance(group, bool))):
        raise RolloutError(f"{at}, field 'group': is {_shown(group)}; expected a string or an integer")
    reward = _reward(fields.get("reward", 0.0), at)
    return _Row(at, prompt_len, response_len, mask, reward, group, str(fields.get("id", number)), per_token, ref or "")


def _lists(fields: dict, ref: str | None, at: str) -> list[str]:
    """Which per-token lists a line has; checks that they go together."""
    optional = [name for name in ("values", "token_rewards") if name in fields]
    references = sorted(name for name in fields if name.startswith("ref_logp"))
    if "kl" in fields and not ("logp" in fields and references):
        return ["kl", *optional]
    if "logp" not in fields:
        return optional
    wanted = f"ref_logp_{ref}" if ref else "ref_logp"
    if wanted not in references:
        has = f"the line has {', '.join(references)}" if references else "the line has none"
        names = [name.removeprefix("ref_logp_") for name in references if name != "ref_logp"]
        pick = f", or a choice by ref= (--ref {'|'.join(names)})" if names else ", or kl in place of logp"
        raise RolloutError(f"{at}, field '{wanted}': is missing ({has}); expected the reference of logp{pick}")
    return ["log_probs", "ref_log_probs", *optional]


def _integer(fields: dict, name: str, least: int, at: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        given = f"is {_shown(value)}" if name in fields else "is missing"
        raise RolloutError(f"{at}, field '{name}': {given}; expected an integer of at least {least}")
    return value


def _reward(value: Any, at: str) -> float:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise RolloutError(
            f"{at}, field 'reward': is {_shown(value)}; expected a finite number, or null where it is missing"
        )
    return float(value)


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
        if type(number) not in (int, float) or not math.isfinite(number):
            raise RolloutError(f"{at}, field '{field}': item {i} is {_shown(number)}; expected a finite number")
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
        samples = _samples(dump["rollout_data"])
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise RolloutError(f"{path}, field 'samples': expected a list with one dict a sample (slime's train dump)")
    for i, sample in enumerate(samples):
        yield _slime_row(sample, f"{path}, sample {i}", i)


def _samples(columns: dict) -> list[dict]:
    """One dict a sample from the lists of one rank (the dumps of older versions)."""
    n = len(columns.get("response_lengths", ()))
    per_sample = {
        name: column for name, column in columns.items() if isinstance(column, (list, tuple)) and len(column) == n
    }
    return [{name: column[i] for name, column in per_sample.items()} for i in range(n)]


def _slime_row(sample: dict, at: str, number: int) -> _Row:
    # a dump's columns keep the plural names of slime's batch, hand-made ones use the singular
    fields = {name: sample.get(name, sample.get(name + "s")) for name in ("response_length", "total_length", "reward")}
    response_len = _integer(fields, "response_length", 0, at)
    total_len = _integer(fields, "total_length", response_len + 1, at)
    loss_mask = sample.get("loss_mask", sample.get("loss_masks"))
    mask = torch.ones(response_len) if loss_mask is None else torch.as_tensor(loss_mask)
    if mask.shape != (response_len,) or not bool(((mask == 0) | (mask == 1)).all()):
        raise RolloutError(
            f"{at}, field 'loss_mask': has shape {list(mask.shape)}; expected {response_len} numbers 0 or 1"
        )
    per_token = {}
    for name in PER_TOKEN:
        if sample.get(name) is None:
            continue
        given = torch.as_tensor(sample[name])
        if given.shape != (response_len,):
            raise RolloutError(
                f"{at}, field '{name}': has shape {list(given.shape)}; expected the whole response, [{response_len}] "
                "(a dump of one context-parallel rank holds only its slice)"
            )
        per_token[name] = given.to(torch.float32)
    if "log_probs" in per_token and "ref_log_probs" in per_token:
        per_token.pop("kl", None)
    else:
        own = per_token.pop("log_probs", None)
        per_token.pop("ref_log_probs", None)
        if own is not None:
            per_token.setdefault("kl", torch.zeros(response_len))  # slime's own choice without a reference
    reward = fields["reward"]
    reward = reward.item() if isinstance(reward, Tensor) else reward
    group = sample.get("group_index", sample.get("group"))
    return _Row(
        at, total_len - response_len, response_len, mask == 1, _reward(reward, at), group, str(number), per_token
    )
