"""Real rollouts over real gloo processes: W ranks give the returns of one, bit for bit or (carry) to a float32 unit."""

import pytest
import torch
from helpers import assert_as_good_as_serial

from cp_returns import reference
from cp_returns.context import CPContext, carry, gather
from cp_returns.estimators import reinforce_plus_plus
from cp_returns.kl import approx_kl
from cp_returns.log_probs import slice_responses
from cp_returns.rollouts import Rollouts, read, whole
from cp_returns.scenario import make_layout
from cp_returns.simulate import in_processes

FILES = {"char_lm_logprobs.jsonl": "int4", "rollout_shapes.jsonl": None}
# every layout of semantics.md section 1: slime's zigzag, Megatron's padded one, both contiguous ones
LAYOUTS = [("zigzag", 1), ("zigzag", 4), ("contiguous", 1), ("contiguous", 4), ("contiguous_pack", 1)]
GAMMA, KL_COEF = 0.9999, 0.05


def returns(batch: Rollouts, layout, rank=0, **how) -> list[torch.Tensor]:
    """This rank's returns of a batch, from its own shards of the log-probs."""
    cp = CPContext(layout, rank, **how)
    own, ref, mask = (
        torch.cat(slice_responses(x, layout, rank)) for x in (batch.log_probs, batch.ref_log_probs, batch.loss_masks)
    )
    local = reinforce_plus_plus(
        approx_kl(own, ref, mask),
        torch.tensor(batch.rewards),
        torch.cat(batch.loss_masks),
        cp=cp,
        gamma=GAMMA,
        kl_coef=KL_COEF,
    )
    return list(local.split(layout.lengths(rank).tolist()))


@pytest.fixture(scope="module", params=FILES, ids=[name.removesuffix(".jsonl") for name in FILES])
def batch_and_alone(request, shared_data):
    batch = read(shared_data(request.param), ref=FILES[request.param])
    one = make_layout("zigzag", batch.total_lengths, batch.response_lengths, 1)
    return batch, returns(batch, one)


def test_the_files_are_the_real_ones(shared_data):
    char, shapes = (read(shared_data(name), ref=ref) for name, ref in FILES.items())
    assert (char.num_samples, sum(char.response_lengths), len(set(char.group_ids))) == (24, 226_185, 6)
    assert (shapes.num_samples, sum(shapes.response_lengths)) == (273, 684_715)
    assert "SEEDED" in shapes.note
    assert "SEEDED" not in char.note
    largest = max(float((own - ref).abs().max()) for own, ref in zip(char.log_probs, char.ref_log_probs, strict=True))
    assert round(largest, 1) == 27.9  # nats, as the data's own README says
    ends_masked = sum(not bool(mask[-1]) for mask in shapes.loss_masks)
    assert ends_masked == 174
    assert min(shapes.total_lengths) == 74
    assert max(shapes.total_lengths) == 28_654


def test_one_rank_is_as_good_as_the_float64_oracle(batch_and_alone):
    batch, alone = batch_and_alone
    for i, mask in enumerate(batch.loss_masks):
        kl = torch.where(mask, batch.log_probs[i] - batch.ref_log_probs[i], 0.0)
        exact = reference.reinforce_plus_plus(
            kl.tolist(), batch.rewards[i], mask.tolist(), gamma=GAMMA, kl_coef=KL_COEF
        )
        assert_as_good_as_serial(alone[i].tolist(), exact)


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_every_layout_gives_the_returns_of_one_rank(batch_and_alone, cp_size):
    batch, alone = batch_and_alone
    layouts = [
        make_layout(name, batch.total_lengths, batch.response_lengths, cp_size, multiple=multiple)
        for name, multiple in LAYOUTS
    ]

    def rank_fn(rank, all_gather):
        return [
            [
                torch.cat(returns(batch, layout, rank, all_gather=all_gather, strategy=s)).numpy()
                for s in (gather, carry)
            ]
            for layout in layouts
        ]

    of_ranks = in_processes(rank_fn, cp_size, timeout=240)
    for which, layout in enumerate(layouts):
        gathered, carried = (
            whole(
                [torch.from_numpy(r[which][s]).split(layout.lengths(i).tolist()) for i, r in enumerate(of_ranks)],
                layout,
            )
            for s in (0, 1)
        )
        for i, exact in enumerate(alone):
            assert torch.equal(gathered[i], exact), f"{LAYOUTS[which]}, sample {batch.ids[i]}: gather is not bit-equal"
            allowed = 2.0**-23 * float(exact.abs().max())
            off = float((carried[i].double() - exact.double()).abs().max())
            assert off <= allowed, (
                f"{LAYOUTS[which]}, sample {batch.ids[i]}: carry is off by {off:.3g} of {allowed:.3g}"
            )
