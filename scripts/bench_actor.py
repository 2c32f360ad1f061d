"""Where a training step of the toy actor spends its time, on one rank and under context parallelism.

    python scripts/bench_actor.py [--quick] [--out DIR]

The step is that of `train_toy_actor.py` (a tiny GPTModel on Megatron-core): sample, score, returns, update. The gate:
a short run under CP gets the very rewards of one rank, step by step.
"""

import bench_common as common
import torch
import toy_megatron as toy
import train_toy_actor as trainer
from bench_common import Row, at_most
from toy_actor import Settings

RANKS = {"cp 1": (1, 1, 1), "cp 2": (2, 1, 1)}
SETTINGS = {"reinforce_plus_plus": Settings(), "gae": Settings(estimator="gae")}
SHARE = {"cp 2": at_most(5.0)}  # percent of the step that returns may cost
WARM_UP = 2  # first steps, not counted


def train(settings: Settings, ranks: tuple[int, int, int], steps: int) -> list[dict]:
    """Rank 0's metrics of every step, its seconds a phase among them."""
    metrics = []
    heard = lambda message: metrics.append(message) if "reward" in message else None
    cp, dp, tp = ranks
    toy.run_ranks(trainer.train, cp * dp * tp, "echo", settings, ranks, steps, 64, 1, "float32", heard=heard)
    return metrics


def gate(steps: int) -> None:
    for estimator, settings in SETTINGS.items():
        alone, *others = ([m["reward"] for m in train(settings, ranks, steps)] for ranks in RANKS.values())
        for name, rewards in zip(list(RANKS)[1:], others, strict=True):
            if rewards != alone:
                raise common.Red(f"{estimator}: rewards {rewards} under {name}; expected {alone}. Not timed.")


def measure(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    gate(2 if quick else 5)
    rows = []
    for estimator, settings in SETTINGS.items():
        for name, ranks in RANKS.items():
            steps = train(settings, ranks, WARM_UP + (3 if quick else 40))[WARM_UP:]
            rows += phases(f"{estimator}, {name}", [m["seconds"] for m in steps], SHARE.get(name))
    return rows


def phases(part: str, steps: list[dict[str, float]], target) -> list[Row]:
    """Median milliseconds of each phase, and the share of the returns in a step (median over the steps)."""
    rows = []
    for phase in trainer.PHASES:
        seconds = [step[phase] for step in steps]
        rows.append(Row(part, phase, 1e3 * common.median(seconds), "ms", note=common.noisy(seconds)))
    shares = [100 * step["returns"] / sum(step.values()) for step in steps]
    return [*rows, Row(part, "returns of the whole step", common.median(shares), "%", target)]


if __name__ == "__main__":
    raise SystemExit(common.run("bench_actor", __doc__, measure))
