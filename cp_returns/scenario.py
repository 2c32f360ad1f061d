"""Scenario files: one YAML mapping that says which returns to compute, on which rollouts, under which layout.

    layout: zigzag            # zigzag | contiguous | contiguous_pack
    cp_size: 4
    multiple: 1               # each sample is padded to a multiple of pieces * multiple (contiguous_pack: the stream)
    gamma: 1.0
    clock: token              # token | trainable | turn
    kl: k1                    # k1 | k2 | k3, where the rollouts have log-probs
    kl_coef: 0.01
    strategy: gather          # whose returns --out writes; the report has both
    rollouts: sample_rollouts.jsonl   # beside this file
    ref: int4                 # picks ref_logp_int4 in files with several references
    seed: 0                   # for log-probs that the rollouts lack

Every key has a default but `rollouts`, which --rollouts may give instead. An unknown key is an error.
"""

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cp_returns.layout import Layout, contiguous, contiguous_pack, zigzag
from cp_returns.rollouts import Rollouts

CHOICES = {
    "layout": ("zigzag", "contiguous", "contiguous_pack"),
    "clock": ("token", "trainable", "turn"),
    "kl": ("k1", "k2", "k3"),
    "strategy": ("gather", "carry"),
}


class ScenarioError(ValueError):
    """A scenario that cannot be run: names the file, the key, what was given and what was expected."""


@dataclass(frozen=True)
class Scenario:
    """The settings of one `simulate`; see the module's docstring."""

    layout: str = "zigzag"
    cp_size: int = 4
    multiple: int = 1
    gamma: float = 1.0
    clock: str = "token"
    kl: str = "k1"
    kl_coef: float = 0.01
    strategy: str = "gather"
    rollouts: str | None = None
    ref: str | None = None
    seed: int = 0

    def layout_of(self, batch: Rollouts, cp_size: int) -> Layout:
        """The layout of a batch over `cp_size` ranks."""
        return make_layout(self.layout, batch.total_lengths, batch.response_lengths, cp_size, multiple=self.multiple)


def make_layout(name: str, total_lengths, response_lengths, cp_size: int, *, multiple: int = 1) -> Layout:
    """A layout by name; contiguous_pack pads its stream to a multiple of cp_size * multiple."""
    if name == "contiguous_pack":
        unit = cp_size * multiple
        stream_length = -(-sum(total_lengths) // unit) * unit
        return contiguous_pack(total_lengths, response_lengths, cp_size, stream_length=stream_length)
    per_sample = {"zigzag": zigzag, "contiguous": contiguous}[name]
    return per_sample(total_lengths, response_lengths, cp_size, multiple=multiple)


def load(path: str | Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ScenarioError: no such file, not a YAML mapping, an unknown key, or a value of the wrong kind.
    """
    import yaml

    path = Path(path)
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(settings, dict):
        raise ScenarioError(f"{path}: is {type(settings).__name__}; expected a mapping of settings")
    known = [field.name for field in fields(Scenario)]
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ScenarioError(f"{path}, key '{key}': unknown; expected one of {', '.join(near or known)}")
        _check(key, value, f"{path}, key '{key}'")
    if settings.get("rollouts") is not None:
        settings["rollouts"] = str(path.parent / settings["rollouts"])
    return Scenario(**settings)


def _check(key: str, value: Any, at: str) -> None:
    if key in CHOICES:
        if value not in CHOICES[key]:
            raise ScenarioError(f"{at}: is {value!r}; expected one of {', '.join(CHOICES[key])}")
    elif key in ("rollouts", "ref"):
        if not (value is None or isinstance(value, str)):
            raise ScenarioError(f"{at}: is {value!r}; expected a name")
    elif key in ("gamma", "kl_coef"):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or (key == "gamma" and not 0 <= value <= 1):
            raise ScenarioError(f"{at}: is {value!r}; expected a number{' in [0, 1]' if key == 'gamma' else ''}")
    elif not isinstance(value, int) or isinstance(value, bool) or value < (0 if key == "seed" else 1):
        raise ScenarioError(f"{at}: is {value!r}; expected an integer of at least {0 if key == 'seed' else 1}")
