"""What kind of difference is it? Pure arithmetic on the numbers of one rank and those put together from many.

Each test asks whether one well-known mistake explains every number, and says which with the evidence; a test that
cannot be decided by the numbers at hand gives None. Nothing here runs the function that is checked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

KINDS = {
    "hang": "a rank is not in the collective that others wait in",
    "raised": "an error that one rank alone does not give",
    "shape": "an output of another length than the tokens that the rank owns",
    "NaN spread": "NaN or inf where the valid input is finite",
    "scale": "multiplied or divided by the number of ranks",
    "local count": "divided by the tokens of the rank in place of those of all ranks",
    "zeros": "0 on some of the ranks: not computed, or detached",
    "whitening group": "affine per rank: statistics of a part of the ranks",
    "order": "pieces in the wrong order: another layout",
    "shift": "off by one token",
    "terminal reward": "the reward of the sample is not at its last valid token alone",
    "piece ends": "what follows a piece is not seen: look-ahead or carry",
    "empty shards": "only samples of which some rank owns nothing",
    "unrecognised": "none of the known kinds",
}
_LOOSE = 20.0  # times the tolerance: a hypothesis multiplies the rounding of the numbers it is fitted to
_NOISE = 0.1  # of the differences: what a hypothesis may leave of them; one that leaves more explains nothing
Array = np.ndarray


@dataclass(frozen=True)
class Diagnosis:
    """A key of KINDS, and the numbers that say so."""

    kind: str
    why: str


@dataclass(frozen=True)
class Places:
    """Where each number of an output lives; arrays have one entry a number, -1 where there is no such thing."""

    sample: Array
    token: Array
    piece: Array
    piece_alone: Array  # the piece on one rank, where zigzag has two
    rank: Array  # of the CP group
    dp_rank: Array
    valid: Array  # does the mask select it?
    dp_size: int
    cp_size: int
    rewards: Array  # [N]
    empty: Array  # [N] some rank owns nothing of the sample

    @property
    def world_rank(self) -> Array:
        """Megatron's numbering: cp_rank + cp_size * dp_rank."""
        return self.rank + self.cp_size * self.dp_rank

    @property
    def per_token(self) -> bool:
        return bool((self.token >= 0).all())


@dataclass(frozen=True)
class Case:
    """The numbers of one output: from one rank, from many, how far they may differ, and where they live."""

    expected: Array
    got: Array
    tol: Array
    at: Places

    @cached_property
    def off(self) -> Array:
        """Which numbers differ. NaN equals NaN, inf equals inf of the same sign."""
        with np.errstate(invalid="ignore"):
            near = np.abs(self.got - self.expected) <= self.tol
        same = (self.got == self.expected) | (np.isnan(self.got) & np.isnan(self.expected))
        return ~(near | same)

    @cached_property
    def excess(self) -> Array:
        """Each difference over what is allowed: above 1 it is one. Infinite where only one of the two is a number."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.abs(self.got - self.expected) / np.maximum(self.tol, np.finfo(np.float64).tiny)
        return np.where(self.off, np.where(np.isfinite(ratio), ratio, np.inf), np.where(np.isfinite(ratio), ratio, 0.0))

    @property
    def worst_sample(self) -> int:
        """The sample with the largest excess, of those that differ one with two tokens or more if there is any."""
        at, long = self.at, np.bincount(self.at.sample, minlength=1) > 1
        drawn = self.off & long[at.sample]
        excess = np.where(drawn, self.excess, -1.0) if drawn.any() else self.excess
        return int(at.sample[excess.argmax()]) if len(excess) else 0

    def explained_by(self, candidate: Array) -> bool:
        """Is every number that of the candidate, and are those that differ much nearer to it than to one rank's?"""
        with np.errstate(invalid="ignore"):
            left, before = np.abs(self.got - candidate), np.abs(self.got - self.expected)
        near = (left <= _LOOSE * self.tol) | (np.isnan(self.got) & np.isnan(candidate))
        return bool(near.all()) and np.nansum(left[self.off]) <= _NOISE * np.nansum(before[self.off])

    def samples_off(self) -> Iterator[tuple[int, Array]]:
        """(sample, its entries in token order) for each sample that has a difference."""
        for i in np.unique(self.at.sample[self.off]):
            entries = np.flatnonzero(self.at.sample == i)
            yield int(i), entries[np.argsort(self.at.token[entries], kind="stable")]


def diagnose(case: Case, rerun: Callable[[Case], Diagnosis | None] = lambda case: None) -> Diagnosis:
    """The first kind that explains the difference. `rerun` may try what the numbers alone do not show."""
    if not np.isfinite(case.got[np.isfinite(case.expected)]).all():
        return _nan(case)
    known = np.isfinite(case.expected)
    finite = Case(np.where(known, case.expected, 0.0), np.where(known, case.got, 0.0), case.tol, case.at)
    tests = (scale, zeros, local_count, per_group, wrong_order, shift, sites, mask_moved)
    for test in (*tests, rerun, empty_shards, offset_per_sample):
        found = test(case if test is rerun else finite)
        if found is not None:
            return found
    return Diagnosis("unrecognised", "no single known mistake gives these numbers")


def _nan(case: Case) -> Diagnosis:
    bad = np.isfinite(case.expected) & ~np.isfinite(case.got)
    samples = np.unique(case.at.sample[bad])
    return Diagnosis(
        "NaN spread", f"{bad.sum()} of {len(bad)} numbers are NaN or inf here and finite on one rank; samples {samples}"
    )


def scale(case: Case) -> Diagnosis | None:
    """Every number times cp_size, dp_size, their product, or one over that."""
    cp, dp = case.at.cp_size, case.at.dp_size
    sizes = {
        "cp_size": cp,
        "dp_size": dp,
        "(dp_size * cp_size)": dp * cp if min(dp, cp) > 1 else 1,
        "cp_size^2": cp * cp,
    }
    for name, k in sizes.items():
        for factor, text in ((float(k), name), (1.0 / k, f"1 / {name}")):
            if k > 1 and _multiplied(case, factor):
                also = [other for other, size in sizes.items() if size == k and other != name]
                same = f" (here also {', '.join(also)})" if also else ""
                return Diagnosis("scale", f"every number is {text} = {factor:g} times that of one rank{same}")
    return None


def _multiplied(case: Case, factor: float) -> bool:
    room = _LOOSE * max(factor, 1.0) * case.tol
    return bool((np.abs(case.got - factor * case.expected) <= room).all())


def zeros(case: Case) -> Diagnosis | None:
    """All that differs is on ranks that have nothing but 0 at all their tokens."""
    at = case.at
    if not at.per_token:
        return None
    ranks = np.unique(at.world_rank[case.off])
    there = np.isin(at.world_rank, ranks)
    if case.got[there].any():
        return None
    names = ", ".join(f"dp rank {k // at.cp_size}, rank {k % at.cp_size}" for k in ranks[:4])
    return Diagnosis(
        "zeros", f"every number of {names} is 0, and all that differs is there: not computed there, or detached"
    )


def local_count(case: Case) -> Diagnosis | None:
    """Every number times all valid tokens / those of its own rank (of its CP or DP rank), or that over the ranks."""
    at = case.at
    if not at.per_token:
        return None
    for name, group in (("rank", at.world_rank), ("CP rank", at.rank), ("DP rank", at.dp_rank)):
        counts = np.bincount(group[at.valid], minlength=int(group.max(initial=0)) + 1)
        n, some = counts.sum(), counts[counts > 0]
        if len(some) < 2 or not np.ptp(some):
            continue
        for ranks, averaged in ((1, ""), (len(counts), ", and averaged over the ranks")):
            factor = np.divide(n / ranks, counts, out=np.zeros(len(counts)), where=counts > 0)
            if case.explained_by(factor[group] * case.expected):
                own = ", ".join(f"{g}: {n} / {c}" for g, c in enumerate(counts) if c)
                why = f"each {name} has the factor of its valid tokens ({own}): divided by the local count{averaged}"
                return Diagnosis("local count", why)
    return None


def per_group(case: Case) -> Diagnosis | None:
    """got = a * expected + b on the valid tokens of all ranks, or with its own a and b on each group of ranks."""
    at = case.at
    use = at.valid
    if (case.off & ~use).any() or not use.any():
        return None
    groupings: list[tuple[str, Array, str]] = [("all ranks", np.zeros_like(at.rank), "a population that is not all")]
    if at.cp_size > 1:
        of = "DP only, not DP x CP" if at.dp_size > 1 else "one rank (DP only, or none), not CP"
        groupings.append(("CP rank", at.rank, of))
    if at.dp_size > 1:
        groupings.append(("DP rank", at.dp_rank, "CP only, not DP x CP" if at.cp_size > 1 else "one rank, not DP"))
    if at.cp_size > 1 and at.dp_size > 1:
        groupings.append(("rank", at.world_rank, "each rank's own tokens"))
    for name, group, over in groupings:
        fits = _affine(case, group, use)
        if fits is None:
            continue
        shown = ", ".join(f"{g}: {a:.4g} x {b:+.4g}" for g, (a, b) in list(fits.items())[:8])
        which = "all ranks share one a, b" if name == "all ranks" else f"each {name} has its own a, b"
        return Diagnosis(
            "whitening group", f"got = a x + b where one rank gives x, and {which} ({shown}): statistics over {over}"
        )
    return None


def _affine(case: Case, group: Array, use: Array) -> dict[int, tuple[float, float]] | None:
    """(a, b) of each group through its smallest and largest number, if all others lie on the line; else None.

    A group whose expected numbers are all equal has slope NaN. Among the numbers that differ three must be more than
    the two that any line goes through, and the line must leave little of their differences. Slope 0 is no statistic.
    """
    fits, spare = {}, 0
    for g in np.unique(group[use]):
        mine = np.flatnonzero(use & (group == g))
        x, y = case.expected[mine], case.got[mine]
        low, high = x.argmin(), x.argmax()
        if x[high] - x[low] <= 100 * case.tol[mine].max():
            if np.ptp(y) > _LOOSE * case.tol[mine].max():
                return None
            fits[int(g)] = (np.nan, float(y[0]))
            continue
        a = (y[high] - y[low]) / (x[high] - x[low])
        b = y[low] - a * x[low]
        left = np.abs(y - (a * x + b))
        if a == 0 or (left > _LOOSE * max(abs(a), 1.0) * case.tol[mine]).any():
            return None
        off = case.off[mine]
        if left[off].sum() > _NOISE * np.abs(y - x)[off].sum():
            return None
        distinct = len(np.unique(np.round((x[off] - x[low]) / (x[high] - x[low]), 4)))
        spare += distinct - 2 if off.any() else 0
        fits[int(g)] = (float(a), float(b))
    slopes = np.array([a for a, _ in fits.values()])
    return fits if spare >= 3 and not np.isnan(slopes).all() else None


def wrong_order(case: Case) -> Diagnosis | None:
    """The right numbers of each sample at other tokens."""
    if not case.at.per_token:
        return None
    for _, entries in case.samples_off():
        if case.off[entries].sum() < 2:
            return None  # a number alone has none to change places with
        if (np.abs(np.sort(case.got[entries]) - np.sort(case.expected[entries])) > case.tol[entries]).any():
            return None
    return Diagnosis("order", "each sample has the right numbers at other tokens: pieces put together in another order")


def shift(case: Case) -> Diagnosis | None:
    """The number of the token before or after, but for one token a piece at its border."""
    if not case.at.per_token:
        return None
    for step, which in ((1, "after"), (-1, "before")):
        moved = lost = 0
        for _, entries in case.samples_off():
            there = entries[np.clip(np.arange(len(entries)) + step, 0, len(entries) - 1)]
            same = np.abs(case.got[entries] - case.expected[there]) <= 2 * case.tol[entries]
            border = case.at.piece[entries[case.off[entries] & ~same]]
            if len(np.unique(border)) < len(border):
                break  # more than one a piece: this is no shift
            moved, lost = moved + np.count_nonzero(case.off[entries] & same), lost + len(border)
        else:
            if moved >= 2 and moved > 2 * lost:
                why = f"{moved} of {moved + lost} differing tokens have the number of the token {which}"
                return Diagnosis("shift", why)
    return None


def sites(case: Case) -> Diagnosis | None:
    """Where do differences enter? In d_j - c * d_next they stand at few tokens: piece ends, or the terminal reward.

    d = got - expected runs to the left from where it enters and decays by c a step (gamma, or gamma * lam), whatever
    the estimator is; c is the median ratio of neighbours. The steps are all tokens, or the valid ones.
    """
    if not case.at.per_token:
        return None
    for clock in ("every", "trainable", "token"):
        if clock != "every" and (case.off & ~case.at.valid).any():
            continue
        for entering in _entering(case, clock):
            found = _terminal(case, entering) or _piece_ends(case, entering)
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class _Entering:
    """Of one sample: its steps, what enters at each, at which of them anything does, and the decay."""

    sample: int
    steps: Array
    what: Array
    where: Array
    decay: float


def _entering(case: Case, clock: str) -> Iterator[list[_Entering]]:
    """For each plausible decay, what enters where in the samples that differ."""
    steps = {i: entries if clock == "every" else entries[case.at.valid[entries]] for i, entries in case.samples_off()}
    gaps = {i: np.diff(case.at.token[own]) if clock == "token" else np.ones(len(own) - 1) for i, own in steps.items()}
    ratios = {i: _ratios(case, own, gaps[i]) for i, own in steps.items()}
    pooled = np.concatenate([np.zeros(0), *ratios.values()])
    common = float(np.median(pooled)) if len(pooled) >= 3 else 0.0  # fewer say nothing
    for decay in (None, 1.0, 0.0):
        found = []
        for i, own in steps.items():
            c = decay
            if c is None:
                c = float(np.median(ratios[i])) if len(ratios[i]) >= 3 else common
            d = (case.got - case.expected)[own]
            what = d - np.append(c ** gaps[i] * d[1:], 0.0)
            noise = np.maximum(4 * case.tol[own].max(), 2e-3 * np.abs(d).max())
            found.append(_Entering(i, own, what, np.abs(what) > noise, c))
        yield found


def _ratios(case: Case, steps: Array, gaps: Array) -> Array:
    """The decay a step between neighbours of one piece that both clearly differ."""
    d = (case.got - case.expected)[steps]
    clear = np.abs(d) > np.maximum(_LOOSE * case.tol[steps], 1e-3 * np.abs(d).max())
    pair = clear[:-1] & clear[1:] & (np.diff(case.at.piece[steps]) == 0) & (d[:-1] * d[1:] > 0)
    ratio = (d[:-1][pair] / d[1:][pair]) ** (1.0 / gaps[pair])
    return ratio[ratio <= 1.05]


def _terminal(case: Case, samples: list[_Entering]) -> Diagnosis | None:
    """All that enters is the sample's reward, too much or missing, or the last step misses it."""
    for s in samples:
        reward = float(case.at.rewards[s.sample])
        room = 2e-3 * abs(reward) + 4 * case.tol[s.steps].max()
        is_reward = np.abs(np.abs(s.what[s.where]) - abs(reward)) <= room
        missing = abs(s.what[-1] + reward) <= room
        if reward == 0 or not s.where.any() or not (missing or is_reward.all()):
            return None
    first = samples[0]
    reward = float(case.at.rewards[first.sample])
    places = [
        f"{'too much' if x * reward > 0 else 'missing'} at token {case.at.token[k]} (rank {case.at.rank[k]})"
        for k, x in zip(first.steps[first.where], first.what[first.where], strict=True)
    ]
    valid = first.steps[case.at.valid[first.steps]]
    last = f", whose last valid token is {case.at.token[valid[-1]]}" if len(valid) else ""
    why = f"the reward {reward:g} of sample {first.sample}{last}, is {', '.join(places[:4])}"
    return Diagnosis("terminal reward", why)


def _piece_ends(case: Case, samples: list[_Entering]) -> Diagnosis | None:
    """All enters at the last step of a piece that has another piece behind it, here or on one rank."""
    ends = inside = places = unmasked = 0
    for s in samples:
        pieces = np.stack([case.at.piece[s.steps], case.at.piece_alone[s.steps]])
        end = np.append((np.diff(pieces) != 0).any(axis=0), False)
        if (s.where & ~end).any():
            return None
        ends, inside, places = ends + end.sum(), inside + (~end).sum(), places + s.where.sum()
        # what enters only where a masked token follows may as well be the gap's, such as another clock
        follows = np.append((np.diff(case.at.token[s.steps]) == 1) & case.at.valid[s.steps[1:]], False)
        unmasked += (s.where & follows).sum()
    if inside < 3 or not unmasked:
        return None
    return Diagnosis(
        "piece ends",
        f"all differences enter at the last tokens of pieces ({places} of {ends} of them) and run to the left with "
        f"decay {samples[0].decay:.4g}: what follows the piece is not seen (look-ahead or carry)",
    )


def mask_moved(case: Case) -> Diagnosis | None:
    """The tokens that differ are those whose neighbour's mask differs, and are 0 where that neighbour is masked."""
    if not case.at.per_token:
        return None
    for step, which in ((1, "after"), (-1, "before")):
        for _, entries in case.samples_off():
            there = entries[np.clip(np.arange(len(entries)) + step, 0, len(entries) - 1)]
            off, masked = case.off[entries], ~case.at.valid[there]
            small = np.abs(case.got[entries]) <= case.tol[entries]
            if (off & (case.at.valid[entries] == case.at.valid[there])).any() or (off & masked & ~small).any():
                break
        else:
            return Diagnosis("shift", f"the differing tokens are those whose mask is not that of the token {which}")
    return None


def offset_per_sample(case: Case) -> Diagnosis | None:
    """Each sample is off by a constant on each rank, where the mask selects: a number a sample made from some ranks."""
    at = case.at
    use = np.flatnonzero(at.valid)
    if not at.per_token or (case.off & ~at.valid).any():
        return None
    d, group = (case.got - case.expected)[use], at.sample[use] * (at.dp_size * at.cp_size) + at.world_rank[use]
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    spare = np.count_nonzero(case.off[use]) - len(np.unique(group[case.off[use]]))
    if spare < 3 or (np.abs(d - d[first][group]) > 4 * case.tol[use]).any():
        return None
    why = "each sample is off by a constant of its own on each rank: a sum or mean over a part of the ranks"
    return Diagnosis("whitening group", why)


def empty_shards(case: Case) -> Diagnosis | None:
    """Only samples of which some rank owns nothing, while there are others, which agree."""
    at = case.at
    if not (at.sample >= 0).all():
        return None
    samples_off = np.unique(at.sample[case.off])
    sound = np.unique(at.sample[(np.abs(case.expected) > case.tol) & ~at.empty[at.sample]])
    if len(sound) and at.empty[samples_off].all():
        return Diagnosis(
            "empty shards",
            f"the samples that differ ({samples_off.tolist()}) are of those where a rank owns nothing; the other "
            f"{len(sound)} agree",
        )
    return None
