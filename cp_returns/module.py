"""The door for Megatron actor code: ReturnsConfig says what to compute, ContextParallelReturns takes and gives lists as
trainers hold them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from cp_returns import groups, lists
from cp_returns.admission import Batch, admit
from cp_returns.agreement import ENVELOPE, Facts, agree, refuse
from cp_returns.arrays import copy, quiet
from cp_returns.collectives import AllGather, Counted, alone, call
from cp_returns.config import LAYOUTS, STRATEGIES, ReturnsConfig
from cp_returns.context import CPContext
from cp_returns.errors import CPInputError, text_of
from cp_returns.estimators import (
    advantage_estimates,
    baseline_advantages,
    discounted_returns,
    group_scalars,
    less_baseline,
)
from cp_returns.kl import difference, of_difference
from cp_returns.layout import Layout, contiguous_pack
from cp_returns.lists import pack, per_sample
from cp_returns.masks import as_bits
from cp_returns.report import Info, Returns, Whitening
from cp_returns.whiten import MESSAGE, apply, merge, moments

logger = logging.getLogger(__name__)


_NUMBERS = ("gamma", "lam", "lam_value", "lam_alpha", "kl_coef")
_SCOPE = {
    **dict.fromkeys(("samples", "valid_tokens", "fully_masked", "missing_rewards"), "cp"),
    **dict.fromkeys(("kl_in_reward", "whitening"), "global"),
    **dict.fromkeys(("bytes_sent", "collectives"), "local"),
}


@dataclass(frozen=True)
class _Groups:
    """The collectives of one call, counted."""

    cp: AllGather
    rank: int
    size: int
    dp: AllGather
    dp_cp: AllGather | None  # None without whitening
    wide: AllGather | None  # the same group, where it is known, whether or not this call whitens
    counted: list[Counted]


class ContextParallelReturns(nn.Module):
    """Returns and advantages when each context-parallel rank holds its slice of every response.

    Build it once in the actor and call it in loss code or, with whitening, once per rollout batch on the last pipeline
    stage; tensor-parallel peers hold equal inputs and make equal calls. Groups may be given here or per call and are
    resolved per call (see `groups`).
    """

    def __init__(
        self,
        config: ReturnsConfig,
        *,
        cp_group: groups.Group = None,
        dp_cp_group: groups.Group = None,
        dp_group: groups.Group = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        self.config = config
        self.groups = {
            "cp_group": cp_group,
            "dp_cp_group": dp_cp_group,
            "dp_group": dp_group,
            "pg_collection": pg_collection,
        }

    def extra_repr(self) -> str:
        changed = (
            f"{f.name}={getattr(self.config, f.name)!r}"
            for f in fields(self.config)
            if getattr(self.config, f.name) != f.default
        )
        return ", ".join(changed)

    @torch.no_grad()
    def forward(
        self,
        *,
        loss_masks: Sequence[Tensor],
        response_lengths: Sequence[int],
        total_lengths: Sequence[int],
        kl: Sequence[Tensor] | None = None,
        rewards: Sequence[float] | Tensor | None = None,
        log_probs: Sequence[Tensor] | None = None,
        ref_log_probs: Sequence[Tensor] | None = None,
        values: Sequence[Tensor] | None = None,
        token_rewards: Sequence[Tensor] | None = None,
        group_ids: Sequence[int] | Tensor | None = None,
        sample_mask: Sequence[float] | Tensor | None = None,
        bootstrap: Sequence[float] | Tensor | None = None,
        baselines: Sequence[float] | Tensor | None = None,
        gamma: float | Sequence[float] | Tensor | None = None,
        lam: float | Sequence[float] | Tensor | None = None,
        kl_coef: float | Sequence[float] | Tensor | None = None,
        padded_lengths: Sequence[int] | None = None,
        stream_length: int | None = None,
        cp_group: groups.Group = None,
        dp_cp_group: groups.Group = None,
        dp_group: groups.Group = None,
        pg_collection: Any = None,
        packed_seq_params: Any = None,
    ) -> Returns:
        """One call for a batch of N samples; every rank of the groups must make it, with N = 0 too.

        kl (or log_probs and ref_log_probs, with `ReturnsConfig(kl=)`), values, token_rewards: lists of this rank's
        shards, [local tokens] each. loss_masks: whole responses, 0/1. rewards, sample_mask, bootstrap, baselines
        (ReMax), group_ids: one a sample. gamma, lam, kl_coef: per-call values in place of the config's, a float or one
        a sample. padded_lengths, and stream_length for "contiguous_pack": see `layout`; padded_lengths default to those
        of packed_seq_params.cu_seqlens_q_padded. dp_group: the data-parallel ranks that share groups of samples; the
        other groups: see `groups`.

        Raises CPInputError, the same on every rank of the widest group that the call uses.
        """
        given = {"cp_group": cp_group, "dp_cp_group": dp_cp_group, "dp_group": dp_group, "pg_collection": pg_collection}
        chosen = {name: self.groups[name] if value is None else value for name, value in given.items()}
        where = self._resolve(packed_seq_params=packed_seq_params, **chosen)
        tokens = {
            "kl": kl,
            "log_probs": log_probs,
            "ref_log_probs": ref_log_probs,
            "values": values,
            "token_rewards": token_rewards,
        }
        samples = {
            "rewards": rewards,
            "group_ids": group_ids,
            "sample_mask": sample_mask,
            "bootstrap": bootstrap,
            "baselines": baselines,
        }
        numbers = {"gamma": gamma, "lam": lam, "kl_coef": kl_coef}
        shown = loss_masks if isinstance(loss_masks, Sequence) else ()
        device = groups.device_of(where.counted[0].all_gather, *shown)
        try:
            self._check_arguments(tokens, samples, numbers)
            if not isinstance(loss_masks, Sequence):
                what = type(loss_masks).__name__
                raise CPInputError(f"loss_masks is a {what}; expected a list of tensors, whole responses on every rank")
            padded = lists.padded_lengths(padded_lengths, packed_seq_params)
            layout = self._layout(total_lengths, response_lengths, where.size, padded, stream_length)
            packed = {
                name: pack(name, x, layout.lengths(where.rank), layout.response_lengths, device)
                for name, x in tokens.items()
            }
            packed["loss_masks"] = pack(
                "loss_masks", loss_masks, layout.response_lengths, layout.response_lengths, device
            )
            numbers_of = {name: per_sample(name, x, layout.num_samples, device) for name, x in samples.items()}
            many = {name: x for name, x in numbers.items() if isinstance(x, list | tuple)}
            numbers |= {name: per_sample(name, x, layout.num_samples, device) for name, x in many.items()}
        except Exception as error:  # whatever one rank trips over, the others must not wait for it
            self._refuse(where, text_of(error), device)
        cp = CPContext(
            layout,
            where.rank,
            where.cp,
            STRATEGIES[self.config.strategy],
            self.config.agreement,
            settings=self.config.shown,
        )
        return self._compute(cp, where, packed, numbers_of, {k: v for k, v in numbers.items() if v is not None})

    def _resolve(self, *, cp_group, dp_cp_group, dp_group, pg_collection, packed_seq_params) -> _Groups:
        cp = groups.context_parallel(cp_group, packed_seq_params, pg_collection)
        rank, size = groups.rank_and_size(cp)
        gathers = [Counted(cp)]
        dp: AllGather = alone
        if dp_group is not None and self.config["group_center"] is not None:
            gathers.append(Counted(groups.given(dp_group)))
            dp = gathers[-1]
        wide = None
        try:
            wide = Counted(groups.data_and_context_parallel(dp_cp_group, pg_collection, cp))
        except RuntimeError:
            if self.config.whiten:
                raise
        dp_cp = wide if self.config.whiten else None
        if dp_cp is not None:
            gathers.append(dp_cp)
        return _Groups(gathers[0], rank, size, dp, dp_cp, wide, gathers)

    def _check_arguments(self, tokens: dict, samples: dict, numbers: dict) -> None:
        """Each input that was given is used, and each that is needed was given."""
        config = self.config
        used = config.defaults()
        by_groups = used.get("group_center") is not None or config.group_center is not None
        needs = {
            "values": "gamma" in used and "lam" in used,
            "group_ids": by_groups,
            "baselines": config.estimator == "remax",
        }
        needs |= {"log_probs": config.kl is not None, "ref_log_probs": config.kl is not None}
        takes = needs | {
            "token_rewards": not by_groups,
            "bootstrap": needs["values"],
            "kl": "kl_coef" in used and config.kl is None,
        }
        given = {**tokens, **samples}
        for name, value in given.items():
            if value is not None and not takes.get(name, True):
                hint = (
                    "; set ReturnsConfig(kl=) to turn it into a KL" if "log_probs" in name and "kl_coef" in used else ""
                )
                raise CPInputError(
                    f"{name} was given, which this configuration of estimator {config.estimator!r} does not use{hint}"
                )
        for name, needed in needs.items():
            if needed and given[name] is None:
                raise CPInputError(f"{name} is absent; estimator {config.estimator!r} with this configuration needs it")
        if by_groups and given["rewards"] is None:
            raise CPInputError(f"rewards is absent; estimator {config.estimator!r} needs one a sample")
        if config.kl is None and given["kl"] is None:
            if takes["kl"] and not _is_zero(config["kl_coef"] if numbers["kl_coef"] is None else numbers["kl_coef"]):
                raise CPInputError(
                    "kl is absent; a kl_coef other than 0 needs it, or log_probs and ref_log_probs with "
                    "ReturnsConfig(kl=)"
                )
            if given["rewards"] is None and given["token_rewards"] is None:
                raise CPInputError("rewards is absent; expected rewards, token_rewards or kl")
        for name, value in numbers.items():
            if value is not None and (name not in used or (name == "lam" and config.lam_alpha is not None)):
                raise CPInputError(
                    f"{name} was given, which this configuration of estimator {config.estimator!r} does not use"
                )

    def _layout(self, total_lengths, response_lengths, cp_size: int, padded, stream_length) -> Layout:
        if self.config.layout == "contiguous_pack":
            if stream_length is None:
                raise CPInputError(
                    "stream_length is absent; layout 'contiguous_pack' needs the padded length of the stream"
                )
            return contiguous_pack(
                total_lengths, response_lengths, cp_size, stream_length=stream_length, padded_lengths=padded
            )
        if stream_length is not None:
            raise CPInputError(f"stream_length is {stream_length}, which layout {self.config.layout!r} does not use")
        cut = LAYOUTS[self.config.layout]
        return cut(total_lengths, response_lengths, cp_size, multiple=self.config.multiple, padded_lengths=padded)

    def _refuse(self, where: _Groups, text: str, device: torch.device, *, after: int = 0) -> NoReturn:
        """Tell every group that this call cannot go on, in the order in which a good call meets them; raises
        CPInputError.
        """
        if self.config.agreement == "full":
            steps = [
                ("agreement", where.cp, "CP rank", ENVELOPE),
                ("group baseline", where.dp, "rank", ENVELOPE),
                ("whiten", where.dp_cp, "DP x CP rank", MESSAGE),
            ]
            for step, all_gather, name, size in steps[after:]:
                if all_gather is None or all_gather is alone or (step == "agreement" and where.size == 1):
                    continue
                if step == "whiten" and where.size > 1:
                    text = f"in its CP group, {text}"
                try:
                    refuse(all_gather, text, device, step=step, where=name, size=size)
                except CPInputError as error:
                    text = str(error)
        raise CPInputError(text)

    @quiet
    def _compute(self, cp: CPContext, where: _Groups, packed: dict, samples: dict, numbers: dict) -> Returns:
        full_mask: Tensor = packed.pop("loss_masks")
        config = self.config
        try:
            batch = self._admit(cp, packed, full_mask, samples, numbers)
        except Exception as error:
            self._refuse(where, text_of(error), full_mask.device)
        try:
            returns, advantages = self._estimate(cp, where.dp, batch, samples)
        except CPInputError as error:
            # Ranks that differ in `whiten` do what most of them would: nobody waits for one of them.
            whitens = error.usual.get("whiten", str(config.whiten)) == "True"
            here = replace(where, dp_cp=where.wide if whitens else None)
            self._refuse(here, str(error), full_mask.device, after=2)
        told: list[np.ndarray] = []  # by the DP x CP ranks
        whitening = None
        if where.dp_cp is not None:
            advantages, whitening = self._whiten(cp, where.dp_cp, batch, told, advantages)
        return self._report(cp, where, batch, told, returns, advantages, whitening)

    def _admit(self, cp: CPContext, packed: dict, full_mask: Tensor, samples: dict, numbers: dict) -> Batch:
        config = self.config
        kl = packed["kl"] if config.kl is None else _approx_kl(packed, config)
        rewards = samples["rewards"]
        if config.estimator == "remax":
            rewards = less_baseline(rewards, samples["baselines"])
        tokens = {"kl": kl, "values": packed["values"], "token_rewards": packed["token_rewards"]}
        numbers = (
            {"gamma": 1.0, "kl_coef": 0.0}
            | {name: config[name] for name in _NUMBERS if config[name] is not None}
            | numbers
        )
        return admit(
            cp,
            full_mask,
            rewards,
            tokens={name: tokens[name] for name in _formula_inputs(config)},
            numbers=numbers,
            clock=config["clock"] or "token",
            samples={name: samples[name] for name in ("group_ids", "bootstrap", "baselines")},
            sample_mask=samples["sample_mask"],
            unselected=("values",) if config["masked_values"] == "use" else (),
            nonfinite=config.nonfinite,
            owned=True,
        )

    def _estimate(self, cp: CPContext, dp: AllGather, batch: Batch, samples: dict) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.estimator == "gae":
            out = advantage_estimates(batch, cp)
            return out.returns, out.advantages
        ids, options = samples["group_ids"], config.group_options()
        if config.estimator in ("reinforce_plus_plus", "remax"):
            if config["group_center"] is not None:  # the group's advantage is the reward
                scalars = group_scalars(batch, cp, ids, all_gather=dp, **options)
                batch = replace(batch, rewards=scalars.double())
                cp = replace(cp, agreement="off")  # done by the line above
            returns = discounted_returns(batch, cp)
        else:
            returns = baseline_advantages(batch, cp, ids, all_gather=dp, **options)
        return returns, copy(returns)

    def _whiten(
        self, cp: CPContext, dp_cp: AllGather, batch: Batch, told: list[np.ndarray], x: Tensor
    ) -> tuple[Tensor, Whitening]:
        options = self.config.whiten_options
        bits = counted = batch.keep
        if self.config.nonfinite == "propagate":  # what is not finite spoils its own sample only
            counted = bits & as_bits(x.isfinite())
        weights = None
        if self.config["whiten_weight"] == "sequence":
            options = options | {"ddof": 0}
            weights = cp.spread(1.0 / batch.valid_counts.clamp(min=1).double())
        local = moments(x, counted, weights)
        if self.config.agreement == "full":
            shared = Facts(settings=cp.settings, sums=batch.facts.sums, told=told)
            messages = agree(dp_cp, shared, local, step="whiten", where="DP x CP rank", size=MESSAGE)
        else:
            messages = call(dp_cp, local, "whiten")
        merged = merge(messages)
        population, mean, m2 = merged.tolist()
        freedom = population - options["ddof"]
        return apply(x, bits, merged, options), Whitening(population, mean, m2 / freedom if freedom > 0 else 0.0)

    def _report(self, cp, where, batch, told, returns, advantages, whitening) -> Returns:
        own, missing, masked, valid = batch.facts.sums.tolist()
        kl_sum, scope, tokens = own, "cp", valid
        if told:
            kl_sum, scope = float(told[0][:, 0].sum()), "global"
            tokens = float(told[0][:, 3].sum()) / where.size  # the ranks of a CP group tell the same number
        elif batch.facts.told:
            kl_sum = float(batch.facts.told[0][:, 0].sum())
        elif where.size > 1:
            scope, tokens = "local", -int(batch.keep.sum())  # bits: a valid token is -1
        if missing:
            logger.warning(
                "cp_returns: %d of %d samples have no reward (NaN) and were left out", missing, cp.layout.num_samples
            )
        info = Info(
            samples=cp.layout.num_samples,
            valid_tokens=int(valid),
            fully_masked=int(masked),
            missing_rewards=int(missing),
            kl_in_reward=batch.inputs[0] is not None and not _is_zero(batch.numbers["kl_coef"]),
            kl_sum=kl_sum,
            kl_mean=kl_sum / tokens if tokens else 0.0,
            whitening=whitening,
            bytes_sent=sum(counted.bytes_sent for counted in where.counted),
            collectives=sum(counted.collectives for counted in where.counted),
            scope=_SCOPE | {"kl_sum": scope, "kl_mean": scope},
        )
        sizes = cp.layout.lengths(cp.rank).tolist()
        # Nobody else holds the packed tensors: autograd need not know the shards as views of them.
        of_returns, of_advantages = (list(torch.unsafe_split_with_sizes(x, sizes)) for x in (returns, advantages))
        return Returns(of_returns, of_advantages, batch.here, info)


def _formula_inputs(config: ReturnsConfig) -> tuple[str, ...]:
    """The per-token inputs of the estimator's formula, in its order."""
    if config.estimator == "gae":
        return ("kl", "values", "token_rewards")
    return ("kl", "token_rewards") if config.estimator in ("reinforce_plus_plus", "remax") else ("kl",)


def _is_zero(x: float | Tensor) -> bool:
    return not isinstance(x, Tensor) and x == 0


def _approx_kl(packed: dict, config: ReturnsConfig) -> Tensor:
    """The KL at all tokens: admission selects the valid ones, whatever the others hold."""
    d = difference(packed["log_probs"], packed["ref_log_probs"])
    kl = of_difference(d, kind=config["kl"], clamp=config.kl_clamp)
    # A clamp would hide an infinite log-prob.
    return kl if config.kl_clamp is None else torch.where(d.isfinite(), kl, torch.nan)
