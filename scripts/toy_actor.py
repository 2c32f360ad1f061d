"""A Megatron actor under context parallelism, as small as it can be: log-probs, returns, advantages, loss, update.

Everything that concerns context parallelism here is a call of `cp_returns`; the rest is Megatron-core's own.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import toy_megatron as toy
from toy_tasks import VOCAB, Batch, Prompts

from cp_returns import ContextParallelReturns, CPContext, ReturnsConfig, over, zigzag
from cp_returns.log_probs import at_responses, local_grid, response_log_probs, slice_responses
from cp_returns.loss import (
    combine,
    count_sequences,
    count_tokens,
    gspo_loss,
    kl_loss,
    megatron_loss,
    policy_loss,
    sequence_mean,
    token_mean,
    value_loss,
)


@dataclass(frozen=True)
class Settings:
    estimator: str = "reinforce_plus_plus"  # or gae, grpo, gspo
    gamma: float = 0.9
    lam: float = 0.95
    kl_coef: float = 0.01
    eps_clip: float = 0.2
    value_coef: float = 0.5
    micro_batches: int = 1
    updates: int = 1  # of a rollout
    width: int = 16
    packed: bool = False  # thd, lengths padded to 2 * cp * tp, in place of rows of one width
    per_token: bool = True  # Megatron's calculate_per_token_loss
    rope: bool = True
    lr: float = 5e-3
    adam_eps: float = 1e-5
    clip_grad: float = 1.0
    seed: int = 1

    @property
    def grouped(self) -> bool:
        return self.estimator in ("grpo", "gspo")

    @property
    def group(self) -> int:
        """Answers to one prompt."""
        return 8 if self.grouped else 1

    @property
    def reduce(self):
        return sequence_mean if self.grouped else token_mean


@dataclass(frozen=True)
class Actor:
    """What a rank of a trainer holds; built once, used for every batch."""

    settings: Settings
    returns_fn: ContextParallelReturns
    config: object
    model: torch.nn.Module
    reference: torch.nn.Module  # the first weights, frozen
    ddp: torch.nn.Module
    optimizer: object


@dataclass(frozen=True)
class Experience:
    """This rank's shards of a batch, one tensor a sample in every list."""

    log_probs: list[torch.Tensor]
    ref_log_probs: list[torch.Tensor]
    advantages: list[torch.Tensor]
    returns: list[torch.Tensor] | None = None
    values: list[torch.Tensor] | None = None

    def part(self, rows: slice) -> "Experience":
        return Experience(*(None if x is None else x[rows] for x in vars(self).values()))


def build_actor(settings: Settings) -> Actor:
    build = partial(
        toy.build_model,
        vocab=VOCAB,
        max_length=settings.width,
        rope=settings.rope,
        seed=settings.seed,
        value_head=settings.estimator == "gae",
        per_token=settings.per_token,
    )
    _, reference = build()
    config, model = build()
    ddp, optimizer = toy.build_trainer(
        config, model, lr=settings.lr, eps=settings.adam_eps, clip_grad=settings.clip_grad
    )
    returns_fn = ContextParallelReturns(returns_config(settings))
    return Actor(settings, returns_fn, config, model, reference, ddp, optimizer)


def returns_config(settings: Settings, whiten: bool = True) -> ReturnsConfig:
    if settings.grouped:  # one scalar a response; the KL is in the loss
        return ReturnsConfig(estimator="grpo")
    shared = {"gamma": settings.gamma, "kl_coef": settings.kl_coef, "kl": "k1", "whiten": whiten, "strategy": "carry"}
    if settings.estimator == "gae":
        return ReturnsConfig(estimator="gae", lam=settings.lam, **shared)
    return ReturnsConfig(estimator=settings.estimator, **shared)


def context(actor: Actor, batch: Batch) -> CPContext:
    """Which of the batch's tokens this rank holds."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if actor.settings.packed:  # each sample is padded to a multiple of 2 * cp * tp
        padding = {"multiple": actor.config.tensor_model_parallel_size}
    else:
        padding = {"padded_lengths": [actor.settings.width] * len(batch.tokens)}
    layout = zigzag(batch.total_lengths, batch.response_lengths, group.size(), **padding)
    return CPContext(layout, group.rank(), over(group))


def forward(actor: Actor, model: torch.nn.Module, batch: Batch, cp: CPContext, packing=None):
    """(log-probs, values or None) of this rank's response tokens, packed; `packing`: Megatron's packed_seq_params."""
    layout, rank = cp.layout, cp.rank
    tokens = local_grid(batch.tokens, layout, rank)
    positions = local_grid([torch.arange(len(t)) for t in batch.tokens], layout, rank)
    rows = 1 if actor.settings.packed else len(batch.tokens)
    if actor.settings.packed and packing is None:
        packing = packed_seq_params(layout)
    with toy.CudaMeansCpu():
        logits = model(tokens.view(rows, -1), positions.view(rows, -1), None, packed_seq_params=packing)
        log_probs = response_log_probs(logits, batch.responses, layout, rank)
    if actor.settings.estimator != "gae":
        return log_probs, None
    values = (model.module if model is actor.ddp else model).values
    return log_probs, at_responses(values.flatten(), layout, rank)


def packed_seq_params(layout, **dynamic):
    """Megatron's description of a packed batch; `dynamic`: cp_group and local_cp_size of this micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    total = torch.from_numpy(layout.total_lengths)
    padded = torch.from_numpy(layout.padded_lengths)
    cu, cu_padded = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (total, padded))
    longest = int(padded.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **dynamic,
    )


def score(actor: Actor, batch: Batch, cp: CPContext, packing=None):
    """Log-probs of policy and reference and the policy's values before the update, as lists of shards."""
    with torch.no_grad():
        log_probs, values = forward(actor, actor.model, batch, cp, packing)
        ref_log_probs, _ = forward(actor, actor.reference, batch, cp, packing)
    of_rank = cp.layout.lengths(cp.rank).tolist()
    return [None if x is None else list(x.split(of_rank)) for x in (log_probs, ref_log_probs, values)]


def judge(actor: Actor, batch: Batch, cp: CPContext, log_probs, ref_log_probs, values) -> Experience:
    """Returns and advantages of this rank's tokens; all but the group estimators' are whitened over DP x CP."""
    tokens = {}
    if not actor.settings.grouped:
        tokens = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "values": values}
    if batch.token_rewards is None or actor.settings.grouped:
        rewards = {"rewards": batch.rewards}
    else:
        rewards = {"token_rewards": slice_responses(batch.token_rewards, cp.layout, cp.rank)}
    out = actor.returns_fn(
        **tokens,
        **rewards,
        group_ids=batch.group_ids if actor.settings.grouped else None,
        loss_masks=batch.masks,
        total_lengths=batch.total_lengths,
        response_lengths=batch.response_lengths,
        padded_lengths=cp.layout.padded_lengths,
    )
    return Experience(log_probs, ref_log_probs, out.advantages, out.returns, values)


def loss_of(actor: Actor, batch: Batch, experience: Experience, log_probs, values, cp: CPContext):
    """The loss of a micro-batch, this rank's share."""
    settings, mask = actor.settings, batch.full_mask
    policy = gspo_loss if settings.estimator == "gspo" else policy_loss
    old, advantages = torch.cat(experience.log_probs), torch.cat(experience.advantages)
    clip = {"eps_clip": settings.eps_clip, "reduce": settings.reduce}
    loss = policy(log_probs, old, advantages, mask, cp=cp, **clip)
    if settings.estimator == "gae":
        old_values, returns = torch.cat(experience.values), torch.cat(experience.returns)
        critic = value_loss(values, old_values, returns, mask, cp=cp, reduce=settings.reduce)
        loss = combine((1.0, loss), (settings.value_coef, critic))
    if settings.grouped:  # the others charge the KL in the reward
        ref = torch.cat(experience.ref_log_probs)
        loss = combine((1.0, loss), (settings.kl_coef, kl_loss(log_probs, ref, mask, cp=cp, reduce=settings.reduce)))
    return loss


def update(actor: Actor, batch: Batch, experience: Experience) -> tuple[float, dict[str, float]]:
    """One optimizer step of Megatron's over the batch: (gradient norm, report)."""
    report = backward(actor, batch, experience)
    with toy.CudaMeansCpu():
        _, grad_norm, _ = actor.optimizer.step()
    return float(grad_norm), report


def backward(actor: Actor, batch: Batch, experience: Experience) -> dict[str, float]:
    """Leaves the gradient of the whole batch in every parameter's `main_grad`; the report is of the whole batch."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    settings, data_parallel = actor.settings, parallel_state.get_data_parallel_group()
    count = count_sequences if settings.grouped else count_tokens
    scaling = {
        "calculate_per_token_loss": settings.per_token,
        "num_microbatches": settings.micro_batches,
        "data_parallel_size": data_parallel.size(),
        "whole_batch": count(batch.masks, all_gather=over(data_parallel)),
    }

    def forward_step(micro_batches, model):
        part, shards = next(micro_batches)
        cp = context(actor, part)
        log_probs, values = forward(actor, model, part, cp)
        loss = lambda outputs: megatron_loss(loss_of(actor, part, shards, outputs, values, cp), **scaling)
        return log_probs, loss

    n, m = len(batch.tokens), settings.micro_batches
    parts = [slice(n * i // m, n * (i + 1) // m) for i in range(m)]
    with toy.CudaMeansCpu():
        actor.ddp.zero_grad_buffer()
        actor.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([(batch.part(rows), experience.part(rows)) for rows in parts]),
            model=[actor.ddp],
            num_microbatches=m,
            seq_length=settings.width,
            micro_batch_size=n,
            forward_only=False,
        )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return whole_report(reports, group)


def whole_report(reports: list[dict[str, torch.Tensor]], group) -> dict[str, float]:
    """The reports of all micro-batches and ranks as means over the whole batch."""
    names = list(reports[0])
    pairs = torch.stack([torch.stack([r[name] for name in names]) for r in reports]).sum(0)
    dist.all_reduce(pairs, group=group)
    return {name: float(total / count.clamp(min=1)) for name, (total, count) in zip(names, pairs, strict=True)}


def sample(actor: Actor, prompts: Prompts, noise: torch.Tensor) -> torch.Tensor:
    """The finished rows [b, width]; `noise` [b, sampled tokens, vocab] is uniform and decides the draws (Gumbel-max).

    Under context parallelism the logit that predicts a token is on one rank; the others add zeros.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    tokens, rows = prompts.tokens.clone(), torch.arange(len(prompts.tokens))
    here = toy.stream_positions([tokens.shape[1]], group.size(), group.rank())
    nth = prompts.sampled.cumsum(1) * prompts.sampled  # 1, 2, .. at the positions to sample
    gumbel = -(-noise.log()).log()
    for k in range(noise.shape[1]):
        due, at = (nth == k + 1).max(1)
        with torch.no_grad(), toy.CudaMeansCpu():
            logits = actor.model(tokens[:, here], here.expand(len(rows), -1), None, runtime_gather_output=True)
        mine = here[None, :] == at[:, None] - 1
        predicting = torch.where(mine[..., None], logits, 0).sum(1)
        dist.all_reduce(predicting, group=group)
        drawn = (predicting + gumbel[:, k]).argmax(-1)
        tokens[rows[due], at[due]] = drawn[due]
    return tokens
