"""The optimiser of the matched suite: AdamW groups, OneCycle with cycled beta1, clipping, loss scaling, EMA (Table 4).

One call of `optimiser_step` is one attempt at a step: backward (scaled in FP16), gradients of all processes together,
unscale, clip, AdamW, EMA, schedule. A step that the loss scaler skips leaves parameters, EMA and schedule untouched, so the
schedule counts optimiser steps.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

UNDECAYED_MODULES = (nn.LayerNorm, nn.RMSNorm, nn.Embedding)
LATENT_NAMES = ("latents", "seeds")


def parameter_groups(model: nn.Module, weight_decay: float, decay_latents: bool) -> list[dict]:
    """Two AdamW groups: decayed, and not (biases, norms, embeddings; latents and seeds if not `decay_latents`)."""
    undecayed = {parameter for module in model.modules() if isinstance(module, UNDECAYED_MODULES)
                 for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last == "bias" or (last in LATENT_NAMES and not decay_latents):
            undecayed.add(parameter)
    decayed = [parameter for parameter in model.parameters() if parameter not in undecayed]
    kept = [parameter for parameter in model.parameters() if parameter in undecayed]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


class EagerAdamW(torch.optim.AdamW):
    """AdamW for steps that nothing compiles. PyTorch wraps these methods in functions that import its compiler when they are first
    called, which is a third of the time of a short run; here are the same methods without."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


@dataclass
class Optimiser:
    """Everything that moves during training besides the model itself."""

    adamw: torch.optim.AdamW
    schedule: torch.optim.lr_scheduler.OneCycleLR
    scaler: torch.amp.GradScaler
    average: nn.Module  # the model with exponentially averaged parameters
    ema_decay: float
    clip_norm: float

    def state_dict(self) -> dict:
        parts = ("adamw", "schedule", "scaler", "average")
        return {part: getattr(self, part).state_dict() for part in parts}

    def load_state_dict(self, state: dict) -> None:
        for part, value in state.items():
            getattr(self, part).load_state_dict(value)


def build_optimiser(model: nn.Module, training: dict) -> Optimiser:
    """AdamW, OneCycle, scaler and EMA of `model` from the training section of a run spec.

    Uses lr, weight_decay, decay_latents, betas, eps, steps, pct_start, div_factor, final_div_factor, clip_norm, ema_decay,
    precision. The schedule cycles beta1 between 0.85 and 0.95, so the configured beta1 is never used (as in the study).
    """
    device = next(model.parameters()).device
    first, second = map(float, training["betas"])
    adamw = EagerAdamW(
        parameter_groups(model, training["weight_decay"], training["decay_latents"]),
        lr=training["lr"], betas=(first, second), eps=training["eps"], fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        adamw, max_lr=training["lr"], total_steps=training["steps"], pct_start=training["pct_start"],
        div_factor=training["div_factor"], final_div_factor=training["final_div_factor"])
    scaler = torch.amp.GradScaler(device.type, enabled=training["precision"] == "fp16")
    average = copy.deepcopy(model).requires_grad_(False)
    return Optimiser(adamw, schedule, scaler, average, training["ema_decay"], training["clip_norm"])


def optimiser_step(model: nn.Module, optimiser: Optimiser, loss: Tensor,
                   synchronise: Callable[[nn.Module], None] = lambda model: None) -> tuple[Tensor, bool]:
    """Attempt one step from a loss. Returns (gradient norm before clipping, whether the step was taken).

    `synchronise` makes the gradients those of all processes; they then clip, and step or skip, alike.
    """
    scaler = optimiser.scaler
    scaler.scale(loss).backward()
    synchronise(model)
    scaler.unscale_(optimiser.adamw)
    norm = nn.utils.clip_grad_norm_(model.parameters(), optimiser.clip_norm)
    scale = scaler.get_scale()
    scaler.step(optimiser.adamw)
    scaler.update()
    optimiser.adamw.zero_grad()
    taken = scaler.get_scale() >= scale  # the scaler shrinks exactly when it skips
    if taken:
        update_average(optimiser.average, model, optimiser.ema_decay)
        optimiser.schedule.step()
    return norm, taken


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average <- decay * average + (1 - decay) * model for parameters; buffers are copied."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
    for kept, current in zip(average.buffers(), model.buffers()):
        kept.copy_(current)
