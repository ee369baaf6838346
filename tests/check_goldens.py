#!/usr/bin/env python3
"""Compare our classes with reference arrays: python tests/check_goldens.py DIR [--only PATTERN]

Every .npz of DIR holds parameters, inputs, outputs and gradients in FP64 of a reference implementation, and a JSON `meta` with
its constructor arguments. One line a file: the largest error of the output and of the gradients, each over its tolerance's
unit. Outputs must agree to 1e-10 of the largest; a gradient to 1e-8 of max(its own largest, 1e-6 of the file's largest);
twenty-step trajectories to 1e-9. A mismatch, and a file that no class here answers to, make the exit code non-zero.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import torch

from flarepp.data.store import Affine
from flarepp.layers import INIT_STD, ResidualLinear, ResidualMLP
from flarepp.losses import central_differences, relative_l2, training_loss
from flarepp.mixers import build_mixer
from flarepp.models import build_model
from flarepp.optimise import build_optimiser, optimiser_step

OUTPUT, GRADIENT, TRAJECTORY = 1e-10, 1e-8, 1e-9
POSITIONS = 1e-6  # a table of distances computed in FP32 on both sides
KINDS = {"mha": "full", "flare": "flare", "flarepp": "flarepp", "flarepp_shared": "flarepp_shared",
         "flarepp_anchored": "flarepp_anchored", "transolver": "transolver", "transolverpp": "transolverpp",
         "transolver3": "transolver3"}
MIXER_NAMES = [  # reference name -> ours
    (r"\bk_proj\.fc\b", "key_proj"), (r"\bv_proj\.fc\b", "value_proj"), (r"\bk_proj\b", "key_proj"),
    (r"\bv_proj\b", "value_proj"), (r"\blatent_q_fixed\b", "latents"), (r"\blatent_q0\b", "seeds"),
    (r"\blatent_q\b", "latents"), (r"\bk0_proj\.fc\b", "routing_key_proj"), (r"\bv0_proj\.fc\b", "routing_value_proj"),
    (r"\bk0_proj\b", "routing_proj"), (r"\bq0_norm\b", "seed_norm"), (r"\bk0_norm\b", "routing_key_norm"),
    (r"\bq_norm\b", "query_norm"), (r"\bk_norm\b", "key_norm"),
]
SLICE_NAMES = [
    (r"\bin_project_fx\b", "token_proj"), (r"\bin_project_x\b", "routing_proj"), (r"\bin_project_slice\b", "slice_proj"),
    (r"\bproj_temperature\b", "temperature_proj"), (r"\bto_q\b", "slice_attention.query_proj"),
    (r"\bto_k\b", "slice_attention.key_proj"), (r"\bto_v\b", "slice_attention.value_proj"),
    (r"\bto_out(\.0|_linear)\b", "out_proj"),
]
MIXER_NAMES += SLICE_NAMES
MLP_NAMES = [(r"\bfc1\b", "input"), (r"\bfcs\b", "hidden"), (r"\bfc2\b", "output")]
BACKBONE_NAMES = [(r"^out_proj\.0\.", "out_norm."), (r"^out_proj\.1\.", "out_proj."), *MLP_NAMES, *MIXER_NAMES]
PERCEIVER_NAMES = [
    (r"^encoder\.latent_q$", "latents"), (r"^encoder\.ln\.", "encoder_norm."), (r"^decoder\.ln1\.", "latent_norm."),
    (r"^decoder\.ln2\.", "token_norm."), (r"^out_proj\.ln\.", "out_norm."), (r"^out_proj\.mlp\.", "out_proj."),
    (r"\.ln(?=[12]\.)", ".norm"), (r"\.att\.", "."), (r"\.mlp\.", ".ffn."), (r"\bq_proj\b", "query_proj"), (r"\bk_proj\b", "key_proj"),
    (r"\bv_proj\b", "value_proj"), *MLP_NAMES,
]
SET_TRANSFORMER_NAMES = [
    (r"^out_proj\.0\.", "out_norm."), (r"^out_proj\.1\.", "out_proj."), (r"\.attn\.I$", ".inducing_points"),
    (r"\.attn\.mab0\.", ".encode_block."), (r"\.attn\.mab1\.", ".decode_block."), (r"\.ln0\.", ".norm1."), (r"\.ln1\.", ".norm2."),
    (r"\bfc_q\b", "query_proj"), (r"\bfc_k\b", "key_proj"), (r"\bfc_v\b", "value_proj"), (r"\bfc_o\b", "out_proj"), *MLP_NAMES,
]
LNO_NAMES = [
    (r"^trunk_projector\.", "trunk_proj."), (r"^branch_projector\.", "branch_proj."), (r"^attention_projector\.", "score_proj."),
    (r"^out_mlp\.", "out_proj."), (r"^attn_blocks\.", "blocks."), (r"\.ln(?=[12]\.)", ".norm"), (r"\.mlp\.0\.", ".ffn_input."),
    (r"\.mlp\.2\.", ".ffn_output."), (r"\.self_attn\.Wq\.", ".query_proj."), (r"\.self_attn\.Wk\.", ".key_proj."),
    (r"\.self_attn\.Wv\.", ".value_proj."), (r"\.self_attn\.proj\.", ".out_proj."),
]
GNOT_NAMES = [
    (r"^preprocess_x\.", "x_proj."), (r"^preprocess_z\.", "f_proj."), (r"\.linear_pre\.0\.", ".input."), (r"\.linear_post\.", ".output."),
    *((rf"\.ln{index + 1}\.", f".norms.{index}.") for index in range(5)), (r"\.selfattn\.", ".self_attention."),
    (r"\.crossattn\.", ".cross_attention."), (r"\.key\.", ".key_proj."), (r"\.query\.", ".query_proj."), (r"\.value\.", ".value_proj."),
    (r"\.proj\.", ".out_proj."), (r"\.moe_mlp([12])\.(\d+)\.0\.", r".experts\1.experts.\2.input."),
    (r"\.moe_mlp([12])\.(\d+)\.2\.", r".experts\1.experts.\2.output."), (r"\.gatenet\.", ".gate."),
    (r"^fc1\.", "out_proj.input."), (r"^fc2\.", "out_proj.output."),
]


class Golden:
    """One file: arrays by key, meta."""

    def __init__(self, path: Path):
        self.path = path
        with np.load(path, allow_pickle=False) as file:
            self.arrays = {key: file[key] for key in file.files if key != "meta"}
            self.meta = json.loads(str(file["meta"]))
        self.ctor = self.meta["ctor"]

    def tensor(self, key: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.arrays[key]))

    def group(self, prefix: str, names) -> dict[str, torch.Tensor]:
        """Arrays below `prefix`/, reference names turned into ours, in the shapes of ours."""
        found = {}
        for key in self.arrays:
            if key.startswith(prefix + "/"):
                found |= in_our_shape(key.removeprefix(prefix + "/"), self.tensor(key), names)
        return found


def in_our_shape(name: str, value: torch.Tensor, names) -> dict[str, torch.Tensor]:
    """One reference array as ours: Transolver-3's fused input projection is two of ours, its leading axis of one goes."""
    if match := re.fullmatch(r"(.*\b)in_project\.(weight|bias)", name):
        parts = value.chunk(2)  # what is averaged, what is routed by
        return {f"{rename(match[1], names)}{ours}.{match[2]}": part
                for ours, part in zip(("token_proj", "routing_proj"), parts, strict=True)}
    if re.search(r"(^|\.)(temperature|bias)$", name) and value.ndim == 4:
        value = value[0]  # [H, 1, 1]
    return {rename(name, names): value}


def rename(name: str, names) -> str:
    for pattern, ours in names:
        name, count = re.subn(pattern, ours, name)
        if count and names is MIXER_NAMES:
            break
    return name


def distance(ours: torch.Tensor, theirs: torch.Tensor, unit: float | None = None) -> float:
    """Largest difference over `unit`, by default over the largest reference value."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    unit = theirs.abs().max().item() if unit is None else unit
    error = (ours - theirs).abs().max().item() / max(unit, np.finfo(float).tiny)
    return error if math.isfinite(error) else math.inf


def check_module(golden: Golden, module: torch.nn.Module, names) -> list[tuple[str, float, float]]:
    """Output and gradients of sum(output * w) with respect to every parameter and input."""
    module = module.double()
    module.load_state_dict(golden.group("param", names))
    x = golden.tensor("input/x").requires_grad_()
    output = module(x)
    (output * golden.tensor("w")).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    expected = golden.group("grad_param", names)
    for name in expected.keys() | gradients.keys():
        if (name in expected) != (gradients.get(name) is not None):
            return [(f"gradient of {name} on one side only", math.inf, GRADIENT)]
    pairs = [(gradients[name], value) for name, value in expected.items()]
    pairs.append((x.grad, golden.tensor("grad_input/x")))
    largest = max(theirs.abs().max().item() for _, theirs in pairs)
    errors = [distance(ours, theirs, max(theirs.abs().max().item(), 1e-6 * largest)) for ours, theirs in pairs]
    return [("output", distance(output, golden.tensor("output")), OUTPUT), ("gradients", max(errors), GRADIENT)]


def norm_of(ctor: dict) -> str:
    return "rmsnorm" if ctor.get("rmsnorm") else "layernorm"


def residual_mlp(golden: Golden):
    ctor = golden.ctor
    if ctor["act"] not in (None, "gelu"):
        raise LookupError(f"activation {ctor['act']!r}")
    residual = (ctor["input_residual"], ctor["output_residual"])
    if ctor["num_layers"] == -1:
        linear = residual == (True, True) and ctor["in_dim"] == ctor["out_dim"]
        module = ResidualLinear(ctor["in_dim"]) if linear else torch.nn.Linear(ctor["in_dim"], ctor["out_dim"])
        return check_module(golden, module, [(r"^fc\.", "")])
    module = ResidualMLP(ctor["in_dim"], ctor["hidden_dim"], ctor["out_dim"], num_layers=ctor["num_layers"],
                         input_residual=residual[0], output_residual=residual[1])
    return check_module(golden, module, MLP_NAMES)


def mixer(golden: Golden):
    ctor = dict(golden.ctor)
    kind, norm = KINDS[ctor.pop("kind", "flare")], norm_of(ctor)
    ctor.pop("rmsnorm", None)
    return check_module(golden, build_mixer(kind, norm=norm, **ctor), MIXER_NAMES)


def slice_mixer(golden: Golden):
    """Transolver, Transolver++ (the uniform numbers of its noise given) and Transolver-3, which also runs in tiles."""
    ctor, kind = golden.ctor, golden.path.stem.partition("_")[0]
    sizes = {"channel_dim": ctor["dim"], "num_heads": ctor["heads"], "num_latents": ctor["slice_num"]}
    if ctor.get("dim_head", ctor["dim"] // ctor["heads"]) * ctor["heads"] != ctor["dim"] or ctor.get("dropout"):
        raise LookupError("heads that do not fill the width, or dropout")
    if kind != "transolverpp":
        return check_module(golden, build_mixer(kind, **sizes), MIXER_NAMES)
    module = build_mixer(kind, **sizes, eval_noise=True)
    module.uniform = lambda logits: golden.tensor("aux/u")
    return check_module(golden, module, MIXER_NAMES)


def backbone_model(ctor: dict) -> torch.nn.Module:
    if ctor["kind"] not in KINDS:
        raise LookupError(f"mixer kind {ctor['kind']!r}")
    if (ctor["num_layers_in_out_proj"], ctor["num_layers_ffn"], ctor["out_proj_norm"]) != (2, 0, True) or ctor.get("act"):
        raise LookupError("a backbone with other projections or activation than the matched one")
    latents = {} if ctor["kind"] == "mha" else {"num_latents": ctor["num_latents"]}
    return build_model("backbone", in_dim=ctor["c_in"], out_dim=ctor["c_out"], mixer=KINDS[ctor["kind"]],
                       channel_dim=ctor["channel_dim"], num_heads=ctor["num_heads"], num_blocks=ctor["num_blocks"],
                       ffn_ratio=ctor["mlp_ratio_ffn"], norm=norm_of(ctor), **latents)


def backbone(golden: Golden):
    return check_module(golden, backbone_model(golden.ctor), BACKBONE_NAMES)


def architecture(golden: Golden, name: str, names, options: dict):
    """One of the complete models; `options` maps our keywords to values, or to the names of the reference's arguments."""
    ctor = golden.ctor
    given = {ours: ctor[theirs] if isinstance(theirs, str) else theirs for ours, theirs in options.items()}
    if ctor.get("act") not in (None, "gelu", "GELU") or ctor.get("dropout") or ctor.get("cross_attn"):
        raise LookupError("another activation, dropout or cross-attention blocks")
    return check_module(golden, build_model(name, **given), names)


def perceiver_io(golden: Golden):
    same = ("in_dim", "out_dim", "channel_dim", "num_heads", "num_blocks", "num_latents")
    options = {key: key for key in same} | {"ffn_ratio": "mlp_ratio", "init_std": INIT_STD}
    return architecture(golden, "perceiver_io", PERCEIVER_NAMES, options)


def set_transformer(golden: Golden):
    if golden.ctor["num_layers_in_out_proj"] != 2:
        raise LookupError("other projections")
    same = ("in_dim", "out_dim", "channel_dim", "num_heads", "num_blocks", "num_inducing")
    return architecture(golden, "set_transformer", SET_TRANSFORMER_NAMES,
                        {key: key for key in same} | {"ffn_ratio": "mlp_ratio"})


def lno(golden: Golden):
    if golden.ctor["model_attr"]["time"] or golden.ctor["x_dim"] != golden.ctor["y1_dim"]:
        raise LookupError("a time-dependent operator, or two different inputs")
    return architecture(golden, "lno", LNO_NAMES, {
        "in_dim": "x_dim", "out_dim": "y2_dim", "channel_dim": "n_dim", "num_heads": "n_head", "num_blocks": "n_block",
        "num_modes": "n_mode", "num_layers": "n_layer"})


def gnot(golden: Golden):
    """The unified-position table is the reference's own: it was computed in FP32 and then widened."""
    ctor = golden.ctor
    if ctor["fun_dim"] or ctor["time_input"] or ctor["act"] != "gelu" or ctor["dropout"]:
        raise LookupError("separate input functions, time, another activation or dropout")
    model = build_model("gnot", in_dim=ctor["space_dim"], out_dim=ctor["out_dim"], channel_dim=ctor["n_hidden"],
                        num_heads=ctor["n_heads"], num_blocks=ctor["n_layers"], num_experts=ctor["n_experts"],
                        ffn_ratio=ctor["mlp_ratio"], as_published=ctor["unified_pos"], reference_grid=ctor["ref"],
                        grid=tuple(ctor["shapelist"]) if ctor["shapelist"] else None)
    if not ctor["unified_pos"]:
        return check_module(golden, model, GNOT_NAMES)
    ours, theirs = model.distances.double(), golden.tensor("aux/pos")
    model.distances = theirs
    return [("positions", distance(ours, theirs), POSITIONS), *check_module(golden, model, GNOT_NAMES)]


def rel_loss(golden: Golden):
    prediction, target = golden.tensor("input/pred").requires_grad_(), golden.tensor("input/target")
    loss = training_loss(prediction, target, gradient_weight=0, grid=None)
    loss.backward()
    norm = Affine.fit(target.numpy())
    encoded = torch.from_numpy(norm.encode(target.numpy()))
    return [("output", distance(loss.detach(), golden.tensor("output")), OUTPUT),
            ("mean of errors", distance(relative_l2(prediction, target).mean().detach(), golden.tensor("output")), OUTPUT),
            ("normaliser", distance(encoded, golden.tensor("aux/encoded_target")), OUTPUT),
            ("round trip", distance(torch.from_numpy(norm.decode(encoded.numpy())), target), OUTPUT),
            ("gradients", distance(prediction.grad, golden.tensor("grad_input/pred")), GRADIENT)]


def darcy_loss(golden: Golden):
    norm = Affine.fit(golden.arrays["input/X_stats"])
    mean, std = (torch.from_numpy(value) for value in (norm.mean, norm.std))
    grid = (golden.ctor["s"],) * 2
    encoded = golden.tensor("input/yh").requires_grad_()
    target = golden.tensor("input/y_enc") * std + mean
    loss = training_loss(encoded * std + mean, target, gradient_weight=0.1, grid=grid)
    loss.backward()
    along_x, along_y = (slope[..., None] for slope in central_differences(target, grid))
    return [("output", distance(loss.detach(), golden.tensor("output")), OUTPUT),
            ("d/dx", distance(along_x, golden.tensor("aux/gt_grad_x")), OUTPUT),
            ("d/dy", distance(along_y, golden.tensor("aux/gt_grad_y")), OUTPUT),
            ("gradients", distance(encoded.grad, golden.tensor("grad_input/yh")), GRADIENT)]


def training_section(settings: dict, steps: int, ema_decay: float) -> dict:
    return {"lr": settings["lr"], "weight_decay": settings["weight_decay"], "decay_latents": True,
            "betas": settings["betas"], "eps": settings["eps"], "steps": steps, "pct_start": settings["pct_start"],
            "div_factor": settings["div_factor"], "final_div_factor": settings["final_div_factor"],
            "clip_norm": settings["clip_grad_norm"], "ema_decay": ema_decay, "precision": "fp32"}


def onecycle(golden: Golden):
    """Learning rate and beta1 as our own optimiser reports them before each step."""
    ctor = golden.ctor
    settings = ctor | {"lr": ctor["max_lr"], "weight_decay": 0.0, "betas": ctor["configured_betas"], "eps": 1e-8,
                       "clip_grad_norm": 1.0}
    model = torch.nn.Linear(1, 1).double()
    optimiser = build_optimiser(model, training_section(settings, ctor["total_steps"], 0.9))
    rates, betas = [], []
    for _ in range(ctor["total_steps"]):
        rates.append(optimiser.adamw.param_groups[0]["lr"])
        betas.append(optimiser.adamw.param_groups[0]["betas"][0])
        optimiser_step(model, optimiser, model.weight.sum())
    return [("lr", distance(torch.tensor(rates, dtype=torch.float64), golden.tensor("output")), OUTPUT),
            ("beta1", distance(torch.tensor(betas, dtype=torch.float64), golden.tensor("aux/beta1")), OUTPUT)]


def trajectory(golden: Golden):
    """Twenty steps through our optimiser, schedule, clipping and EMA from the same weights and batches."""
    settings = golden.meta["train"]
    model = backbone_model(golden.ctor).double()
    model.load_state_dict(golden.group("init", BACKBONE_NAMES))
    optimiser = build_optimiser(model, training_section(settings, settings["total_steps"], settings["ema_decay"]))
    x, mean, std = golden.tensor("input/x"), golden.tensor("aux/mean"), golden.tensor("aux/std")
    target = golden.tensor("input/y_enc") * std + mean
    side = math.isqrt(x.shape[1])
    gradient = {"gradient_weight": 0.1, "grid": (side, side)} if "gradient" in golden.meta["loss"] else {
        "gradient_weight": 0, "grid": None}
    found = {"output": [], "aux/grad_norm_preclip": [], "aux/lr": [], "aux/beta1": []}
    for batch in golden.tensor("input/batch_indices").long():
        group = optimiser.adamw.param_groups[0]
        found["aux/lr"].append(group["lr"])
        found["aux/beta1"].append(group["betas"][0])
        loss = training_loss(model(x[batch]) * std + mean, target[batch], **gradient)
        norm, _ = optimiser_step(model, optimiser, loss)
        found["output"].append(loss.item())
        found["aux/grad_norm_preclip"].append(norm.item())
    rows = [(key, distance(torch.tensor(values, dtype=torch.float64), golden.tensor(key)), TRAJECTORY)
            for key, values in found.items()]
    for prefix, ours in (("final", model), ("ema", optimiser.average)):
        theirs = golden.group(prefix, BACKBONE_NAMES)
        largest = max(value.abs().max().item() for value in theirs.values())
        rows.append((prefix, max(distance(value, theirs[name], largest) for name, value in ours.state_dict().items()),
                     TRAJECTORY))
    return rows


FAMILIES = {  # by the beginning of a file's name; the longest that fits
    "residual_mlp": residual_mlp, "flare_mixer_flarepy3b66": mixer, "flarepp": mixer, "mixer_backbone": backbone,
    "transolver_mixer_flarepy3b66": slice_mixer, "transolver3_mixer_flarepy3b66": slice_mixer, "transolverpp_attn": slice_mixer,
    "perceiverio": perceiver_io, "set_transformer": set_transformer, "lno": lno, "gnot": gnot,
    "rel_loss": rel_loss, "darcy_loss": darcy_loss, "onecycle": onecycle, "train_backbone": trajectory,
}


def check(path: Path) -> tuple[bool, str]:
    """(passed, line) of one file."""
    fitting = [prefix for prefix in FAMILIES if path.stem.startswith(prefix)]
    if not fitting:
        return False, f"UNMAPPED {path.name}: no class here answers to it"
    try:
        rows = FAMILIES[max(fitting, key=len)](Golden(path))
    except LookupError as error:
        return False, f"UNMAPPED {path.name}: {error}"
    failed = [name for name, error, tolerance in rows if not error <= tolerance]
    text = ", ".join(f"{name} {error:.1e}" for name, error, _ in rows)
    return not failed, f"{'FAILED  ' if failed else 'ok      '} {path.name}: {text}{' <- ' + ', '.join(failed) if failed else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of .npz files")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="check only files whose name fits; repeatable")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob("*.npz"))
    if arguments.only:
        paths = [path for path in paths if any(fnmatch.fnmatch(path.stem, p) or fnmatch.fnmatch(path.name, p)
                                               for p in arguments.only)]
    if not paths:
        print(f"error: no .npz file to check in {arguments.folder}", file=sys.stderr)
        return 2
    results = [check(path) for path in paths]
    print("\n".join(line for _, line in results))
    passed = sum(ok for ok, _ in results)
    print(f"{passed} of {len(results)} files agree")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
