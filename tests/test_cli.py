"""The command line prints and writes what is right; bad input is exit code 2 and writes nothing; disagreement is 1."""

import builtins
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cp_returns import pictures, scenario
from cp_returns.cli import main
from cp_returns.context import CPContext

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def rollouts(tmp_path):
    """Three samples by hand: an undiscounted one with a gap, one token, and a long one after a long prompt."""
    lines = [
        {
            "prompt_len": 3,
            "response_len": 5,
            "loss_mask_spans": [[0, 1], [3, 5]],
            "kl": [0.0] * 5,
            "reward": 3,
            "id": "gap",
        },
        {"prompt_len": 9, "response_len": 1, "kl": [1.0], "reward": -1, "id": "one"},
        {"prompt_len": 60, "response_len": 70, "kl": [0.5] * 70, "reward": 0, "id": "long"},
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def config(tmp_path):
    def written(**settings) -> str:
        path = tmp_path / "scenario.yaml"
        path.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
        return str(path)

    return written


def returns_in(folder) -> dict[str, list[float]]:
    return {row["id"]: row["returns"] for row in map(json.loads, (folder / "returns.jsonl").read_text().splitlines())}


@pytest.mark.parametrize("strategy", ["gather", "carry"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "contiguous_pack"])
def test_simulate_writes_the_right_returns_and_a_picture(tmp_path, rollouts, config, capsys, layout, strategy):
    """gamma 1: rewards to go by hand; kl_coef 0.1, so the long sample counts down by 0.05 a token."""
    path = config(layout=layout, cp_size=2, kl_coef=0.1, strategy=strategy, rollouts=rollouts.name)
    out = tmp_path / "new" / "out"
    assert main(["simulate", "--config", path, "--out", str(out)]) == 0
    got = returns_in(out)
    assert list(got) == ["gap", "one", "long"]
    assert got["gap"] == [3, 0, 0, 3, 3]
    assert got["one"] == [pytest.approx(-1.1, abs=1e-6)]
    assert got["long"] == pytest.approx([-0.05 * (70 - j) for j in range(70)], abs=1e-6)
    assert (out / "returns.png").read_bytes().startswith(PNG)
    text = capsys.readouterr().out
    assert "3 samples, 76 response tokens, 74 of them trained; KL from rollouts.jsonl" in text
    assert "padded to the longest response the batch would have 2.76 times as many tokens" in text  # 3 * 70 / 76
    assert "the ranks agree" in text


def test_the_table_of_ranks(rollouts, config, capsys):
    """zigzag over 2: tokens and pieces by hand, one fixed envelope of 16 KiB for carry, two collectives for gather."""
    assert main(["simulate", "--config", config(cp_size=2, rollouts=rollouts.name)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # gap: total 8, pieces of 2, logits of the response at 2..6 -> rank 1 holds 2..5, rank 0 holds 6
    # one: total 10, pieces of 3, its logit at 8 -> rank 1; long: total 130, pieces of 33, logits at 59..128
    #   rank 0: 99..128 (30), rank 1: 59..65 and 66..98 (40)
    (zero,) = [row for row in rows if row[:3] == ["0", "31", "2"]]
    (one,) = [row for row in rows if row[:3] == ["1", "45", "5"]]
    for row in (zero, one):
        assert row[4] == "16,384"
        assert row[5:7] == ["2", "1"]


def test_ref_and_cp_size_of_the_command_line_win(tmp_path, config, capsys):
    line = {"prompt_len": 1, "response_len": 2, "logp": [0, 0], "ref_logp_int8": [-1, -1], "ref_logp_int4": [-2, -2]}
    (tmp_path / "refs.jsonl").write_text(json.dumps(line) + "\n")
    path = config(cp_size=4, kl_coef=1.0, ref="int8", rollouts="refs.jsonl")
    for ref, expected in ((None, [-2, -1]), ("int4", [-4, -2])):
        args = ["simulate", "--config", path, "--cp-size", "3", "--out", str(tmp_path / "out")]
        assert main([*args, "--ref", ref] if ref else args) == 0
        assert returns_in(tmp_path / "out")["1"] == expected
        assert "zigzag over 3 ranks" in capsys.readouterr().out


def test_seeded_log_probs_are_reported(tmp_path, config, capsys):
    (tmp_path / "shapes.jsonl").write_text('{"prompt_len": 5, "response_len": 9}\n')
    assert main(["simulate", "--config", config(cp_size=2, rollouts="shapes.jsonl")]) == 0
    assert "log-probs SEEDED (seed 0): shapes.jsonl holds shapes only" in capsys.readouterr().out


def test_a_missing_reward_is_told_once_and_its_tokens_are_not_trained(tmp_path, config, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a shell: warnings go to stderr, of the ranks too
    drawn = []
    monkeypatch.setattr(pictures, "returns_png", lambda *args, **_: drawn.append(args[-1]) or PNG)
    line = {"prompt_len": 5, "response_len": 4, "kl": [0.0] * 4}
    (tmp_path / "null.jsonl").write_text("".join(json.dumps(line | {"reward": r}) + "\n" for r in (None, 1.0)))
    path, out = config(cp_size=2, rollouts="null.jsonl"), tmp_path / "out"
    assert main(["simulate", "--config", path, "--out", str(out)]) == 0
    shown = capfd.readouterr()
    assert "8 response tokens, 4 of them trained (samples without a reward, fully masked: 1)" in shown.out
    assert "no reward" not in shown.err
    assert returns_in(out) == {"1": [0] * 4, "2": [1] * 4}
    assert drawn == [[False] * 4]
    assert logging.getLogger("cp_returns.module").level == logging.NOTSET


def test_an_empty_file_is_refused(tmp_path, config, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    out = tmp_path / "out"
    assert main(["simulate", "--config", config(cp_size=2, rollouts="empty.jsonl"), "--out", str(out)]) == 2
    assert "empty.jsonl: holds no sample" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("spoilt", ["gather", "carry"])
def test_ranks_that_disagree_are_exit_code_1(rollouts, config, monkeypatch, capsys, spoilt):
    """Rank 1 moves one return of one strategy: by a unit in the last place (gather), by 2^-22 of it (carry)."""
    right = CPContext.run

    def wrong(self, formula, inputs, facts):
        (returns,) = right(self, formula, inputs, facts)
        if self.layout.cp_size == 2 and self.rank == 1 and self.strategy.__name__ == spoilt:
            returns = returns.clone()
            last = returns[-1].clone()  # of the long sample's largest piece
            returns[-1] = torch.nextafter(last, last + 1) if spoilt == "gather" else last + 1e-6
        return (returns,)

    monkeypatch.setattr(CPContext, "run", wrong)
    assert main(["simulate", "--config", config(cp_size=2, rollouts=rollouts.name)]) == 1
    assert "the ranks DISAGREE" in capsys.readouterr().out


BAD_CONFIGS = {
    "unknown key": ("gama: 0.5\n", "key 'gama': unknown; expected one of gamma"),
    "unknown layout": (
        "layout: ring\n",
        "key 'layout': is 'ring'; expected one of zigzag, contiguous, contiguous_pack",
    ),
    "gamma above 1": ("gamma: 1.5\n", r"key 'gamma': is 1.5; expected a number in \[0, 1\]"),
    "cp_size 0": ("cp_size: 0\n", "key 'cp_size': is 0; expected an integer of at least 1"),
    "cp_size a word": ("cp_size: four\n", "key 'cp_size': is 'four'"),
    "not yaml": ("a: [1\n", "not YAML"),
    "a list": ("- 1\n", "is list; expected a mapping"),
    "empty": ("", "is NoneType; expected a mapping"),
    "nested": ("[" * 100_000, "not YAML"),
    "a number of 5,000 digits": (f"gamma: {'9' * 5000}", "not YAML"),
    "huge seed": (f"seed: {2**64}\n", "key 'seed': is 18446744073709551616; expected .* below 2\\^64"),
    "no rollouts": ("cp_size: 2\n", "names no rollouts; give --rollouts FILE"),
    "absent rollouts": ("rollouts: none.jsonl\n", "none.jsonl: no such file"),
}


@pytest.mark.parametrize(("text", "expected"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_scenario_is_exit_code_2(tmp_path, capsys, text, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["simulate", "--config", str(path), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr()
    assert re.search(expected, shown.err)
    assert shown.out == ""
    assert not (tmp_path / "out").exists()


def test_bad_rollouts_write_nothing(tmp_path, rollouts, config, capsys):
    with rollouts.open("a") as file:
        file.write('{"prompt_len": 2, "response_len": "7"}\n')
    path = config(cp_size=2, rollouts=rollouts.name)
    assert main(["simulate", "--config", path, "--out", str(tmp_path / "out")]) == 2
    expected = f"{rollouts}, line 4, field 'response_len': is '7'; expected an integer of at least 0"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file_is_refused_before_the_work(tmp_path, rollouts, config, capsys):
    args = ["simulate", "--config", config(cp_size=2, rollouts=rollouts.name), "--out", str(rollouts)]
    before = rollouts.read_bytes()
    assert main(args) == 2
    assert "is a file; expected a directory" in capsys.readouterr().err
    assert rollouts.read_bytes() == before


@pytest.mark.parametrize("module", ["yaml", "rich", "matplotlib"])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    tmp_path, rollouts, config, monkeypatch, capsys, module
):
    absent = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return absent(name, *args, **kwargs)

    path = config(cp_size=2, rollouts=rollouts.name)
    for name in [name for name in sys.modules if name.split(".")[0] == module or name == "cp_returns.terminal"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["simulate", "--config", path, "--out", str(tmp_path / "out")]) == 2
    assert (
        f"{module} is not installed; it comes with the extra 'cli': pip install '.[cli]' in the checkout"
        in capsys.readouterr().err
    )


SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def test_the_largest_seed_is_taken(tmp_path, config):
    (tmp_path / "shapes.jsonl").write_text('{"prompt_len": 5, "response_len": 9}\n')
    assert main(["simulate", "--config", config(cp_size=1, seed=2**64 - 1, rollouts="shapes.jsonl")]) == 0


def test_the_shipped_scenarios_cover_every_choice():
    loaded = [scenario.load(path) for path in SHIPPED]
    for key in ("layout", "clock", "kl", "strategy"):
        assert {getattr(one, key) for one in loaded} == set(scenario.CHOICES[key])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_scenarios_run_on_the_shipped_rollouts(path, capsys):
    assert main(["simulate", "--config", str(path)]) == 0
    assert "log-probs from sample_rollouts.jsonl" in capsys.readouterr().out


def test_a_slime_dump_is_a_rollout_file(tmp_path, config):
    """gamma .5, KL .5, kl_coef .2: 1 - .1 at the end; two steps of the clock before it, a quarter of that minus .1."""
    sample = {"response_length": 3, "total_length": 9, "loss_mask": [1, 0, 1], "reward": 1.0}
    sample |= {"log_probs": torch.tensor([-1.0, -2, -3]), "ref_log_probs": torch.tensor([-1.5, 9, -3.5])}
    torch.save({"samples": [sample]}, tmp_path / "train_0.pt")
    args = [
        "simulate",
        "--config",
        config(cp_size=2, gamma=0.5, kl_coef=0.2),
        "--rollouts",
        str(tmp_path / "train_0.pt"),
    ]
    assert main([*args, "--out", str(tmp_path / "out")]) == 0
    assert returns_in(tmp_path / "out")["0"] == pytest.approx([0.225 - 0.1, 0, 0.9], abs=1e-7)


def test_under_torchrun_one_report_from_all_ranks(tmp_path, rollouts, config):
    path = config(cp_size=4, kl_coef=0.1, rollouts=rollouts.name)
    code = "import sys; from cp_returns.cli import main; sys.exit(main(sys.argv[1:]))"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*launch, sys.executable, "-c", code, "simulate", "--config", path, "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the ranks agree") == 1
    assert "zigzag over 2 ranks" in done.stdout
    assert returns_in(tmp_path / "out")["gap"] == [3, 0, 0, 3, 3]


# layout


def test_layout_shows_owners_and_draws_them(tmp_path, capsys):
    """T=33, R=4, W=4 of semantics.md: owners 2, 2, 1, 1."""
    picture = tmp_path / "layout.png"
    assert main(["layout", "--total", "33", "--response", "4", "--cp", "4", "--png", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2211" in lines
    rows = [line.split() for line in lines]
    assert ["5", "2", "25..29", "0..1", "2"] in rows
    assert ["6", "1", "30..34", "2..3", "2"] in rows
    assert picture.read_bytes().startswith(PNG)


def test_layout_of_every_kind(capsys):
    """T=7, R=6, W=2: logits 0..5; pieces of 2 (zigzag) or 4."""
    for kind, owners in (("zigzag", "001111"), ("contiguous", "000011"), ("contiguous_pack", "000011")):
        assert main(["layout", "--total", "7", "--response", "6", "--cp", "2", "--layout", kind]) == 0
        assert owners in capsys.readouterr().out.splitlines()


def test_layout_of_a_long_response_fits_the_screen(capsys):
    assert main(["layout", "--total", "100000", "--response", "90000", "--cp", "16"]) == 0
    text = capsys.readouterr().out
    assert "one character every" in text
    assert max(map(len, text.splitlines())) <= 100


def test_bad_layouts_write_nothing(tmp_path, capsys):
    picture = tmp_path / "layout.png"
    assert main(["layout", "--total", "4", "--response", "4", "--cp", "2", "--png", str(picture)]) == 2
    assert "the prompt needs at least one token" in capsys.readouterr().err
    assert (
        main(["layout", "--total", "5", "--response", "4", "--cp", "2", "--png", str(tmp_path / "no" / "x.png")]) == 2
    )
    assert "no such directory" in capsys.readouterr().err
    other = tmp_path / "layout.xyz"
    assert main(["layout", "--total", "5", "--response", "4", "--cp", "2", "--png", str(other)]) == 2
    assert "layout.xyz: expected a name that ends in .png" in capsys.readouterr().err
    assert not other.exists()
    with pytest.raises(SystemExit) as stopped:
        main(["layout", "--total", "5", "--response", "4", "--cp", "0"])
    assert stopped.value.code == 2
    assert not picture.exists()
