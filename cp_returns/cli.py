"""The command `cp-returns`: simulate rollouts on n ranks, check your own code, and show who owns which token.

Exit codes: 0 all well, 1 the ranks disagree, 2 a bad call or bad input (then nothing has been written), 3 ranks of
`check` hang.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cp_returns import scenario
from cp_returns.batches import hard_batch
from cp_returns.check import CheckError, check_cp_invariance
from cp_returns.check import Report as CheckReport
from cp_returns.errors import CPInputError
from cp_returns.layout import Layout
from cp_returns.rollouts import RolloutError, Rollouts, read
from cp_returns.scenario import CHOICES, Report, Scenario, ScenarioError, make_layout
from cp_returns.simulate import RankFailure, under_torchrun

OK, DIFFER, BAD_CALL, HANG = 0, 1, 2, 3
EXTRAS = ("rich", "yaml", "matplotlib")


class UsageError(ValueError):
    """Arguments that do not go together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except (ScenarioError, RolloutError, CPInputError, CheckError, UsageError) as error:
        return _refuse(str(error), BAD_CALL)
    except RankFailure as failure:
        bad_input = isinstance(failure.outcomes[failure.first].error, CPInputError)
        return _refuse(str(failure), BAD_CALL if bad_input else DIFFER)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        text = f"{error.name} is not installed; it comes with the extra 'cli': pip install '.[cli]' in the checkout"
        return _refuse(text, BAD_CALL)


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

    check = commands.add_parser("check", help="does your own function give on n ranks what it gives on one?")
    check.add_argument("function", metavar="PACKAGE.MODULE:FUNCTION", help="fn(view); see cp_returns.check")
    check.add_argument("--rollouts", metavar="FILE", help="rollout file, in place of a made-up batch of hard samples")
    check.add_argument("--ref", help="which reference log-probs of the file")
    check.add_argument("--cp", type=_sizes, default=(1, 2, 4), metavar="1,2,4", help="context-parallel sizes")
    check.add_argument("--dp", type=_sizes, default=(1,), metavar="1,2", help="data-parallel sizes")
    check.add_argument("--layout", choices=CHOICES["layout"], default="zigzag")
    check.add_argument("--multiple", type=_positive, default=1, help="pad to a multiple of pieces * this (default 1)")
    check.add_argument("--run", choices=("threads", "processes"), default="threads", help="processes: gloo, Megatron")
    check.add_argument("--gradients", action="store_true", help="compare gradients of the loss by log_probs too")
    check.add_argument("--rtol", type=float, default=1e-5, help="of the largest number of a sample (default 1e-5)")
    check.add_argument("--timeout", type=_positive, default=60, metavar="SECONDS", help="bound on each (dp, cp)")
    check.add_argument("--out", type=Path, metavar="DIR", help="write report.txt, differences.png, worst_sample.png")
    check.set_defaults(command=_check)

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


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


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
        mask = batch.trained_masks[i].tolist()
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


# check


def _check(args: argparse.Namespace) -> int:
    from cp_returns.terminal import print_check, progress_bar

    fn = _function(args.function)
    if args.out is not None:
        _writable(args.out)
    batch = read(args.rollouts, ref=args.ref) if args.rollouts else hard_batch()
    with progress_bar() as tick:
        report = check_cp_invariance(
            fn,
            batch,
            cp_sizes=args.cp,
            dp_sizes=args.dp,
            layout=lambda total, response, cp: make_layout(args.layout, total, response, cp, multiple=args.multiple),
            run=args.run,
            rtol=args.rtol,
            gradients=args.gradients,
            timeout=float(args.timeout),
            tick=lambda done, total: tick("dp x cp", done, total),
        )
    title = f"{args.function}, {args.layout}: {batch.num_samples} samples, {sum(batch.response_lengths):,} tokens"
    print_check(f"{title}; {batch.note}", report)
    if args.out is not None:
        _write_check(args.out, f"{args.function}, {args.layout}", report)
    return HANG if report.hangs else OK if report.agrees else DIFFER


def _function(name: str) -> Callable:
    """package.module:function, found as `python -m` finds modules: from the current directory too."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise UsageError(f"{name!r} is no function; expected package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever runs when a user's module is imported
        raise UsageError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"{module} has no function {path}")
    return found


def _write_check(out: Path, title: str, report: CheckReport) -> None:
    from cp_returns.pictures import differences_png, sample_png

    files = {"report.txt": f"{report}\n".encode()}
    if report.worst is not None:
        world, name = report.worst
        case, at = world.outputs[name], world.outputs[name].at
        title = f"{title}: {name}, dp {world.dp_size} x cp {world.cp_size}"
        ranks = [f"dp {d}, cp {r}" for d in range(world.dp_size) for r in range(world.cp_size)]
        files["differences.png"] = differences_png(case.excess, at.world_rank, at.sample, ranks, title=title)
        worst = at.sample == case.worst_sample
        one = (x[worst] for x in (case.expected, case.got, at.rank, at.piece, case.off))
        files["worst_sample.png"] = sample_png(*one, title=f"{title}, sample {case.worst_sample}")
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (out / name).write_bytes(content)
    print(f"wrote {', '.join(str(out / name) for name in files)}")


# layout


def _layout(args: argparse.Namespace) -> int:
    from cp_returns.terminal import print_layout

    layout = make_layout(args.layout, [args.total], [args.response], args.cp, multiple=args.multiple)
    prompt = args.total - args.response
    title = f"{args.layout}, cp_size {args.cp}, total {args.total} (prompt {prompt}), response {args.response}"
    picture = b""
    if args.png is not None:
        from cp_returns.pictures import layout_png

        if args.png.suffix.lower() != ".png":
            raise UsageError(f"--png {args.png}: expected a name that ends in .png")
        if not args.png.absolute().parent.is_dir():
            raise UsageError(f"--png {args.png}: no such directory")
        picture = layout_png(layout, title=title)
    print_layout(layout, title)
    if args.png is not None:
        args.png.write_bytes(picture)
        print(f"wrote {args.png}")
    return OK
