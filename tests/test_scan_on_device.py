"""The scan's code path of a GPU, run on the host: the same bits as the host's own path through numpy."""

import numpy as np
import pytest
import torch

from cp_returns import blocks, masks, scan


@pytest.mark.parametrize("seed", range(12))
def test_both_libraries_give_the_same_bits(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([3, 40, 700]), rng.integers(1, 8)).tolist()
    x = torch.from_numpy(rng.normal(size=sum(lengths))).float()
    decay = [0.9, 0.0, 1.0, torch.from_numpy(rng.random(len(lengths)))][seed % 4]
    places = np.flatnonzero(rng.random(len(x)) < rng.choice([0.01, 0.5]))
    odd = (places, [0.5, torch.from_numpy(rng.random(len(lengths)))][seed // 4 % 2]) if seed % 3 else None
    keep = masks.as_bits(torch.from_numpy(rng.random(len(x)) < 0.6)) if seed % 2 else None
    impulse = (torch.zeros(len(lengths), dtype=torch.int64), torch.from_numpy(rng.normal(size=len(lengths))))
    entering = torch.from_numpy(rng.normal(size=len(lengths)))

    def results():
        how = {"scale": -0.1, "impulse": impulse, "keep": keep, "odd": odd}
        begun = scan.begin(x, lengths, decay, **how)
        heads = begun.heads.clone()
        whole = scan.scan(x, lengths, decay, **how, dtype=torch.float32)
        return heads, scan.finish(begun, entering, dtype=torch.float32), whole

    host = results()
    for module in (scan, blocks, masks):
        monkeypatch.setattr(module, "native", lambda tensor: tensor)
    for on_host, on_device in zip(host, results(), strict=True):
        assert torch.equal(on_host, on_device)
