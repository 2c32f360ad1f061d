"""`cp-returns check`: exit codes, the table, the pictures, and functions found as a user names them."""

import itertools
import json
import math
import struct
import subprocess
import sys

import numpy as np
import planted
import pytest

from cp_returns import cli, pictures, zigzag
from cp_returns.cli import main
from cp_returns.pictures import differences_png, returns_png, sample_png

PNG = b"\x89PNG\r\n\x1a\n"


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_right_function_is_exit_code_0_with_a_table(capsys):
    assert main(["check", "planted:per_sample_gather", "--cp", "1,2", "--dp", "1,2"]) == 0
    text = capsys.readouterr().out
    assert "8 samples, 214 tokens; made-up numbers (seed 0)" in text
    table = [row for row in rows(text) if row[:2] in (["1", "1"], ["1", "2"], ["2", "1"], ["2", "2"])]
    assert [row[-1] for row in table] == ["rank", "agrees", "agrees", "agrees"]
    assert [row[2:5] for row in table[1:]] == [["output", "214", "0"]] * 3
    assert "the function agrees with one rank (ranks in threads)" in text


def test_a_wrong_function_is_exit_code_1_with_report_and_pictures(tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert main(["check", "planted:gae_without_look_ahead", "--cp", "1,2,4", "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert ["1", "2", "advantages"] in [row[:3] for row in rows(shown)]
    assert "piece ends" in shown
    assert "DIFFERS" in shown
    report = (out / "report.txt").read_text()
    assert "dp 1 x cp 2: PIECE ENDS" in report
    assert "sample 0, token 0, dp rank 0, rank 0, piece 0" in report
    for name in ("differences.png", "worst_sample.png"):
        assert (out / name).read_bytes().startswith(PNG)
    assert len(list(out.iterdir())) == 3


def test_a_hang_is_exit_code_3(tmp_path, capsys):
    """Two samples of which ranks 1 and 3 of four own nothing; pictures there are none, the report there is."""
    lines = [{"prompt_len": 12, "response_len": 1, "kl": [0.5]}, {"prompt_len": 88, "response_len": 9, "kl": [0.1] * 9}]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["check", "planted:skips_when_it_has_nothing", "--rollouts", str(path), "--cp", "4"]
    assert main([*args, "--timeout", "20", "--out", str(tmp_path / "out")]) == 3
    text = capsys.readouterr().out
    assert "rank 3 returned after 0 collectives, others wait in number 1" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.txt"]


def test_gradients_layout_and_tolerance_are_options(capsys):
    assert main(["check", "planted:gradient_times_cp", "--cp", "2"]) == 0  # the loss alone is right
    assert main(["check", "planted:gradient_times_cp", "--cp", "2", "--gradients"]) == 1
    assert "every number is cp_size = 2 times that of one rank" in capsys.readouterr().out
    # slime's zigzag arithmetic does not hold in other layouts, where its shards have other lengths
    assert main(["check", "planted:per_sample_gather", "--cp", "2", "--layout", "contiguous"]) != 0
    args = ["check", "planted:whitened_over_dp_only", "--cp", "2", "--layout", "contiguous"]
    assert main(args) == 1
    assert main([*args, "--rtol", "100"]) == 0


def test_a_function_is_found_in_the_current_directory_too(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "advantages.py").write_text("class Mine:\n    def kl(view):\n        return view.kl\n")
    code = "import sys; from cp_returns.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "check", "mine.advantages:Mine.kl", "--cp", "2"]
    options = {"cwd": tmp_path, "env": planted.environment(), "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert "agrees with one rank" in done.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["planted"], "'planted' is no function; expected package.module:function"),
        (["no_such_module:fn"], "no_such_module cannot be imported: ModuleNotFoundError"),
        (["planted:nothing"], "planted has no function nothing"),
        (["planted:GAMMA"], "planted has no function GAMMA"),
        (["planted:environment"], "the function fails on one rank already: TypeError"),
        (["planted:per_sample_gather", "--rollouts", "none.jsonl"], "none.jsonl: no such file"),
        (["planted:per_sample_gather", "--gradients"], "no output is a Share"),
    ],
)
def test_bad_calls_are_exit_code_2_and_write_nothing(tmp_path, capsys, args, text):
    out = tmp_path / "out"
    assert main(["check", *args, "--cp", "2", "--out", str(out)]) == 2
    assert text in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("sizes", ["0", "1,", "two", "-1"])
def test_sizes_are_whole_numbers(capsys, sizes):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "planted:per_sample_gather", "--cp", sizes])
    assert stopped.value.code == 2
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_rollouts_of_a_file_are_checked(tmp_path, capsys):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"prompt_len": 3, "response_len": 5, "kl": [1, 2, 3, 4, 5], "reward": 3}\n')
    assert main(["check", "planted:scan_of_own_pieces_only", "--rollouts", str(path), "--cp", "2"]) == 1
    text = capsys.readouterr().out
    assert "1 samples, 5 tokens; KL from rollouts.jsonl" in text


# ---- pictures


def pixels(png: bytes) -> tuple[int, int]:
    return struct.unpack(">II", png[16:24])


def colours_in(png: bytes) -> set[tuple[int, int, int]]:
    import io

    from matplotlib.image import imread

    image = (imread(io.BytesIO(png))[..., :3] * 255).round().astype(int)
    return set(map(tuple, image.reshape(-1, 3)))


def test_the_heat_map_shows_where_ranks_differ():
    rank, sample = np.array([0, 0, 1, 1, 0, 1]), np.array([0, 0, 0, 0, 1, 1])
    draw = lambda excess: differences_png(np.array(excess), rank, sample, ["dp 0, cp 0", "dp 0, cp 1"])
    pale = (0xD8, 0xE4, 0xEE)
    calm, loud = draw([0.0] * 6), draw([0.0, 0.5, 2.0, 1e4, 0.0, math.inf])
    assert pale in colours_in(calm)
    assert pale in colours_in(loud)
    red, cross = (0x80, 0x00, 0x26), (0xC0, 0x00, 0xC0)  # the dark end of the scale; NaN or inf
    assert red in colours_in(loud)
    assert cross in colours_in(loud)
    assert cross not in colours_in(calm)


def test_a_large_batch_is_drawn_in_the_same_width():
    n, ranks = 300_000, [f"dp 0, cp {r}" for r in range(8)]
    rng = np.random.default_rng(0)
    large = differences_png(rng.exponential(size=n), np.arange(n) % 8, np.arange(n) // 1000, ranks)
    assert pixels(large)[0] == 1200


def test_the_worst_sample_is_drawn_with_its_owners_and_borders():
    expected = np.arange(6.0)
    got = expected + np.array([0, 0, 0, 2.0, 0, math.nan])
    png = sample_png(expected, got, np.array([0, 0, 1, 1, 1, 0]), np.array([0, 0, 1, 1, 2, 3]), got != expected)
    seen = colours_in(png)
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xC0, 0x00, 0xC0)} <= seen
    assert pixels(png) == (1200, 624)


def drawn(monkeypatch, draw):
    """The axes of a picture, in place of its bytes."""
    save, figures = pictures._png, []
    monkeypatch.setattr(pictures, "_png", lambda figure: figures.append(figure) or save(figure))
    draw()
    return figures[0].axes


def whole_ticks(axis) -> bool:
    return all(float(x).is_integer() for x in axis.get_xticks())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_short_sample_is_drawn_with_markers_and_whole_tokens(monkeypatch, n):
    x, piece = np.arange(n) + 1.0, np.arange(n)
    upper, lower = drawn(monkeypatch, lambda: sample_png(x, x + 1, piece % 2, piece, x > 0))
    alone = upper.get_lines()[0]
    assert alone.get_label() == "one rank"
    assert alone.get_marker() == "o"
    assert whole_ticks(lower)
    assert lower.get_xlim() == (-0.5, n - 0.5)
    figure = upper.figure
    right = upper.get_legend().get_window_extent().x1
    assert right <= figure.bbox.x1
    boxes = [text.get_window_extent() for text in lower.texts]
    assert [text.get_text() for text in lower.texts] == [str(k) for k in range(n)]
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_pieces_of_one_token_do_not_print_over_each_other(monkeypatch):
    x, piece = np.zeros(400), np.minimum(np.arange(400), 7)
    _, lower = drawn(monkeypatch, lambda: sample_png(x, x + 1, piece % 2, piece, x == 0))
    assert [text.get_text() for text in lower.texts] == ["0"]


@pytest.mark.filterwarnings("error")
def test_returns_break_at_masked_tokens_only(monkeypatch):
    """T = 10, R = 9, W = 2: pieces of tokens 0..2, 3..5 and 6..8."""
    layout, mask = zigzag([10], [9], 2), [True] * 4 + [False] + [True] * 4
    upper, lower = drawn(monkeypatch, lambda: returns_png(layout, 0, range(9), range(9), mask))
    joined = {
        (a, b)
        for line in upper.get_lines()
        for (a, y), (b, z) in itertools.pairwise(line.get_xydata())
        if np.isfinite(y + z)
    }
    assert joined == {(0, 1), (1, 2), (2, 3), (5, 6), (6, 7), (7, 8)}
    assert whole_ticks(lower)
    (one, _) = drawn(monkeypatch, lambda: returns_png(zigzag([5], [1], 2), 0, [1.0], [1.0], [True]))
    assert whole_ticks(one)
    assert len(one.get_xticks()) >= 1


def test_exit_codes_are_documented():
    assert (cli.OK, cli.DIFFER, cli.BAD_CALL, cli.HANG) == (0, 1, 2, 3)
    assert "3 ranks of" in cli.__doc__
