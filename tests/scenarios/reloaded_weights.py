# SPDX-License-Identifier: Apache-2.0
"""Weights reloaded from disk on a release's real runner, beside its prefill graphs.

The runner, the loader, the update and the capture are SGLang's. Two conditions are made: the update takes this machine
for one with graphs, and the layers' weights get new storage after loading, as those of quantized models do.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from cpu_sglang import graphs, one_batch, prefill
from sglang_bcg_fixes.engine.swapped import replaced
from sglang_bcg_fixes.fixes import reload_keeps_prefill_graphs as fix
from tests.scenarios import released, telling

# for each bucket one, of one request: 0.5.11 replays no others
BATCHES = ([8], [11])
# the slot that padding is written to
UNUSED = 0


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, between, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name in ("model.embed_tokens", "lm_head"):
        yield name, (config["vocab_size"], hidden)
    yield "model.norm", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (between, hidden),
            "mlp.up_proj": (between, hidden),
            "mlp.down_proj": (hidden, between),
        }
        for name, shape in parts.items():
            yield f"model.layers.{layer}.{name}", shape


def write_checkpoint(folder: pathlib.Path, seed: int) -> str:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    config = json.loads((one_batch.MODELS / "llama" / "config.json").read_text())
    tensors = {}
    for name, shape in shapes(config):
        values = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = (1 + 0.1 * values if len(shape) == 1 else 0.08 * values).half()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


class PlatformWithGraphs:
    """The release's platform, as one whose graphs an update captures anew."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.capabilities = SimpleNamespace(graph_capture=True)

    def is_out_of_tree(self) -> bool:
        return True

    def support_cuda_graph(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Server:
    def __init__(self, loaded: one_batch.LoadedModel) -> None:
        self.loaded = loaded
        self.runner = loaded.model_runner
        self.updater = getattr(self.runner, "weight_updater", self.runner)
        module: Any = sys.modules[type(self.updater).__module__]
        module.current_platform = PlatformWithGraphs(module.current_platform)
        self.attribute = next(name for name in fix.INITIALISERS if hasattr(self.runner, name))
        self.moves = True
        method = type(self.runner.model.model.layers[0].mlp.down_proj.quant_method)
        process = method.process_weights_after_loading

        def process_and_move(quant_method: Any, layer: Any) -> None:
            process(quant_method, layer)
            if self.moves:
                layer.weight.data = layer.weight.data.clone()

        method.process_weights_after_loading = process_and_move

    @property
    def graphs(self) -> Any:
        return getattr(self.runner, self.attribute)

    def update(self, folder: str, **options: Any) -> bool:
        return bool(self.updater.update_weights_from_disk(folder, "safetensors", **options)[0])

    def answers(self) -> list[Any]:
        return [one_batch.generate(self.loaded, prefill._prompts(lengths), 1)[1] for lengths in BATCHES]

    def compare(self) -> list[str]:
        """Answers from each bucket's graph next to eager ones, with the weights that the model has now."""
        with replaced(self.runner, self.attribute, None):
            eager = self.answers()
        told = []
        for lengths, expected in zip(BATCHES, eager, strict=True):
            before = graphs.counters.replays
            answer = one_batch.generate(self.loaded, prefill._prompts(lengths), 1)[1]
            way = "replayed" if graphs.counters.replays > before else "eager"
            told.append(f"{way}, {'right' if bool((answer == expected).all()) else 'wrong'}")
        return told

    def cached(self) -> list[Any]:
        """Copies of the keys that were cached, without those of padding."""
        pool, layers = self.runner.token_to_kv_pool, self.runner.model_config.num_hidden_layers
        return [pool.get_key_buffer(layer)[UNUSED + 1 :].clone() for layer in range(layers)]


def main() -> None:
    server = Server(released.load("llama"))
    with tempfile.TemporaryDirectory() as temporary:
        folders = [write_checkpoint(pathlib.Path(temporary, name), seed) for seed, name in enumerate("ab")]

        def recapture(folder: str) -> dict[str, Any]:
            server.answers()
            old, cached = server.graphs, server.cached()
            updated = server.update(folder, recapture_cuda_graph=True)
            kept = all(bool((one == other).all()) for one, other in zip(cached, server.cached(), strict=True))
            return {
                "updated": updated,
                "runner": "old" if server.graphs is old else "none" if server.graphs is None else "new",
                "old graphs freed": not prefill.captured_graphs(old),
                "cache kept": kept,
                "answers": server.compare(),
            }

        def act() -> dict[str, Any]:
            found: dict[str, Any] = {}
            prefill.capture_prefill(server.runner)
            found["at start"] = server.compare()
            captured = server.graphs
            server.moves = False
            assert server.update(folders[1])
            found["weights in place"] = [server.graphs is captured, *server.compare()]
            server.moves = True
            found["a checkpoint that is not there"] = recapture(str(pathlib.Path(temporary, "missing")))
            found["first reload"] = recapture(folders[0])
            found["second reload"] = recapture(folders[1])
            prefill.capture_prefill(server.runner)
            server.runner.is_draft_worker = True
            found["a draft"] = recapture(folders[0])
            server.runner.is_draft_worker = False
            prefill.capture_prefill(server.runner)
            question = "can_run_graph" if hasattr(server.graphs, "can_run_graph") else "can_run"
            setattr(server.graphs, question, lambda batch: False)
            found["graphs that a self-check refused"] = recapture(folders[1])
            prefill.capture_prefill(server.runner)
            with replaced(server.runner, fix.INITIALISERS[server.attribute], out_of_memory):
                found["no memory"] = recapture(folders[0])
            return found

        telling.with_and_without(act)


def out_of_memory() -> None:
    raise RuntimeError("out of memory")


if __name__ == "__main__":
    main()
