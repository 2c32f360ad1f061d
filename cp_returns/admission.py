"""The door: every estimator's input is checked here, once, before anything is exchanged or computed.

Nothing raises here: the first problem of a rank becomes part of its facts, and all ranks raise it together
(`agreement`). Tests of data that live on a GPU are left there; only a failure looks for the culprit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int8, Int64, Shaped
from torch import Tensor

from cp_returns.agreement import Check, Facts, Problem, check_each
from cp_returns.arrays import Array, countable, library, like, native, repeat, result_dtype, stack, tensor
from cp_returns.clocks import CLOCKS, Clock, valid_steps
from cp_returns.context import CPContext, Formula, Inputs, PerSample, Reward
from cp_returns.exchange import cut
from cp_returns.groups import device_of
from cp_returns.layout import Layout, Lengths
from cp_returns.masks import Prefix, as_bits, last_valid, pick, put, select, select_in_place

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPES = (*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Batch:
    """A batch as formulas use it: selected, promoted, and with the facts that all ranks compare.

    Where the facts hold a problem the rest is empty, and no formula comes to see it.
    """

    facts: Facts  # their sums: the KL at valid tokens, missing rewards, masked samples, valid tokens
    layout: Layout  # of the steps of the clock: of all tokens, or of the valid ones alone
    clock: Clock
    inputs: Inputs  # per-token, of this rank's steps, selected by the mask
    numbers: Mapping[str, PerSample]  # gamma, lam, kl_coef, ..: a float or float64 [samples]
    mask: Bool[Tensor, " full"]  # tokens that count: the loss mask of the samples that count
    rewards: Float64[Tensor, " samples"]  # 0 where none are given
    counted: Bool[Tensor, " samples"]  # not left out by sample_mask or a missing reward
    missing: Bool[Tensor, " samples"]  # a NaN reward
    bootstrap: Float64[Tensor, " samples"] | None
    last_valid: Int64[Tensor, " samples"]  # which step is the last of them, -1 where there is none
    here: Bool[Tensor, " local"]  # this rank's part of the mask
    keep: Int8[Tensor, " local"]  # the same as bits
    all_steps: bool = True  # masked tokens are steps too
    rewarded: bool = True  # were rewards given?

    @cached_property
    def valid_counts(self) -> Int64[Tensor, " samples"]:
        """Valid tokens of each whole response."""
        if not self.all_steps:
            return self.last_valid + 1
        return tensor(Prefix(self.mask).upto(self.layout.response_lengths)).diff()

    @property
    def dtype(self) -> torch.dtype:
        return result_dtype(*(x for x in self.inputs if x is not None))

    def run(self, cp: CPContext, formula: Formula) -> tuple[Tensor, ...]:
        """The formula on the steps of the clock, by the strategy of `cp`; 0 at tokens that are none."""
        outs = replace(cp, layout=self.layout).run(formula, self.inputs, self.facts)
        return outs if self.all_steps else tuple(put(out, self.here) for out in outs)

    def output(self, cp: CPContext) -> Int8[Tensor, " steps"] | None:
        """Which of the steps that a formula sees give an output, this rank's or those of whole responses; None: all."""
        if not self.all_steps:
            return None
        return as_bits(self.mask) if cp.holds_all and len(self.mask) > len(self.keep) else self.keep

    def reward(self, cp: CPContext, kl: Tensor | None, token_rewards: Tensor | None) -> Reward:
        """r_j = -kl_coef * kl_j + token_reward_j on valid tokens, and the scalar reward at the last valid token."""
        coef = self.numbers["kl_coef"]
        terminal = cp.terminal(self.last_valid, self.rewards) if self.rewarded else None
        if token_rewards is None and kl is not None:
            return Reward(kl, -coef, terminal)
        if token_rewards is None:
            return Reward(torch.zeros(int(cp.segments.sum()), device=self.mask.device), 1.0, terminal)
        if kl is None:
            return Reward(token_rewards, 1.0, terminal)
        coef = cp.spread(coef) if isinstance(coef, Tensor) else coef
        return Reward(token_rewards.double() - coef * kl.double(), 1.0, terminal)


def admit(
    cp: CPContext,
    full_mask: Shaped[Tensor, " full"],
    rewards: Shaped[Tensor, " samples"] | None,
    *,
    tokens: Mapping[str, Tensor | None],
    numbers: Mapping[str, object],
    clock: str = "token",
    choices: Mapping[str, tuple[object, tuple]] | None = None,
    samples: Mapping[str, Tensor | None] | None = None,
    sample_mask: Tensor | None = None,
    required: tuple[str, ...] = (),
    unselected: tuple[str, ...] = (),
    nonfinite: str = "error",
    owned: bool = False,
) -> Batch:
    """Check the input of one call; what is wrong is in the facts of the batch.

    tokens: this rank's packed per-token inputs by name, None where absent. numbers: gamma and lam (in [0, 1]) and
    kl_coef, each a float, a 0-dim tensor or one per sample. clock: see `clocks`. choices: settings that are one of a
    few words. samples: more [N] inputs to compare. required: those of tokens and samples that must not be None.
    unselected: tokens that are used at masked positions too, on the token clock. owned: the tokens are the caller's
    copies, which may be written over.
    """
    choices, samples = {"clock": (clock, CLOCKS), **(choices or {})}, samples or {}
    settings, lengths = _settings_and_lengths(cp, tokens, numbers, choices, nonfinite)
    problem = _first_problem(
        cp, full_mask, rewards, tokens, numbers, choices, samples, sample_mask, required, nonfinite
    )
    if problem is not None:
        device = device_of(cp.all_gather, full_mask, rewards, *tokens.values())
        return _refused(Facts(settings, lengths, problem=problem), cp.layout, device)
    layout, device = cp.layout, full_mask.device
    loss_mask, checks = zero_or_one("loss_mask", full_mask, layout.response_lengths)
    dtype = result_dtype(*(y for y in tokens.values() if y is not None))
    x, data, more = _rewards(rewards, layout.num_samples, device, dtype)
    data, checks, lib = {"loss_mask": loss_mask, **data}, checks + more, library(x)
    missing = lib.isnan(x)
    kept = ~missing
    if sample_mask is not None:
        given, more = _sample_mask(sample_mask.detach().to(device))
        data["sample_mask"] = given
        checks += more
        kept = kept & native(given)
    mask = loss_mask
    if mask.is_cuda or not kept.all():
        mask = mask & repeat(tensor(kept), layout.response_lengths)
        x = lib.where(kept, x, 0.0)
    values = {key: _number(value, layout.num_samples, device) for key, value in numbers.items()}
    data |= {key: value for key, value in values.items() if isinstance(value, Tensor)}
    checks += [_in_range(key, value) for key, value in values.items() if isinstance(value, Tensor)]
    data |= {key: value.detach().to(device) for key, value in samples.items() if value is not None}
    bootstrap, more = _bootstrap(data.get("bootstrap"))
    checks += more
    if "baselines" in data:  # before the rewards, from which it has been taken
        y = data["baselines"]
        checks.insert(0, check_each("baselines", y, ~y.isfinite(), "a finite number"))
    here = cut(mask, layout, cp.rank)
    keep = as_bits(here)
    token_rewards = tokens.get("token_rewards")
    if token_rewards is not None:
        own = here if mask is loss_mask else cut(loss_mask, layout, cp.rank)
        checks.append(_masked_rewards(cp, token_rewards.detach(), as_bits(own)))
    bits = dict.fromkeys(tokens, keep) | {name: as_bits(cp.spread(tensor(kept))) for name in unselected}
    steps, ticks, last = _steps(layout, mask, clock)
    if clock == "token":
        keep_only = select_in_place if owned else select
        inputs = {name: None if y is None else keep_only(y.detach(), bits[name]) for name, y in tokens.items()}
    else:
        inputs = {name: None if y is None else pick(y.detach(), here) for name, y in tokens.items()}
    totals = {name: _total(y) for name, y in inputs.items() if y is not None}  # at this rank's valid tokens
    if nonfinite == "error":
        place = (lambda y: y) if clock == "token" else (lambda y: put(y, here))
        floats = {name: y for name, y in inputs.items() if y is not None and y.dtype in _FLOATS}
        checks += [_tokens_finite(cp, name, y, totals[name], place) for name, y in floats.items()]
    sums = stack(totals.get("kl", 0.0), missing.sum(), (last < 0).sum(), lib.count_nonzero(native(mask)))
    facts = Facts(settings, lengths, data, checks=checks, sums=sums)
    return Batch(
        facts=facts,
        layout=steps,
        clock=ticks,
        inputs=tuple(inputs.values()),
        numbers=values,
        mask=mask,
        rewards=tensor(x),
        counted=tensor(kept),
        missing=tensor(missing),
        bootstrap=bootstrap,
        last_valid=tensor(last),
        here=here,
        keep=keep,
        all_steps=clock == "token",
        rewarded=rewards is not None,
    )


def _rewards(
    rewards: Tensor | None, samples: int, device: torch.device, dtype: torch.dtype
) -> tuple[Array, dict[str, Array], list[Check]]:
    """(float64, what ranks compare of them, checks); 0 where none are given. dtype: of the results, which hold them."""
    if rewards is None:
        return native(torch.zeros(samples, dtype=torch.float64, device=device)), {}, []
    x = native(rewards.detach().to(device, torch.float64))
    lib = library(x)
    x = lib.where(lib.isnan(x), lib.nan, x)  # NaN has many bit patterns
    finite = f"a finite number in {str(dtype).removeprefix('torch.')}, or NaN where it is missing"
    check = check_each("reward", x, abs(x) > torch.finfo(dtype).max, finite)
    return x, {"reward": x}, [check]


def _bootstrap(given: Tensor | None) -> tuple[Tensor | None, list[Check]]:
    """(float64, checks); 0 where there is none."""
    if given is None:
        return None, []
    x = given.double()
    check = check_each("bootstrap", x, x.isinf(), "a finite number, or NaN where there is none")
    return torch.where(x.isfinite(), x, 0.0), [check]


def _steps(layout: Layout, mask: Tensor, clock: str) -> tuple[Layout, Clock, Array]:
    """(the steps' layout, clock, [N] which step is the last valid token of a response or -1)."""
    if clock == "token":
        return layout, Clock(), last_valid(mask, layout.response_lengths)
    steps, ticks = valid_steps(layout, Prefix(mask), clock)
    return steps, ticks, like(steps.response_lengths - 1, native(mask))


def _settings_and_lengths(cp: CPContext, tokens, numbers, choices, nonfinite: str) -> tuple[dict, dict]:
    """What the host knows of the call and all ranks must hold alike."""
    layout = cp.layout
    settings: dict[str, object] = {key: value for key, (value, _) in choices.items()}
    settings |= {key: _plain(value) for key, value in numbers.items()} | {"nonfinite": nonfinite}
    settings |= {"pieces of a sample": len(layout.owners)}
    settings |= {f"dtype of {key}": _dtype(value) for key, value in tokens.items()}
    lengths = {
        "response_length": layout.response_lengths,
        "total_length": layout.total_lengths,
        "length of its pieces": layout.piece,
        "place in the stream": layout.begin,
    }
    return settings, lengths


def _refused(facts: Facts, layout: Layout, device: torch.device) -> Batch:
    none = torch.zeros(0, dtype=torch.bool, device=device)
    return Batch(
        facts=facts,
        layout=layout,
        clock=Clock(),
        inputs=(),
        numbers={},
        mask=none,
        rewards=none.double(),
        counted=none,
        missing=none,
        bootstrap=None,
        last_valid=none.long(),
        here=none,
        keep=as_bits(none),
    )


_UNBOUNDED = ("kl_coef",)
_UPPER = {"lam_alpha": float("inf")}


def _range(key: str) -> str:
    if key in _UNBOUNDED:
        return "a finite number"
    return "a number that is at least 0" if key in _UPPER else "a number in [0, 1]"


def _first_problem(
    cp, full_mask, rewards, tokens, numbers, choices, samples, sample_mask, required, nonfinite
) -> Problem | None:
    """What the host can see without reading a tensor: settings, dtypes and shapes."""
    layout = cp.layout
    for key, (value, allowed) in {**choices, "nonfinite": (nonfinite, ("error", "propagate"))}.items():
        if value not in allowed:
            return Problem(key, repr(value), f"one of {', '.join(map(repr, allowed))}")
    for key, value in numbers.items():
        problem = _number_problem(key, value, layout.num_samples)
        if problem is not None:
            return problem
    per_sample = {"rewards": rewards, "sample_mask": sample_mask, **samples}
    for name, value, count, what in (
        ("full_mask", full_mask, layout.num_tokens, "one a token of the whole responses"),
        *((name, x, layout.num_samples, "one a sample") for name, x in per_sample.items()),
        *((name, x, layout.sizes[cp.rank], "one a token that this rank owns") for name, x in tokens.items()),
    ):
        if value is None and name in (*required, "full_mask"):
            return Problem(name, "absent", f"a tensor, {what}")
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            kind = type(value).__name__ if not isinstance(value, Tensor) else f"{value.layout} tensor"
            return Problem(name, f"a {kind}", "a tensor")
        if value.dtype not in _DTYPES:
            return Problem(f"dtype of {name}", value.dtype, "a float, int or bool dtype")
        if tuple(value.shape) != (count,):
            return Problem(f"shape of {name}", list(value.shape), f"[{count}], {what}")
    return None


def _number_problem(key: str, value: object, samples: int) -> Problem | None:
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES:
            return Problem(f"dtype of {key}", value.dtype, "a float, int or bool dtype")
        fits = value.dim() == 0 or tuple(value.shape) == (samples,)
        return None if fits else Problem(f"shape of {key}", list(value.shape), f"[] or [{samples}]")
    if isinstance(value, int | float | np.integer | np.floating) and math.isfinite(value):
        number = float(value)
        if key in _UNBOUNDED or 0 <= number <= _UPPER.get(key, 1.0):
            return None
    return Problem(key, repr(value), _range(key))


def _number(value, samples: int, device: torch.device) -> PerSample:
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach().to(device, torch.float64).expand(samples)


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{len(value)} numbers" if value.dim() else "a tensor"
    return float(value) if isinstance(value, int | float | np.number) else value  # two that are shown alike may differ


def _dtype(x: object) -> str:
    return "absent" if x is None else str(getattr(x, "dtype", type(x).__name__))


def zero_or_one(name: str, full_mask: Tensor, lengths: Lengths) -> tuple[Bool[Tensor, " full"], list[Check]]:
    """A mask of packed whole responses as bool, and a check that it holds 0 and 1 only; none of a bool one."""
    full_mask = full_mask.detach()
    if full_mask.dtype == torch.bool:
        return full_mask, []
    mask = full_mask.bool()

    def find() -> Problem | None:
        return _locate(name, full_mask, mask & (full_mask != 1), lengths, "0 or 1")

    if full_mask.is_floating_point() or full_mask.is_complex() or not len(full_mask):
        whole = native(countable(full_mask)) == native(mask)
        return mask, [Check(torch.as_tensor(~whole.all()), find)]
    whole = native(full_mask)
    return mask, [Check((whole.min() < 0) | (whole.max() > 1), find)]


def _sample_mask(sample_mask: Tensor) -> tuple[Tensor, list[Check]]:
    kept = sample_mask != 0
    return kept, [check_each("sample_mask", sample_mask, kept & (sample_mask != 1), "0 or 1")]


def _in_range(name: str, x: Tensor) -> Check:
    good = x.isfinite() if name in _UNBOUNDED else (x >= 0) & (x <= _UPPER.get(name, 1.0))
    return check_each(name, x, ~good, _range(name))


def _total(x: Tensor) -> Array:
    total = native(x.sum(dtype=x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32))
    return total if x.is_cuda or np.isfinite(total) else native(x.sum(dtype=torch.float64))


def _tokens_finite(cp: CPContext, name: str, x: Tensor, total: Array, place: Callable[[Tensor], Tensor]) -> Check:
    """NaN and inf at valid tokens. The sum is the cheap test: they never leave it finite. If it overflows, `find`
    knows better. place: from the steps, which x holds, to all tokens.
    """

    def find() -> Problem | None:
        return _locate_local(cp, name, place(x), place(~x.isfinite()), "a finite number at a valid token")

    return Check(~library(total).isfinite(total), find)


def _masked_rewards(cp: CPContext, x: Tensor, bits: Int8[Tensor, " local"]) -> Check:
    outside = select(countable(x), ~bits)
    y = native(outside)
    bad = (y != 0) & (y == y)  # not NaN

    def find() -> Problem | None:
        return _locate_local(
            cp, "token_rewards", outside, tensor(bad), "0 or NaN at a masked token: a reward there would be lost"
        )

    return Check(bad.any(), find)


def _locate(name: str, x: Tensor, bad: Tensor, lengths: Lengths, expected: str) -> Problem | None:
    """The first bad token of packed whole responses."""
    first = bad.nonzero()
    if not len(first):
        return None
    at = int(first[0])
    sample = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    token = at - int(np.cumsum(lengths)[sample] - lengths[sample])
    return Problem(name, x[at].item(), expected, sample, token)


def _locate_local(cp: CPContext, name: str, x: Tensor, bad: Tensor, expected: str) -> Problem | None:
    """The first bad token of this rank's pack, named in response coordinates."""
    first = bad.nonzero()
    if not len(first):
        return None
    at = int(cp.layout.index(cp.rank)[int(first[0])])
    starts = cp.layout.starts
    sample = int(np.searchsorted(starts + cp.layout.response_lengths, at, side="right"))
    return Problem(name, x[first[0]].item(), expected, sample, at - int(starts[sample]))
