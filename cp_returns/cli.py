"""The command `cp-returns`: simulate rollouts on n ranks, and show who owns which token.

Exit codes: 0 all well, 1 the ranks disagree, 2 a bad call or bad input (then nothing has been written).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cp_returns import scenario
from cp_returns.errors import CPInputError
from cp_returns.layout import Layout
from cp_returns.rollouts import RolloutError, Rollouts, read
from cp_returns.scenario import CHOICES, Report, Scenario, ScenarioError, make_layout
from cp_returns.simulate import RankFailure, under_torchrun

OK, DIFFER, BAD_CALL = 0, 1, 2
EXTRAS = ("rich", "yaml", "matplotlib")


class UsageError(ValueError):
    """Arguments that do not go together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except (ScenarioError, RolloutError, CPInputError, UsageError) as error:
        return _refuse(str(error), BAD_CALL)
    except RankFailure as failure:
        bad_input = isinstance(failure.outcomes[failure.first].error, CPInputError)
        return _refuse(str(failure), BAD_CALL if bad_input else DIFFER)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _refuse(f"{error.name} is not installed; it comes with: pip install 'cp_returns[cli]'", BAD_CALL)


def _refuse(text: str, code: int) -> int:
    print(f"cp-returns: {text}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cp-returns", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    simulate = commands.add_parser("simulate", help="compute returns on n ranks and on one, and compare")
    simulate.add_argument("--config", required=True, help="scenario file (YAML)")
    simulate.add_argument(
        "--rollouts", help="rollout file (.jsonl, or a slime train dump .pt), in place of the scenario's"
    )
    simulate.add_argument("--ref", help="which reference log-probs of the file, e.g. int8 or int4")
    simulate.add_argument("--cp-size", type=_positive, metavar="N", help="ranks, in place of the scenario's")
    simulate.add_argument("--out", type=Path, metavar="DIR", help="write returns.jsonl and returns.png there")
    simulate.add_argument("--timeout", type=_positive, default=300, metavar="SECONDS", help="bound on the ranks' work")
    simulate.set_defaults(command=_simulate)

    layout = commands.add_parser("layout", help="show who owns which token of one sample")
    layout.add_argument("--total", type=_positive, required=True, help="tokens of prompt and response")
    layout.add_argument("--response", type=_positive, required=True, help="tokens of the response")
    layout.add_argument("--cp", type=_positive, required=True, help="ranks")
    layout.add_argument("--layout", choices=CHOICES["layout"], default="zigzag")
    layout.add_argument("--multiple", type=_positive, default=1, help="pad to a multiple of pieces * this (default 1)")
    layout.add_argument("--png", type=Path, metavar="FILE", help="draw it there too")
    layout.set_defaults(command=_layout)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


# simulate


def _simulate(args: argparse.Namespace) -> int:
    from cp_returns.terminal import print_report, progress_bar

    settings = scenario.load(args.config)
    file = args.rollouts or settings.rollouts
    if file is None:
        raise UsageError(f"{args.config} names no rollouts; give --rollouts FILE")
    if args.out is not None:
        _writable(args.out)
    batch = read(file, ref=args.ref or settings.ref, seed=settings.seed)
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    cp_size = args.cp_size or started or settings.cp_size
    if started not in (None, cp_size):
        raise UsageError(f"--cp-size is {cp_size}, but torchrun started {started} ranks")
    with progress_bar() as tick:
        report = scenario.run(settings, batch, cp_size, timeout=args.timeout, tick=tick)
    if report is None:  # under torchrun: rank 0 has the results
        return OK
    print_report(settings, batch, report)
    if args.out is not None:
        _write_returns(args.out, settings, batch, report)
    return OK if report.agrees else DIFFER


def _writable(out: Path) -> None:
    """Find out before the work whether --out can be a directory, and whether the picture can be drawn."""
    import matplotlib  # noqa: F401

    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UsageError(f"--out {out}: {nearest} is a file; expected a directory")


def _write_returns(out: Path, settings: Scenario, batch: Rollouts, report: Report) -> None:
    from cp_returns.pictures import returns_png

    returns = report.strategies[settings.strategy].returns
    lines = []
    for i, full in enumerate(returns):
        numbers = [float(f"{x:.9g}") for x in full.tolist()]  # nine digits hold a float32
        lines.append(
            json.dumps({"id": batch.ids[i], "response_len": batch.response_lengths[i], "returns": numbers}) + "\n"
        )
    files = {"returns.jsonl": "".join(lines).encode()}
    if returns:
        i = _telling(report.layout)
        how = f"{settings.layout}, {settings.strategy}, gamma {settings.gamma:g}"
        title = f"sample {batch.ids[i]}: REINFORCE++ returns, {how}"
        mask = batch.loss_masks[i].tolist()
        files["returns.png"] = returns_png(
            report.layout, i, returns[i].tolist(), report.alone.returns[i].tolist(), mask, title=title
        )
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    print(f"wrote {', '.join(str(out / name) for name in files)}")


def _telling(layout: Layout) -> int:
    """The sample to draw: cut into as many pieces as possible, and of those the shortest."""
    pieces = (layout.piece_lengths > 0).sum(axis=1)
    return max(range(layout.num_samples), key=lambda i: (pieces[i], -layout.response_lengths[i]))


# layout


def _layout(args: argparse.Namespace) -> int:
    from cp_returns.terminal import print_layout

    layout = make_layout(args.layout, [args.total], [args.response], args.cp, multiple=args.multiple)
    prompt = args.total - args.response
    title = f"{args.layout}, cp_size {args.cp}, total {args.total} (prompt {prompt}), response {args.response}"
    picture = b""
    if args.png is not None:
        from cp_returns.pictures import layout_png

        if not args.png.absolute().parent.is_dir():
            raise UsageError(f"--png {args.png}: no such directory")
        picture = layout_png(layout, title=title)
    print_layout(layout, title)
    if args.png is not None:
        args.png.write_bytes(picture)
        print(f"wrote {args.png}")
    return OK
