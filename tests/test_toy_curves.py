"""The toy actor learns, and its reward curve is the same for every CP and DP size.

A rising reward proves little (a wrong scan learns too): test_megatron_actor.py compares the gradients.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import toy_megatron as toy  # noqa: E402
import train_toy_actor  # noqa: E402
from toy_actor import Settings  # noqa: E402

from cp_returns import rollouts  # noqa: E402

OTHERS = [(2, 1, 1), (4, 1, 1), (2, 2, 1)]


def curve(ranks, steps: int, *, task="echo", dtype="float32", **settings) -> list[dict]:
    """The metrics of every step of a run on cp x dp x tp ranks."""
    metrics = []
    heard = lambda message: metrics.append(message) if "reward" in message else None
    cp, dp, tp = ranks
    job = (task, Settings(**settings), ranks, steps, 64, 1, dtype)
    toy.run_ranks(train_toy_actor.train, cp * dp * tp, *job, heard=heard)
    return metrics


def mean(metrics: list[dict], key: str, steps: slice) -> float:
    values = [m[key] for m in metrics[steps]]
    return sum(values) / len(values)


@pytest.mark.parametrize(("dtype", "steps"), [("float32", 20), ("float64", 40)])
def test_reward_curves_are_identical(dtype, steps):
    rewards = lambda ranks: [m["reward"] for m in curve(ranks, steps, dtype=dtype)]
    expected = rewards((1, 1, 1))
    assert len(set(expected)) > steps // 2
    for ranks in OTHERS:
        assert rewards(ranks) == expected, f"cp, dp, tp = {ranks}"


def test_echo_is_learned_under_cp():
    metrics = curve((2, 1, 1), 60)
    print(f"reward {metrics[0]['reward']:.3f} -> {mean(metrics, 'reward', slice(50, 60)):.3f}")
    assert metrics[0]["reward"] < 0.2
    assert mean(metrics, "reward", slice(50, 60)) >= 0.70


def test_repeat_is_learned_under_cp():
    metrics = curve((2, 1, 1), 40, task="repeat", width=8, **train_toy_actor.REPEAT)
    print(f"exact {metrics[0]['exact']:.3f} -> {mean(metrics, 'exact', slice(30, 40)):.3f}")
    assert metrics[0]["exact"] < 0.2
    assert mean(metrics, "exact", slice(30, 40)) >= 0.7


@pytest.mark.parametrize("estimator", ["grpo", "gspo"])
def test_group_estimators_run_on_groups_of_answers(estimator):
    one, two = (curve(ranks, 3, estimator=estimator, updates=2) for ranks in ((1, 1, 1), (2, 1, 1)))
    assert [m["reward"] for m in one] == [m["reward"] for m in two]
    assert all(m["clip_fraction"] > 0 for m in two)


def test_the_script_writes_its_files(tmp_path):
    command = [sys.executable, SCRIPTS / "train_toy_actor.py", "--estimator", "gae", "--steps", "2", "--turns", "2"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "returns" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(m["run"], m["step"]) for m in lines] == [(r, s) for r in ("cp1", "cp2dp1tp1") for s in (0, 1)]
    assert lines[0]["reward"] == lines[2]["reward"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    batch = rollouts.read(tmp_path / "rollouts.jsonl")
    assert batch.num_samples == 128
    assert batch.values is not None
