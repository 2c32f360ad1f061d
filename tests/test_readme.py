"""The README says what is so: its Python blocks run and its table is what the library counts; the public names."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cp_returns

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
sys.path.insert(0, str(ROOT / "scripts"))
import count_messages  # noqa: E402

PUBLIC = """
    CPCollectiveError CPContext CPInputError ContextParallelReturns GAE Layout ReturnsConfig alone approx_kl carry
    contiguous contiguous_pack gae gather group_advantage over reinforce_plus_plus reinforce_plus_plus_baseline remax
    reverse_scan whiten zigzag
"""


def block(words: str) -> str:
    """The first Python block that holds these words."""
    return next(text for text in BLOCKS if words in text)


def test_the_twelve_lines_run():
    names = {}
    exec(compile(block("rewards=[1.0],  # one a sample"), "README.md", "exec"), names)
    out = names["out"]
    # KL .1 .2 .1 at .01, reward 1; whitened by the mean .99733 and sqrt(2.3333e-6 + 1e-8).
    torch.testing.assert_close(out.returns[0], torch.tensor([0.996, 0.997, 0.999]))
    torch.testing.assert_close(out.advantages[0], torch.tensor([-0.87101, -0.21775, 1.08876]), atol=1e-3, rtol=0)


def test_the_functions_run_as_shown():
    from cp_returns.simulate import in_processes

    def rank_returns(rank, all_gather):
        names = {
            "total_lengths": [8],
            "response_lengths": [3],
            "cp_size": 2,
            "rank": rank,
            "cp_group": all_gather.cp_group,
            "dp_cp_group": all_gather.dp_cp_group,
            "kl": torch.zeros(cp_returns.zigzag([8], [3], 2).lengths(rank).sum()),
            "rewards": torch.tensor([2.0]),
            "full_mask": torch.tensor([1, 1, 1]),
        }
        exec(compile(block("from cp_returns import CPContext, carry, over"), "README.md", "exec"), names)
        return names["G"].tolist(), names["A"].tolist()

    first, second = in_processes(rank_returns, 2, timeout=120)
    assert sorted(first[0] + second[0]) == [2.0, 2.0, 2.0]
    assert first[1] + second[1] == [0.0, 0.0, 0.0]  # equal returns


def test_the_slime_actor_runs():
    names = {}
    exec(compile(block("compat.slime import advantages"), "README.md", "exec"), names)
    torch.testing.assert_close(names["rollout_data"]["returns"][0], torch.tensor([0.996, 0.997, 0.999]))
    torch.testing.assert_close(names["rollout_data"]["advantages"][0], torch.tensor([0.996, 0.997, 0.999]))
    exec(block("get_reinforce_plus_plus_returns"), {})


@pytest.mark.parametrize(("samples", "tokens"), [(64, 32_768), (8, 1_000_000)])
@pytest.mark.parametrize("cp_size", [2, 128])
def test_a_row_of_the_table_is_what_the_library_counts(samples, tokens, cp_size):
    counts = [count_messages.count(strategy, cp_size, samples, tokens) for strategy in ("carry", "gather")]
    cells = [f"{samples} x {tokens:,}", cp_size, *counts, count_messages.count_all_reduce(samples, tokens)]
    assert "| " + " | ".join(map(str, cells)) + " |" in README


def test_the_public_names_are_these():
    names = {name for name, value in vars(cp_returns).items() if not isinstance(value, ModuleType)}
    assert {name for name in names if not name.startswith("_")} == set(PUBLIC.split())
