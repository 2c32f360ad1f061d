"""Point it at your own advantage or loss code: does it give on dp x cp ranks what it gives on one?

    report = check_cp_invariance(fn, batch, cp_sizes=(1, 2, 4), dp_sizes=(1, 2))     # fn(view) -> what it computes
    report.agrees, report.findings, str(report)

`fn` sees one rank's `View` and returns its outputs: one, or several in a dict, tuple or dataclass. An output is

| a list with one 1-D tensor a sample, or one packed 1-D tensor | a number for each token that this rank owns |
| a list or 1-D tensor with one number a sample                 | the same on each CP rank                    |
| a number                                                      | the same on every rank (a metric)           |
| Share(number)                                                 | parts that add up over all ranks (a loss)   |

A finding names the first sample, token, rank and piece that differ, both numbers, and the kind of mistake that it
looks like (`diagnose.KINDS`). Nothing waits without a bound: ranks that wait for each other are a finding too.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_returns.diagnose import KINDS, Case, Diagnosis, Places, diagnose
from cp_returns.layout import Layout, contiguous, zigzag
from cp_returns.rollouts import PER_TOKEN, Rollouts
from cp_returns.simulate import Outcome, RankFailure
from cp_returns.view import CheckError, MakeLayout, Plan, Runner, Share, Value, View, Whole, whole_of

__all__ = ["CheckError", "Finding", "Report", "Share", "View", "World", "check_cp_invariance"]

_SLACK = 2.0**-21  # of an output's largest number: what float32 may lose in a sum over the batch
# A metric or loss may be 0 but for rounding, such as the mean of whitened advantages; its own size then says nothing.
_MEAN_SLACK = 2.0**-23  # what float32 loses in a mean of numbers of size 1


@dataclass(frozen=True)
class Finding:
    """One difference, or one set of ranks that did not end; None where there is no such place or number."""

    kind: str
    why: str
    dp_size: int
    cp_size: int
    output: str | None = None
    sample: int | None = None
    token: int | None = None
    dp_rank: int | None = None
    rank: int | None = None
    piece: int | None = None
    expected: float | None = None
    got: float | None = None
    differ: int = 0
    compared: int = 0
    outcomes: tuple[Outcome, ...] = ()

    @property
    def where(self) -> str:
        """The first place that differs, in words."""
        place = ("sample", "token", "dp_rank", "rank", "piece")
        at = [f"{name.replace('_', ' ')} {value}" for name in place if (value := getattr(self, name)) is not None]
        return ", ".join(at) or "the sum over ranks"

    def __str__(self) -> str:
        lines = [f"dp {self.dp_size} x cp {self.cp_size}: {self.kind.upper()}, {KINDS[self.kind]}"]
        if self.output is not None and not self.compared:
            lines.append(f"  {self.output}: not compared")
        elif self.output is not None:
            got, expected = ("nothing" if x is None else f"{x:.9g}" for x in (self.got, self.expected))
            lines.append(f"  {self.output}: {self.differ} of {self.compared} numbers differ")
            lines.append(f"  first at {self.where}: {got}; one rank gives {expected}")
        lines.append(f"  {self.why}")
        for o in self.outcomes:
            state = "returned" if o.error is None else f"{type(o.error).__name__}: {o.error}"
            lines.append(f"  rank {o.rank} (collectives: {o.collectives}, last: {o.last_collective}) {state}")
            lines.extend(f"  | {line}" for line in _own_frames(o.where))
        return "\n".join(lines)


def _own_frames(stack: str) -> list[str]:
    """The lines of a stack without those of the machinery that runs the ranks."""
    frames = ("\n" + stack.rstrip()).split("\n  File ")
    machinery = tuple(f'cp_returns{sep}{name}.py"' for sep in "/\\" for name in ("simulate", "view", "check"))
    kept = [frame for frame in frames[1:] if not frame.partition(",")[0].endswith(machinery)]
    return [line for frame in kept for line in f"File {frame}".splitlines()]


@dataclass(frozen=True)
class World:
    """One (dp, cp): the numbers of every output beside those of one rank, and what was found."""

    dp_size: int
    cp_size: int
    outputs: Mapping[str, Case] = field(repr=False)
    findings: tuple[Finding, ...]
    seconds: float


@dataclass(frozen=True)
class Report:
    """All worlds of a check, in the order they were run; one rank, which the others are compared with, is the first."""

    worlds: tuple[World, ...]
    run: str

    @property
    def findings(self) -> list[Finding]:
        return [finding for world in self.worlds for finding in world.findings]

    @property
    def agrees(self) -> bool:
        return not self.findings

    @property
    def worst(self) -> tuple[World, str] | None:
        """The world and the output per token that differ most, over what is allowed; None without such numbers."""
        cases = [(w, name) for w in self.worlds for name, case in w.outputs.items() if case.at.per_token]
        return max(cases, key=lambda c: c[0].outputs[c[1]].excess.max(initial=0.0), default=None)

    @property
    def hangs(self) -> bool:
        return any(finding.kind == "hang" for finding in self.findings)

    def __str__(self) -> str:
        names = ", ".join(f"{w.dp_size} x {w.cp_size}" for w in self.worlds)
        if self.agrees:
            return f"dp x cp = {names} (ranks in {self.run}): every output is that of one rank"
        wrong = [{f.kind == "hang" for f in w.findings} for w in self.worlds if w.findings]
        hung, of = sum(True in kinds for kinds in wrong), len(self.worlds)
        said = [f"{hung} of {of} hang"] if hung else []
        said += [f"{len(wrong) - hung} of {of} differ from one rank"] if len(wrong) > hung else []
        head = f"dp x cp = {names} (ranks in {self.run}): {', '.join(said)}"
        alike: dict[tuple, list[Finding]] = {}
        for finding in self.findings:
            alike.setdefault((finding.kind, finding.output), []).append(finding)
        texts = [head]
        for first, *others in alike.values():
            also = ", ".join(f"dp {f.dp_size} x cp {f.cp_size}" for f in others)
            texts.append(f"{first}\n  the same kind at {also}" if also else str(first))
        return "\n\n".join(texts)


def check_cp_invariance(
    fn: Callable[[View], Any],
    batch: Rollouts,
    *,
    cp_sizes: Sequence[int] = (1, 2, 4),
    dp_sizes: Sequence[int] = (1,),
    layout: MakeLayout = zigzag,
    run: str = "threads",
    rtol: float = 1e-5,
    atol: float | None = None,
    gradients: bool = False,
    timeout: float = 60.0,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Run fn(view) at every (dp, cp), put the shards together, and compare with one rank (dp = cp = 1).

    A number agrees within atol + rtol * (largest number of its sample; of a Share: the sum of its parts' sizes). atol
    defaults to 2^-21 of the output's largest; where no number is one of a token, to that plus 2^-23 of the largest
    reward, or of 1 if that is larger: float32 rounds a mean of rewards, or of whitened numbers, by so much.
    `gradients=True` also compares the gradient of the sum of all `Share` outputs by view.log_probs, token by token.
    `layout(total_lengths, response_lengths, cp_size)` cuts each DP rank's samples. `run` is "threads" (no process group
    is set up; messages travel without autograd) or "processes" (gloo, with Megatron's parallel_state where
    megatron-core is installed). `timeout` in seconds bounds each (dp, cp). `tick(done, total)` counts them.

    Raises:
        CheckError: arguments that do not fit, or fn fails or gives what cannot be compared on one rank.
    """
    _check_arguments(batch, run, gradients)
    if not (cp_sizes and dp_sizes and all(isinstance(n, int) and n >= 1 for n in (*cp_sizes, *dp_sizes))):
        raise CheckError(f"cp_sizes is {tuple(cp_sizes)} and dp_sizes {tuple(dp_sizes)}; expected sizes of at least 1")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise CheckError(f"{name} is {value}; expected a finite number of at least 0")
    if not timeout > 0:
        raise CheckError(f"timeout is {timeout}; expected seconds above 0")
    sizes = dict.fromkeys([(1, 1), *((d, c) for d in dp_sizes for c in cp_sizes)])
    runner = Runner(fn, layout, run, gradients, timeout)
    worlds: list[World] = []
    alone: dict[str, Whole] = {}
    for dp, cp in sizes:
        start = time.monotonic()
        plan = Plan(batch, dp, cp, layout)
        results, failure = runner(plan)
        cases: dict[str, Case] = {}
        found: list[Finding] = []
        if failure is not None:
            found = [_failed(plan, failure)]
        elif not worlds:
            alone = {name: whole_of(name, value, plan) for name, value in results[0].items()}
            if not alone:
                raise CheckError("the function returns no output, so there is nothing to compare")
            cases, found = _poisoned(alone, plan, runner)
        else:
            cases, found = _compared(alone, results, plan, (rtol, atol), runner)
        worlds.append(World(dp, cp, cases, tuple(found), time.monotonic() - start))
        tick(len(worlds), len(sizes))
        if not alone:
            break  # it hangs on one rank
    return Report(tuple(worlds), run)


def _check_arguments(batch: Rollouts, run: str, gradients: bool) -> None:
    if run not in ("threads", "processes"):
        raise CheckError(f"run is {run!r}; expected 'threads' or 'processes'")
    if gradients and batch.log_probs is None:
        raise CheckError("gradients=True needs a batch with log_probs")
    for name in ("loss_masks", *PER_TOKEN):
        for i, x in enumerate(getattr(batch, name) or ()):
            if x.shape != (batch.response_lengths[i],):
                whole = f"[{batch.response_lengths[i]}], the whole response"
                raise CheckError(f"sample {i}, {name} has shape {list(x.shape)}; expected {whole}")


# ---- comparing


def _poisoned(alone: dict[str, Whole], plan: Plan, runner: Runner) -> tuple[dict[str, Case], list[Finding]]:
    """NaN or inf on one rank already, which is gone when masked slots of the input hold 0."""
    cases, found, clean = {}, [], {}
    for name in PER_TOKEN:
        if (full := getattr(plan.batch, name)) is not None:
            pairs = zip(full, plan.batch.loss_masks, strict=True)
            clean[name] = [torch.where(mask != 0, x, torch.zeros_like(x)) for x, mask in pairs]
    for name, whole in alone.items():
        at = plan.places_of(whole.of[0])
        bad = ~np.isfinite(whole.expected) & at.valid
        if not bad.any():
            continue
        right = runner.alone(replace(plan.batch, **clean), name)
        if right is not None and np.isfinite(right[bad]).any():
            why = (
                "on one rank already: what stands in masked slots of the input reaches the output; with 0 there the "
                "numbers are finite. NaN * 0 is NaN: select with torch.where(mask, x, 0) in place of x * mask"
            )
            cases[name] = Case(right, whole.expected, np.zeros(len(right)), at)
            found.append(_located(name, cases[name], bad & np.isfinite(right), Diagnosis("NaN spread", why)))
    return cases, found


def _compared(
    alone: dict[str, Whole], results: list[dict[str, Value]], plan: Plan, tolerances, runner: Runner
) -> tuple[dict[str, Case], list[Finding]]:
    """Every output of one rank beside what the ranks of a plan give."""
    cases, found = {}, []
    for name in dict.fromkeys(name for of_rank in results for name in of_rank if name not in alone):
        r = next(k for k, of_rank in enumerate(results) if name in of_rank)
        why = f"rank {r} returns this output, and one rank does not: there is nothing to compare it with"
        found.append(Finding("shape", why, plan.dp, plan.cp, name))
    for name, whole in alone.items():
        values = [of_rank.get(name) for of_rank in results]
        case = _put_together(name, whole, values, plan, tolerances)
        if isinstance(case, Finding):
            found.append(case)
            continue
        cases[name] = case
        if case.off.any():
            local = _local_counts(case, values, plan) if whole.of == ("share",) else None
            kind = local or diagnose(case, lambda case, name=name: _read_in_rank_order(name, case, plan, runner))
            found.append(_located(name, case, case.off, kind))
    return cases, found


def _put_together(name: str, whole: Whole, values: list[Value | None], plan: Plan, tolerances) -> Case | Finding:
    """The numbers of all ranks in the order of those of one, or what is wrong with their shape."""
    single = {"scalar", "share"}
    given = [v for v in values if v is not None and (v.form in single) == (whole.of[0] in single)]
    if len(given) < len(values):
        r = next(k for k, v in enumerate(values) if v is None or (v.form in single) != (whole.of[0] in single))
        why = f"rank {r} returns no such output, or another sort of it than one rank does"
        return Finding("shape", why, plan.dp, plan.cp, name)
    packs = [v.pack for v in given]
    owned = {
        "token": [len(held) for held in plan.held],
        "sample": [len(plan.samples(d)) for d, _ in plan.ranks()],
        **dict.fromkeys(single, [1] * len(packs)),
    }
    of = next((of for of in whole.of if owned[of] == [len(pack) for pack in packs]), whole.of[0])
    if of == "token" and (finding := _misfit(name, whole, given, plan)) is not None:
        return finding
    if owned[of] != [len(pack) for pack in packs]:
        why = f"the ranks return {[len(pack) for pack in packs]} numbers; expected one a sample, {owned[of]}"
        return Finding("shape", why, plan.dp, plan.cp, name)
    expected, got = whole.expected, np.concatenate(packs)
    if of == "token":
        got = np.empty(len(expected))
        got[np.concatenate(plan.held)] = np.concatenate(packs)
    elif of == "share":
        got = np.array([got.sum()])
    else:
        expected = np.concatenate([expected[plan.samples(d)] if of == "sample" else expected for d, _ in plan.ranks()])
    # the parts may cancel, as those of a loss that is 0, and each is as exact as its own size allows
    terms = np.maximum(np.abs(expected), np.abs(np.concatenate(packs)).sum()) if of == "share" else expected
    at = plan.places_of(of)
    return Case(expected, got, _tolerance(terms, at, *tolerances), at)


def _tolerance(terms: np.ndarray, at: Places, rtol: float, atol: float | None) -> np.ndarray:
    """How far each number may be off; `terms` has the size of what it is or was summed from."""
    size = np.where(np.isfinite(terms), np.abs(terms), 0.0)
    largest = np.zeros(int(at.sample.max(initial=-1)) + 2)
    np.maximum.at(largest, at.sample, size)  # sample -1 is the last entry
    rewards = np.abs(at.rewards[np.isfinite(at.rewards)])
    mean = 0.0 if at.per_token else _MEAN_SLACK * float(rewards.max(initial=1.0))
    slack = _SLACK * float(size.max(initial=0.0)) + mean if atol is None else atol
    return slack + rtol * largest[at.sample]


def _located(name: str, case: Case, off: np.ndarray, found: Diagnosis) -> Finding:
    """The first difference: of the first sample and token, or of the first rank."""
    at = case.at
    first = min(np.flatnonzero(off), key=lambda k: (at.sample[k], at.token[k], at.dp_rank[k], at.rank[k]))

    def place(of: np.ndarray) -> int | None:
        return int(of[first]) if of[first] >= 0 else None

    return Finding(
        found.kind,
        found.why,
        at.dp_size,
        at.cp_size,
        name,
        sample=place(at.sample),
        token=place(at.token),
        dp_rank=place(at.dp_rank),
        rank=place(at.rank),
        piece=place(at.piece),
        expected=float(case.expected[first]),
        got=float(case.got[first]),
        differ=int(off.sum()),
        compared=len(off),
    )


def _misfit(name: str, whole: Whole, values: list[Value], plan: Plan) -> Finding | None:
    """The first rank that returns another number of values than it owns tokens; do they fit another layout?"""
    for k, (d, r) in enumerate(plan.ranks()):
        own = plan.layouts[d].lengths(r)
        of = plan.samples(d)
        given = [len(x) for x in values[k].data] if values[k].form == "list" else None
        if (given is None and len(values[k].pack) != own.sum()) or (given is not None and given != own.tolist()):
            break
    else:
        return None
    sample, x, tokens = None, values[k].pack, plan.held[k]
    if given is not None and len(given) == len(own):
        i = next(i for i, n in enumerate(own) if given[i] != n)
        sample, x, tokens = of[i], values[k].data[i], tokens[plan.places.sample[tokens] == of[i]]
    n = min(len(x), len(tokens))
    wrong = np.flatnonzero(~np.isclose(x[:n], whole.expected[tokens[:n]], rtol=1e-5, atol=1e-9, equal_nan=True))
    first = int(wrong[0]) if len(wrong) else n
    at = tokens[first] if first < len(tokens) else None
    kind, why = "shape", f"rank {r} returns {len(x)} numbers where it owns {len(tokens)} tokens"
    for candidate, (of_kind, layout_of) in _OTHER_LAYOUTS.items():
        others = [layout_of(layout) for layout in plan.layouts]
        if all(len(v.pack) == others[d].lengths(r).sum() for v, (d, r) in zip(values, plan.ranks(), strict=True)):
            kind, why = of_kind, f"{why}, as under {candidate}"
            break
    return Finding(
        kind,
        why,
        plan.dp,
        plan.cp,
        name,
        sample if at is None else int(plan.places.sample[at]),
        None if at is None else int(plan.places.token[at]),
        d,
        r,
        None if at is None else int(plan.places.piece[at]),
        expected=None if at is None else float(whole.expected[at]),
        got=float(x[first]) if first < len(x) else None,
        differ=len(wrong) + abs(len(x) - len(tokens)),
        compared=max(len(x), len(tokens)),
    )


def _moved(layout: Layout, step: int) -> Layout:
    """The same pieces cut `step` tokens further to the right of the response."""
    first_logit = layout.begin + layout.total_lengths - layout.response_lengths - 1
    raw = np.arange(len(layout.owners) + 1) * layout.piece[:, None] - first_logit[:, None] + step
    return replace(layout, cuts=np.clip(raw, 0, layout.response_lengths[:, None]))


def _lengths(layout: Layout) -> tuple[list[int], list[int]]:
    return layout.total_lengths.tolist(), layout.response_lengths.tolist()


# What ranks take their tokens for by mistake.
_OTHER_LAYOUTS: Mapping[str, tuple[str, Callable[[Layout], Layout]]] = {
    "a prompt border that is one token late": ("shift", lambda x: _moved(x, -1)),
    "a prompt border that is one token early": ("shift", lambda x: _moved(x, 1)),
    "the contiguous layout": ("order", lambda x: contiguous(*_lengths(x), x.cp_size)),
    "the zigzag layout": ("order", lambda x: zigzag(*_lengths(x), x.cp_size)),
}


def _read_in_rank_order(name: str, case: Case, plan: Plan, runner: Runner) -> Diagnosis | None:
    """Does one rank give the same numbers when each response is the shards of rank 0, 1, .. one after the other?"""
    at = case.at
    natural = np.arange(len(at.sample))
    order = np.lexsort((natural, at.rank, at.sample))
    if not at.per_token or (order == natural).all():
        return None

    def read(full: list[Tensor]) -> list[Tensor]:
        return list(torch.cat(full)[torch.from_numpy(order)].split(plan.batch.response_lengths))

    lists = {key: read(full) for key in PER_TOKEN if (full := getattr(plan.batch, key)) is not None}
    misread = replace(plan.batch, **lists)
    for batch in (misread, replace(misread, loss_masks=read(plan.batch.loss_masks))):
        out = runner.alone(batch, name)
        if out is not None:
            candidate = np.empty(len(natural))
            candidate[order] = out
            if case.explained_by(candidate):
                why = "one rank gives these numbers when the shards of rank 0, 1, .. are read one after the other"
                return Diagnosis("order", f"{why}: the pieces are not put back in the order of the tokens")
    return None


def _local_counts(case: Case, values, plan: Plan) -> Diagnosis | None:
    """Do the parts of a loss add up to the whole once each is weighted with its rank's share of the valid tokens?"""
    at = plan.places
    counts = [int((at.valid & (at.dp_rank == d) & (at.rank == r)).sum()) for d, r in plan.ranks()]
    n, ranks = sum(counts), len(counts)
    if len(set(counts)) == 1 or not n:
        return None
    for times, averaged in ((1, ""), (ranks, ", then averaged over the ranks")):
        whole = times * sum(float(v.data) * count for v, count in zip(values, counts, strict=True) if count) / n
        if math.isclose(whole, case.expected[0], rel_tol=1e-4):
            why = f"the parts add up once each is weighted with its rank's valid tokens ({counts} of {n})"
            return Diagnosis("local count", f"{why}: each is divided by the local token count{averaged}")
    return None


# ---- ranks that did not end


def _failed(plan: Plan, failure: RankFailure) -> Finding:
    """A hang or an error, the rank to look at, and where every rank was."""
    outcomes = failure.outcomes
    error = outcomes[failure.first].error
    out_of_step = "all_gather needs one dtype and shape on all ranks" in str(error)
    hang = failure.kind == "hang" or out_of_step
    nothing = {
        o.rank: [plan.samples(o.rank // plan.cp)[i] for i in np.flatnonzero(lengths == 0)]
        for o in outcomes
        if len(lengths := plan.layouts[o.rank // plan.cp].lengths(o.rank % plan.cp))
    }
    # who skipped a collective: it joined the fewest, and has a reason
    behind = min(outcomes, key=lambda o: (o.collectives, not nothing.get(o.rank)))
    culprit = behind.rank if hang else failure.first
    if out_of_step:
        why = f"the ranks are in different collectives, which on real groups hangs or mixes data: {error}"
    elif hang:
        state = "returned" if behind.error is None else "stands"
        most = max(o.collectives for o in outcomes)
        why = f"rank {culprit} {state} after {behind.collectives} collectives, others wait in number {most}"
    else:
        why = f"rank {culprit} {failure.kind}: {type(error).__name__}: {error}"
    if hang and nothing.get(culprit):
        samples = ", ".join(map(str, nothing[culprit]))
        why += f"; rank {culprit} owns nothing of sample {samples}: does it skip a collective when a shard is empty?"
    dp_rank, rank = divmod(culprit, plan.cp)
    kind = "hang" if hang else "raised"
    return Finding(kind, why, plan.dp, plan.cp, dp_rank=dp_rank, rank=rank, outcomes=tuple(outcomes))
