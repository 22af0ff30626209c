# SPDX-License-Identifier: Apache-2.0
"""One batch through a released SGLang's real ModelRunner, in this process and without a scheduler.

SGLang's own one-batch benchmark builds what a server would: ServerArgs, ModelRunner, memory pools, attention backends
and ScheduleBatch. Plugins are loaded as in a server, so SGLANG_PLUGINS chooses them (`__none__` chooses none).

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m cpu_sglang.one_batch --model llama --json OUT \\
        --arm without SGLANG_PLUGINS=__none__ --arm with SGLANG_PLUGINS=bcg_fixes
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import flash_attention, mamba, model_registry, stand_ins

MODELS = pathlib.Path(__file__).parent / "models"
# torch_native has no latent attention; early releases' triton backend fails if the first layer is linear
ATTENTION_BACKENDS = {"bailing_full": "fa3"}
_freeze = gc.freeze
# name parts of vectors that scale a layer's output
NEAR_ONE = ("norm", "ln_", "_scale")
PROMPTS = ([3, 4, 5, 6, 7], [8, 9, 10])

# flags that a release does not know are left out: their names changed between releases
DEFAULT_SERVER_ARGS = {
    "load_format": "dummy",
    "device": "cpu",
    "sampling_backend": "pytorch",
    "dtype": "float16",
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "disable_decode_cuda_graph": True,
    "max_total_tokens": 512,
    "context_length": 128,
    "chunked_prefill_size": 64,
    "max_mamba_cache_size": 8,
    "max_running_requests": 4,
    "mem_fraction_static": 0.5,
    "random_seed": 0,
    "log_level": "warning",
}


class _Loaded(Exception):
    """Raised to leave SGLang's benchmark before it measures; carries the runner that it built."""


@dataclass(frozen=True)
class LoadedModel:
    benchmark: Any
    runner: Any

    @property
    def model_runner(self) -> Any:
        # later releases wrap the ModelRunner
        return getattr(self.runner, "torch_runner", self.runner)


def import_sglang(with_graphs: bool = False) -> Any:
    """Install the stand-ins, import sglang and return it; load_plugins() comes next, as in a server."""
    # imports live forever: exempt them from this and all later garbage collections
    gc.disable()
    stand_ins.install()
    _compile_nothing()
    if with_graphs:
        from . import graphs

        graphs.install()
    import sglang

    stand_ins.after_import()
    if with_graphs:
        graphs.after_import()
    gc.freeze()
    gc.enable()
    return sglang


def _compile_nothing() -> None:
    # compiling gains nothing here, and would hide operations from a capture
    import torch._dynamo

    torch._dynamo.config.disable = True


def freeze_for_good() -> None:
    """Keep all that is there out of later collections."""
    _freeze()
    # SGLang unfreezes around each capture, and collections would scan all that was imported again
    gc.freeze = gc.unfreeze = lambda: None


def load_plugins() -> None:
    from sglang.srt import plugins

    plugins.load_plugins()


def _import_benchmark() -> Any:
    if importlib.util.find_spec("sglang.benchmark.one_batch") is not None:
        return importlib.import_module("sglang.benchmark.one_batch")
    return importlib.import_module("sglang.bench_one_batch")


def server_arguments(model: str, **server_args: Any) -> Any:
    """SGLang's ServerArgs for `models/<model>` on a CPU, and what such a server calls."""
    from sglang.srt.server_args import ServerArgs

    model_registry.install()
    known = getattr(ServerArgs, "__struct_fields__", None) or [field.name for field in dataclasses.fields(ServerArgs)]
    chosen = DEFAULT_SERVER_ARGS | {"model_path": str(MODELS / model)} | server_args
    chosen.setdefault("attention_backend", ATTENTION_BACKENDS.get(model, "torch_native"))
    if chosen["attention_backend"] == "fa3":
        flash_attention.install()
    args = ServerArgs(**{name: value for name, value in chosen.items() if name in known})
    mamba.install(args)
    return args


def load(model: str, **server_args: Any) -> LoadedModel:
    """Build `models/<model>` with dummy weights, after import_sglang(), load_plugins(); one per process."""
    return load_rank(model, server_args)


def load_rank(model: str, server_args: dict[str, Any], rank: int = 0, port: int | None = None) -> LoadedModel:
    """Build the part of one of several ranks, which meet at the port: see ranks.py."""
    freeze_for_good()
    # torch's settings are a thread's own, and a pool forks from a thread
    _compile_nothing()
    benchmark = _import_benchmark()
    from sglang.srt.server_args import PortArgs

    args = server_arguments(model, **server_args)

    def leave(run_name: Any, runner: Any, *_: Any, **__: Any) -> None:
        raise _Loaded(runner)

    benchmark.latency_test_run_once = leave
    benchmark.get_tokenizer = lambda *_, **__: None
    sizes = benchmark.BenchArgs(batch_size=(1,), input_len=(4,), output_len=(2,))
    ports = PortArgs.init_new(args)
    if port is not None:
        ports.nccl_port = port
    try:
        benchmark.latency_test(args, ports, sizes, rank, rank)
    except _Loaded as loaded:
        freeze_for_good()
        return LoadedModel(benchmark, loaded.args[0])
    raise RuntimeError("SGLang's one-batch benchmark ended before it measured anything")


def randomize(model: Any, seed: int = 0, std: float = 0.08) -> None:
    """Enlarge dummy weights: within 1e-3 of zero, no layer would be visible next to the residual."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.dtype.is_floating_point:
                continue
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_((values * std).to(parameter.dtype))
            elif any(word in name.lower() for word in NEAR_ONE):
                parameter.copy_((1 + 0.1 * values).to(parameter.dtype))


def derive(model: Any) -> None:
    """Derive again what a model keeps of its weights, such as products of those of latent attention."""
    # behind a tower it is a part of the model that does so
    inner = model if hasattr(model, "post_load_weights") else getattr(model, "language_model", model)
    if hasattr(inner, "post_load_weights"):
        inner.post_load_weights()
    elif any(getattr(part, "w_kc", part) is None for part in model.modules()):
        # some models do that behind the last weight
        model.load_weights([])


def generate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], steps: int) -> tuple[list[list[int]], Any]:
    """Generate greedily; return each prompt's tokens and the (prompt, step, vocabulary) logits."""
    import numpy
    import torch

    with torch.no_grad():
        loaded.runner.clear()
        requests = loaded.benchmark.prepare_synthetic_inputs_for_latency_test(
            len(prompts), max(map(len, prompts)), [numpy.array(prompt, dtype=numpy.int32) for prompt in prompts]
        )
        tokens, logits, batch = loaded.runner.extend(requests)
        all_tokens, all_logits = [tokens.clone()], [logits.float().clone()]
        for _ in range(steps - 1):
            tokens, logits = loaded.runner.decode(tokens, batch)
            all_tokens.append(tokens.clone())
            all_logits.append(logits.float().clone())
    return torch.stack(all_tokens, 1).tolist(), torch.stack(all_logits, 1)


def _tokens_of(model: str, steps: int, environment: dict[str, str]) -> list[list[int]]:
    os.environ.update(environment)
    load_plugins()
    loaded = load(model)
    randomize(loaded.model_runner.model)
    return generate(loaded, PROMPTS, steps)[0]


def tokens_of(
    arms: Mapping[str, dict[str, str]], models: Sequence[str], steps: int
) -> dict[str, dict[str, list[list[int]]]]:
    """Tokens of each model in each arm, which is an environment; call it after import_sglang()."""
    # SGLang's globals allow one model in a process; forked processes inherit the imports, which take the longest
    _import_benchmark()
    runs = [(model, steps, environment) for environment in arms.values() for model in models]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = iter(pool.starmap(_tokens_of, runs, chunksize=1))
    return {arm: {model: next(found) for model in models} for arm in arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(folder.name for folder in MODELS.iterdir()), required=True)
    parser.add_argument(
        "--arm",
        action="append",
        nargs="+",
        required=True,
        metavar=("NAME", "VARIABLE=VALUE"),
        help="what to run and its environment; repeat",
    )
    parser.add_argument("--steps", type=int, default=2, help="tokens to generate for each prompt")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    arms = {name: dict(pair.split("=", 1) for pair in pairs) for name, *pairs in arguments.arm}
    release = import_sglang().__version__
    report = {"release": release, "tokens": tokens_of(arms, arguments.model, arguments.steps)}
    arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
