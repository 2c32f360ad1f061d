"""One thread a process, the same hypothesis examples on every run, and where the shared data lies."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "derandomized",
    deadline=None,  # the first example pays for imports
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("derandomized")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_data():
    """`shared_data("char_lm_logprobs.jsonl")` is the path of that real data; where it is absent the test is NOT RUN."""

    def path_of(name: str) -> Path:
        path = SHARED / "data" / name
        if not path.exists():
            pytest.skip(f"NOT RUN: the real data {name} is not beside this checkout")
        return path

    return path_of
