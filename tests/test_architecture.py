"""What the architecture promises, read from the source: who imports whom, where effects live, what is never written."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cp_returns"

# A module imports only from lower levels, also inside functions.
LEVELS = [
    {"errors", "arrays"},
    {"layout", "reference", "collectives", "kl", "masks", "presets", "report"},
    {"blocks", "agreement", "groups", "lists"},
    {"scan"},
    {"exchange", "baselines", "whiten"},
    {"clocks"},
    {"context"},
    {"admission"},
    {"estimators", "log_probs", "loss"},
    {"config", "simulate", "rollouts", "pictures", "diagnose"},
    {"module"},
    {"scenario", "batches", "view", "compat.slime"},
    {"check"},
    {"terminal"},
    {"cli", "pytest_plugin"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
assert len(LEVEL_OF) == sum(map(len, LEVELS)), "a module has two levels"

# What `import cp_returns` does not need: imported late, inside a function, save in modules that themselves are.
EXTRAS = {"megatron", "rich", "yaml", "matplotlib", "hypothesis", "scipy", "pytest", "triton"}
IMPORTED_LATE = {"terminal": {"rich"}, "pytest_plugin": {"pytest"}}

COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|reduce_scatter|broadcast|gather|scatter|reduce|barrier|monitored_barrier"
    r"|send|recv|isend|irecv|batch_isend_irecv)(_|$)"
)
# Not a step of the library: under torchrun rank 0 is handed what each rank returned.
NOT_A_STEP = {("simulate", "gather_object")}

MUTABLE = {("collectives", "Counted")}  # counts the calls and bytes of the collective that it wraps


def modules() -> dict[str, ast.Module]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in files]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, files, strict=True)}


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """The full names that a tree imports: `from a import b` gives a.b, which may be a module or a name in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; this project writes absolute ones"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(name: str) -> str | None:
    """The module of this package that an imported name is, or is in."""
    parts = name.split(".")
    if parts[0] != "cp_returns":
        return None
    found = [".".join(parts[1:end]) for end in range(2, len(parts) + 1) if ".".join(parts[1:end]) in MODULES]
    return found[-1] if found else name


def at_import(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run on import, those in `if TYPE_CHECKING` left out."""
    runs, todo = [], list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            todo += [s for handler in getattr(node, "handlers", []) for s in handler.body]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            runs.append(node)
    return runs


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_lower_levels(name):
    assert name in LEVEL_OF, f"{name} has no level: say in LEVELS where it belongs"
    for full_name in imported(MODULES[name]):
        target = own(full_name)
        if target is not None:
            assert target in LEVEL_OF, f"{name} imports {full_name}, which is no module with a level"
            assert LEVEL_OF[target] < LEVEL_OF[name], (
                f"{name} (level {LEVEL_OF[name]}) imports {target} (level {LEVEL_OF[target]})"
            )


@pytest.mark.parametrize("name", MODULES)
def test_extras_are_imported_late(name):
    allowed = IMPORTED_LATE.get(name, set())
    for statement in at_import(MODULES[name]):
        tops = {full_name.split(".")[0] for full_name in imported(statement)}
        assert not tops & (EXTRAS - allowed), f"line {statement.lineno}: an extra is imported with the package"
        late = {own(full_name) for full_name in imported(statement)} & set(IMPORTED_LATE)
        assert not late or name in IMPORTED_LATE, f"line {statement.lineno}: {late} needs an extra; import it late"


def test_importing_the_package_needs_no_extra():
    code = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ImportError(name + " is blocked by the test")

sys.meta_path.insert(0, Absent())
import cp_returns
cp_returns.ContextParallelReturns(cp_returns.ReturnsConfig())
import cp_returns.compat.slime
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", MODULES)
def test_only_collectives_calls_collectives(name):
    if name == "collectives":
        return
    names = {"torch.distributed"}
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.asname and "torch.distributed" in alias.name}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
    used = [full_name.rpartition(".") for full_name in imported(MODULES[name])]
    used += [
        (ast.unparse(node.value), ".", node.attr)
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names
    ]
    for module, _, function in used:
        if module in names or module.startswith("torch.distributed"):
            assert not COLLECTIVE.match(function) or (name, function) in NOT_A_STEP, f"{name} uses {module}.{function}"


def identifiers(node: ast.expr) -> Iterator[str]:
    """The names of a chain like `batch.masks[i].float()`: batch, masks, float."""
    while True:
        if isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Attribute):
            yield node.attr
            node = node.value
        elif isinstance(node, ast.Subscript | ast.UnaryOp):
            node = node.value if isinstance(node, ast.Subscript) else node.operand
        else:
            if isinstance(node, ast.Name):
                yield node.id
            return


PRODUCTS = ("mul", "mul_", "multiply", "multiply_", "addcmul", "addcmul_")


def multiplied(tree: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            yield from ((node.lineno, side) for side in (node.left, node.right))
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
            yield from ((node.lineno, side) for side in (node.target, node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PRODUCTS:
            yield from ((node.lineno, side) for side in (node.func.value, *node.args))


def mask_products(tree: ast.AST) -> list[str]:
    return [
        f"line {line}: {ast.unparse(side)} is multiplied; select with torch.where"
        for line, side in multiplied(tree)
        if any(re.search(r"(^|_)masks?($|_)", identifier) for identifier in identifiers(side))
    ]


@pytest.mark.parametrize("name", MODULES)
def test_values_are_selected_by_masks_never_multiplied(name):
    assert not mask_products(MODULES[name])


@pytest.mark.parametrize(
    "product",
    ["x * mask", "x * full_mask.to(x)", "loss_masks[i] * x", "x.mul(mask)", "torch.mul(x, mask)", "x *= ~mask.bool()"],
)
def test_a_product_with_a_mask_is_seen(product):
    assert mask_products(ast.parse(product))


@pytest.mark.parametrize("name", MODULES)
def test_dataclasses_are_frozen_and_there_are_no_globals(name):
    for node in ast.walk(MODULES[name]):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: a global"
        if isinstance(node, ast.ClassDef) and (name, node.name) not in MUTABLE:
            marks = [ast.unparse(mark) for mark in node.decorator_list if "dataclass" in ast.unparse(mark)]
            assert all("frozen=True" in mark for mark in marks), f"{node.name} is a mutable dataclass"


def test_the_test_script_collects_every_test_file():
    lines = (ROOT / "scripts" / "test.sh").read_text().splitlines()
    (command,) = [line for line in lines if re.fullmatch(r"\.venv/bin/python -m pytest\b.*", line)]
    here = [sys.executable, *shlex.split(command)[1:], "--collect-only", "-qq"]
    run = subprocess.run(here, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    collected = {line.rpartition(":")[0] for line in run.stdout.splitlines() if re.fullmatch(r"\S+\.py: \d+", line)}
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert written
    assert written <= collected, f"not collected: {sorted(written - collected)}"


def test_ci_runs_the_test_script():
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
