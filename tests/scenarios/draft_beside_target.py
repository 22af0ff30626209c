# SPDX-License-Identifier: Apache-2.0
"""A target and a draft of one checkpoint, the draft built by its own constructor, as a server builds it."""

from __future__ import annotations

from typing import Any

from cpu_sglang import one_batch
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.fixes import hybrid_layer_misrouted as fix
from sglang_bcg_fixes.planning.registry import declared_in
from tests.scenarios import named

FIX = declared_in(fix)


def configuration(*pairs: str) -> dict[str, Any]:
    """Tell the layers of full attention that a target's configuration names, before its draft is built and after."""
    one_batch.import_sglang(with_graphs=True)
    one_batch.load_plugins()
    loaded = one_batch.load("qwen3next")
    one_batch.randomize(loaded.model_runner.model)
    process = plugin.load()
    paths = dict(pair.split("=", 1) for pair in pairs)
    found: dict[str, Any] = {
        "state": process.report.state(FIX.id),
        "alone": rebuilt(loaded),
        "beside a draft": beside_a_draft(loaded),
    }
    found["patched"] = {name: pollute(path) for name, path in paths.items()}
    process.ledger.undo(FIX.id)
    found["unpatched"] = {name: pollute(path) for name, path in paths.items()}
    found["beside a draft, unpatched"] = beside_a_draft(loaded)
    return found


def seen(config: Any) -> dict[str, Any]:
    ids = list(config.hf_text_config.full_attention_layer_ids)
    return {"ids": ids, "architecture": config.hf_config.architectures[0]}


def part_of(config: Any) -> bool:
    return config.hf_text_config is config.hf_config or config.hf_text_config is config.hf_config.get_text_config()


def build(config: Any) -> None:
    from sglang.srt.models.registry import ModelRegistry

    model, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    model(config.hf_config)


def pollute(path: str) -> dict[str, Any]:
    from sglang.srt.configs.model_config import ModelConfig

    target = ModelConfig(path)
    before = seen(target)
    draft = ModelConfig(path, is_draft_model=True)
    whole = part_of(target) and part_of(draft)
    build(draft)
    return {"before": before, "after": seen(target), "draft": seen(draft)["ids"], "whole": whole}


def rebuilt(loaded: one_batch.LoadedModel) -> list[Any]:
    """Rebuild the backend as --speculative-adaptive does to the target when its draft is there."""
    runner = loaded.model_runner
    backend = runner._get_attention_backend(init_new_workspace=True)
    runner.attn_backend = backend
    try:
        return [list(backend.full_attn_layers), one_batch.generate(loaded, one_batch.PROMPTS, 3)[0]]
    except Exception as error:
        return [list(backend.full_attn_layers), type(error).__name__]


def beside_a_draft(loaded: one_batch.LoadedModel) -> list[Any]:
    from sglang.srt.configs.model_config import ModelConfig

    args = loaded.model_runner.server_args
    build(
        ModelConfig.from_server_args(
            args, model_path=args.model_path, model_revision=args.revision, is_draft_model=True
        )
    )
    return rebuilt(loaded)


if __name__ == "__main__":
    named.run(globals())
