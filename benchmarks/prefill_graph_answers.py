"""Does a server with breakable prefill graphs answer as one without them? Stock and patched, on a GPU.

    python benchmarks/prefill_graph_answers.py --json benchmarks/results/answers.json

Makes a tiny Qwen3-Next with random weights (nothing is downloaded) and sends the same serial greedy requests to fresh
servers of the installed SGLang: `refused` with breakable graphs, the plugin and every replay refused, which is the
exact reference; `stock` with breakable graphs and no plugin; `patched` with both; `eager` without prefill graphs, for
information. A server that dies or hangs is a result, with the end of its log.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from sglang_bcg_fixes import __version__, release

BUCKETS = [64, 128, 256, 512, 1024]
LENGTHS = (50, 64, 100, 128, 200, 333, 511, 17, 65, 1, 900, 257)
TIMED_LENGTHS = (253, 1021)
NEW_TOKENS = 12
VOCABULARY = 2048


def make_model(folder: pathlib.Path, layers: int) -> None:
    """Qwen3-Next, one full-attention layer in four; weights at a scale where the logits spread."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, head_dim, inner, experts = 512, 4, 128, 128, 8
    k_heads, v_heads, linear_dim = 4, 8, 128
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear_dim,
        "linear_value_head_dim": linear_dim,
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": v_heads,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    torch.manual_seed(0)

    def normal(*shape: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(*shape) * (scale or shape[-1] ** -0.5)).to(torch.bfloat16)

    def constant(value: float, size: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=1.0),
        "lm_head.weight": normal(VOCABULARY, hidden, scale=0.15),
        "model.norm.weight": constant(0, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = constant(0, hidden)
        weights[prefix + "post_attention_layernorm.weight"] = constant(0, hidden)
        if (layer + 1) % 4 == 0:
            part = prefix + "self_attn."
            weights[part + "q_proj.weight"] = normal(2 * heads * head_dim, hidden)
            weights[part + "k_proj.weight"] = normal(head_dim, hidden)
            weights[part + "v_proj.weight"] = normal(head_dim, hidden)
            weights[part + "o_proj.weight"] = normal(hidden, heads * head_dim)
            weights[part + "q_norm.weight"] = constant(0, head_dim)
            weights[part + "k_norm.weight"] = constant(0, head_dim)
        else:
            part = prefix + "linear_attn."
            mixed = 2 * k_heads * linear_dim + v_heads * linear_dim
            weights[part + "in_proj_qkvz.weight"] = normal(mixed + v_heads * linear_dim, hidden)
            weights[part + "in_proj_ba.weight"] = normal(2 * v_heads, hidden)
            weights[part + "conv1d.weight"] = normal(mixed, 1, 4)
            weights[part + "dt_bias"] = constant(1, v_heads)
            weights[part + "A_log"] = torch.log(torch.empty(v_heads).uniform_(0.5, 4)).to(torch.bfloat16)
            weights[part + "norm.weight"] = constant(1, linear_dim)
            weights[part + "out_proj.weight"] = normal(hidden, v_heads * linear_dim)
        part = prefix + "mlp."
        weights[part + "gate.weight"] = normal(experts, hidden)
        weights[part + "shared_expert_gate.weight"] = normal(1, hidden)
        for owner in ("shared_expert", *(f"experts.{index}" for index in range(experts))):
            weights[f"{part}{owner}.gate_proj.weight"] = normal(inner, hidden)
            weights[f"{part}{owner}.up_proj.weight"] = normal(inner, hidden)
            weights[f"{part}{owner}.down_proj.weight"] = normal(hidden, inner)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def graph_flags(arm: str) -> dict[str, Any]:
    """How this release turns prefill graphs off, or breakable ones on."""
    source = release.installed()
    assert source, "no SGLang is installed"
    if source.has_option("--cuda-graph-backend-prefill"):
        if arm == "eager":
            return {"cuda_graph_backend_prefill": "disabled"}
        return {"cuda_graph_backend_prefill": "breakable", "cuda_graph_bs_prefill": BUCKETS}
    if arm == "eager":
        return {"disable_piecewise_cuda_graph": True}
    return {
        "enable_breakable_cuda_graph": True,
        "enforce_piecewise_cuda_graph": True,
        "piecewise_cuda_graph_tokens": BUCKETS,
    }


def serve(arm: str, model: str, file: pathlib.Path, requests: int) -> None:
    """One server, in this process and its children: answers and times into the file after every request."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=model,
        skip_tokenizer_init=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.2,
        max_running_requests=16,
        disable_radix_cache=True,
        random_seed=0,
        log_level="info",
        dtype="bfloat16",
        cuda_graph_max_bs=16,
        max_total_tokens=65536,
        chunked_prefill_size=4096,
        context_length=4096,
        **graph_flags(arm),
    )
    rng = random.Random(1)
    answers: list[dict[str, Any]] = []
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for number in range(requests):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(LENGTHS[number % len(LENGTHS)])]
        answer = engine.generate(input_ids=[prompt], sampling_params=sampling, return_logprob=True)[0]
        logprobs = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
        answers.append({"tokens": answer["output_ids"], "logprobs": logprobs})
        file.write_text(json.dumps({"answers": answers}))
    times = {}
    for length in TIMED_LENGTHS:
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(length)]
        taken = []
        for _ in range(25):
            start = time.perf_counter()
            engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1})
            taken.append((time.perf_counter() - start) * 1e3)
        times[str(length)] = round(statistics.median(taken[5:]), 3)
    file.write_text(json.dumps({"answers": answers, "first_token_ms": times}))
    engine.shutdown()


def run_arm(arm: str, model: pathlib.Path, folder: pathlib.Path, requests: int, limit: int) -> dict[str, Any]:
    """A fresh server in its own process group; killed at the limit."""
    file, log = folder / f"{arm}.json", folder / f"{arm}.log"
    command = [sys.executable, __file__, "--serve", arm, "--model", str(model), "--json", str(file)]
    environment = {"SGLANG_PLUGINS": "__none__", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
    if arm in ("patched", "refused"):
        environment |= {"SGLANG_PLUGINS": "bcg_fixes", "SGLANG_BCG_FIXES": "strict"}
    if arm == "refused":
        environment["PYTHONPATH"] = os.pathsep.join([str(install_reference(folder)), os.environ.get("PYTHONPATH", "")])
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--requests", str(requests)],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"killed after {limit} s"
        if process.poll() != 0:
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text(errors="replace").replace(str(pathlib.Path.home()), "~")
    found = json.loads(file.read_text()) if file.exists() else {"answers": []}
    return {
        **found,
        "status": status,
        "seconds": round(time.perf_counter() - start, 1),
        "prefills_replayed": len(re.findall(r"Prefill batch.*cuda graph: True", text)),
        "plugin": sorted(set(re.findall(r"bcg-fixes .*", text))),
        "log_tail": [] if status == 0 else [line[:160] for line in text.splitlines()[-12:]],
        "errors": sorted(set(re.findall(r"[^\n]*illegal memory access[^\n]*", text)))[:2],
    }


def install_reference(folder: pathlib.Path) -> pathlib.Path:
    """The package that refuses replay, where entry points are looked for."""
    info = folder / "site" / "refuse_replay-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refuse-replay\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang_bcg_fixes]\nrefuse_replay = refuse_replay\n")
    shutil.copy(pathlib.Path(__file__).with_name("refuse_replay.py"), info.parent)
    return info.parent


def compare(reference: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    """Requests answered, equal in every token, and equal in every bit of every logprob."""
    pairs = list(zip(reference["answers"], arm["answers"], strict=False))
    gaps = [
        abs(a - b) if a == a and b == b else float("nan")
        for one, other in pairs
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    return {
        "answered": len(arm["answers"]),
        "same_tokens": sum(one["tokens"] == other["tokens"] for one, other in pairs),
        "same_bits": sum(one == other for one, other in pairs),
        "largest_logprob_gap": max(gaps, default=None, key=lambda gap: (gap != gap, gap)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="refused,stock,patched,refused,eager")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=int, default=150, help="seconds until a server is killed")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--serve", metavar="ARM", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model, options.json, options.requests)
        return
    import torch

    folder = pathlib.Path(tempfile.mkdtemp())
    make_model(folder / "model", options.layers)
    runs = []
    for position, arm in enumerate(options.arms.split(",")):
        (folder / str(position)).mkdir()
        found = run_arm(arm, folder / "model", folder / str(position), options.requests, options.limit)
        found = {"arm": arm, **compare(runs[0] if runs else found, found), **found}
        runs.append(found)
        print({name: value for name, value in found.items() if name not in ("answers", "log_tail")}, flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sglang": getattr(release.installed(), "version", None),
        "sglang_kernel": importlib.metadata.version("sglang-kernel"),
        "bcg_fixes": __version__,
        "model": f"random Qwen3-Next, {options.layers} layers",
        "buckets": BUCKETS,
        "runs": [{name: value for name, value in run.items() if name != "answers"} for run in runs],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
