"""The pytest plugin: a stranger's test suite finds the fixture, failures read well, batches are what they promise."""

import importlib.metadata
import math
import re
import subprocess
import sys
from pathlib import Path

import planted
import pytest
import tomllib
import torch
from hypothesis import find, given, settings

from cp_returns import pytest_plugin, zigzag
from cp_returns.batches import filled
from cp_returns.pytest_plugin import assert_cp_invariant, rollout_batches

ROOT = Path(__file__).resolve().parents[1]

# The two blocks of the README's section "Check your own code".
README_SCRIPT = """
import torch
from cp_returns.batches import hard_batch
from cp_returns.check import check_cp_invariance


def centred_kl(view):  # one rank's view: its shards, whole masks, lengths, rewards, and view.all_gather(.cp, .dp)
    kl, mask = torch.cat(view.kl), torch.cat(view.shards(view.loss_masks))
    return torch.where(mask, kl - kl[mask].mean(), 0)  # the mean of this rank's tokens only: a mistake


print(check_cp_invariance(centred_kl, hard_batch(), cp_sizes=(1, 2, 4), dp_sizes=(1, 2)))
"""
README_TESTS = """
from hypothesis import given, settings
from cp_returns.batches import hard_batch
from cp_returns.compat.slime import get_reinforce_plus_plus_returns  # or yours: it looks up its groups
from cp_returns.pytest_plugin import assert_cp_invariant, rollout_batches


def returns(view):
    lists = view.kl, view.loss_masks, view.response_lengths, view.total_lengths
    return get_reinforce_plus_plus_returns(view.rewards, *lists, kl_coef=0.1, gamma=0.99)


def test_returns_in_megatrons_groups(cp_world):
    cp_world(dp=2, cp=2).assert_cp_invariant(returns, hard_batch())


@settings(deadline=None, max_examples=30)
@given(batch=rollout_batches())  # empty shards, gaps, masked tails, one token, NaN in masked slots, large numbers
def test_kl(batch):
    assert_cp_invariant(lambda view: view.kl, batch, cp_sizes=(1, 2), dp_sizes=(1, 2))
"""

# As a user writes it: a function for Megatron's global groups, lists in and lists out, which knows of no check.
MEGATRON_CODE = '''
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu


def own_spans(total, response):
    cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    chunk, first = -(-total // (2 * cp)), total - response - 1
    return [
        (min(max(c * chunk - first, 0), response), min(max((c + 1) * chunk - first, 0), response))
        for c in (rank, 2 * cp - 1 - rank)
    ]


def mean_advantages(kl, rewards, loss_masks, total_lengths, response_lengths, group=None):
    """reward - mean KL of the whole response, at every valid token."""
    out = []
    for i, own in enumerate(kl):
        spans = own_spans(total_lengths[i], response_lengths[i])
        mask = torch.cat([loss_masks[i][a:b] for a, b in spans]).bool()
        total = torch.where(mask, own, 0.0).sum()
        dist.all_reduce(total, group=group or mpu.get_context_parallel_group())
        out.append(torch.where(mask, rewards[i] - total / loss_masks[i].sum(), 0.0))
    return out


def mean_advantages_of_the_wrong_group(**lists):
    return mean_advantages(**lists, group=mpu.get_data_parallel_group())
'''

SUITE = """
import pytest
from hypothesis import given, settings
from megatron_code import mean_advantages, mean_advantages_of_the_wrong_group

from cp_returns.batches import hard_batch
from cp_returns.pytest_plugin import assert_cp_invariant, rollout_batches

NAMES = ("kl", "rewards", "loss_masks", "total_lengths", "response_lengths")


def on_view(fn):
    return lambda view: fn(**{name: getattr(view, name) for name in NAMES})


def test_right(cp_world):
    cp_world(dp=2, cp=2).assert_cp_invariant(on_view(mean_advantages), hard_batch())


def test_wrong(cp_world):
    cp_world(cp=2).assert_cp_invariant(on_view(mean_advantages_of_the_wrong_group), hard_batch())


def test_groups(cp_world):
    def fn(rank, all_gather):
        from megatron.core import parallel_state as mpu

        return mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank(), mpu.get_data_parallel_rank()

    assert cp_world(dp=2, cp=2).run(fn) == [(2, 0, 0), (2, 1, 0), (2, 0, 1), (2, 1, 1)]


@settings(max_examples=5, deadline=None)
@given(batch=rollout_batches())
def test_threads(batch):
    assert_cp_invariant(lambda view: view.kl, batch, cp_sizes=(1, 2))
"""


def test_a_strangers_suite_uses_the_plugin(tmp_path):
    """Their function uses parallel_state and all_reduce and is checked unchanged, in ranks that the fixture sets up."""
    pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")
    (tmp_path / "megatron_code.py").write_text(MEGATRON_CODE)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_readme.py").write_text(README_TESTS)
    env = planted.environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it may be installed, and is named here
    command = [sys.executable, "-m", "pytest", "-q", "-p", "cp_returns.pytest_plugin", "-p", "no:cacheprovider", "-rf"]
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 400, "check": False}
    done = subprocess.run(command, **options)
    text = done.stdout
    assert "1 failed, 5 passed" in text, text + done.stderr
    assert "FAILED test_suite.py::test_wrong" in text
    assert "dp 1 x cp 2:" in text
    assert "; one rank gives " in text
    assert "pytest_plugin.py" not in text  # the report, not the plugin's own frames


def test_the_readme_shows_what_runs(capsys):
    exec(compile(README_SCRIPT, "README.md", "exec"), {})
    report = capsys.readouterr().out
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## Check your own code")[2].partition("\n## ")[0]
    assert "5 of 6 differ from one rank" in report
    assert "dp 1 x cp 2: WHITENING GROUP" in report
    if section:
        blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        assert blocks == [README_SCRIPT.lstrip("\n"), README_TESTS.lstrip("\n")]
        for line in report.splitlines():
            assert f"    {line}".rstrip() in section


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["pytest11"].values()
    entry = importlib.metadata.EntryPoint("cp_returns", value, "pytest11")
    assert entry.load() is pytest_plugin
    assert hasattr(pytest_plugin, "cp_world")


def test_a_failure_is_the_report():
    """T = 41, R = 33, W = 2: tokens 4 and on are in piece 1 (see test_check)."""
    batch = filled([41], [33], [torch.ones(33, dtype=torch.bool)], [1.0])
    with pytest.raises(pytest.fail.Exception) as failed:
        assert_cp_invariant(planted.prompt_border_off_by_one, batch, cp_sizes=(2,))
    assert "SHIFT, off by one token" in str(failed.value)
    assert "first at sample 0, token 4, dp rank 0, rank 1, piece 1: " in str(failed.value)


def empty_at_4(batch) -> bool:
    layout = zigzag(batch.total_lengths, batch.response_lengths, 4)
    return any((layout.lengths(rank) == 0).any() for rank in range(4))


def tail(mask: torch.Tensor) -> bool:
    return bool(mask[0]) and not mask[-1] and int(mask.int().diff().abs().sum()) == 1


def gap(mask: torch.Tensor) -> bool:
    return bool(mask[0]) and bool(mask[-1]) and not mask.all()


HARD = {
    "empty shards": empty_at_4,
    "one token": lambda batch: any(n == 1 for n in batch.response_lengths),
    "tail": lambda batch: any(tail(mask) for mask in batch.loss_masks),
    "gap": lambda batch: any(gap(mask) for mask in batch.loss_masks),
    "nan": lambda batch: any(x.isnan().any() for x in batch.log_probs),
    "inf": lambda batch: any(x.isinf().any() for x in batch.values),
    "huge": lambda batch: any((x.abs() > 1e38).any() and x.isfinite().all() for x in batch.values),
    "large rewards": lambda batch: max(map(abs, batch.rewards)) >= 1e5,
    "small values": lambda batch: 0 < float(batch.values[0][batch.loss_masks[0]].abs().max()) < 0.01,
}


def test_batches_are_well_formed_and_hard():
    seen = set()

    @settings(max_examples=150)
    @given(batch=rollout_batches())
    def each(batch):
        seen.update(name for name, hard in HARD.items() if hard(batch))
        assert 2 <= batch.num_samples <= 5
        for i, n in enumerate(batch.response_lengths):
            mask = batch.loss_masks[i]
            assert 1 <= n <= 24
            assert n < batch.total_lengths[i] <= n + 40
            assert mask.any()
            for name in ("log_probs", "ref_log_probs", "values", "token_rewards"):
                x = getattr(batch, name)[i]
                assert x.shape == mask.shape == (n,)
                assert x[mask].isfinite().all()
            assert math.isfinite(batch.rewards[i])

    each()
    assert seen == set(HARD)


def test_fully_masked_samples_on_request():
    batches = rollout_batches(fully_masked=True, masked=("zero",), scales=(1.0,))
    batch = find(batches, lambda batch: not batch.loss_masks[0].any(), settings=settings(database=None))
    assert all(x.isfinite().all() for x in batch.log_probs)
