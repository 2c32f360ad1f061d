"""Scenario files: one YAML mapping that says which returns to compute, on which rollouts, under which layout.

    layout: zigzag            # zigzag | contiguous | contiguous_pack
    cp_size: 4
    multiple: 1               # each sample is padded to a multiple of pieces * multiple (contiguous_pack: the stream)
    gamma: 1.0
    clock: token              # token | trainable | turn
    kl: k1                    # k1 | k2 | k3, where the rollouts have log-probs
    kl_coef: 0.01
    strategy: gather          # whose returns --out writes; the report has both
    rollouts: sample_rollouts.jsonl   # beside this file
    ref: int4                 # picks ref_logp_int4 in files with several references
    seed: 0                   # for log-probs that the rollouts lack

Every key has a default but `rollouts`, which --rollouts may give instead. An unknown key is an error.
"""

import difflib
import importlib.util
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cp_returns import reference, simulate
from cp_returns.clocks import CLOCKS
from cp_returns.config import LAYOUTS, STRATEGIES, ReturnsConfig
from cp_returns.kl import approx_kl
from cp_returns.layout import Layout, contiguous_pack
from cp_returns.log_probs import slice_responses
from cp_returns.module import ContextParallelReturns
from cp_returns.rollouts import Rollouts, whole

Tick = Callable[[str, int, int], None]
CALLS = 5

CHOICES = {
    "layout": tuple(LAYOUTS),
    "clock": CLOCKS,
    "kl": ("k1", "k2", "k3"),
    "strategy": tuple(STRATEGIES),
}


class ScenarioError(ValueError):
    """A scenario that cannot be run: names the file, the key, what was given and what was expected."""


@dataclass(frozen=True)
class Scenario:
    """The settings of one `simulate`; see the module's docstring."""

    layout: str = "zigzag"
    cp_size: int = 4
    multiple: int = 1
    gamma: float = 1.0
    clock: str = "token"
    kl: str = "k1"
    kl_coef: float = 0.01
    strategy: str = "gather"
    rollouts: str | None = None
    ref: str | None = None
    seed: int = 0

    def layout_of(self, batch: Rollouts, cp_size: int) -> Layout:
        """The layout of a batch over `cp_size` ranks."""
        return make_layout(self.layout, batch.total_lengths, batch.response_lengths, cp_size, multiple=self.multiple)


def make_layout(name: str, total_lengths, response_lengths, cp_size: int, *, multiple: int = 1) -> Layout:
    """A layout by name; contiguous_pack pads its stream to a multiple of cp_size * multiple."""
    if name == "contiguous_pack":
        unit = cp_size * multiple
        stream_length = -(-sum(total_lengths) // unit) * unit
        return contiguous_pack(total_lengths, response_lengths, cp_size, stream_length=stream_length)
    return LAYOUTS[name](total_lengths, response_lengths, cp_size, multiple=multiple)


def load(path: str | Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ScenarioError: no such file, not a YAML mapping, an unknown key, or a value of the wrong kind.
    """
    import yaml

    path = Path(path)
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: a number or a nesting too long
        raise ScenarioError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise ScenarioError(f"{path}: is {type(settings).__name__}; expected a mapping of settings")
    known = [field.name for field in fields(Scenario)]
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ScenarioError(f"{path}, key '{key}': unknown; expected one of {', '.join(near or known)}")
        _check(key, value, f"{path}, key '{key}'")
    if settings.get("rollouts") is not None:
        settings["rollouts"] = str(path.parent / settings["rollouts"])
    return Scenario(**settings)


def _check(key: str, value: Any, at: str) -> None:
    if key in CHOICES:
        if value not in CHOICES[key]:
            raise ScenarioError(f"{at}: is {value!r}; expected one of {', '.join(CHOICES[key])}")
    elif key in ("rollouts", "ref"):
        if not (value is None or isinstance(value, str)):
            raise ScenarioError(f"{at}: is {value!r}; expected a name")
    elif key in ("gamma", "kl_coef"):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or (key == "gamma" and not 0 <= value <= 1):
            raise ScenarioError(f"{at}: is {value!r}; expected a number{' in [0, 1]' if key == 'gamma' else ''}")
    elif key == "seed":
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
            raise ScenarioError(f"{at}: is {value!r}; expected an integer of at least 0 and below 2^64")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScenarioError(f"{at}: is {value!r}; expected an integer of at least 1")


@dataclass(frozen=True)
class Result:
    """What one strategy (or one rank) gave, put together to whole responses; lists have one entry a rank."""

    returns: list[Tensor]
    bytes_sent: list[int]
    collectives: list[int]
    milliseconds: list[float]
    bit_equal: bool  # to W = 1
    from_alone: float  # largest difference from W = 1 in any sample, over that sample's largest |G|
    from_oracle: float  # the same from the float64 oracle


@dataclass(frozen=True)
class Report:
    """Returns of one batch from `layout.cp_size` ranks by every strategy, and from one rank."""

    layout: Layout
    groups: str
    alone: Result
    strategies: dict[str, Result]

    @property
    def agrees(self) -> bool:
        """Whether gather equals W = 1 bit for bit, and carry to one unit of float32 (semantics.md section 10)."""
        return self.strategies["gather"].bit_equal and self.strategies["carry"].from_alone <= 2.0**-23


def run(
    settings: Scenario, batch: Rollouts, cp_size: int, *, timeout: float = 300.0, tick: Tick = lambda *_: None
) -> Report | None:
    """Compute the returns on `cp_size` ranks by both strategies and on one, and compare.

    Megatron's parallel_state makes the groups where megatron-core is installed. `tick(what, done, total)` reports
    progress. Under torchrun rank 0 gets the report, the others None.

    Raises:
        RankFailure: a rank failed.
        CPInputError: lengths that the layout cannot hold.
    """
    layout = settings.layout_of(batch, cp_size)
    one = settings.layout_of(batch, 1)

    def rank_fn(rank, all_gather):
        return {name: _measured(settings, batch, layout, rank, name, all_gather) for name in STRATEGIES}

    megatron = _has_megatron()
    with _without_warnings():
        alone = _measured(settings, batch, one, 0, "gather")
        of_ranks = simulate.run(
            rank_fn, cp_size, megatron=megatron, timeout=timeout, tick=lambda done: tick("ranks", done, cp_size)
        )
    if of_ranks is None:
        return None
    oracle = _oracle(settings, batch, tick)
    whole_alone = whole([alone.returns], one)
    strategies = {
        name: _result([of_rank[name] for of_rank in of_ranks], layout, whole_alone, oracle) for name in STRATEGIES
    }
    groups = "real Megatron groups" if megatron else "torch.distributed groups: megatron-core is not installed"
    return Report(layout, groups, _result([alone], one, whole_alone, oracle), strategies)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Every call on every rank would log that rewards are missing; the report says it once."""
    logger = logging.getLogger(ContextParallelReturns.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class _Measured:
    """What one rank got and spent on one call: the median of `CALLS`, after a first one that is not counted."""

    returns: list[Tensor]
    bytes_sent: int
    collectives: int
    milliseconds: float


def _measured(settings: Scenario, batch: Rollouts, layout: Layout, rank: int, strategy: str, peers=None) -> _Measured:
    """`peers` is the all-gather of a rank; without Megatron it is the group, too. None: one rank."""
    config = ReturnsConfig(
        gamma=settings.gamma,
        clock=settings.clock,
        kl_coef=settings.kl_coef,
        kl=None if batch.log_probs is None else settings.kl,
        layout=settings.layout,
        multiple=settings.multiple,
        strategy=strategy,
    )
    returns_fn = ContextParallelReturns(config, cp_group=None if _has_megatron() else peers)
    names = ("log_probs", "ref_log_probs", "kl", "token_rewards")
    own = {name: slice_responses(full, layout, rank) for name in names if (full := getattr(batch, name)) is not None}
    times, out = [], None
    for _ in range(CALLS + 1):
        if peers is not None:
            peers(torch.zeros(1))  # start together
        start = time.perf_counter()
        out = returns_fn(
            **own,
            rewards=batch.rewards,
            loss_masks=batch.loss_masks,
            response_lengths=batch.response_lengths,
            total_lengths=batch.total_lengths,
            stream_length=layout.grid_length * layout.cp_size if settings.layout == "contiguous_pack" else None,
        )
        times.append(1e3 * (time.perf_counter() - start))
    assert out is not None
    return _Measured(out.returns, out.info.bytes_sent, out.info.collectives, statistics.median(times[1:]))


def _has_megatron() -> bool:
    return importlib.util.find_spec("megatron") is not None


def _whole_kl(settings: Scenario, batch: Rollouts, i: int) -> Tensor:
    """The KL of a whole response in float32, as the module computes it; masked slots may hold anything."""
    if batch.log_probs is None or batch.ref_log_probs is None:
        return batch.kl[i] if batch.kl else torch.zeros(batch.response_lengths[i])
    return approx_kl(batch.log_probs[i], batch.ref_log_probs[i], batch.loss_masks[i], kind=settings.kl)


def _oracle(settings: Scenario, batch: Rollouts, tick: Tick) -> list[list[float]]:
    """The float64 loop on every whole response, with the KL as it is computed in float32."""
    oracle = []
    for i, mask in enumerate(batch.loss_masks):
        oracle.append(
            reference.reinforce_plus_plus(
                _whole_kl(settings, batch, i).tolist(),
                batch.rewards[i],
                mask.tolist(),
                gamma=settings.gamma,
                kl_coef=settings.kl_coef,
                clock=settings.clock,
                token_rewards=batch.token_rewards[i].tolist() if batch.token_rewards else None,
            )
        )
        tick("float64 oracle", i + 1, batch.num_samples)
    return oracle


def _result(of_ranks: list[_Measured], layout: Layout, alone: list[Tensor], oracle: list[list[float]]) -> Result:
    returns = whole([m.returns for m in of_ranks], layout)
    exact = [torch.tensor(numbers, dtype=torch.float64) for numbers in oracle]
    return Result(
        returns=returns,
        bytes_sent=[m.bytes_sent for m in of_ranks],
        collectives=[m.collectives for m in of_ranks],
        milliseconds=[m.milliseconds for m in of_ranks],
        bit_equal=all(torch.equal(a, b) for a, b in zip(returns, alone, strict=True)),
        from_alone=_largest(returns, alone),
        from_oracle=_largest(returns, exact),
    )


def _largest(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference of any sample, over the largest |G| of that sample; NaN if a number is."""
    worst = 0.0
    for a, b in zip(got, exact, strict=True):
        if len(b):
            off, size = float((a.double() - b.double()).abs().max()), float(b.double().abs().max())
            share = off / size if size else (0.0 if off == 0 else math.inf)
            worst = share if not share <= worst else worst
    return worst
