"""A tiny GPTModel learns a verifiable task by RL under context parallelism: Megatron-core on CPU, one command.

    python scripts/train_toy_actor.py --task echo --cp 2 --steps 60 --out runs/echo

A step samples 64 responses under CP, takes the log-probs of the policy and of the frozen reference, returns,
advantages whitened over DP x CP and the clipped loss, and lets Megatron's schedule, DDP and optimizer update the
model. The same run on one rank goes first and is drawn beside it. `--out` gets metrics.jsonl, curves.png and
rollouts.jsonl (the format of `cp_returns.rollouts`).
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import toy_actor
import toy_megatron as toy
from toy_actor import Settings
from toy_tasks import TASKS, VOCAB, grade, make_prompts

from cp_returns.rollouts import whole

REPEAT = {"gamma": 1.0, "kl_coef": 0.1}  # a reward at the end only; the KL keeps the policy from settling too early
PHASES = ("sample", "score", "returns", "update")


def main() -> None:
    from rich.console import Console

    args, settings = parse()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    runs = {"cp1": run("cp1", args, settings, 1, 1, 1)}
    if args.cp * args.dp * args.tp > 1:
        name = f"cp{args.cp}dp{args.dp}tp{args.tp}"
        runs[name] = run(name, args, settings, args.cp, args.dp, args.tp)
    console = Console()
    for name, (metrics, _) in runs.items():
        console.print(summary(name, metrics))
    if args.out:
        write(args.out, runs)
        console.print(f"wrote metrics.jsonl, curves.png and rollouts.jsonl to {args.out}")


def parse() -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="echo")
    estimators = ["reinforce_plus_plus", "gae", "grpo", "gspo"]
    parser.add_argument("--estimator", choices=estimators, default="reinforce_plus_plus")
    for axis in ("cp", "dp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=2 if axis == "cp" else 1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=64, help="responses a step; grpo and gspo take 8 to a prompt")
    parser.add_argument("--turns", type=int, default=1, help="echo: at most so many turns a response")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps a rollout")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--packed", action="store_true", help="packed samples (thd) in place of rows of one width")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unit = 2 * args.cp
    width = 8 if args.task == "repeat" else 6 * args.turns + 10
    settings = Settings(
        estimator=args.estimator,
        width=-(-width // unit) * unit,
        updates=args.updates,
        micro_batches=args.micro_batches,
        packed=args.packed,
        seed=args.seed,
        **(REPEAT if args.task == "repeat" else {}),
    )
    return args, settings


def run(name: str, args: argparse.Namespace, settings: Settings, cp: int, dp: int, tp: int) -> tuple[list, list]:
    """One training run on cp * dp * tp ranks, with a progress bar: (metrics, rollouts)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()]
    metrics, rollouts = [], []
    with Progress(*columns, TextColumn("{task.fields[shown]}")) as progress:
        bar = progress.add_task(f"{name:12}", total=args.steps, shown="importing Megatron")

        def heard(message: dict) -> None:
            if "rollouts" in message:
                rollouts.extend(message["rollouts"])
                return
            metrics.append({"run": name, **message})
            progress.update(bar, advance=1, shown=shown(message))

        job = (args.task, settings, (cp, dp, tp), args.steps, args.samples, args.turns, args.dtype)
        toy.run_ranks(train, cp * dp * tp, *job, heard=heard, timeout=300.0)
    return metrics, sorted(rollouts, key=lambda r: (r["step"], r["sample"]))


def shown(m: dict) -> str:
    phases = " ".join(f"{phase} {1000 * m['seconds'][phase]:.0f}" for phase in PHASES)
    return f"reward {m['reward']:.3f} KL {m['kl']:+.4f} grad {m['grad_norm']:.3f} ms: {phases}"


def train(
    say: Callable, task: str, settings: Settings, ranks, steps: int, samples: int, turns: int, dtype: str
) -> None:
    """A rank's training loop. Prompts and draws come from the step alone, so that every (cp, dp, tp) sees the same."""
    torch.set_default_dtype(getattr(torch, dtype))
    cp, dp, tp = ranks
    toy.init_groups(cp, dp, tp)
    from megatron.core import parallel_state

    actor = toy_actor.build_actor(settings)
    dp_rank, each = parallel_state.get_data_parallel_rank(), samples // dp
    mine = slice(dp_rank * each, (dp_rank + 1) * each)
    for step in range(steps):
        clock = Clock()
        prompts = make_prompts(task, 1000 * settings.seed + step, samples, settings.width, turns, settings.group)
        draws = torch.rand(
            samples,
            int(prompts.sampled.sum(1).max()),
            VOCAB,
            generator=torch.Generator().manual_seed(10**6 * settings.seed + step),
        )
        part = prompts.part(mine)
        batch = grade(task, part, toy_actor.sample(actor, part, draws[mine]), settings.group, mine.start)
        clock.lap("sample")
        context = toy_actor.context(actor, batch)
        scores = toy_actor.score(actor, batch, context)
        dist.barrier()  # else the returns would be charged for waiting for the other rank's log-probs
        clock.lap("score")
        experience = toy_actor.judge(actor, batch, context, *scores)
        clock.lap("returns")
        for _ in range(settings.updates):
            grad_norm, report = toy_actor.update(actor, batch, experience)
        clock.lap("update")
        metrics = measure(batch, context, experience)
        if dist.get_rank() == 0:
            say({"step": step, **metrics, "grad_norm": grad_norm, **report, "seconds": clock.seconds})
        if rollouts := finished(step, mine.start, batch, context, experience):
            say({"rollouts": rollouts})


class Clock:
    """Seconds since the lap before, by phase."""

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self.last = now - self.last, now


def measure(batch, context, experience) -> dict[str, float]:
    """Reward, exact matches and KL (k1) of the whole batch."""
    from megatron.core import parallel_state

    mask = context.take(batch.full_mask)
    kl = torch.cat(experience.log_probs) - torch.cat(experience.ref_log_probs)
    exact = (batch.rewards == 1).double().sum()
    samples = (
        torch.tensor([batch.rewards.double().sum(), exact, len(batch.rewards)], dtype=torch.float64)
        / context.layout.cp_size
    )
    tokens = torch.stack([torch.where(mask, kl, 0).double().sum(), mask.sum().double()])
    sums = torch.cat([samples, tokens])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return {"reward": float(sums[0] / sums[2]), "exact": float(sums[1] / sums[2]), "kl": float(sums[3] / sums[4])}


def finished(step: int, first: int, batch, context, experience) -> list[dict]:
    """The batch as lines of a rollout file, from one rank of each CP and TP group; the others send their shards."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    shards = [None] * group.size()
    dist.all_gather_object(shards, (experience.log_probs, experience.ref_log_probs, experience.values), group=group)
    if group.rank() or parallel_state.get_tensor_model_parallel_rank():
        return []
    per_token = {"logp": [s[0] for s in shards], "ref_logp": [s[1] for s in shards]}
    if experience.values is not None:
        per_token["values"] = [s[2] for s in shards]
    full = {name: whole(local, context.layout) for name, local in per_token.items()}
    return [
        {
            "id": f"step-{step}-{first + i}",
            "group": f"step-{step}-{int(batch.group_ids[i])}",
            "step": step,
            "sample": first + i,
            "prompt_len": batch.prompt_lengths[i],
            "response_len": len(mask),
            "loss_mask_spans": spans(mask),
            "reward": round(float(batch.rewards[i]), 6),
        }
        | {name: [round(x, 5) for x in values[i].tolist()] for name, values in full.items()}
        for i, mask in enumerate(batch.masks)
    ]


def spans(mask: torch.Tensor) -> list[list[int]]:
    """[start, end) of each run of trained tokens."""
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return [[a, b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


# ---- output


def summary(name: str, metrics: list[dict]) -> str:
    first, last = metrics[:10], metrics[-10:]
    mean = lambda rows, key: sum(m[key] for m in rows) / len(rows)
    phases = {phase: 1000 * median(m["seconds"][phase] for m in metrics) for phase in PHASES}
    share = 100 * phases["returns"] / sum(phases.values())
    return (
        f"{name}: reward {metrics[0]['reward']:.3f} at first, first and last ten steps {mean(first, 'reward'):.3f} -> "
        f"{mean(last, 'reward'):.3f}, exact {mean(first, 'exact'):.3f} -> {mean(last, 'exact'):.3f}; median ms a step: "
        + ", ".join(f"{phase} {ms:.1f}" for phase, ms in phases.items())
        + f" (returns {share:.1f} %)"
    )


def write(out: Path, runs: dict[str, tuple[list, list]]) -> None:
    with open(out / "metrics.jsonl", "w") as f:
        f.writelines(json.dumps(m) + "\n" for metrics, _ in runs.values() for m in metrics)
    with open(out / "rollouts.jsonl", "w") as f:
        _, rollouts = list(runs.values())[-1]
        f.writelines(json.dumps(r) + "\n" for r in rollouts)
    draw(out / "curves.png", {name: metrics for name, (metrics, _) in runs.items()})


def draw(path: Path, runs: dict[str, list[dict]]) -> None:
    """Reward, KL and gradient norm of the runs over each other, and where a step's time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    looks = [{"color": "0.75", "linewidth": 5}, {"color": "tab:blue", "linewidth": 1.5}]
    for axis, (key, title) in zip(
        axes, {"reward": "reward", "kl": "KL to the reference", "grad_norm": "gradient norm"}.items(), strict=False
    ):
        for (name, metrics), look in zip(runs.items(), looks, strict=False):
            axis.plot([m["step"] for m in metrics], [m[key] for m in metrics], label=name, **look)
        axis.set(title=title, xlabel="step")
    axes[0].legend()
    left = dict.fromkeys(runs, 0.0)
    for phase in PHASES:
        ms = {name: 1000 * median(m["seconds"][phase] for m in metrics) for name, metrics in runs.items()}
        axes[3].barh(list(runs), list(ms.values()), left=list(left.values()), label=phase)
        left = {name: left[name] + ms[name] for name in runs}
    axes[3].set(title="median ms a step")
    axes[3].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
