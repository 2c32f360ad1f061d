"""ReturnsConfig: what to compute. One table says which options an estimator uses, and with which defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from cp_returns.baselines import CENTERS, SCALES, SINGLETONS
from cp_returns.clocks import CLOCKS
from cp_returns.context import carry, gather
from cp_returns.errors import CPInputError
from cp_returns.estimators import MASKED_VALUES
from cp_returns.layout import contiguous, contiguous_pack, zigzag
from cp_returns.whiten import EPS_MODES
from cp_returns.whiten import options as whiten_options

LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous, "contiguous_pack": contiguous_pack}
STRATEGIES = {"gather": gather, "carry": carry}

_KL = {"kl_coef": 0.0, "kl": None, "kl_clamp": None}
_GROUP = {"group_center": "mean", "group_scale": "none", "group_ddof": 1, "group_eps": 1e-6, "singleton": "zero"}
_WHITEN = {f"whiten_{key}": value for key, value in whiten_options().items()} | {"whiten_weight": "token"}
# Which options an estimator uses, with its defaults. A named group estimator is a combination of options.
ESTIMATORS: Mapping[str, Mapping[str, object]] = {
    "reinforce_plus_plus": {"gamma": 1.0, "clock": "token", **_KL, **_GROUP, "group_center": None},
    "reinforce_plus_plus_baseline": {**_KL, **_GROUP},
    "gae": {
        "gamma": 1.0,
        "lam": 1.0,
        "lam_value": None,
        "lam_alpha": None,
        "clock": "trainable",
        "masked_values": "zero",
        **_KL,
    },
    "remax": dict(_KL),
    "grpo": {**_GROUP, "group_scale": "std"},
    "dr_grpo": dict(_GROUP),
    "rloo": {**_GROUP, "group_center": "loo"},
    "opo": {**_GROUP, "group_center": "opo"},
}


@dataclass(frozen=True)
class ReturnsConfig:
    """What to compute. None means the estimator's default; an option that the estimator does not use must stay None.

    estimator: reinforce_plus_plus, reinforce_plus_plus_baseline, gae, remax, grpo, dr_grpo, rloo, opo.
    gamma, lam, lam_value, lam_alpha, clock, masked_values, kl_coef: as in `estimators`. With `group_center` set,
    reinforce_plus_plus takes the group's advantage as its reward (OpenRLHF's rloo and group_norm).
    kl, kl_clamp: the estimator ("k1", "k2", "k3") when log_probs and ref_log_probs are given in place of kl.
    group_*, singleton: as in `group_advantage`. whiten and whiten_*: as in `whiten`; whiten_weight "token" or
    "sequence".
    layout, multiple: "zigzag", "contiguous" or "contiguous_pack", as in `layout`. strategy: "gather" (bit-exact) or
    "carry" (one small message). agreement: "full" or "off", the same on all ranks. nonfinite: "error" or "propagate".

    Raises CPInputError for an unknown word and for an option that would be ignored.
    """

    estimator: str = "reinforce_plus_plus"
    gamma: float | None = None
    lam: float | None = None
    lam_value: float | None = None
    lam_alpha: float | None = None
    clock: str | None = None
    masked_values: str | None = None
    kl_coef: float | None = None
    kl: str | None = None
    kl_clamp: float | None = None
    group_center: str | None = None
    group_scale: str | None = None
    group_ddof: int | None = None
    group_eps: float | None = None
    singleton: str | None = None
    whiten: bool = False
    whiten_ddof: int | None = None
    whiten_eps: float | None = None
    whiten_eps_mode: str | None = None
    whiten_center: bool | None = None
    whiten_shift_mean: bool | None = None
    whiten_scale: bool | None = None
    whiten_weight: str | None = None
    layout: str = "zigzag"
    multiple: int = 1
    strategy: str = "gather"
    agreement: str = "full"
    nonfinite: str = "error"

    def __post_init__(self):
        for name, allowed in (
            ("estimator", ESTIMATORS),
            ("layout", LAYOUTS),
            ("strategy", STRATEGIES),
            ("agreement", ("full", "off")),
            ("nonfinite", ("error", "propagate")),
            ("clock", (None, *CLOCKS)),
            ("masked_values", (None, *MASKED_VALUES)),
            ("kl", (None, "k1", "k2", "k3")),
            ("group_center", (None, *CENTERS)),
            ("group_scale", (None, *SCALES)),
            ("group_ddof", (None, 0, 1)),
            ("singleton", (None, *SINGLETONS)),
            ("whiten", (False, True)),
            *((f"whiten_{name}", (None, False, True)) for name in ("center", "shift_mean", "scale")),
            ("whiten_weight", (None, "token", "sequence")),
            ("whiten_ddof", (None, 0) if self.whiten_weight == "sequence" else (None, 0, 1)),
            ("whiten_eps_mode", (None, *EPS_MODES)),
        ):
            value = getattr(self, name)
            if not isinstance(value, str | int | None) or value not in allowed:
                words = ", ".join(repr(word) for word in allowed if word is not None)
                raise CPInputError(f"{name} is {value!r}; expected one of {words}")
        if not isinstance(self.multiple, int) or self.multiple < 1:
            raise CPInputError(f"multiple is {self.multiple!r}; expected at least 1, a whole number")
        for name in ("whiten_eps", "group_eps", "kl_clamp"):
            value = getattr(self, name)
            positive = name == "kl_clamp"
            if value is not None and not (
                isinstance(value, int | float) and value >= 0 and (value > 0 or not positive)
            ):
                wanted = "a positive number" if positive else "a number that is at least 0"
                raise CPInputError(f"{name} is {value!r}; expected {wanted}")
        used = self.defaults()
        for name in (*_OPTIONS, *_WHITEN):
            if getattr(self, name) is not None and name not in used:
                why = "whiten=False" if name in _WHITEN else f"estimator {self.estimator!r}"
                raise CPInputError(
                    f"{name} is {getattr(self, name)!r}, which {why} does not use; expected it to be left out"
                )
        if self.masked_values == "use" and self["clock"] != "token":
            raise CPInputError(
                "masked_values is 'use'; expected clock 'token', the only one for which a masked token is a step"
            )
        for names, unused, why in (
            (_GROUP, self["group_center"] is None, "without group_center"),
            (("group_ddof", "group_eps"), self["group_scale"] == "none", "with group_scale 'none'"),
            (("whiten_ddof", "whiten_eps", "whiten_eps_mode"), self.whiten_scale is False, "with whiten_scale=False"),
            (("kl_clamp",), self.kl is None, "without kl, the estimator of the KL"),
            (("lam",), self.lam_alpha is not None, "with lam_alpha, which takes its place"),
            (("whiten_shift_mean",), self.whiten_center is False, "with whiten_center=False, which takes no mean away"),
            (("whiten_scale",), self.whiten_center is False, "with whiten_center=False, which only scales"),
        ):
            for name in names:
                if unused and getattr(self, name) is not None:
                    raise CPInputError(f"{name} is {getattr(self, name)!r}, which is not used {why}")

    def defaults(self) -> dict[str, object]:
        """The options that are used, with their defaults."""
        return dict(ESTIMATORS[self.estimator]) | (_WHITEN if self.whiten else {})

    def __getitem__(self, name: str) -> Any:
        """The value of an option, its default where it was left out; None where the estimator does not use it."""
        return self.settings[name]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every option by name, defaults filled in."""
        defaults = self.defaults()
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: defaults.get(name) if value is None else value for name, value in given.items()}

    @cached_property
    def shown(self) -> dict[str, str]:
        """`settings` as ranks compare them, once for all calls."""
        return {name: str(value) for name, value in self.settings.items()}

    @cached_property
    def whiten_options(self) -> dict[str, Any]:
        return {name: self[f"whiten_{name}"] for name in whiten_options()}

    def group_options(self) -> dict[str, Any]:
        names = ("center", "scale", "ddof", "eps")
        return {name: self[f"group_{name}"] for name in names} | {"singleton": self["singleton"]}

    @classmethod
    def preset(cls, framework: str, *, estimator: str, **changes) -> "ReturnsConfig":
        """The settings with which this library gives that framework's numbers (`configs/presets/*.yaml`), with
        `changes`.

        framework: slime, verl, openrlhf, nemo_rl, miles or trl. whiten=False and kl=None take what the preset says of
        the whitening and of the KL along. Needs PyYAML. Raises CPInputError naming what there is.
        """
        from cp_returns.presets import load

        without = {"whiten": _WHITEN, "kl": ("kl_clamp",)}
        gone = {name for key, names in without.items() if key in changes and not changes[key] for name in names}
        settings = {name: value for name, value in load(framework, estimator).items() if name not in gone}
        return cls(**(settings | changes))


_OPTIONS = tuple(dict.fromkeys(name for options in ESTIMATORS.values() for name in options))
