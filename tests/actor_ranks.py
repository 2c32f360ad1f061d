"""What one rank does in the tests of the toy Megatron actor: importable, so that forked ranks can be sent here."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import toy_actor
import toy_megatron as toy
from toy_actor import Settings
from toy_tasks import VOCAB, Batch

import cp_returns
from cp_returns import CPContext, over, zigzag
from cp_returns.log_probs import at_responses, local_grid

ESTIMATORS = ("reinforce_plus_plus", "gae", "grpo", "gspo")
WIDTH = 32
# (prompt, mask): straddling pieces, prompt-heavy (ranks without a token), one token, gaps, a masked tail, none valid.
SAMPLES = [
    (3, [1] * 20),
    (24, [1, 1, 0, 0, 1]),
    (9, [1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1]),
    (12, [1]),
    (1, [1] * 17 + [0] * 6),
    (7, [0, 0, 0, 0]),
    (15, [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]),
]
UNEVEN = (slice(0, 4), slice(4, 7))  # of DP 2


def batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    dtype = torch.get_default_dtype()
    return Batch(
        tokens=[torch.randint(0, VOCAB, (q + len(m),), generator=generator) for q, m in SAMPLES],
        prompt_lengths=[q for q, _ in SAMPLES],
        masks=[torch.tensor(m).bool() for _, m in SAMPLES],
        rewards=torch.tensor([1.0, -0.5, 2.0, 0.25, 0.0, 1.0, -1.0], dtype=dtype),
        token_rewards=None,
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
    )


def build(settings: Settings):
    """An actor whose policy is not its reference."""
    actor = toy_actor.build_actor(settings)
    _, other = toy.build_model(vocab=VOCAB, max_length=settings.width, rope=settings.rope, seed=9, value_head=True)
    return replace(actor, reference=other)


def gradients(ranks, cases) -> list:
    """For each (settings, dtype, bug) the (gradients, report) of every update."""
    toy.init_groups(*ranks)
    return [updates(*case) for case in cases]


def updates(settings: Settings, dtype: torch.dtype, bug: str | None = None) -> list:
    from megatron.core import parallel_state

    torch.set_default_dtype(dtype)
    whole = batch()
    rows = (
        UNEVEN[parallel_state.get_data_parallel_rank()]
        if parallel_state.get_data_parallel_world_size() > 1
        else slice(7)
    )
    mine, actor = whole.part(rows), build(settings)
    with planted(bug):
        cp = toy_actor.context(actor, mine)
        experience = toy_actor.judge(actor, mine, cp, *toy_actor.score(actor, mine, cp))
        results = []
        for _ in range(settings.updates):
            report = toy_actor.backward(actor, mine, experience)
            results.append((toy.full_gradients(actor.model), report))
            with toy.CudaMeansCpu():
                actor.optimizer.step()
    return results


# ---- planted bugs


class planted:  # noqa: N801 - with planted("labels"):
    """Within it one function of the actor is wrong, as real trainers have had it wrong."""

    def __init__(self, bug: str | None):
        self.wrong = WRONG[bug] if bug else {}

    def __enter__(self):
        self.right = {name: getattr(toy_actor, name) for name in self.wrong}
        for name, function in self.wrong.items():
            setattr(toy_actor, name, function)

    def __exit__(self, *_):
        for name, function in self.right.items():
            setattr(toy_actor, name, function)


def judge_shard_as_whole(actor, batch, cp, log_probs, ref_log_probs, values):
    """Scans a rank's two pieces as if they were one response."""
    lengths = [len(x) for x in log_probs]
    out = actor.returns_fn(
        log_probs=log_probs,
        ref_log_probs=ref_log_probs,
        rewards=batch.rewards,
        loss_masks=list(cp.take(batch.full_mask).split(lengths)),
        response_lengths=lengths,
        total_lengths=[n + 1 for n in lengths],
        packed_seq_params=SimpleNamespace(local_cp_size=1),
    )
    return toy_actor.Experience(log_probs, ref_log_probs, out.advantages, out.returns)


def judge_whitening_over_dp(actor, *args):
    from megatron.core import parallel_state

    returns_fn = lambda **given: actor.returns_fn(dp_cp_group=parallel_state.get_data_parallel_group(), **given)
    return right_judge(replace(actor, returns_fn=returns_fn), *args)


def labels_shifted_after_the_cut(logits, responses, layout, rank):
    tokens = local_grid(now.tokens, layout, rank)
    labels = torch.cat([tokens[1:], tokens.new_zeros(1)])
    log_probs = logits.flatten(0, -2).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    return at_responses(log_probs, layout, rank)


def forward_noting_tokens(actor, model, batch, *args):
    now.tokens = batch.tokens
    return right_forward(actor, model, batch, *args)


def divided_by_the_local_count(loss, **_):
    return loss.total / loss.count.clamp(min=1), torch.ones((), dtype=torch.int), loss.report


def three_tuple_whatever_the_config(loss, **_):
    return loss.total, loss.count.int(), loss.report


now = SimpleNamespace(tokens=None)
right_judge, right_forward = toy_actor.judge, toy_actor.forward
WRONG = {
    "shard scanned as contiguous": {"judge": judge_shard_as_whole},
    "whitening over DP only": {"judge": judge_whitening_over_dp},
    "labels shifted after slicing": {
        "response_log_probs": labels_shifted_after_the_cut,
        "forward": forward_noting_tokens,
    },
    "loss divided by local token count": {"megatron_loss": divided_by_the_local_count},
    "calculate_per_token_loss handled wrongly": {"megatron_loss": three_tuple_whatever_the_config},
}


# ---- micro-batches with CP sizes 2, 1, 1 in one step


def dynamic(rows_of_rank: list[list[slice]]) -> dict:
    """One update on two ranks: a micro-batch that both share, then two of each rank's own; CP sizes 2, 1, 1."""
    from megatron.core import parallel_state

    toy.init_groups(2)
    group, rank = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
    settings = Settings(width=WIDTH, packed=True, rope=False, micro_batches=3)
    actor = build(settings)
    returns_fn = cp_returns.ContextParallelReturns(toy_actor.returns_config(settings, whiten=False))
    micro_batches, outs = [], []
    for size, rows in zip((2, 1, 1), rows_of_rank[rank], strict=True):
        part = batch().part(rows)
        layout = zigzag(part.total_lengths, part.response_lengths, size)
        cp = CPContext(layout, rank, over(group)) if size == 2 else CPContext(layout)
        packing = toy_actor.packed_seq_params(layout, local_cp_size=size, cp_group=group if size == 2 else None)
        log_probs, ref_log_probs, _ = toy_actor.score(actor, part, cp, packing)
        outs.append(
            returns_fn(
                log_probs=log_probs,
                ref_log_probs=ref_log_probs,
                rewards=part.rewards,
                loss_masks=part.masks,
                total_lengths=part.total_lengths,
                response_lengths=part.response_lengths,
                packed_seq_params=packing,
            )
        )
        micro_batches.append((part, cp, packing, log_probs))
    whitened = cp_returns.whiten(
        torch.cat([x for out in outs for x in out.returns]),
        torch.cat([x for out in outs for x in out.masks]),
        all_gather=over(parallel_state.get_data_parallel_group(with_context_parallel=True)),
    ).split([sum(map(len, out.returns)) for out in outs])

    def forward_step(steps, model):
        (part, cp, packing, old), advantages = next(steps)
        log_probs, _ = toy_actor.forward(actor, model, part, cp, packing)
        mask = part.full_mask
        loss = lambda x: toy_actor.megatron_loss(toy_actor.policy_loss(x, torch.cat(old), advantages, mask, cp=cp))
        return log_probs, loss

    run_schedule(actor, forward_step, zip(micro_batches, whitened, strict=True), 3)
    return toy.full_gradients(actor.model)


def run_schedule(actor, forward_step, steps, count: int) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with toy.CudaMeansCpu():
        actor.ddp.zero_grad_buffer()
        actor.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(steps),
            model=[actor.ddp],
            num_microbatches=count,
            seq_length=WIDTH,
            micro_batch_size=1,
            forward_only=False,
        )


# ---- the README's actor


def readme_step(block: str, cp: int) -> dict:
    """One train_step of the README's code: its gradients."""
    toy.init_groups(cp)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    actor, whole = build(Settings(width=WIDTH)), batch()
    given = {
        "tokens": whole.tokens,
        "responses": whole.responses,
        "rewards": whole.rewards,
        "loss_masks": whole.masks,
    }
    with toy.CudaMeansCpu():
        out = names["train_step"](actor.ddp, actor.reference, actor.optimizer, given, WIDTH)
    assert [len(x) for x in out.advantages] == [len(x) for x in out.masks]
    return toy.full_gradients(actor.model)
