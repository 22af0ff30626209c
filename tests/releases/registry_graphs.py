# SPDX-License-Identifier: Apache-2.0
"""A release's own decision about prefill graphs, for each architecture of its registry.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.registry_graphs OUT.json [ARCHITECTURE...]

It decides twice. ServerArgs chooses the backend of a server that is started without flags on an NVIDIA GPU; then the
model runner looks for the layers and may refuse, also where graphs are asked for: that one sees the model itself, built
on torch's meta device, up to the capture.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys
import tempfile
from typing import Any
from unittest import mock

from cpu_sglang.architectures import CONFIGURATIONS
from tests.harm.forked_rows import register
from tests.releases import layer_stacks
from tests.releases.layer_stacks import REFUSED, Said
from tests.releases.registry_configs import (
    CAPTURED,
    DRAFT_OF,
    DRAFTS_OF_THEIR_OWN,
    NEVER,
    NO_ATTENTION,
    NOT_EXAMINED,
    READ,
    UNASKED,
    config_of,
)

BREAKABLE, AS_ITS_TARGET = "breakable", "as its target"
# for which SGLang chooses one graph for the whole prefill
FULL = ("InklingForConditionalGeneration",)
# the first of these that SGLang accepts for the model; torch's own, which runs on a CPU, would switch graphs off
ATTENTION_BACKENDS = ("fa3", "triton")
# of a layer with the id of another one
SHARED = "duplicate attention layer_id"
RULE = re.compile(r"incompatible with (.*); disabling prefill")
# attributes of a layer whose parts look at one token at a time
PLAIN = re.compile(r"norm|mlp|moe|feed_forward|ffn|expert|dropout|communicator|scal|router|gate", re.IGNORECASE)
Row = dict[str, Any]


def is_draft(name: str) -> bool:
    return name in DRAFT_OF or name in DRAFTS_OF_THEIR_OWN or name in UNASKED


def asked_for(model_runner: Any, name: str, said: Said) -> Row:
    """The runner's decision where breakable graphs are asked for."""
    if name in UNASKED:
        return {"asked for": NEVER}
    if name in NOT_EXAMINED:
        return {"not examined": NOT_EXAMINED[name]}
    if name in READ:
        return as_read(name)
    found = config_of(name)
    assert found is not None, f"registry_configs.py has nothing about {name}"
    architecture, config = found
    model_config, model = layer_stacks.build_of(architecture, config, is_draft=name in DRAFT_OF)
    assert model_config.hf_config.architectures == [name], f"it became {model_config.hf_config.architectures}"
    said.records.clear()
    try:
        answer = layer_stacks.start_runner(model_runner, model_config, model, said, is_draft=is_draft(name))
    except ValueError as error:
        if SHARED not in str(error):
            raise
        # the layers were found; docs/graphs_by_model.md says how stock ends there, and shared_layers_refused fixes it
        answer = CAPTURED
    row: Row = {"asked for": answer if answer.startswith(REFUSED) else CAPTURED}
    if answer == NO_ATTENTION:
        row["layers of"] = parts_without_attention(model, model_runner.attention_layers)
    return row


def as_read(name: str) -> Row:
    read = READ[name]
    row: Row = {"read": f"{read.file}: {read.line}", "asked for": read.answer}
    if read.layers_of:
        row["layers of"] = list(read.layers_of)
    return row


def parts_without_attention(model: Any, attention: list[Any]) -> list[str]:
    """Classes of what such layers have in its place, as far as names tell."""
    import torch

    stacks = [
        part
        for path, part in model.named_modules()
        if path.rpartition(".")[2] == "layers" and isinstance(part, torch.nn.ModuleList) and len(part) == len(attention)
    ]
    # a vision tower may have as many layers as the text
    of_text = [stack for stack in stacks if any(found in set(stack.modules()) for found in attention if found)]
    layers = [layer for layer, found in zip((of_text or stacks)[0], attention, strict=True) if found is None]
    parts = [(name, type(part).__name__) for layer in layers for name, part in layer.named_children()]
    return sorted({part for name, part in parts if not PLAIN.search(name)})


def by_default(name: str, said: Said) -> str:
    """The backend that ServerArgs chooses without flags, or the rule that switches graphs off."""
    if is_draft(name):
        return AS_ITS_TARGET
    found = config_of(name)
    if found is None:
        return by_name(name)
    architecture, config = found
    register(config["model_type"])
    known = CONFIGURATIONS[architecture].server_args if architecture in CONFIGURATIONS else {}
    arguments = {key: value for key, value in known.items() if key != "attention_backend"}
    preferred = known.get("attention_backend")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        for attention in dict.fromkeys((preferred, *ATTENTION_BACKENDS) if preferred else ATTENTION_BACKENDS):
            try:
                return resolved(folder, said, attention_backend=attention, **arguments)
            except Exception as error:
                refused = f"{type(error).__name__}: {error}"
    raise RuntimeError(f"{name}: ServerArgs accepts no attention backend: {refused}")


def chosen(folder: str, **arguments: Any) -> str:
    """The prefill backend of a server of the model in this folder."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.model_executor import cuda_graph_config
    from sglang.srt.server_args import ServerArgs

    with mock.patch.object(cuda_graph_config, "default_prefill_backend", lambda: BREAKABLE):
        args = ServerArgs(
            model_path=folder,
            device="cuda",
            load_format="dummy",
            skip_tokenizer_init=True,
            mem_fraction_static=0.5,
            # the other ones want what the platform of a CPU does not offer
            mamba_radix_cache_strategy="no_buffer",
            disable_overlap_schedule=True,
            **arguments,
        )
        args.resolve_once()
    backend: str = resolved_view(args).cuda_graph_config.prefill.backend
    return backend


def resolved(folder: str, said: Said, **arguments: Any) -> str:
    said.records.clear()
    backend = chosen(folder, **arguments)
    if backend != "disabled":
        return backend
    messages = said.messages("sglang.")
    rules = [found[1] for message in messages if (found := RULE.search(message))]
    forced = [message.partition(" detected")[0] for message in messages if "--disable-cuda-graph" in message]
    return f"off: {(rules or forced)[0]}"


def by_name(name: str) -> str:
    """The part of the decision that needs the name only."""
    if name in FULL:
        return "full"
    model_config = importlib.import_module("sglang.srt.configs.model_config")
    if model_config.is_multimodal_model([name]) and not model_config.is_multimodal_breakable_cuda_graph_supported(
        [name]
    ):
        return "off: multimodal model"
    return BREAKABLE


def main(out: str, *names: str) -> None:
    model_runner, said, known = layer_stacks.start()
    from sglang.srt.configs import model_config

    absent = [name for name in names if name not in known and not {name} & {*READ, *NOT_EXAMINED, *UNASKED}]
    assert not absent, f"registry_configs.py has to say what is read of {absent}, which cannot be imported here"
    report: dict[str, Row] = {name: asked_for(model_runner, name, said) for name in names}
    # settling the arguments changes the environment of what is built after it
    for name in names:
        row = report[name]
        row["by default"] = by_default(name, said)
        # some are served as text models unless a flag or their configuration says otherwise
        if row["by default"] == BREAKABLE and by_name(name) != BREAKABLE:
            row["as multimodal"] = by_name(name)
        row["generates"] = model_config.is_generation_model([name])
    pathlib.Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
