"""One rank's view of a batch, and running a user's function on the views of dp x cp ranks.

`check` compares what comes out; this module deals the batch, runs the ranks and reads what they return.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_returns.diagnose import Places
from cp_returns.layout import Layout
from cp_returns.log_probs import slice_responses
from cp_returns.rollouts import PER_TOKEN, Rollouts
from cp_returns.simulate import RankFailure, RankGather, in_processes, in_threads

GRADIENT = "gradient of log_probs"
MakeLayout = Callable[[list[int], list[int], int], Layout]
"""layout(total_lengths, response_lengths, cp_size), such as `zigzag`."""


class CheckError(ValueError):
    """What cannot be checked: a batch or arguments that do not fit, or a function that fails on one rank already."""


@dataclass(frozen=True)
class View:
    """What one rank of a trainer would hold of a batch. Lists have one entry a sample of this DP rank.

    rank, size: in the CP group. all_gather: over all ranks ([..] -> [dp * cp, ..]); all_gather.cp and .dp over those
    groups. cp_group, dp_cp_group: the process groups with run="processes", else None; Megatron's parallel_state is set
    up there too. kl, log_probs, ref_log_probs, values, token_rewards: this rank's tokens, None where the batch has none
    (kl is then log_probs - ref_log_probs). loss_masks: whole responses. rewards: float32 [samples], NaN where missing.
    samples: their numbers in the batch; sample i is on DP rank i % dp_size.
    """

    rank: int
    size: int
    dp_rank: int
    dp_size: int
    all_gather: RankGather = field(repr=False)
    layout: Layout = field(repr=False)
    samples: list[int]
    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: list[Tensor]
    rewards: Tensor
    group_ids: Tensor
    kl: list[Tensor] | None = None
    log_probs: list[Tensor] | None = None
    ref_log_probs: list[Tensor] | None = None
    values: list[Tensor] | None = None
    token_rewards: list[Tensor] | None = None

    cp_group = property(lambda self: self.all_gather.cp_group)
    dp_cp_group = property(lambda self: self.all_gather.dp_cp_group)

    def shards(self, full: Sequence[Tensor]) -> list[Tensor]:
        """This rank's tokens of whole responses, such as `loss_masks`."""
        return slice_responses(full, self.layout, self.rank)


@dataclass(frozen=True)
class Share:
    """A scalar output of which each rank has a part: the parts of all DP x CP ranks add up to that of one rank.

    A trainer that averages over ranks adds parts that are divided by the number of ranks.
    """

    value: Tensor | float


@dataclass(frozen=True)
class Plan:
    """A batch dealt to dp x cp ranks."""

    batch: Rollouts
    dp: int
    cp: int
    make_layout: MakeLayout

    @cached_property
    def layouts(self) -> list[Layout]:
        """One a DP rank."""
        return [self.make_layout(*self._lengths(d), self.cp) for d in range(self.dp)]

    def samples(self, dp_rank: int) -> list[int]:
        return list(range(dp_rank, self.batch.num_samples, self.dp))

    def _lengths(self, dp_rank: int) -> tuple[list[int], list[int]]:
        of = self.samples(dp_rank)
        return [self.batch.total_lengths[i] for i in of], [self.batch.response_lengths[i] for i in of]

    def view(self, all_gather: RankGather, gradients: bool) -> View:
        layout, of = self.layouts[all_gather.dp_rank], self.samples(all_gather.dp_rank)
        full = {name: None if (x := getattr(self.batch, name)) is None else [x[i] for i in of] for name in PER_TOKEN}
        own = {name: None if x is None else slice_responses(x, layout, all_gather.cp_rank) for name, x in full.items()}
        if own["kl"] is None and own["log_probs"] is not None and own["ref_log_probs"] is not None:
            own["kl"] = [a - b for a, b in zip(own["log_probs"], own["ref_log_probs"], strict=True)]
        if gradients and own["log_probs"] is not None:
            own["log_probs"] = [x.clone().requires_grad_() for x in own["log_probs"]]
        total, response = self._lengths(all_gather.dp_rank)
        return View(
            rank=all_gather.cp_rank,
            size=self.cp,
            dp_rank=all_gather.dp_rank,
            dp_size=self.dp,
            all_gather=all_gather,
            layout=layout,
            samples=of,
            total_lengths=total,
            response_lengths=response,
            loss_masks=[self.batch.loss_masks[i].clone() for i in of],
            rewards=torch.tensor([self.batch.rewards[i] for i in of], dtype=torch.float32),
            group_ids=torch.tensor([self.batch.group_ids[i] for i in of], dtype=torch.int64),
            **own,
        )

    def ranks(self) -> Iterator[tuple[int, int]]:
        """(dp_rank, cp_rank) in rank order."""
        return ((d, r) for d in range(self.dp) for r in range(self.cp))

    @cached_property
    def held(self) -> list[np.ndarray]:
        """For each rank the tokens of the full pack that it holds, in its own order."""
        lengths = np.asarray(self.batch.response_lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        packs = [_runs(starts[self.samples(d)], lengths[self.samples(d)]) for d in range(self.dp)]
        return [packs[d][self.layouts[d].index(r)] for d, r in self.ranks()]

    @cached_property
    def places(self) -> Places:
        """Where each token of the full pack lives."""
        lengths = np.asarray(self.batch.response_lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        sample = np.repeat(np.arange(len(lengths)), lengths)
        piece, rank, dp_rank = (np.zeros(len(sample), dtype=np.int64) for _ in range(3))
        empty = np.zeros(len(lengths), dtype=bool)
        for d, layout in enumerate(self.layouts):
            of = self.samples(d)
            pack = _runs(starts[of], lengths[of])
            dp_rank[pack] = d
            piece[pack] = np.tile(np.arange(len(layout.owners)), len(of)).repeat(layout.piece_lengths.ravel())
            rank[pack] = layout.owners[piece[pack]]
            empty[of] = (np.stack([layout.lengths(r) for r in range(self.cp)]) == 0).any(axis=0)
        masks = [(mask != 0).cpu().numpy() for mask in self.batch.loss_masks]
        valid = np.concatenate([np.zeros(0, dtype=bool), *masks])
        token = np.arange(len(sample)) - starts[sample]
        rewards = np.asarray(self.batch.rewards, dtype=np.float64)
        alone = self.make_layout(self.batch.total_lengths, self.batch.response_lengths, 1)
        piece_alone = np.tile(np.arange(len(alone.owners)), len(lengths)).repeat(alone.piece_lengths.ravel())
        return Places(sample, token, piece, piece_alone, rank, dp_rank, valid, self.dp, self.cp, rewards, empty)

    def places_of(self, of: str) -> Places:
        """Where the numbers of an output live: one a "token", "sample" (on each CP rank) or "scalar" (each rank)."""
        if of == "token":
            return self.places
        entries = [(-1, r, d) for d, r in self.ranks()] if of == "scalar" else [(-1, -1, -1)]
        if of == "sample":
            entries = [(i, r, d) for d, r in self.ranks() for i in self.samples(d)]
        sample, rank, dp_rank = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        none, valid = np.full(len(sample), -1), np.ones(len(sample), dtype=bool)
        places = self.places
        return replace(
            places, sample=sample, token=none, piece=none, piece_alone=none, rank=rank, dp_rank=dp_rank, valid=valid
        )


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, .. for each run, one after the other."""
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


@dataclass(frozen=True)
class Value:
    """One output of one rank: "list" of arrays, "vector", "scalar" or "share"."""

    form: str
    data: Any

    @property
    def pack(self) -> np.ndarray:
        """All numbers of this rank, sample by sample."""
        return np.concatenate([np.zeros(0), *self.data]) if self.form == "list" else np.atleast_1d(self.data)


@dataclass(frozen=True)
class Runner:
    """Runs the function that is checked on a plan's ranks."""

    fn: Callable[[View], Any]
    make_layout: MakeLayout
    run: str
    gradients: bool
    timeout: float

    def __call__(self, plan: Plan) -> tuple[list[dict[str, Value]], RankFailure | None]:
        """Each rank's outputs, or how the ranks failed. On one rank an error is the caller's."""

        def rank_fn(rank: int, all_gather: RankGather) -> dict[str, Value]:
            return _call(self.fn, plan.view(all_gather, self.gradients), self.gradients)

        n = plan.dp * plan.cp
        try:
            if self.run == "threads":
                return in_threads(rank_fn, n, cp_size=plan.cp, timeout=self.timeout), None
            megatron = importlib.util.find_spec("megatron") is not None
            return in_processes(rank_fn, n, cp_size=plan.cp, megatron=megatron, timeout=self.timeout), None
        except RankFailure as failure:
            own = failure.outcomes[failure.first].error
            if isinstance(own, CheckError):
                raise CheckError(str(own)) from None
            if n == 1 and failure.kind != "hang":
                hint = ""
                if self.run == "threads" and "process group has not been initialized" in str(own):
                    hint = "; it uses torch.distributed, which run='processes' sets up"
                text = f"the function fails on one rank already: {type(own).__name__}: {own}{hint}"
                raise CheckError(text) from failure
            return [], failure

    def alone(self, batch: Rollouts, name: str) -> np.ndarray | None:
        """An output on one rank for another batch of the same lengths, None if the function refuses it."""
        plan = Plan(batch, 1, 1, self.make_layout)
        try:
            results, failure = self(plan)
        except CheckError:
            return None
        return None if failure else whole_of(name, results[0][name], plan).expected


def _call(fn: Callable[[View], Any], view: View, gradients: bool) -> dict[str, Value]:
    """One rank's outputs by name, as float64 arrays."""
    named = _named(fn(view))
    outputs = {name: _value(name, x) for name, x in named.items()}
    if gradients:
        parts = [x.value for x in named.values() if isinstance(x, Share) and isinstance(x.value, Tensor)]
        if not any(isinstance(x, Share) for x in named.values()):
            raise CheckError("gradients=True, but no output is a Share: return Share(this rank's part of the loss)")
        own = [x for x in parts if x.requires_grad]
        grads = _gradients(own, view.log_probs or [], alone=view.size * view.dp_size == 1)
        outputs[GRADIENT] = Value("list", grads)
    return outputs


def _gradients(parts: list[Tensor], leaves: list[Tensor], alone: bool) -> list[np.ndarray]:
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if parts and leaves:
        grads = torch.autograd.grad(sum(parts[1:], parts[0]).sum(), leaves, allow_unused=True)
    if alone and leaves and all(g is None for g in grads):
        raise CheckError(
            "gradients=True, but no Share depends on view.log_probs on one rank: compute the loss from view.log_probs, "
            "without detach, or leave gradients out"
        )
    return [_array(torch.zeros_like(x) if g is None else g) for g, x in zip(grads, leaves, strict=True)]


def _named(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {str(name): x for name, x in result.items()}
    if is_dataclass(result) and not isinstance(result, (Share, type)):
        return {f.name: getattr(result, f.name) for f in fields(result)}
    if isinstance(result, tuple):
        names = getattr(result, "_fields", [f"output {i}" for i in range(len(result))])
        return dict(zip(names, result, strict=True))
    return {"output": result}


def _value(name: str, x: Any) -> Value:
    if isinstance(x, Share):
        inner = _value(name, x.value)
        if inner.form == "scalar":
            return Value("share", inner.data)
    elif isinstance(x, Tensor) and x.dim() <= 1:
        return Value("scalar", float(x.detach())) if x.dim() == 0 else Value("vector", _array(x))
    elif isinstance(x, (int, float, np.number)):
        return Value("scalar", float(x))
    elif isinstance(x, list) and all(isinstance(y, Tensor) and y.dim() == 1 for y in x):
        return Value("list", [_array(y) for y in x])
    elif isinstance(x, list) and all(isinstance(y, (int, float)) or (isinstance(y, Tensor) and not y.dim()) for y in x):
        return Value("vector", np.array([float(y) for y in x]))
    given = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    raise CheckError(
        f"{name} is {given}; expected a list of 1-D tensors (one a sample), a 1-D tensor, one number a sample, a "
        "number or a Share of one; return only what is to be compared"
    )


def _array(x: Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.float64).numpy()


@dataclass(frozen=True)
class Whole:
    """An output on one rank: what each number belongs to ("token", "sample", "scalar", "share"), and the numbers."""

    of: tuple[str, ...]
    expected: np.ndarray


def whole_of(name: str, value: Value, plan: Plan) -> Whole:
    tokens, samples = sum(plan.batch.response_lengths), plan.batch.num_samples
    if value.form in ("scalar", "share"):
        return Whole((value.form,), np.array([value.data]))
    data = value.pack
    of = tuple(what for what, n in (("token", tokens), ("sample", samples)) if len(data) == n)
    if value.form == "list" and [len(x) for x in value.data] != plan.batch.response_lengths:
        of = ()
    if not of:
        raise CheckError(
            f"{name} has {len(data)} numbers on one rank; expected one a response token ({tokens}, in the order of the "
            f"samples) or one a sample ({samples})"
        )
    return Whole(of, data)
