"""One step of a complete model on random tokens: what the cost (Figure 5) and the scaling experiment (Table 2) measure.

A step is forward, loss and backward of the class that is trained, without an optimiser. The sample is a function of its
settings alone: whoever sees only some of its tokens draws exactly those.
"""

from __future__ import annotations

import gc
import math

import numpy as np
import torch
from torch import Tensor

from flarepp import record
from flarepp.losses import mean_squared_error
from flarepp.models import build_model
from flarepp.provenance import peak_memory_mb

IN_DIM, OUT_DIM = 3, 1  # a field on points in space
CHUNK = 4096  # tokens that are drawn together, whatever part of them is wanted
IDLE_TOKENS = 64  # of the step after which a process counts as idle


def draw(settings: dict, span: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Features [B, n, 3] and target [B, n, 1] of the tokens in `span` (first, last + 1), by default all; standard normal."""
    first, last = span or (0, settings["num_tokens"])
    shape = settings["batch_size"], CHUNK, IN_DIM + OUT_DIM
    parts = [np.empty((shape[0], 0, shape[2]), np.float32)]
    for index in range(first // CHUNK, math.ceil(last / CHUNK)):
        chunk = np.random.default_rng([settings["seed"], index]).standard_normal(shape, np.float32)
        start = index * CHUNK
        parts.append(chunk[:, max(first - start, 0):last - start])
    features, target = torch.from_numpy(np.concatenate(parts, 1)).split([IN_DIM, OUT_DIM], -1)
    return features.contiguous(), target.contiguous()


def sample_origin(settings: dict) -> dict:
    """What a record says of the sample."""
    drawn = {"numpy": np.__version__, "chunk": CHUNK} | {key: settings[key] for key in ("seed", "batch_size", "num_tokens")}
    return {"source": "random", "fingerprint": record.digest(drawn)}


def configure(settings: dict) -> None:
    """Threads and precision of this process."""
    torch.set_num_threads(settings["num_threads"])
    torch.set_float32_matmul_precision("highest")  # no TF32 in a measurement called FP32


class Step:
    """The complete model of a spec and the sample of its section, or the tokens in `span`; calling it makes one step."""

    def __init__(self, spec: dict, section: str, device: torch.device, span: tuple[int, int] | None = None) -> None:
        settings, self.device = spec[section], device
        torch.manual_seed(settings["seed"])
        self.model = build_model(**spec["model"], in_dim=IN_DIM, out_dim=OUT_DIM).to(device)
        self.features, self.target = (part.to(device) for part in draw(settings, span))
        self.count = settings["batch_size"] * settings["num_tokens"] * OUT_DIM
        self.half = settings["precision"] == "fp16"

    def forward(self) -> Tensor:
        """Prediction [B, n, 1] under the spec's precision."""
        with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.half):
            return self.model(self.features)

    def loss(self, prediction: Tensor) -> Tensor:
        """These tokens' part of the mean squared error over all tokens, in FP32."""
        return mean_squared_error(prediction, self.target, count=self.count)

    def __call__(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(self.forward())
        loss.backward()
        return loss.detach()


def small(spec: dict, section: str) -> dict:
    """A spec with one block and a few tokens: its step loads what a process needs and leaves nothing else behind."""
    return spec | {"model": spec["model"] | {"num_blocks": 1}, section: spec[section] | {"num_tokens": IDLE_TOKENS}}


def idle_memory_mb(device: torch.device) -> float:
    """Memory of this process after a small step, so that libraries, threads and connections are there, and before there is a
    model. On the CPU its peak resident set so far, on CUDA 0, from where the peak counts afterwards."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0.0
    return peak_memory_mb(device)
