"""Batches of whole responses, and every way to compute returns from them, cut over simulated ranks and put together.

A *door* is one public way in: an estimator function, or `ContextParallelReturns` with one configuration. `run` cuts a
batch by a layout, calls the door on every rank in threads, and joins what the ranks return to whole responses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from helpers import assert_same_bits
from torch import Tensor

from cp_returns.context import CPContext, carry, gather
from cp_returns.estimators import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from cp_returns.layout import Layout
from cp_returns.module import ContextParallelReturns, Info, ReturnsConfig
from cp_returns.scenario import make_layout
from cp_returns.simulate import in_threads

STRATEGIES = {"gather": gather, "carry": carry}


@dataclass(frozen=True)
class Batch:
    """N whole responses: `mask` and `tokens` are packed [sum of response], `samples` are [N]."""

    total: tuple[int, ...]
    response: tuple[int, ...]
    mask: Tensor
    tokens: Mapping[str, Tensor]
    samples: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.response)

    def rows(self, packed: Tensor) -> list[Tensor]:
        """One tensor a sample."""
        return list(packed.split(list(self.response)))

    def pick(self, order: Sequence[int]) -> "Batch":
        """These samples in this order."""

        def tokens(packed: Tensor) -> Tensor:
            rows = self.rows(packed)
            return torch.cat([packed[:0], *(rows[i] for i in order)])

        index = torch.tensor(list(order), dtype=torch.int64)
        return Batch(
            tuple(self.total[i] for i in order),
            tuple(self.response[i] for i in order),
            tokens(self.mask),
            {name: tokens(x) for name, x in self.tokens.items()},
            {name: x[index] for name, x in self.samples.items()},
        )

    def change(self, **new: Tensor | None) -> "Batch":
        """With other tensors of these names; None leaves one out."""
        mask = new.pop("mask", self.mask)
        tokens, samples = dict(self.tokens), dict(self.samples)
        for name, x in new.items():
            of = samples if name in SAMPLES else tokens
            of[name] = x
        return replace(
            self,
            mask=mask,
            tokens={k: x for k, x in tokens.items() if x is not None},
            samples={k: x for k, x in samples.items() if x is not None},
        )

    def to(self, dtype: torch.dtype) -> "Batch":
        """Per-token inputs in another dtype."""
        return replace(self, tokens={name: x.to(dtype) for name, x in self.tokens.items()})


SAMPLES = ("rewards", "baselines", "group_ids", "bootstrap", "sample_mask")


def make(shapes: Sequence[tuple[int, int]], masks: Sequence[Sequence[int]] | None = None, seed: int = 0) -> Batch:
    """Random numbers for samples of these (prompt, response) lengths; `masks` as given, else with random gaps."""
    r = np.random.default_rng(seed)
    response = [length for _, length in shapes]
    tokens, n = sum(response), len(response)
    mask = r.random(tokens) < 0.7 if masks is None else np.concatenate([np.zeros(0), *masks]) == 1
    normal = {name: r.normal(size=tokens) for name in ("kl", "values", "log_probs", "ref_log_probs", "token_rewards")}
    normal["token_rewards"] = np.where(mask, normal["token_rewards"], 0.0)
    return Batch(
        tuple(prompt + length for prompt, length in shapes),
        tuple(response),
        torch.from_numpy(mask),
        {name: torch.from_numpy(x).float() for name, x in normal.items()},
        {
            "rewards": torch.from_numpy(r.normal(size=n)),
            "baselines": torch.from_numpy(r.normal(size=n)),
            "bootstrap": torch.from_numpy(r.normal(size=n)),
            "group_ids": torch.arange(n) // 3,
            "sample_mask": torch.ones(n),
        },
    )


@dataclass(frozen=True)
class Out:
    """Whole responses, packed, put together from all ranks; `infos` one a rank (doors of the module only)."""

    tokens: dict[str, Tensor]
    infos: list[Info] = field(default_factory=list)


@dataclass(frozen=True)
class Door:
    """One way in. `reads`: the inputs that it takes of a batch, by name.

    prepare(batch, layout, rank) -> the keyword arguments of that rank.
    call(arguments, context, numbers) -> its outputs, and the info of the module.
    """

    name: str
    estimator: str
    reads: tuple[str, ...]
    prepare: Callable[[Batch, Layout, int], dict[str, Any]]
    call: Callable[[dict[str, Any], CPContext, dict[str, Any]], tuple[dict[str, Any], Info | None]]
    whitens: bool = False

    @property
    def by_groups(self) -> bool:
        return "group_ids" in self.reads

    def __str__(self) -> str:
        return self.name


def function(name: str, fn: Callable, *reads: str, **options: Any) -> Door:
    """A door of the functions, which take packed tensors."""

    def prepare(batch: Batch, layout: Layout, rank: int) -> dict[str, Any]:
        index = torch.from_numpy(layout.index(rank))
        absent = {name: None for name in ("kl", "rewards") if name not in reads}
        tokens = {name: batch.tokens[name][index] for name in reads if name in batch.tokens}
        return absent | tokens | _samples(batch, reads) | {"full_mask": batch.mask}

    def call(arguments: dict[str, Any], cp: CPContext, numbers: dict[str, Any]):
        got = fn(**arguments, cp=cp, **(options | numbers))
        return ({"advantages": got.advantages, "returns": got.returns} if fn is gae else {"returns": got}), None

    return Door(name, fn.__name__, reads, prepare, call)


def module(name: str, *reads: str, **config: Any) -> Door:
    """A door of ContextParallelReturns, which takes lists."""

    def prepare(batch: Batch, layout: Layout, rank: int) -> dict[str, Any]:
        index, sizes = torch.from_numpy(layout.index(rank)), layout.lengths(rank).tolist()
        tokens = {name: list(batch.tokens[name][index].split(sizes)) for name in reads if name in batch.tokens}
        lengths = {"total_lengths": list(batch.total), "response_lengths": list(batch.response)}
        return tokens | _samples(batch, reads) | lengths | {"loss_masks": batch.rows(batch.mask)}

    def call(arguments: dict[str, Any], cp: CPContext, numbers: dict[str, Any]):
        nonfinite = {"nonfinite": numbers.pop("nonfinite")} if "nonfinite" in numbers else {}
        settings = config | nonfinite | dict(cp.settings) | {"strategy": cp.strategy.__name__}
        returns_fn = ContextParallelReturns(ReturnsConfig(**settings))
        out = returns_fn(**arguments, cp_group=cp.all_gather, dp_cp_group=cp.all_gather, **numbers)
        return {"returns": out.returns, "advantages": out.advantages, "masks": out.masks}, out.info

    return Door(name, config["estimator"], reads, prepare, call, whitens=bool(config.get("whiten")))


def _samples(batch: Batch, reads: Sequence[str]) -> dict[str, Any]:
    return {name: batch.samples[name] for name in reads if name in batch.samples}


def join(layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """All ranks' local packs -> the full pack."""
    whole = parts[0].new_empty(int(layout.response_lengths.sum()))
    for rank, part in enumerate(parts):
        whole[torch.from_numpy(layout.index(rank))] = part
    return whole


def run(
    door: Door,
    batch: Batch,
    cp_size: int = 1,
    strategy: str = "gather",
    *,
    layout: tuple[str, int] = ("zigzag", 1),
    **numbers: Any,
) -> Out:
    """The door on every rank of `cp_size`, in threads. layout: (name, multiple). numbers: gamma, lam, nonfinite, ..

    What holds of every call is asserted of every call: see `assert_clean`.
    """
    name, multiple = layout
    cut = make_layout(name, batch.total, batch.response, cp_size, multiple=multiple)
    settings = {"layout": name, "multiple": multiple}

    def rank_fn(rank, all_gather):
        cp = CPContext(cut, rank, all_gather.cp, STRATEGIES[strategy], settings=settings)
        arguments = door.prepare(batch, cut, rank)
        before = [(x, x.detach().clone()) for x in tensors(arguments)]
        parts, info = door.call(arguments, cp, dict(numbers))
        assert_clean(parts, before, cut.lengths(rank).tolist())
        return {key: torch.cat(x) if isinstance(x, list) and x else x for key, x in parts.items()}, info

    ranks = in_threads(rank_fn, cp_size)
    packs = {key: [parts[key] for parts, _ in ranks] for key in ranks[0][0]}
    tokens = {key: join(cut, x) for key, x in packs.items() if len(batch)}
    return Out(tokens, [info for _, info in ranks if info is not None])


def tensors(x: Any) -> list[Tensor]:
    """All tensors of nested dicts and lists."""
    if isinstance(x, Tensor):
        return [x]
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [tensor for item in inner for tensor in tensors(item)]


def assert_clean(outputs: dict[str, Any], inputs: Sequence[tuple[Tensor, Tensor]], sizes: list[int]) -> None:
    """Lengths are this rank's, no graph, float32 or float64, no memory of an input or of another output, and the
    inputs hold what they held.
    """
    seen = {x.untyped_storage().data_ptr() for x, _ in inputs if x.numel()}
    for name, x in outputs.items():
        lengths = [len(part) for part in x] if isinstance(x, list) else [len(x)]
        assert lengths == (sizes if isinstance(x, list) else [sum(sizes)]), f"{name}: lengths {lengths}, owns {sizes}"
        for part in tensors(x):
            assert not part.requires_grad, name
            assert part.dtype in ((torch.bool,) if name == "masks" else (torch.float32, torch.float64)), name
        own = {part.untyped_storage().data_ptr() for part in tensors(x) if part.numel()}
        assert not own & seen, f"{name} shares memory with an input or another output"
        seen |= own
    for x, old in inputs:
        assert_same_bits(x.detach(), old)


SAMPLE = ("rewards", "sample_mask")
REWARD = ("kl", "token_rewards", *SAMPLE)
VALUE = (*REWARD, "values", "bootstrap")
GROUP = ("group_ids", *SAMPLE)
ADAPTIVE = {"lam_value": 1.0, "lam_alpha": 0.2}
USE = {"clock": "token", "masked_values": "use"}

FUNCTIONS = [
    *(
        function(f"rf++ {clock}", reinforce_plus_plus, *REWARD, gamma=0.9, kl_coef=0.1, clock=clock)
        for clock in ("token", "trainable", "turn")
    ),
    *(
        function(f"gae {clock}", gae, *VALUE, gamma=0.9, lam=0.8, kl_coef=0.1, clock=clock)
        for clock in ("token", "trainable", "turn")
    ),
    function("gae use", gae, *VALUE, gamma=0.9, lam=0.8, lam_value=1.0, kl_coef=0.1, **USE),
    function("remax", remax, *REWARD, "baselines", kl_coef=0.1),
    function("rf++ baseline", reinforce_plus_plus_baseline, "kl", *GROUP, kl_coef=0.1),
]
_LOG_PROBS = ("log_probs", "ref_log_probs")
MODULES = [
    module("RF++", *REWARD, estimator="reinforce_plus_plus", gamma=0.9, kl_coef=0.1, clock="turn", whiten=True),
    module("RF++ k3", *_LOG_PROBS, *SAMPLE, estimator="reinforce_plus_plus", kl="k3", kl_coef=0.1, gamma=0.99),
    module("RF++ of groups", "kl", *GROUP, estimator="reinforce_plus_plus", kl_coef=0.1, group_center="loo"),
    module("RF++ baseline", "kl", *GROUP, estimator="reinforce_plus_plus_baseline", kl_coef=0.1, whiten=True),
    module("GAE", *VALUE, estimator="gae", gamma=0.9, lam=0.8, kl_coef=0.1),
    module("GAE use", *VALUE, estimator="gae", gamma=0.9, lam=0.8, kl_coef=0.1, whiten=True, **USE),
    module("VAPO", *_LOG_PROBS, *SAMPLE, "values", estimator="gae", kl="k2", kl_clamp=1.0, kl_coef=0.1, **ADAPTIVE),
    module("ReMax", *REWARD, "baselines", estimator="remax", kl_coef=0.1),
    module("GRPO", *GROUP, estimator="grpo"),
    module("Dr. GRPO", *GROUP, estimator="dr_grpo", whiten=True, whiten_weight="sequence"),
    module("RLOO", *GROUP, estimator="rloo", singleton="raw"),
    module("OPO", *GROUP, estimator="opo"),
]
DOORS = [*FUNCTIONS, *MODULES]
