"""Context parallelism: the tokens of one sample over R ranks, exactly (FLARE++, Section C.1), and what training adds to it.

One distributed encoder, per attention row; O_r, L_r: attention and log-sum-exp over the N_r keys of rank r:

    L = logsumexp_r L_r        Z = sum_r exp(L_r - L) O_r                 (one gather of [O_r, L_r]; nothing depends on N)
    G = sum_r G_r              (one sum in backward; G_r: what rank r's own decoder made of its copy of Z)
    P_r = exp(s Q K_r^T - L)   dV_r = P_r^T G   dS_r = P_r * (G V_r^T - <G, Z>)   dK_r = s dS_r^T Q   dQ_r = s dS_r K_r

dQ_r is this rank's part. What Q is decides who adds the parts, once: a parameter's are added with all parameter gradients
(`sync_gradients`), those of a synthesised Q(X) by the encoder that made it. The loss is one number that all ranks hold, so
what it gathers has this rank's slice as its gradient. This is the only file that knows of ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from flarepp.attention import attend_with_lse, fused_backward, fused_forward, merge_shards, prepared, without_keys
from flarepp.processes import end_with

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    Group = dist.ProcessGroup | None  # None: this process alone

HOOKS = ("encode", "sum_over_tokens")  # what a mixer that sees other tokens only through sums calls for them
PATIENCE = 3.0  # seconds that a rank which lost its peers leaves to the one that failed first


# --- mixers


def distributed_encode(q: Tensor, k: Tensor, v: Tensor, *, scale: float, group: Group,
                       key_mask: Tensor | None = None) -> Tensor:
    """softmax_N(scale * q k^T) v over the keys of all ranks of `group` (FLARE++, Section C.1).

    q [B, H, M, D] (or batch 1), the same on every rank; k and v [B, H, N_r, D] of this rank, N_r >= 0; key_mask [B, N_r] bool,
    True = a real key. Returns z [B, H, M, D] in the inputs' dtype, the same on every rank; merged in FP32 or better. Without a
    group it is `attend`. Raises ValueError on every rank when a sample has no key anywhere, or for shapes that do not fit.
    """
    if num_ranks(group) == 1:
        z, lse = attend_with_lse(q, k, v, scale=scale, key_mask=key_mask)
        _require_keys(lse, k, key_mask)
        return z
    head_dim = q.shape[-1]
    return _Encode.apply(*prepared(q, k, v, key_mask), key_mask, scale, group)[..., :head_dim]


class _Encode(torch.autograd.Function):
    """The distributed encoder of the file's head: one collective forward, one backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, group: Group) -> Tensor:
        if k.numel() and q.numel():
            out, lse, ctx.extra = fused_forward(q, k, v, key_mask, scale)  # [B, H, M, D], [B, H, M]
            out, lse = without_keys(out, lse, key_mask)
        else:  # a rank that owns no token, or no query: the CPU kernel divides by their number
            out = torch.zeros_like(q)
            lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        z, lse = _merge(out, lse, group)
        _require_keys(lse, k, key_mask)
        ctx.scale, ctx.group = scale, group
        ctx.save_for_backward(q, k, v, key_mask, z, lse)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, z, lse = ctx.saved_tensors
        grad = _summed(grad.to(lse.dtype), ctx.group).to(q.dtype)
        if not (k.numel() and q.numel()):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None, None
        return *fused_backward(grad, q, k, v, key_mask, z, lse, ctx.extra, ctx.scale), None, None, None


def _merge(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Z and L from every rank's (O_r, L_r), in one gather of [B, H, M, D + 1]."""
    parts = _gathered(torch.cat([out.to(lse.dtype), lse[..., None]], -1), group)  # [R, B, H, M, D + 1]
    z, lse = merge_shards(parts[..., :-1], parts[..., -1])
    return z.to(out.dtype), lse


def _require_keys(lse: Tensor, k: Tensor, key_mask: Tensor | None) -> None:
    """ValueError for a row without any key; looked for only where this rank alone does not rule it out."""
    if key_mask is None and k.shape[2]:
        return
    if (empty := torch.isneginf(lse).flatten(1).any(1)).any():
        raise ValueError(f"sample {int(empty.nonzero()[0])} of the batch has no valid key on any rank")


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, whose use differs from rank to rank: its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grad, ctx.group), None


def _sum_over_tokens(sums: Tensor, *, group: Group) -> Tensor:
    """Sums over this rank's tokens (FP32 or better) to those over all tokens."""
    return sums if num_ranks(group) == 1 else _SumOverRanks.apply(sums, group)


def _own_noise(logits: Tensor, *, mixer: nn.Module, draw: Callable, group: Group, data_group: Group) -> Tensor:
    """This rank's part of the noise that one process draws for logits [B, H, N, M] of the whole batch, tokens and all.

    Every rank draws everything, [N, M] at a time, so that generators stand alike everywhere. Gathers the N_r.
    """
    batch, heads, own, slices = logits.shape
    counts = _gathered(torch.tensor([own], device=logits.device), group)[:, 0].tolist()
    first = sum(counts[:dist.get_rank(group)]) if num_ranks(group) > 1 else 0
    split = mixer.training and num_ranks(data_group) > 1  # in evaluation every replica has the same samples
    replicas, replica = (num_ranks(data_group), dist.get_rank(data_group)) if split else (1, 0)
    parts = []
    for sample in range(replicas * batch):
        drawn = [draw(logits.new_empty(sum(counts), slices))[first:first + own] for _ in range(heads)]
        parts += [torch.stack(drawn)] if sample // batch == replica else []
    return torch.stack(parts)


def _split_noise(model: nn.Module, group: Group, data_group: Group) -> None:
    """Let every mixer that draws noise draw what one process would, and keep this rank's part."""
    mixer: Any
    for mixer in model.modules():
        if hasattr(mixer, "uniform"):
            mixer.uniform = partial(_own_noise, mixer=mixer, draw=type(mixer).uniform, group=group, data_group=data_group)


def context_parallel(model: nn.Module, group: Group) -> nn.Module:
    """Let a model, or a single mixer, see this rank's tokens only: in place, and returned.

    `encode` and `sum_over_tokens` of every mixer are replaced by their distributed forms over `group`, and noise becomes this
    rank's part of one process's. ValueError when a mixer uses neither: it reads other tokens in a way that does not split, as
    full self-attention does.
    """
    mixers: list[Any] = [module for module in model.modules() if any(hasattr(module, hook) for hook in HOOKS)]
    inner = (getattr(module, "mixer", None) for module in model.modules())
    strangers = [module for module in inner if isinstance(module, nn.Module) and module not in mixers]
    if strangers or not mixers:
        name = type((strangers or [model])[0]).__module__.removeprefix("flarepp.")
        raise ValueError(f"context_parallel: {name} cannot be split over ranks: tokens must meet only in {' or '.join(HOOKS)}, "
                         "as in FLARE, FLARE++ and the Transolver family")
    for mixer in mixers:
        if hasattr(mixer, "encode"):
            mixer.encode = partial(distributed_encode, group=group)
        if hasattr(mixer, "sum_over_tokens"):
            mixer.sum_over_tokens = partial(_sum_over_tokens, group=group)
    _split_noise(model, group, None)
    return model


# --- gradients


@torch.no_grad()
def sync_gradients(model: nn.Module, *, context_group: Group = None, data_group: Group = None) -> None:
    """Parameter gradients: the sum over `context_group`, then the mean over `data_group`; one collective each.

    Call it once between backward and clipping. A parameter that no rank used keeps no gradient.
    """
    groups = [group for group in (context_group, data_group) if num_ranks(group) > 1]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not groups or not parameters:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device)
    parts = [(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten() for parameter in parameters]
    flat = torch.cat([*parts, used.float()])  # of the widest dtype, FP32 or better
    for group in groups:
        flat = _summed(flat, group)
    flat /= num_ranks(data_group)
    *sums, used = flat.split([*map(len, parts), len(parts)])
    for parameter, total, seen in zip(parameters, sums, used.tolist()):
        parameter.grad = total.view_as(parameter).to(parameter.dtype) if seen else None


# --- what the loss gathers


class _Norms(torch.autograd.Function):
    """Root of the sum of squares over the ranks, elementwise, of what every rank then uses alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        root = _summed(x.double().square(), group).sqrt().to(x.dtype)
        ctx.save_for_backward(x, root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, root = ctx.saved_tensors
        return grad * torch.where(root == 0, 0, x / root), None


class _Whole(torch.autograd.Function):
    """[B, N_r, c] of every rank side by side, [B, N, c], for what every rank then uses alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], rank: int, group: Group) -> Tensor:
        ctx.span = sum(counts[:rank]), counts[rank]
        padded = F.pad(x, (0, 0, 0, max(counts) - x.shape[1]))
        return torch.cat([part[:, :count] for part, count in zip(_gathered(padded, group), counts)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.narrow(1, *ctx.span), None, None, None


# --- the ranks of a run


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among the R x P processes of a run, and what they do together; `Ranks()` is one alone."""

    context_group: Group = None
    data_group: Group = None
    num_context: int = 1  # R: the tokens of a sample are split over them
    context_rank: int = 0
    num_data: int = 1  # P: the samples of a batch are
    data_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.context_rank == self.data_rank == 0

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens: a contiguous span along `dim`; the spans' lengths differ by one at most."""
        return torch.tensor_split(x, self.num_context, dim)[self.context_rank]

    def replica(self, x: Tensor) -> Tensor:
        """This data rank's samples of a batch [B, ...]."""
        assert len(x) % self.num_data == 0, f"{len(x)} samples over {self.num_data} data ranks"
        return x.chunk(self.num_data)[self.data_rank]

    def whole(self, x: Tensor, num_tokens: int) -> Tensor:
        """The shards [B, N_r, c] of all context ranks together, [B, N, c]; differentiable where all ranks use it alike."""
        if self.num_context == 1:
            return x
        counts = [len(part) for part in torch.tensor_split(torch.empty(num_tokens, device="meta"), self.num_context)]
        return _Whole.apply(x, counts, self.context_rank, self.context_group)

    def norms(self, x: Tensor) -> Tensor:
        """Norms of the whole from norms x of the shards, elementwise; differentiable where all ranks use it alike."""
        return x if self.num_context == 1 else _Norms.apply(x, self.context_group)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the data ranks, without a gradient."""
        return x if self.num_data == 1 else _summed(x.detach(), self.data_group) / self.num_data

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model for its part of a batch, in place: `context_parallel` where tokens are split, noise likewise everywhere."""
        if self.num_context > 1:
            context_parallel(model, self.context_group)
        if self.num_context * self.num_data > 1:
            _split_noise(model, self.context_group, self.data_group)
        return model

    def sync_gradients(self, model: nn.Module) -> None:
        """`sync_gradients` over these groups."""
        sync_gradients(model, context_group=self.context_group, data_group=self.data_group)

    def barrier(self) -> None:
        """Wait for all ranks of the run."""
        if self.num_context * self.num_data > 1:
            dist.barrier()


def launched() -> bool:
    """Whether `launch` or torchrun started this process as one of several ranks."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def join(num_context: int, num_data: int, device_type: str) -> Iterator[Ranks]:
    """Take this process's place among R x P: gloo on the CPU, NCCL with one device a rank on CUDA.

    Rank = data_rank * R + context_rank. ValueError when R x P processes were asked for and others are there, or fewer devices.
    """
    size = int(os.environ["WORLD_SIZE"]) if launched() else 1
    if size != num_context * num_data:
        raise ValueError(f"context_parallel {num_context} x data_parallel {num_data} needs {num_context * num_data} processes; "
                         f"got {size}")
    if launched():
        end_with(os.getppid())
        if device_type == "cuda":
            _take_device(int(os.environ["LOCAL_RANK"]))
    if size == 1:
        yield Ranks()
        return
    with patience():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
        data_rank, context_rank = divmod(dist.get_rank(), num_context)
        ranks = torch.arange(size).view(num_data, num_context)
        context_group, data_group = _own_group(ranks), _own_group(ranks.T)
        yield Ranks(context_group, data_group, num_context, context_rank, num_data, data_rank)
        dist.destroy_process_group()  # after an error the others may hang: then the process ends as it is


def _take_device(index: int) -> None:
    """Make CUDA device `index` this process's; ValueError where there are fewer."""
    if index >= (visible := torch.cuda.device_count()):
        raise ValueError(f"every process on this machine needs a CUDA device of its own; got {visible} for process {index}; "
                         "allowed: fewer processes, or device 'cpu'")
    torch.cuda.set_device(index)


def _own_group(members: Tensor) -> Group:
    """The group of that row of `members` which holds this process; None for rows of one."""
    groups = [(row, dist.new_group(row)) for row in members.tolist() if len(row) > 1]
    return next((group for row, group in groups if dist.get_rank() in row), None)


def num_ranks(group: Group) -> int:
    """Size of a group, 1 for none."""
    return 1 if group is None else dist.get_world_size(group)


def _summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks of x, which stays as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: Tensor, group: Group) -> Tensor:
    """x of every rank, [R, *x.shape]."""
    if num_ranks(group) == 1:
        return x[None]
    parts = x.new_empty(num_ranks(group), *x.shape)
    dist.all_gather(list(parts.unbind()), x.contiguous(), group=group)
    return parts


class Traffic(TorchDispatchMode):
    """Count, while it is active, the collectives of this rank and the bytes of the tensors that it hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; else every rank imports the compiler

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d":
            handed = args[1] if "gather" in function.__name__ else args[0]  # gathers name their output first
            tensors = handed if isinstance(handed, (list, tuple)) else [handed]
            self.count, self.bytes = self.count + 1, self.bytes + sum(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


# --- processes


class RankFailed(RuntimeError):
    """A rank ended with an error; the message names the first one, how it ended and its traceback."""


def launch(function: Callable, arguments: tuple, num_ranks: int) -> Any:
    """Run function(*arguments) on `num_ranks` forks of this process, which has not computed yet; returns rank 0's result.

    The ranks meet at a fresh port of this machine. When one ends with an error the others are ended too, within seconds, and
    RankFailed is raised; a signal that ends this process ends them all (SystemExit). They do not outlive it. Where PyTorch
    is built for CUDA, which forks cannot use once anything looked for a device, they are new processes instead.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    method = "fork" if torch.version.cuda is None else "spawn"
    started = multiprocessing.get_context(method).Barrier(num_ranks)
    with tempfile.TemporaryDirectory(prefix="flarepp-ranks-") as folder:  # of tracebacks
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", start_method=method, max_restarts=0, monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder))
        try:
            return elastic_launch(config, _rank)(function, os.getpid(), arguments, started)[0]
        except ChildFailedError as error:
            raise RankFailed(_first_failure(error)) from None
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None


def _rank(function: Callable, parent: int, arguments: tuple, started: Barrier) -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until `fit` notes it; Python's, inherited, waits for a collective
    end_with(parent)
    started.wait()  # a rank that connects makes the store's thread hold libc's resolver lock, which a later fork would inherit
    return function(*arguments)


@contextmanager
def patience() -> Iterator[None]:
    """A rank whose peers are gone waits before it fails as well, so that the launcher finds the one that failed first."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            time.sleep(PATIENCE)
        raise


def _first_failure(error: ChildFailedError) -> str:
    """Which rank failed first, how it ended, and its traceback where it could leave one."""
    rank, failure = error.get_first_failure()
    ending = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    message = failure.error_file_data.get("message")
    traceback = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else ""
    return f"rank {rank} (process {failure.pid}) ended with {ending}\n{traceback}".rstrip()
