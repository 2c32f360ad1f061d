"""Read the presets: which settings reproduce which framework's numbers."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from cp_returns.errors import CPInputError


def load(framework: str, estimator: str) -> dict[str, Any]:
    """The ReturnsConfig fields of one framework and estimator. Raises CPInputError naming what there is."""
    import yaml

    folder = files("cp_returns") / "preset_files"
    if not folder.is_dir():  # an editable install: the presets lie beside the package, not in it
        folder = Path(__file__).parent.parent / "configs" / "presets"
    there = sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))
    if framework not in there:
        raise CPInputError(f"preset is {framework!r}; expected one of {', '.join(there)}")
    settings = yaml.safe_load((folder / f"{framework}.yaml").read_text())
    if estimator not in settings:
        raise CPInputError(f"estimator of preset {framework!r} is {estimator!r}; expected one of {', '.join(settings)}")
    return {"estimator": estimator} | settings[estimator]
