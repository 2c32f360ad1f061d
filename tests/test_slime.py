"""slime's functions: its signatures, its numbers by formulas of their own, the same bits on 1, 2, 3 and 4 ranks."""

import inspect
import itertools
import random
import re
import threading
from types import SimpleNamespace

import frameworks
import numpy as np
import pytest
import torch

from cp_returns import collectives, groups
from cp_returns.compat import slime
from cp_returns.errors import CPInputError
from cp_returns.simulate import RankFailure, in_processes, in_threads

SIGNATURES = {
    "get_reinforce_plus_plus_returns": "rewards kl loss_masks response_lengths total_lengths kl_coef gamma",
    "get_reinforce_plus_plus_baseline_advantages": "rewards kl loss_masks kl_coef",
    "get_grpo_returns": "rewards kl",
    "get_advantages_and_returns_batch": "total_lengths response_lengths values_list rewards_list gamma lambd chunked",
    "chunked_gae": "rewards values gamma lambd chunk_size",
    "vanilla_gae": "rewards values gamma lambd",
    "chunked_discounted_returns": "rewards discount chunk_size",
    "all_gather_with_cp": "tensor total_length response_length",
    "slice_log_prob_with_cp": "log_prob total_length response_length qkv_format max_token_len",
    "get_logits_and_tokens_offset_with_cp": "total_length response_length qkv_format max_seq_len cp_rank cp_size",
    "distributed_masked_whiten": "values mask process_group shift_mean epsilon",
    "advantages": "args rollout_data",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_slimes(name):
    assert " ".join(inspect.signature(getattr(slime, name)).parameters) == SIGNATURES[name]


# rectangles: the seed's own matrix


def serial(rewards, discount):
    """G_t = r_t + discount * G_{t+1}, one row at a time in Python floats."""
    rows = []
    for row in rewards.double().tolist():
        g, out = 0.0, []
        for r in reversed(row):
            g = r + discount * g
            out.append(g)
        rows.append(out[::-1])
    return torch.tensor(rows, dtype=torch.float64).view(rewards.shape)


def close(actual, expected, dtype):
    """As near as one rounding of the float64 result, by the largest number of the row."""
    bound = torch.finfo(dtype).eps * expected.abs().amax() if expected.numel() else 0.0
    # the float64 serial loop itself errs by up to T roundings
    slack = 1e-12 * (expected.abs().amax() if expected.numel() else 0.0)
    return bool(((actual.double() - expected).abs() <= bound + slack).all())


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (3, 128), (3, 129), (3, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_discounted_returns_equal_the_serial_loop(discount, shape, dtype):
    rewards = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual = slime.chunked_discounted_returns(rewards, discount)
    assert actual.dtype == dtype
    assert actual.shape == shape
    assert close(actual, serial(rewards, discount), dtype)


@pytest.mark.parametrize("extreme", ["large", "alternating", "spike"])
def test_discounted_returns_of_extreme_rewards(extreme):
    t = torch.arange(1000.0)
    rewards = {
        "large": torch.full((1000,), 1e6),
        "alternating": torch.where(t % 2 == 0, 1e6, -1e6),
        "spike": torch.where(t == 700, 1e6, 0.0),
    }[extreme][None]
    for discount in (0.0, 0.5, 0.99, 1.0):
        actual = slime.chunked_discounted_returns(rewards, discount, chunk_size=64)
        assert close(actual, serial(rewards, discount), torch.float32)


def test_right_padding_stays_zero_and_does_not_reach_the_row():
    lengths = [3, 129, 511]
    rewards = torch.zeros(3, 511)
    generator = torch.Generator().manual_seed(0)
    for row, n in zip(rewards, lengths, strict=True):
        row[:n] = torch.randn(n, generator=generator)
    actual = slime.chunked_discounted_returns(rewards, 0.99)
    for i, n in enumerate(lengths):
        assert close(actual[i : i + 1, :n], serial(rewards[i : i + 1, :n], 0.99), torch.float32)
        assert torch.count_nonzero(actual[i, n:]) == 0


def test_infinity_and_nan_reach_earlier_tokens_only():
    inf = slime.chunked_discounted_returns(torch.tensor([[torch.inf, 0.0, 0.0, 1.0]]), 0.9)
    torch.testing.assert_close(inf, torch.tensor([[torch.inf, 0.81, 0.9, 1.0]]))
    rewards = torch.ones(2, 300)
    rewards[0, 0] = torch.nan
    assert slime.chunked_discounted_returns(rewards, 0.9).isnan().sum() == 1


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_and_vanilla_gae_equal_the_formula(length, dtype):
    generator = torch.Generator().manual_seed(length)
    rewards, values = (torch.randn(3, length, generator=generator, dtype=dtype) for _ in range(2))
    following = torch.cat([values[:, 1:].double(), torch.zeros(3, min(length, 1), dtype=torch.float64)], dim=1)
    advantages = serial(rewards.double() + 0.99 * following - values.double(), 0.99 * 0.95)
    for gae in (slime.chunked_gae, slime.vanilla_gae):
        actual = gae(rewards, values, gamma=0.99, lambd=0.95)
        assert [x.dtype for x in actual] == [dtype, dtype]
        assert close(actual[0], advantages, dtype)
        assert close(actual[1], advantages + values.double(), dtype)


def test_gae_by_hand():
    """A_2 = 2 - 1; A_1 = 0 + 1 - 0 + .5; A_0 = 0 + 0 - .5 + .75."""
    out = slime.chunked_gae(torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[0.5, 0.0, 1.0]]), 1.0, 0.5)
    assert out[0].tolist() == [[0.25, 1.5, 1.0]]
    assert out[1].tolist() == [[0.75, 1.5, 2.0]]


def test_rectangles_are_checked():
    with pytest.raises(CPInputError, match=r"\[3\]; expected \[batch, tokens\]"):
        slime.chunked_discounted_returns(torch.zeros(3), 0.9)
    with pytest.raises(CPInputError, match=r"\[1, 3\], \[1, 2\]"):
        slime.chunked_gae(torch.zeros(1, 3), torch.zeros(1, 2), 0.9, 0.9)


# who owns what, by the rule itself: position q is in chunk q // ceil(total / 2W), rank r has chunks r and 2W - 1 - r


def owned(total, response, size, rank):
    """The response tokens of a rank, by looking at each position."""
    chunk = -(-total // (2 * size))
    pieces = (rank, 2 * size - 1 - rank)
    return [j for j in range(response) if (total - response - 1 + j) // chunk in pieces]


def test_offsets_name_the_owned_tokens():
    for size in (2, 3, 4):
        for total in range(2, 40):
            for response in range(1, total):
                for rank in range(size):
                    chunk, chunks, logits, tokens = slime.get_logits_and_tokens_offset_with_cp(
                        total, response, cp_rank=rank, cp_size=size
                    )
                    assert chunk == -(-total // (2 * size))
                    other = 2 * size - 1 - rank
                    assert chunks == ((rank * chunk, (rank + 1) * chunk), (other * chunk, (other + 1) * chunk))
                    prompt = total - response
                    assert [q - prompt for a, b in tokens for q in range(a, b)] == owned(total, response, size, rank)
                    assert [q + 1 for a, b in logits for q in range(a, b)] == [
                        q for a, b in tokens for q in range(a, b)
                    ]
                    assert all(a < b or (a, b) == (0, 0) for a, b in logits + tokens)


def test_offsets_by_hand():
    """T = 10, R = 9, W = 2: chunks of 3; rank 0 predicts from logits 0..2 (tokens 1..3), rank 1 from 3..8."""
    rank0 = (3, ((0, 3), (9, 12)), ((0, 3), (0, 0)), ((1, 4), (0, 0)))
    rank1 = (3, ((3, 6), (6, 9)), ((3, 6), (6, 9)), ((4, 7), (7, 10)))
    assert slime.get_logits_and_tokens_offset_with_cp(10, 9, cp_rank=0, cp_size=2) == rank0
    assert slime.get_logits_and_tokens_offset_with_cp(10, 9, cp_rank=1, cp_size=2) == rank1


def test_offsets_of_a_padded_batch():
    """bshd, width 16, W = 2: chunks of 4; T = 8, R = 5 has logits 2..6: rank 0 has 2 and 3, rank 1 has 4..6."""
    for rank, windows in ((0, ((2, 4), (0, 0))), (1, ((4, 7), (0, 0)))):
        chunk, _, logits, _ = slime.get_logits_and_tokens_offset_with_cp(8, 5, "bshd", 16, cp_rank=rank, cp_size=2)
        assert (chunk, logits) == (4, windows)
    with pytest.raises(CPInputError, match="needs the batch's width"):
        slime.get_logits_and_tokens_offset_with_cp(8, 5, "bshd", cp_rank=0, cp_size=2)


# one process without Megatron


def test_reinforce_plus_plus_as_slime_calls_it_without_cp():
    """Lists whose lengths do not fit, which slime reads only under context parallelism; worked in Python floats."""
    kl = [torch.tensor([0.2, 0.1, 0.3, 0.4, 0.5]), torch.tensor([0.4, 0.2, 0.1])]
    masks = [torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])]
    actual = slime.get_reinforce_plus_plus_returns(
        rewards=torch.tensor([2.0, -1.0]),
        kl=kl,
        loss_masks=masks,
        response_lengths=[3, 3],
        total_lengths=[5, 3],
        kl_coef=0.1,
        gamma=0.99,
    )
    third = 2 - 0.04
    second = -0.03 + 0.99 * third
    first = -0.01 + 0.99 * second
    torch.testing.assert_close(actual[0], torch.tensor([0.99 * first, first, second, third, 0.0]))
    torch.testing.assert_close(
        actual[1], torch.tensor([-0.04 + 0.99 * (-0.02 - 0.99 * 1.01), -0.02 - 0.99 * 1.01, -1.01])
    )


def test_scalars_spread_in_the_dtype_of_kl():
    kl = [torch.tensor([0.5, -1.0], dtype=torch.bfloat16), torch.tensor([], dtype=torch.float64), torch.tensor([9.0])]
    rewards = torch.tensor([2.0, 3.0, torch.nan])
    grpo = slime.get_grpo_returns(rewards, kl)
    assert [x.tolist() for x in grpo] == [[2.0, 2.0], [], [0.0]]
    baseline = slime.get_reinforce_plus_plus_baseline_advantages(rewards, kl, None, 0.5)
    assert [x.tolist() for x in baseline] == [[1.75, 2.5], [], [0.0]]
    assert [x.dtype for x in grpo] == [x.dtype for x in baseline] == [k.dtype for k in kl]
    newer = slime.get_reinforce_plus_plus_baseline_advantages(rewards, kl, 0.5)
    assert [x.tolist() for x in newer] == [x.tolist() for x in baseline]
    for coef in (np.float32(0.5), torch.tensor(0.5)):
        same = slime.get_reinforce_plus_plus_baseline_advantages(rewards, kl, kl_coef=coef)
        assert [x.tolist() for x in same] == [x.tolist() for x in baseline]
    for absent in (None, [torch.ones(2)] * 3):
        with pytest.raises(TypeError, match="kl_coef"):
            slime.get_reinforce_plus_plus_baseline_advantages(rewards, kl, absent)
    with pytest.raises(TypeError, match="kl_coef"):
        slime.get_reinforce_plus_plus_baseline_advantages(rewards, kl)
    for given, text in (([1.0, 2.0], r"rewards has shape \[2\]; expected \[3\]"), (None, "rewards is absent")):
        with pytest.raises(CPInputError, match=text):
            slime.get_grpo_returns(given, kl)


def test_empty_lists_give_empty_lists():
    assert slime.get_reinforce_plus_plus_returns(torch.zeros(0), [], [], [], [], 0.1, 0.9) == []
    assert slime.get_reinforce_plus_plus_baseline_advantages(torch.zeros(0), [], [], 0.1) == []
    assert slime.get_grpo_returns(torch.zeros(0), []) == []
    assert slime.get_advantages_and_returns_batch([], [], [], [], 0.9, 0.9) == ([], [])
    assert slime.chunked_discounted_returns(torch.zeros(0, 5), 0.9).shape == (0, 5)
    assert slime.chunked_gae(torch.zeros(0, 5), torch.zeros(0, 5), 0.9, 0.9)[0].shape == (0, 5)


def test_no_graph_no_alias_no_change():
    kl = [torch.randn(5, requires_grad=True), torch.randn(3, requires_grad=True)]
    masks, rewards = [torch.ones(5), torch.tensor([1, 0, 1])], torch.tensor([1.0, 2.0], requires_grad=True)
    before = [x.detach().clone() for x in (*kl, *masks, rewards)]
    rectangle = torch.randn(2, 4, requires_grad=True)
    outputs = [
        *slime.get_reinforce_plus_plus_returns(rewards, kl, masks, [5, 3], [6, 4], 0.1, 0.9),
        *slime.get_reinforce_plus_plus_baseline_advantages(rewards, kl, masks, 0.1),
        *slime.get_grpo_returns(rewards, kl),
        *itertools.chain(*slime.get_advantages_and_returns_batch([6, 4], [5, 3], kl, kl, 0.9, 0.9)),
        *slime.chunked_gae(rectangle, rectangle, 0.0, 0.0),
        *slime.vanilla_gae(rectangle, rectangle, 0.0, 0.0),
        slime.chunked_discounted_returns(rectangle, 0.0),
        slime.distributed_masked_whiten(kl[0], masks[0]),
    ]
    inputs = [*kl, *masks, rewards, rectangle]
    assert not any(x.requires_grad for x in outputs)
    memory = [x.untyped_storage().data_ptr() for x in outputs]
    assert not {x.untyped_storage().data_ptr() for x in inputs} & set(memory)
    for x in outputs:
        x.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (*kl, *masks, rewards), strict=True))


def test_masked_tokens_reach_nothing():
    """Three masked slots hold what they like; slime's own masked values, gamma times the next return, are kept."""
    masks = [torch.tensor([0, 1, 0, 1, 0])]
    junk = [torch.nan, torch.inf, 3e38]
    results = []
    for a in junk:
        kl = [torch.tensor([a, 1.0, -a, 2.0, a])]
        results += slime.get_reinforce_plus_plus_returns(torch.tensor([4.0]), kl, masks, [5], [9], 0.5, 0.5)
    assert results[0].tolist() == [0.125, 0.25, 1.5, 3.0, 0.0]
    assert all(torch.equal(results[0], x) for x in results)


def test_fully_masked_and_unscored_samples_give_zeros():
    kl, masks = [torch.ones(3)] * 3, [torch.zeros(3), torch.ones(3), torch.ones(3)]
    out = slime.get_reinforce_plus_plus_returns(
        torch.tensor([5.0, torch.nan, 1.0]), kl, masks, [3] * 3, [5] * 3, 1.0, 1.0
    )
    assert [x.tolist() for x in out] == [[0, 0, 0], [0, 0, 0], [-2, -1, 0]]


def test_bad_lists_are_named():
    kl, masks = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.ones(3)]
    with pytest.raises(CPInputError, match=r"sample 1, shape of loss_masks is \[3\]; expected \[2\]"):
        slime.get_reinforce_plus_plus_returns(torch.ones(2), kl, masks, [3, 2], [5, 4], 1.0, 1.0)
    with pytest.raises(CPInputError, match="number of rewards_list is 1; expected 2"):
        slime.get_advantages_and_returns_batch([5, 4], [3, 2], kl, kl[:1], 1.0, 1.0)
    with pytest.raises(CPInputError, match="gamma"):
        slime.get_reinforce_plus_plus_returns(torch.ones(2), kl, kl, [3, 2], [5, 4], 1.0, 1.5)
    with pytest.raises(CPInputError, match=r"loss_mask is 0\.5"):
        slime.get_reinforce_plus_plus_returns(torch.ones(2), kl, [kl[0], kl[1] / 2], [3, 2], [5, 4], 1.0, 1.0)


def test_whiten_by_hand():
    """1, 2, 3: mean 2, unbiased variance 1; the masked 9 is shifted and scaled too, as in slime."""
    x, mask = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0])
    torch.testing.assert_close(slime.distributed_masked_whiten(x, mask), torch.tensor([-1.0, 0.0, 1.0, 7.0]))
    kept_mean = slime.distributed_masked_whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept_mean, torch.tensor([1.0, 2.0, 3.0, 9.0]))
    half = slime.distributed_masked_whiten(x, mask, epsilon=3.0)
    torch.testing.assert_close(half, torch.tensor([-0.5, 0.0, 0.5, 3.5]))
    assert slime.distributed_masked_whiten(x, torch.zeros(4)).tolist() == [0.0] * 4
    assert slime.distributed_masked_whiten(torch.full((50_000,), 0.7), torch.ones(50_000)).abs().max() == 0.0
    bfloat = slime.distributed_masked_whiten(x.bfloat16(), mask.bool())
    assert bfloat.dtype == torch.bfloat16
    spoilt = slime.distributed_masked_whiten(torch.tensor([1.0, 2.0, 3.0, torch.nan]), mask)
    torch.testing.assert_close(spoilt, torch.tensor([-1.0, 0.0, 1.0, torch.nan]), equal_nan=True)
    with pytest.raises(CPInputError, match=r"token 1, mask is 0.5"):
        slime.distributed_masked_whiten(x, torch.tensor([1, 0.5, 1, 1]))
    with pytest.raises(CPInputError, match="shape of mask"):
        slime.distributed_masked_whiten(x, torch.ones(3))
    with pytest.raises(CPInputError, match=r"shape of mask is \[3, 2\]; expected \[2, 3\]"):
        slime.distributed_masked_whiten(torch.ones(2, 3), torch.ones(3, 2))
    for epsilon in (-2.0, torch.nan, None):
        with pytest.raises(CPInputError, match=f"epsilon is {epsilon}; expected a number that is at least 0"):
            slime.distributed_masked_whiten(x, mask, epsilon=epsilon)


def test_one_rank_gathers_and_slices_copies():
    x = torch.randn(4, requires_grad=True)
    whole = slime.all_gather_with_cp(x, 9, 4)
    assert torch.equal(whole, x)
    (whole * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
    numbers = [1.0, 2.0]
    assert slime.slice_log_prob_with_cp(numbers, 9, 2) == numbers
    assert slime.slice_log_prob_with_cp(numbers, 9, 2) is not numbers
    with pytest.raises(CPInputError, match="expected response_length = 3"):
        slime.slice_log_prob_with_cp(numbers, 9, 3)


# real Megatron groups over gloo processes

SHAPES = [(6, 1), (40, 3), (33, 17), (10, 9), (29, 20), (12, 7), (301, 260), (3, 2)]  # total, response


def rollout(seed=0):
    """Gaps, masked tails, a one-token response, a prompt-heavy one, a fully masked one; odd lengths."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.tensor([int(rng.random() < 0.7) for _ in range(r)]) for _, r in SHAPES]
    masks[0][:], masks[4][-6:], masks[5][:] = 1, 0, 0
    draw = lambda: [torch.randn(r, generator=generator) for _, r in SHAPES]
    return SimpleNamespace(
        total_lengths=[t for t, _ in SHAPES],
        response_lengths=[r for _, r in SHAPES],
        masks=masks,
        kl=draw(),
        values=draw(),
        token_rewards=draw(),
        rewards=torch.randn(len(SHAPES), generator=generator),
    )


def all_functions(batch, take):
    """Every function that looks at a group, on the tokens that `take(full tensor, sample)` keeps."""
    local = lambda tensors: [take(x, i) for i, x in enumerate(tensors)]
    kl, masks = local(batch.kl), local(batch.masks)
    lengths = batch.total_lengths, batch.response_lengths
    returns = slime.get_reinforce_plus_plus_returns(
        batch.rewards, kl, batch.masks, batch.response_lengths, batch.total_lengths, 0.3, 0.95
    )
    advantages, targets = slime.get_advantages_and_returns_batch(
        *lengths, local(batch.values), local(batch.token_rewards), 0.97, 0.9
    )
    white = slime.distributed_masked_whiten(torch.cat(returns), torch.cat(masks))
    return SimpleNamespace(
        returns=returns,
        advantages=advantages,
        targets=targets,
        white=list(white.split([len(k) for k in kl])),
    )


def one_rank_of(size):
    batch = rollout()
    lengths = list(zip(batch.total_lengths, batch.response_lengths, strict=True))

    def rank_of(rank, all_gather):
        mine = [torch.tensor(owned(t, r, size, rank), dtype=torch.long) for t, r in lengths]
        counted = []
        real = collectives._all_gather
        collectives._all_gather = lambda *args, **kwargs: (counted.append(1), real(*args, **kwargs))[1]
        out = all_functions(batch, lambda x, i: x[mine[i]])
        collectives._all_gather = real
        out.collectives = len(counted)
        out.sliced = [slime.slice_log_prob_with_cp(x, t, r) for x, (t, r) in zip(batch.kl, lengths, strict=True)]
        out.sliced_list = [
            slime.slice_log_prob_with_cp(x.tolist(), t, r) for x, (t, r) in zip(batch.kl, lengths, strict=True)
        ]
        out.offsets = slime.get_logits_and_tokens_offset_with_cp(33, 17)
        out.gathered, out.gradients, out.graphs = [], [], []
        for i, (t, r) in enumerate(lengths):
            part = batch.kl[i].double()[mine[i]].clone().requires_grad_(len(mine[i]) > 0)
            whole = slime.all_gather_with_cp(part, t, r)
            out.graphs.append(whole.requires_grad)
            (whole.square() * weight(rank, r)).sum().backward()
            out.gathered.append(whole.detach())
            out.gradients.append(part.grad if part.grad is not None else torch.zeros(0, dtype=torch.float64))
            with torch.no_grad():
                assert not slime.all_gather_with_cp(part, t, r).requires_grad
        out.two_columns = slime.all_gather_with_cp(torch.stack([batch.kl[6][mine[6]]] * 2, dim=1), *lengths[6]).detach()
        with torch.no_grad():
            out.integers = slime.all_gather_with_cp(batch.masks[6][mine[6]], *lengths[6])
        return out

    return rank_of


def weight(rank, response):
    return torch.arange(1.0, response + 1, dtype=torch.float64) * (rank + 1)


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    return request.param, in_processes(one_rank_of(request.param), request.param, megatron=True)


def whole_of(ranks, name, sample):
    size, results = ranks
    total, response = SHAPES[sample]
    dtype = getattr(results[0], name)[sample].dtype
    full = torch.full((response,), torch.nan, dtype=dtype)
    for rank, result in enumerate(results):
        full[owned(total, response, size, rank)] = getattr(result, name)[sample]
    return full


@pytest.mark.parametrize("name", ["returns", "advantages", "targets"])
def test_all_ranks_together_have_the_bits_of_one(ranks, name):
    alone = getattr(all_functions(rollout(), lambda x, i: x), name)
    for i in range(len(SHAPES)):
        assert torch.equal(whole_of(ranks, name, i), alone[i])


def test_all_ranks_whiten_alike(ranks):
    alone = all_functions(rollout(), lambda x, i: x).white
    for i in range(len(SHAPES)):
        torch.testing.assert_close(whole_of(ranks, "white", i), alone[i], rtol=0, atol=1e-6)


def test_one_rank_has_the_numbers_of_the_formulas():
    batch = rollout()
    out = all_functions(batch, lambda x, i: x)
    for i, (_, r) in enumerate(SHAPES):
        mask = batch.masks[i].bool()
        x = torch.where(mask, -0.3 * batch.kl[i].double(), 0.0)
        if mask.any():
            x[int(mask.nonzero()[-1])] += batch.rewards[i].double()
        expected = serial(x[None], 0.95)
        assert close(out.returns[i][None], expected, torch.float32)
        v = batch.values[i].double()
        delta = batch.token_rewards[i].double() + 0.97 * torch.cat([v[1:], torch.zeros(1, dtype=torch.float64)]) - v
        a = serial(delta[None], 0.97 * 0.9)[0]
        assert close(out.advantages[i], a, torch.float32)
        assert (out.targets[i].double() - a - v).abs().max() <= 2**-23 * max(a.abs().max(), v.abs().max())
        assert len(out.returns[i]) == r


def test_a_batch_is_one_data_collective(ranks):
    """Returns and GAE: agreement and gather each; whitening: one. The same on every rank, whatever it owns."""
    _, results = ranks
    assert [r.collectives for r in results] == [5] * len(results)


def test_slices_are_what_a_rank_owns(ranks):
    size, results = ranks
    batch = rollout()
    for rank, result in enumerate(results):
        for i, (total, response) in enumerate(SHAPES):
            mine = owned(total, response, size, rank)
            assert torch.equal(result.sliced[i], batch.kl[i][mine])
            assert result.sliced_list[i] == [batch.kl[i].tolist()[j] for j in mine]
        assert result.offsets == slime.get_logits_and_tokens_offset_with_cp(33, 17, cp_rank=rank, cp_size=size)


def test_gathered_responses_and_their_gradient_equal_one_ranks(ranks):
    """One rank has the loss of all ranks, the sum of weight * x^2 over them, by autograd without any collective."""
    size, results = ranks
    batch = rollout()
    for i, (total, response) in enumerate(SHAPES):
        x = batch.kl[i].double().requires_grad_()
        sum((x.square() * weight(rank, response)).sum() for rank in range(size)).backward()
        for rank, result in enumerate(results):
            assert result.graphs[i]
            assert torch.equal(result.gathered[i], batch.kl[i].double())
            torch.testing.assert_close(result.gradients[i], x.grad[owned(total, response, size, rank)])
    for result in results:
        assert torch.equal(result.two_columns, torch.stack([batch.kl[6]] * 2, dim=1))
        assert torch.equal(result.integers, batch.masks[6])


def failing(change):
    """Two ranks, of which rank 1 changes its input; what each rank raised."""
    batch = rollout()

    def rank_of(rank, all_gather):
        mine = [torch.tensor(owned(t, r, 2, rank), dtype=torch.long) for t, r in SHAPES]
        if rank == 1:
            change(batch)
        try:
            all_functions(batch, lambda x, i: x[mine[i][mine[i] < len(x)]])
        except CPInputError as error:
            return str(error)
        return None

    return in_processes(rank_of, 2, megatron=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.kl.__setitem__(2, torch.full((17,), torch.nan)), "CP rank 1 of 2: sample 2"),
        (lambda b: b.masks[6].zero_(), "sample 6, loss_mask"),
        (lambda b: b.masks.__setitem__(6, torch.ones(5)), r"CP rank 1 of 2: sample 6, shape of loss_masks is \[5\]"),
        (lambda b: b.total_lengths.__setitem__(2, 5), "CP rank 1 of 2: sample 2: response_length 17 of total_length 5"),
        (lambda b: b.rewards.__setitem__(3, torch.inf), "sample 3, reward is inf"),
    ],
    ids=["nan", "other mask", "mask length", "lengths", "infinite reward"],
)
def test_bad_input_on_one_rank_is_the_same_error_on_all(change, text):
    first, second = failing(change)
    assert first == second
    assert re.search(text, first)


def test_a_rank_that_dies_ends_the_run():
    def rank_of(rank, all_gather):
        if rank == 1:
            raise KeyError("gone")
        return slime.all_gather_with_cp(torch.zeros(3), 10, 9)

    with pytest.raises(RankFailure, match="gone"):
        in_processes(rank_of, 2, megatron=True, timeout=60)


# ranks as threads: one that leaves while the others wait is seen at once


def each_rank(monkeypatch, function, size, cp_size):
    """What function(rank) gives on each rank, or the text of its CPInputError."""
    here = threading.local()
    for module in (slime, groups):
        monkeypatch.setattr(module, "context_parallel", lambda *given: here.group.cp)
        monkeypatch.setattr(module, "data_and_context_parallel", lambda *given: here.group.everyone)

    def rank_of(rank, all_gather):
        here.group = all_gather
        try:
            return function(rank)
        except CPInputError as error:
            return str(error)

    return in_threads(rank_of, size, cp_size=cp_size, timeout=20)


TWO = [(12, 10), (9, 6)]  # total, response


def two_samples(rank):
    kl = [torch.zeros(len(owned(t, r, 2, rank))) for t, r in TWO]
    lengths = {"response_lengths": [10, 6], "total_lengths": [12, 9]}
    return {
        slime.get_reinforce_plus_plus_returns: lengths
        | {
            "rewards": [1.0, 2.0],
            "kl": kl,
            "loss_masks": [torch.ones(10), torch.ones(6)],
            "kl_coef": 0.1,
            "gamma": 0.9,
        },
        slime.get_advantages_and_returns_batch: lengths
        | {"values_list": kl, "rewards_list": kl, "gamma": 0.9, "lambd": 0.9},
        slime.distributed_masked_whiten: {"values": kl[0], "mask": torch.ones(len(kl[0]))},
        slime.all_gather_with_cp: {"tensor": kl[0], "total_length": 12, "response_length": 10},
    }


@pytest.mark.parametrize(
    ("function", "changed", "text"),
    [
        (slime.get_reinforce_plus_plus_returns, {"kl": []}, "number of kl is 0; expected 2"),
        (slime.get_reinforce_plus_plus_returns, {"kl": [[0.0] * 6, [0.0] * 2]}, "sample 0, kl is a list"),
        (slime.get_reinforce_plus_plus_returns, {"kl": None}, "TypeError"),
        (slime.get_reinforce_plus_plus_returns, {"loss_masks": [[1] * 10, [1] * 6]}, "sample 0, loss_masks is a list"),
        (slime.get_reinforce_plus_plus_returns, {"rewards": [1.0, None]}, "sample 1, rewards is None"),
        (slime.get_reinforce_plus_plus_returns, {"rewards": None}, "rewards is absent"),
        (slime.get_reinforce_plus_plus_returns, {"gamma": [0.9, 0.9]}, "gamma is "),
        (slime.get_advantages_and_returns_batch, {"values_list": []}, "number of values_list is 0; expected 2"),
        (slime.get_advantages_and_returns_batch, {"rewards_list": [[0.0] * 6] * 2}, "sample 0, rewards_list is a list"),
        (slime.distributed_masked_whiten, {"values": [0.0] * 6}, "values is a list"),
        (slime.distributed_masked_whiten, {"mask": [1] * 6}, "mask is a list"),
        (slime.distributed_masked_whiten, {"epsilon": "0"}, "epsilon is '0'"),
        (slime.all_gather_with_cp, {"tensor": torch.zeros(7)}, "tensor has 7 tokens; expected the 6 that this rank"),
        (slime.all_gather_with_cp, {"tensor": torch.zeros(6).double()}, "dtype of tensor is torch.float64"),
        (slime.all_gather_with_cp, {"tensor": torch.zeros(6, 2)}, r"shape of a token is \[2\]"),
        (slime.all_gather_with_cp, {"tensor": [0.0] * 6}, "'list'"),
        (slime.all_gather_with_cp, {"total_length": 5}, "response_length 10 of total_length 5"),
    ],
)
def test_nobody_waits_for_a_rank_with_bad_input(monkeypatch, function, changed, text):
    first, second = each_rank(
        monkeypatch, lambda rank: function(**two_samples(rank)[function] | (changed if rank else {})), 2, 2
    )
    assert first == second
    assert re.search(f"rank 1 of 2: .*{text}", first)


def test_empty_lists_on_all_ranks_give_empty_lists(monkeypatch):
    returns = lambda rank: slime.get_reinforce_plus_plus_returns([], [], [], [], [], 0.1, 0.9)
    assert each_rank(monkeypatch, returns, 2, 2) == [[], []]
    both = lambda rank: slime.get_advantages_and_returns_batch([], [], [], [], 0.9, 0.9)
    assert each_rank(monkeypatch, both, 2, 2) == [([], []), ([], [])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64])
@pytest.mark.parametrize("response", [0, 1, 100, 20_000])
def test_short_and_long_responses_are_gathered_in_their_dtype(monkeypatch, dtype, response):
    whole = torch.randn(response, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    gather = lambda rank: slime.all_gather_with_cp(
        whole[owned(response + 5, response, 3, rank)], response + 5, response
    ).detach()
    assert all(torch.equal(x, whole) for x in each_rank(monkeypatch, gather, 3, 3))


# --custom-advantage-function-path

ARGS = {
    "kl_coef": 0.3,
    "kl_loss_type": "k1",
    "gamma": 0.9,
    "lambd": 0.8,
    "use_rollout_logprobs": False,
    "normalize_advantages": False,
}
GROUPED = ("grpo", "gspo", "cispo")
ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", *GROUPED)


def hook_batch(seed=0):
    """What slime's trainer holds (whole responses here), and the same as the frameworks' loops want it."""
    batch = rollout(seed)
    ref = [x.flip(0) + 0.5 for x in batch.kl]
    data = {
        "log_probs": batch.kl,
        "ref_log_probs": ref,
        "values": batch.values,
        "rewards": batch.rewards.tolist(),
        "loss_masks": batch.masks,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
    }
    floats = lambda rows: [[float(x) for x in row] for row in rows]
    loops = frameworks.Batch(
        floats(batch.kl),
        floats(ref),
        [m.tolist() for m in batch.masks],
        floats(batch.values),
        data["rewards"],
        list(range(len(SHAPES))),
        [0.0] * len(SHAPES),
    )
    return data, loops


def by_formula(estimator, loops, args):
    """(advantages before whitening, returns) by slime's formulas, whose controller has centred the rewards before."""
    kind, clamp = ("k3", 10.0) if args.kl_loss_type == "low_var_kl" else (args.kl_loss_type, None)
    k = frameworks.kl_rows(loops, kind, clamp)
    r = frameworks.token_rewards(k, loops.masks, loops.rewards, args.kl_coef)
    if estimator == "reinforce_plus_plus":
        g = [frameworks.every_token(row, args.gamma) for row in r]
        return g, g
    if estimator == "ppo":
        rows = zip(r, loops.values, strict=True)
        a = [frameworks.gae_every_token(x, v, args.gamma, args.lambd) for x, v in rows]
        return a, frameworks.plus(a, loops.values)
    scalars = frameworks.spread(loops.rewards, loops.masks)
    if estimator == "reinforce_plus_plus_baseline":
        scalars = frameworks.plus(scalars, [[-args.kl_coef * x for x in row] for row in k])
    return scalars, scalars


def assert_valid_tokens(got, expected, masks):
    """Within a float32 rounding of the sample's largest number at valid tokens, exactly 0 at masked ones."""
    for x, y, m in zip(got, expected, masks, strict=True):
        y = torch.tensor(y, dtype=torch.float64)
        valid = torch.as_tensor(m) != 0
        assert torch.count_nonzero(x[~valid]) == 0
        if valid.any():
            assert (x[valid].double() - y[valid]).abs().max() <= 2**-22 * y[valid].abs().max().clamp(min=1.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_hook_has_the_numbers_of_slimes_formulas(estimator, kind):
    data, loops = hook_batch()
    before = {key: [x.clone() for x in value] for key, value in data.items() if isinstance(value[0], torch.Tensor)}
    args = SimpleNamespace(**ARGS | {"advantage_estimator": estimator, "kl_loss_type": kind})
    assert slime.advantages(args, data) is None
    advantages, returns = by_formula(estimator, loops, args)
    assert_valid_tokens(data["advantages"], advantages, loops.masks)
    assert_valid_tokens(data["returns"], returns, loops.masks)
    assert not any(x.requires_grad for x in data["advantages"] + data["returns"])
    assert all(torch.equal(a, b) for key, rows in before.items() for a, b in zip(rows, data[key], strict=True))


def test_the_hook_takes_what_slime_has_at_hand():
    """Rollout log-probs where slime uses them, no reference where kl_coef is 0, values alone in a critic."""
    data, loops = hook_batch()
    args = SimpleNamespace(**ARGS | {"advantage_estimator": "reinforce_plus_plus", "use_rollout_logprobs": True})
    data["rollout_log_probs"] = data.pop("log_probs")
    slime.advantages(args, data)
    assert_valid_tokens(data["returns"], by_formula("reinforce_plus_plus", loops, args)[1], loops.masks)

    args.kl_coef, args.use_rollout_logprobs = 0.0, False
    expected = by_formula("reinforce_plus_plus", loops, args)[1]
    del data["ref_log_probs"], data["rollout_log_probs"]
    slime.advantages(args, data)
    assert_valid_tokens(data["returns"], expected, loops.masks)

    args.kl_coef, args.advantage_estimator = 0.3, "ppo"
    slime.advantages(args, data)
    args.kl_coef = 0.0
    assert_valid_tokens(data["returns"], by_formula("ppo", loops, args)[1], loops.masks)


def test_the_hook_names_what_it_does_not_know():
    data, _ = hook_batch()
    with pytest.raises(CPInputError, match="advantage_estimator is 'gdpo'; expected one of 'reinforce_plus_plus', "):
        slime.advantages(SimpleNamespace(**ARGS | {"advantage_estimator": "gdpo"}), data)
    with pytest.raises(CPInputError, match="kl_loss_type is 'k4'"):
        slime.advantages(SimpleNamespace(**ARGS | {"advantage_estimator": "ppo", "kl_loss_type": "k4"}), data)
    del data["values"]
    with pytest.raises(CPInputError, match="values is absent"):
        slime.advantages(SimpleNamespace(**ARGS | {"advantage_estimator": "ppo"}), data)
    del data["ref_log_probs"]
    with pytest.raises(CPInputError, match="ref_log_probs is absent"):
        slime.advantages(SimpleNamespace(**ARGS | {"advantage_estimator": "reinforce_plus_plus"}), data)
    for rewards in ({}, {"rewards": None}):
        data = {"loss_masks": [], "response_lengths": [], "total_lengths": []} | rewards
        with pytest.raises(CPInputError, match="rollout_data has no rewards"):
            slime.advantages(SimpleNamespace(**ARGS | {"advantage_estimator": "reinforce_plus_plus"}), data)


def hook_of(rank, args, data):
    kl = [torch.zeros(len(owned(t, r, 2, rank))) for t, r in TWO]
    rollout_data = {
        "log_probs": kl,
        "ref_log_probs": kl,
        "values": kl,
        "loss_masks": [torch.ones(10), torch.ones(6)],
        "rewards": [1.0, 2.0],
        "response_lengths": [10, 6],
        "total_lengths": [12, 9],
    } | data
    slime.advantages(SimpleNamespace(**ARGS | args), rollout_data)
    return rollout_data["advantages"]


@pytest.mark.parametrize("whitens", [False, True], ids=["CP", "DP x CP"])
@pytest.mark.parametrize(
    ("estimator", "args", "data", "text"),
    [
        ("reinforce_plus_plus", {"advantage_estimator": "gdpo"}, {}, "advantage_estimator is 'gdpo'"),
        ("reinforce_plus_plus", {}, {"rewards": None}, "rollout_data has no rewards"),
        ("reinforce_plus_plus", {}, {"rewards": [1.0, None]}, "sample 1, rewards is None"),
        ("grpo", {}, {"rewards": None}, "rollout_data has no rewards"),
        ("grpo", {}, {"rewards": 1.0}, "TypeError"),
        ("ppo", {"qkv_format": "bshd"}, {}, "qkv_format is 'bshd' and rollout_data has no max_seq_lens"),
        ("ppo", {"qkv_format": "bshd"}, {"max_seq_lens": [16]}, "1 padded_lengths for 2 samples"),
    ],
)
def test_nobody_waits_for_a_hook_with_bad_input(monkeypatch, whitens, estimator, args, data, text):
    size = 4 if whitens else 2  # the last rank of them is the bad one
    usual = {"advantage_estimator": estimator, "normalize_advantages": whitens}

    def rank_of(rank):
        bad = rank == size - 1
        return hook_of(rank % 2, usual | (args if bad else {}), data if bad else {})

    texts = each_rank(monkeypatch, rank_of, size, 2)
    assert texts == texts[:1] * size
    assert re.search(f"CP rank 1 of 2: .*{text}", texts[0])


@pytest.mark.parametrize("whitens", [False, True])
def test_nobody_waits_for_a_hook_whose_args_lack_lambd(monkeypatch, whitens):
    def rank_of(rank):
        args = SimpleNamespace(**ARGS | {"advantage_estimator": "ppo", "normalize_advantages": whitens})
        if rank == 0:
            del args.lambd
        keys = ("rewards", "loss_masks", "response_lengths", "total_lengths", "values", "log_probs", "ref_log_probs")
        slime.advantages(args, {key: [] for key in keys})

    first, second = each_rank(monkeypatch, rank_of, 2, 2)
    assert first == second
    assert "has no attribute 'lambd'" in first


def test_the_hook_cuts_a_padded_batch_by_its_width(monkeypatch):
    """T = 8, R = 5, width 11, W = 2: pieces of 3, logits 2..6, so rank 0 has token 0 and rank 1 the others."""

    def rank_of(rank):
        _, _, _, tokens = slime.get_logits_and_tokens_offset_with_cp(8, 5, "bshd", 11)
        data = {
            "rewards": [1.0],
            "loss_masks": [torch.ones(5)],
            "response_lengths": [5],
            "total_lengths": [8],
            "max_seq_lens": [11],
            "log_probs": [torch.zeros(sum(b - a for a, b in tokens))],
        }
        data["ref_log_probs"] = data["log_probs"]
        args = ARGS | {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.5, "qkv_format": "bshd"}
        slime.advantages(SimpleNamespace(**args), data)
        return data["advantages"][0].tolist()

    assert each_rank(monkeypatch, rank_of, 2, 2) == [[0.0625], [0.125, 0.25, 0.5, 1.0]]


def slimes_own_whitening(rows, masks):
    """What slime does to the lists that the hook set: single-pass sums in float32 over all of them."""
    return frameworks.whiten([x.tolist() for x in rows], [m.tolist() for m in masks], single_pass_float32=True)


def test_equal_advantages_end_as_zero_after_slimes_whitening():
    """0.7 at 50 000 tokens has a single-pass variance below -1e-8, so every token is NaN; not once the mean is gone."""
    n = 50_000
    constant = [torch.full((n,), 0.7)]
    assert (
        slimes_own_whitening(constant, [torch.ones(n)])[0][0] != slimes_own_whitening(constant, [torch.ones(n)])[0][0]
    )
    data = {"rewards": [0.7], "loss_masks": [torch.ones(n)], "response_lengths": [n], "total_lengths": [n + 1]}
    args = SimpleNamespace(
        **ARGS
        | {"advantage_estimator": "reinforce_plus_plus", "gamma": 1.0, "kl_coef": 0.0, "normalize_advantages": True}
    )
    slime.advantages(args, data)
    assert data["returns"][0].unique().tolist() == pytest.approx([0.7])
    assert max(map(abs, slimes_own_whitening(data["advantages"], data["loss_masks"])[0])) == 0.0


def test_the_hook_leaves_the_scale_to_slime():
    """+-1e-6 has variance 2e-12: divided once by sqrt(2e-12 + 1e-8) it is +-.01; divided twice it would be +-.7."""
    data = {
        "rewards": [1e-6, -1e-6],
        "loss_masks": [torch.ones(1)] * 2,
        "response_lengths": [1, 1],
        "total_lengths": [2, 2],
    }
    slime.advantages(SimpleNamespace(**ARGS | {"advantage_estimator": "grpo", "normalize_advantages": True}), data)
    white = slimes_own_whitening(data["advantages"], data["loss_masks"])
    assert [x for row in white for x in row] == pytest.approx([0.01, -0.01], rel=1e-3)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "ppo", "reinforce_plus_plus_baseline", "grpo"])
def test_the_hook_and_slimes_whitening_on_dp_times_cp_ranks(estimator):
    """DP 2 x CP 2, two batches that differ, the second one empty for one run: as one process whitens all of it."""
    args = SimpleNamespace(**ARGS | {"advantage_estimator": estimator, "normalize_advantages": True})

    def rank_of(rank, all_gather):
        data, _ = hook_batch(rank // 2)
        for key in ("log_probs", "ref_log_probs", "values"):
            data[key] = [x[owned(t, r, 2, rank % 2)] for x, (t, r) in zip(data[key], SHAPES, strict=True)]
        slime.advantages(args, data)
        first = data["advantages"], data["returns"]
        if rank // 2 == 1:
            data = {key: [] for key in data}
        slime.advantages(args, data)
        return first, data["advantages"]

    results = in_processes(rank_of, 4, cp_size=2, megatron=True)
    got, got_returns, masks, raw, returns = [], [], [], [], []
    for dp in range(2):
        _, loops = hook_batch(dp)
        advantages, targets = by_formula(estimator, loops, args)
        for i, (t, r) in enumerate(SHAPES):
            whole, whole_returns = torch.full((r,), torch.nan), torch.full((r,), torch.nan)
            for cp in range(2):
                whole[owned(t, r, 2, cp)] = results[2 * dp + cp][0][0][i]
                whole_returns[owned(t, r, 2, cp)] = results[2 * dp + cp][0][1][i]
            got.append(whole)
            got_returns.append(whole_returns)
        masks, raw, returns = masks + loops.masks, raw + advantages, returns + targets
    assert_valid_tokens(got_returns, returns, masks)
    expected = frameworks.whiten(raw, masks)
    ours = slimes_own_whitening(got, [torch.tensor(m) for m in masks])
    largest = max(abs(x) for row, m in zip(expected, masks, strict=True) for x, v in zip(row, m, strict=True) if v)
    for x, y, m in zip(ours, expected, masks, strict=True):
        assert all(abs(a - b) <= 1e-6 * largest for a, b, valid in zip(x, y, m, strict=True) if valid)
    assert [len(second) for _, second in results] == [8, 8, 0, 0]
