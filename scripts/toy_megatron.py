"""A tiny real Megatron-core GPTModel on CPU over gloo, for the example and the tests: no file of Megatron is changed.

Megatron-core refuses two things on a CPU: CUDA device names, and context parallelism without Transformer Engine. The
first is answered by `cpu_shim`, the second by a core attention in plain torch. Importing Megatron takes seconds, so
`run_ranks` imports it once, in a fork server, and forks the ranks from there.
"""

import multiprocessing
import os
import pickle
import socket
import traceback
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.overrides import TorchFunctionMode

PRELOAD = [
    "torch",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    "cp_returns",
]


# ---- the shim


class CudaMeansCpu(TorchFunctionMode):
    """Megatron runs within this; nothing else needs to, and each torch call costs some microseconds more."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]  # Megatron's cross entropy rounds to float32, which would hide a float64 comparison
        if (
            func is torch.Tensor.type and len(args) == 1 and not kwargs
        ):  # the optimizer asserts on torch.cuda.FloatTensor
            return func(*args).replace("torch.", "torch.cuda.").replace("Double", "Float")
        if kwargs:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs = kwargs | {"device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = kwargs | {"pin_memory": False}
        return func(*args, **(kwargs or {}))


def cpu_shim() -> None:
    """From here on, this process answers Megatron's requests for the current CUDA device with the CPU."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed


# ---- the ranks


def run_ranks(fn, world_size: int, *args, heard=None, timeout: float = 120.0) -> list:
    """[fn(*args) on rank r for r in ranks], on forked gloo processes that share one import of Megatron.

    With `heard` the ranks call fn(say, *args), and what a rank says is heard here while it runs.

    Raises RuntimeError with the first rank's traceback, or when no rank sends anything for `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    queue = context.SimpleQueue()
    port = _free_port()
    ranks = [
        context.Process(target=_rank, args=(fn, r, world_size, port, queue, args, heard is not None))
        for r in range(world_size)
    ]
    for process in ranks:
        process.start()
    results: dict[int, object] = {}
    try:
        while len(results) < world_size:
            if not queue._reader.poll(timeout):  # pyright: ignore - SimpleQueue has no timed get
                raise RuntimeError(
                    f"ranks {sorted(set(range(world_size)) - set(results))} sent nothing for {timeout:g} s"
                )
            kind, rank, value = queue.get()
            if kind == "error":
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            if kind == "said":
                heard(pickle.loads(value))
            else:
                results[rank] = pickle.loads(value)
    finally:
        for process in ranks:
            if len(results) < world_size:
                process.terminate()
            process.join(10)
    return [results[r] for r in range(world_size)]


def _rank(fn, rank: int, world_size: int, port: int, queue, args, talks: bool) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # By value: torch would share memory that ends with this process.
    send = lambda kind, value: queue.put((kind, rank, pickle.dumps(value) if kind != "error" else value))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        cpu_shim()
        value = fn(partial(send, "said"), *args) if talks else fn(*args)
        dist.barrier()
        send("result", value)
        dist.destroy_process_group()
    except BaseException:
        send("error", traceback.format_exc())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- attention


def stream_positions(padded_lengths, cp_size: int, rank: int) -> torch.Tensor:
    """The positions of the packed stream that a rank's tokens have under zigzag context parallelism."""
    if cp_size == 1:
        return torch.arange(sum(padded_lengths))
    positions, begin = [], 0
    for length in padded_lengths:
        piece = length // (2 * cp_size)
        for p in (rank, 2 * cp_size - 1 - rank):
            positions.append(torch.arange(begin + p * piece, begin + (p + 1) * piece))
        begin += length
    return torch.cat(positions)


class _Gather(torch.autograd.Function):
    """All ranks' shards along dim 0; the gradient of a shard is the sum of what all ranks found for it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(torch.nn.Module):
    """Causal core attention under context parallelism: gathers K and V over the CP ranks, in the order of the stream.

    Takes bshd (q [s, b, heads, dim]) and packed thd (q [t, heads, dim]) under zigzag; `packed_seq_params.cp_group` or
    `local_cp_size` override Megatron's group (dynamic CP).
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q, k, v, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        group = attention_group(packed_seq_params)
        packed = q.dim() == 3
        if packed:
            q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        cp_size, rank = (1, 0) if group is None else (group.size(), group.rank())
        lengths = _padded_lengths(packed_seq_params) if packed else (q.shape[0] * cp_size,)
        order, mask = _order_and_mask(lengths, cp_size, rank)
        if group is not None:
            kv = _Gather.apply(torch.cat([k, v], dim=-1), group).index_select(0, order)
            k, v = kv.split([k.shape[-1], v.shape[-1]], dim=-1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        out = out.permute(2, 0, 1, 3).flatten(2)
        return out.squeeze(1) if packed else out


def attention_group(packed_seq_params):
    """The CP group of this call, None for one rank: `cp_group`, else `local_cp_size == 1`, else Megatron's."""
    from megatron.core import parallel_state

    group = getattr(packed_seq_params, "cp_group", None)
    if group is None and getattr(packed_seq_params, "local_cp_size", None) != 1:
        group = parallel_state.get_context_parallel_group()
    return None if group is None or group.size() == 1 else group


def _padded_lengths(packed_seq_params) -> tuple[int, ...]:
    cu = packed_seq_params.cu_seqlens_q_padded
    cu = packed_seq_params.cu_seqlens_q if cu is None else cu
    return tuple(cu.diff().tolist())


@lru_cache(maxsize=64)
def _order_and_mask(lengths: tuple[int, ...], cp_size: int, rank: int):
    order = torch.cat([stream_positions(lengths, cp_size, r) for r in range(cp_size)]).argsort()
    position, stream = stream_positions(lengths, cp_size, rank), torch.arange(sum(lengths))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (stream[None, :] <= position[:, None]) & (sample[None, :] == sample[position][:, None])
    return order, mask


# ---- the model


def init_groups(cp: int, dp: int = 1, tp: int = 1) -> None:
    """Megatron's process groups: rank = tp_rank + tp * (cp_rank + cp * dp_rank)."""
    from megatron.core import parallel_state

    if dist.get_world_size() != cp * dp * tp:
        raise ValueError(f"{dist.get_world_size()} ranks for cp {cp} x dp {dp} x tp {tp}")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)


def build_model(
    *,
    vocab: int,
    max_length: int,
    rope=True,
    hidden=32,
    layers=2,
    heads=4,
    seed=1,
    init_std=0.1,
    value_head=False,
    per_token=True,
):
    """GPTModel of this rank in the default dtype: (config, model).

    With `value_head` a linear layer on the decoder's output is registered, and each forward leaves its values [b, s]
    in `model.values`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        init_method_std=init_std,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        use_cpu_initialization=True,
        params_dtype=torch.get_default_dtype(),
        pipeline_dtype=torch.get_default_dtype(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        batch_p2p_sync=False,
        calculate_per_token_loss=per_token,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=max_length,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope" if rope else "learned_absolute",
    )
    if value_head:
        model.value_head = torch.nn.Linear(hidden, 1)

        def leave_values(_module, _inputs, hidden_states):
            model.values = model.value_head(hidden_states).squeeze(-1).transpose(0, 1)

        model.decoder.register_forward_hook(leave_values)
    return config, model


def build_trainer(config, model, *, lr=5e-3, clip_grad=1.0, eps=1e-5):
    """Megatron's DistributedDataParallel and optimizer around a model: (ddp, optimizer)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = torch.get_default_dtype()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype is not torch.float64, use_distributed_optimizer=False
    )
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=lr, min_lr=lr, weight_decay=0.0, adam_eps=eps, clip_grad=clip_grad, params_dtype=dtype
    )
    with CudaMeansCpu():
        ddp = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
        ddp.broadcast_params()
        optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return ddp, optimizer


def full_gradients(model) -> dict[str, torch.Tensor]:
    """Every parameter's `main_grad`, whole: tensor-parallel shards are joined."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    out = {}
    for name, p in model.named_parameters():
        grad = p.main_grad.clone()
        if getattr(p, "tensor_model_parallel", False) and group.size() > 1:
            shards = [torch.empty_like(grad) for _ in range(group.size())]
            dist.all_gather(shards, grad, group=group)
            # A gated layer's shard is [gate; up] of its own slice: join half by half.
            parts = 2 if name.endswith("linear_fc1.weight") else 1
            halves = [s.chunk(parts, dim=p.partition_dim) for s in shards]
            grad = torch.cat([h[i] for i in range(parts) for h in halves], dim=p.partition_dim)
        out[name] = grad
    return out
