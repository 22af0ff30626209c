"""Which attention every kind of layer goes to, on the real backend of every release, without and with the fix."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

from sglang_bcg_fixes.fixes import hybrid_layer_misrouted, layers_routed_by_id
from sglang_bcg_fixes.model import Fix
from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.source.finding import Verdict
from sglang_bcg_fixes.source.tree import Source
from tests import processes
from tests.mutated import rewritten
from tests.wheels import NEWEST, RELEASES

Root = Callable[[str], pathlib.Path]
CONFIGURATION_IS_SHARED = RELEASES[: RELEASES.index("0.5.14")]
ONE_METHOD_IS_ASKED = RELEASES[RELEASES.index("0.5.13") :]
INKLING = RELEASES[RELEASES.index("0.5.17") :]
MINICPM = RELEASES[RELEASES.index("0.5.19") :]
# Bailing imports this in 0.5.15 and with it the CUDA-only package cutlass, unguarded
WITHOUT_CUTLASS = {"0.5.15": ["sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits"]}

# whose layer, what it is made of, its id, where it belongs; full attention is said to be at 1 and 3, in a draft at 0
TARGET_LAYERS = {
    "linear": ("linear", 0, "linear"),
    "linear, its id is in the list": ("linear", 1, "linear"),
    "Bailing's linear": ("bailing", 0, "linear"),
    "Bailing's linear, its id is in the list": ("bailing", 1, "linear"),
    "MiniCPM's linear": ("minicpm", 0, "linear"),
    "MiniCPM's linear, its id is in the list": ("minicpm", 1, "linear"),
    "linear of a model outside of SGLang": ("plain", 0, "linear"),
    "linear of a model outside of SGLang, beyond the last": ("plain", 99, "linear"),
    "full": ("plain", 1, "full"),
    "full, of a class of its own": ("derived", 3, "full"),
}
DRAFT_LAYERS = {
    "a draft's full": ("plain", 0, "full"),
    "a draft's full, not the first": ("plain", 2, "full"),
    "a draft's full, of a class of its own": ("derived", 2, "full"),
    "a draft's linear": ("linear", 0, "linear"),
    "a draft's linear, not the first": ("linear", 1, "linear"),
    "a draft's, Bailing's linear": ("bailing", 0, "linear"),
}
LAYERS = TARGET_LAYERS | DRAFT_LAYERS
MISROUTED_BY_ID = {
    "linear, its id is in the list",
    "Bailing's linear, its id is in the list",
    "MiniCPM's linear, its id is in the list",
    "a draft's full, not the first",
    "a draft's full, of a class of its own",
    "a draft's linear",
    "a draft's, Bailing's linear",
}
# how builds between 0.5.12.post1 and 0.5.13 decided, in our own words, and what each got wrong
BY_KIND = """
        if layer is not None:
            if isinstance(layer, RadixLinearAttention):
                return False
            if isinstance(layer, RadixAttention):
                return True
        return layer_id in self.full_attn_layers
"""
BY_MARK = BY_KIND.replace("Attention):", f"Attention) or getattr(layer, {layers_routed_by_id.MARK!r}, False):", 1)
FOREIGN = {name for name in LAYERS if "outside" in name}
MARKED = {name for name in LAYERS if "Bailing's" in name or "MiniCPM's" in name}
MISROUTED = {BY_KIND: FOREIGN | MARKED, BY_MARK: FOREIGN}
# guards that are wrong, and what shows it
NO_GUARDS = {
    "a target's RadixAttention is full": FOREIGN,
    "marks do not count": MISROUTED_BY_ID & MARKED,
    "the kind does not count": {"linear, its id is in the list", "a draft's linear"},
    "drafts do not count": {"a draft's full, not the first", "a draft's full, of a class of its own"},
}

PRELUDE = """
import importlib, json, sys, types
from unittest import mock
from cpu_sglang import stand_ins
stand_ins.install()
sys.modules.update({name: mock.MagicMock() for name in STAND_INS})
import torch
from sglang.srt.plugins import load_plugins
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.fixes import layers_routed_by_id as fix
load_plugins()
process = plugin.load()
state = lambda: process.report.state(fix.FIX.id)
states = [state()]
early = sorted({"sglang.srt.model_executor.model_runner", fix.MODULE} & set(sys.modules))
# as a server does: the runner first, the models and with them the backend when a model is loaded
importlib.import_module("sglang.srt.model_executor.model_runner")
backends = importlib.import_module(fix.MODULE)
states.append(state())

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers import radix_linear_attention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
HybridLinearAttnBackend = backends.HybridLinearAttnBackend

class Derived(RadixAttention):
    pass

CLASSES = {"linear": RadixLinearAttention, "plain": RadixAttention, "derived": Derived}
MIXERS = {
    "bailing": ("sglang.srt.models.bailing_moe_linear", "BailingMoELinearAttention"),
    "minicpm": ("sglang.srt.models.minicpm", "MiniCPMLightningMixer")}

def bare(kind, **attributes):
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module

def layer_of(kind, layer_id):
    cls = CLASSES.get(kind, RadixAttention)
    return bare(cls, layer_id=layer_id, num_v_heads=4, head_v_dim=5, tp_q_head_num=2, v_head_dim=3)

class Child(backends.MambaAttnBackendBase):
    # only the linear one is made by its constructor; both say who they are
    name = "linear"
    def forward_decode(self, *args, **kwargs):
        return self.name
    forward_extend = forward_decode
class FullChild(Child):
    name = "full"

settings = types.SimpleNamespace(speculative_eagle_topk=0, enable_unified_memory=False, enable_mis=False)
for name in ("get_spec", "get_memory"):
    if hasattr(backends, name):
        setattr(backends, name, lambda: settings)

def backend_for(model, is_draft, ids):
    runner = types.SimpleNamespace(
        device="cpu", server_args=settings, req_to_token_pool=None, token_to_kv_pool=None, is_draft_worker=is_draft,
        model=model, spec_algorithm=None)
    backend = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    backend.full_attn_layers = ids
    backend.full_attn_backend, backend.linear_attn_backend = FullChild.__new__(FullChild), Child(runner)
    return backend

def batch(mode):
    return types.SimpleNamespace(forward_mode=mode, logical_forward_mode=mode)

def routes(backend, kind, layer):
    q, mixed = torch.zeros(2, 6), torch.zeros(2, 9)
    def forward(mode):
        # as RadixAttention.forward calls it, and as RadixLinearAttention's operation does
        if kind != "linear":
            return backend.forward(q, q, q, layer, batch(mode), True, mixed_qkv=mixed)
        return backend.forward(layer=layer, forward_batch=batch(mode), mixed_qkv=mixed, a=None, b=None, q=q)
    found = {
        backend.forward_decode(layer, batch(ForwardMode.DECODE), True, q, q, q),
        backend.forward_extend(layer, forward_batch=batch(ForwardMode.EXTEND), mixed_qkv=mixed),
        forward(ForwardMode.DECODE), forward(ForwardMode.EXTEND),
        {(2, 6): "full", (2, 4, 5): "linear"}[tuple(forward(ForwardMode.IDLE).shape)]}
    return found.pop() if len(found) == 1 else sorted(found)

def build(rows, is_draft, ids):
    model, layers = torch.nn.ModuleList(), {}
    for name, (kind, layer_id, _) in rows.items():
        layer = layer_of(kind, layer_id)
        if kind in MIXERS:
            module, mixer = MIXERS[kind]
            owner = getattr(importlib.import_module(module), mixer, None)
            if owner is None:
                continue
            model.append(bare(owner, attn=layer))
        else:
            model.append(layer)
        layers[name] = (kind, layer)
    return backend_for(model, is_draft, ids), layers

def table():
    for _, rows in arms:
        for _, layer in rows.values():
            vars(layer).pop(fix.DECIDED, None)
    return {name: routes(backend, *row) for backend, rows in arms for name, row in rows.items()}
"""
ROUTING = """
arms = [build(TARGET_LAYERS, False, [1, 3]), build(DRAFT_LAYERS, True, [0])]
lists = [backend.full_attn_layers for backend, _ in arms]
found = {"states": states, "early": early, "patched": table()}
found["marked"] = sorted(n for _, rows in arms for n, (_, layer) in rows.items() if getattr(layer, fix.MARK, False))

# a layer that only has an id, one that has none, and a child that fails: as the release does it
target = arms[0][0]
def fails(*args, **kwargs):
    raise ZeroDivisionError
def odd():
    results = []
    for call in (
        lambda: target.forward_decode(None, batch(ForwardMode.DECODE), layer_id=1),
        lambda: target.forward_extend(None, batch(ForwardMode.EXTEND), layer_id=2),
        lambda: target.forward(forward_batch=batch(ForwardMode.DECODE), layer_id=3),
        lambda: target.forward(forward_batch=batch(ForwardMode.DECODE)),
        lambda: target.forward_decode(bare(RadixAttention), batch(ForwardMode.DECODE)),
    ):
        try:
            results.append(call())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    children = target.full_attn_backend, target.linear_attn_backend
    for child in children:
        child.forward_decode = fails
    for kind, layer in arms[0][1].values():
        try:
            target.forward_decode(layer, batch(ForwardMode.DECODE))
        except ZeroDivisionError:
            results.append("failed")
    for child in children:
        del child.forward_decode
    return results
found["odd"] = odd()

def table_with(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return table()
    finally:
        setattr(owner, name, before)
target_child, draft_child = (backend.linear_attn_backend for backend, _ in arms)
found["no guards"] = {
    "a target's RadixAttention is full": table_with(target_child, "is_draft_worker", True),
    "drafts do not count": table_with(draft_child, "is_draft_worker", False),
    "marks do not count": table_with(fix, "MARK", "_nobody_has_this"),
    "the kind does not count": table_with(radix_linear_attention, "RadixLinearAttention", FullChild)}

if INKLING:
    inkling = importlib.import_module("sglang.srt.layers.attention.linear.inkling_sconv_backend")
    cls = inkling.InklingShortConvHybridAttnBackend
    own = vars(cls)["_is_full_attn"]
    backend = cls.__new__(cls)
    found["inkling"] = [own.__module__ == cls.__module__, hasattr(own, "__bcg_fix__"),
                        backend._is_full_attn(layer_of("linear", 0)), backend._is_full_attn(layer_of("plain", 7))]

points = ("forward", "forward_decode", "forward_extend", "_is_full_attn")
wrapped = lambda: [n for n in points if hasattr(vars(HybridLinearAttnBackend).get(n), "__bcg_fix__")]
found["wrapped"] = wrapped()
applied = next(d.fix for d in process.plan.decisions if d.id == fix.FIX.id)
process.ledger.undo(fix.FIX.id)
found |= {"wrapped after undo": wrapped(), "unpatched": table(), "odd unpatched": odd()}
found["lists kept"] = all(backend.full_attn_layers is ids for (backend, _), ids in zip(arms, lists))

found["builds"] = []
for body in BUILDS:
    source = f"def _is_full_attn(self, layer, layer_id=None):{body}"
    space = {"RadixAttention": RadixAttention, "RadixLinearAttention": RadixLinearAttention}
    exec(source, space)
    before = HybridLinearAttnBackend._is_full_attn
    HybridLinearAttnBackend._is_full_attn = space["_is_full_attn"]
    # the marks of before are those that such a build sets itself, if it looks at them
    unpatched = table()
    process.ledger.apply(applied)
    patched = table()
    process.ledger.undo(fix.FIX.id)
    HybridLinearAttnBackend._is_full_attn = before
    found["builds"].append([unpatched, patched])
print("RESULT", json.dumps(found))
"""

# a target and a draft of one checkpoint, the draft built by its own constructor, as a server builds it
POLLUTION = """
import json, sys
from cpu_sglang import one_batch
one_batch.import_sglang()
one_batch.load_plugins()
from sglang_bcg_fixes import plugin
from sglang_bcg_fixes.fixes import hybrid_layer_misrouted as fix
process = plugin.load()
loaded = one_batch.load("qwen3next")
runner = loaded.model_runner
one_batch.randomize(runner.model)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.registry import ModelRegistry

def seen(config):
    ids = list(config.hf_text_config.full_attention_layer_ids)
    return {"ids": ids, "architecture": config.hf_config.architectures[0]}

def part_of(config):
    return config.hf_text_config is config.hf_config or config.hf_text_config is config.hf_config.get_text_config()

def pollute(path):
    target = ModelConfig(path)
    before = seen(target)
    draft = ModelConfig(path, is_draft_model=True)
    whole = part_of(target) and part_of(draft)
    model, _ = ModelRegistry.resolve_model_cls(draft.hf_config.architectures)
    model(draft.hf_config)
    return {"before": before, "after": seen(target), "draft": seen(draft)["ids"], "whole": whole}

def rebuilt():
    # what --speculative-adaptive does to the target when its draft is there
    backend = runner._get_attention_backend(init_new_workspace=True)
    runner.attn_backend = backend
    try:
        return [list(backend.full_attn_layers), one_batch.generate(loaded, one_batch.PROMPTS, 3)[0]]
    except Exception as error:
        return [list(backend.full_attn_layers), type(error).__name__]

def beside_a_draft():
    draft = ModelConfig.from_server_args(
        runner.server_args, model_path=runner.server_args.model_path, model_revision=runner.server_args.revision,
        is_draft_model=True)
    ModelRegistry.resolve_model_cls(draft.hf_config.architectures)[0](draft.hf_config)
    return rebuilt()

paths = dict(pair.split("=", 1) for pair in sys.argv[1:])
found = {"state": process.report.state(fix.FIX.id), "alone": rebuilt(), "beside a draft": beside_a_draft()}
found["patched"] = {name: pollute(path) for name, path in paths.items()}
process.ledger.undo(fix.FIX.id)
found["unpatched"] = {name: pollute(path) for name, path in paths.items()}
found["beside a draft, unpatched"] = beside_a_draft()
print("RESULT", json.dumps(found))
"""
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "torch_dtype": "float32",
    "text_config": SMALL
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "intermediate_size": 128,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "vision_config": {"model_type": "qwen3_5", "hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
}
NEMOTRON_H = SMALL | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*E",
    "mtp_hybrid_override_pattern": "*E",
    "head_dim": 16,
    "intermediate_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
FULL_ATTENTION_AT = {"qwen3next": [1], "bailing_full": [1], "qwen3_5": [1], "nemotron_h": [2]}
# these drafts copy the configuration themselves from 0.5.13 on
CAREFUL = ("qwen3next", "qwen3_5")


def run(root: pathlib.Path, reports: pathlib.Path, fix: Fix, code: str, *arguments: str) -> dict:
    # the others are not looked at here, and this one must be there
    only = {"SGLANG_BCG_FIXES": "off", fix.flag: "on", "SGLANG_BCG_REPORT_DIR": str(reports)}
    return processes.beside(root, "-c", code, *arguments, timeout=600, **only)[0]


def wrong(routes: dict) -> set[str]:
    return {name for name, route in routes.items() if route != LAYERS[name][2]}


@pytest.mark.forms_of("layers_routed_by_id", "hybrid_layer_misrouted")
@pytest.mark.parametrize("release", RELEASES)
def test_every_layer_goes_where_it_belongs(release_root: Root, release: str, tmp_path: pathlib.Path) -> None:
    one_method = release in ONE_METHOD_IS_ASKED
    values = {
        "TARGET_LAYERS": TARGET_LAYERS,
        "DRAFT_LAYERS": DRAFT_LAYERS,
        "INKLING": release in INKLING,
        "BUILDS": list(MISROUTED) if one_method else [],
        "STAND_INS": WITHOUT_CUTLASS.get(release, []),
    }
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    found = run(release_root(release), tmp_path / "reports", layers_routed_by_id.FIX, given + PRELUDE + ROUTING)
    there = {name for name in LAYERS if release in MINICPM or "MiniCPM" not in name}
    assert found["states"] == ["waiting", "applied"] and found["early"] == []

    assert set(found["patched"]) == set(found["unpatched"]) == there
    assert wrong(found["patched"]) == set()
    assert wrong(found["unpatched"]) == MISROUTED_BY_ID & there
    assert set(found["marked"]) == MARKED & there
    assert {name: wrong(routes) for name, routes in found["no guards"].items()} == {
        name: rows & there for name, rows in NO_GUARDS.items()
    }

    # ids without a layer, layers without an id, and failures are the release's own business
    assert found["odd"] == found["odd unpatched"]
    assert found["odd"][:3] == ["full", "linear", "full"]
    assert [text.partition(":")[0] for text in found["odd"][3:5]] == [
        "AssertionError" if one_method else "KeyError",
        "AttributeError",
    ]
    assert found["odd"][5:] == ["failed"] * len(there & set(TARGET_LAYERS)) and found["lists kept"]

    places = ["_is_full_attn"] if one_method else ["forward", "forward_decode", "forward_extend"]
    assert found["wrapped"] == places and found["wrapped after undo"] == []
    assert found.get("inkling") == ([True, False, True, True] if release in INKLING else None)

    for (unpatched, patched), rows in zip(found["builds"], MISROUTED.values(), strict=one_method):
        assert wrong(unpatched) == rows & there and wrong(patched) == set()


@pytest.mark.parametrize("release", ["0.5.13", NEWEST])
@pytest.mark.parametrize("body", MISROUTED, ids=["by kind", "by mark"])
def test_a_build_between_releases_is_known(release_root: Root, release: str, body: str) -> None:
    text = "return layer_id in self.full_attn_layers"
    file = layers_routed_by_id.MODULE.replace(".", "/") + ".py"
    finding = ask(layers_routed_by_id.FIX, Source(rewritten(release_root(release), file, text, body)))
    assert finding.verdict is Verdict.LATENT and "routed by kind" in finding.reason, finding


@pytest.mark.parametrize("release", CONFIGURATION_IS_SHARED)
def test_a_draft_leaves_its_targets_configuration_alone(
    release_root: Root, release: str, tmp_path: pathlib.Path
) -> None:
    models = processes.REPOSITORY / "cpu_sglang" / "models"
    folders = {name: models / name for name in ("qwen3next", "bailing_full")}
    for name, config in (("qwen3_5", QWEN3_5), ("nemotron_h", NEMOTRON_H)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(json.dumps(config))
    pairs = [f"{name}={folder}" for name, folder in folders.items()]
    found = run(release_root(release), tmp_path / "reports", hybrid_layer_misrouted.FIX, POLLUTION, *pairs)
    assert found["state"] == "applied"
    copied_by_the_draft = CAREFUL if release in ONE_METHOD_IS_ASKED else ()
    for name, ids in FULL_ATTENTION_AT.items():
        patched, unpatched = found["patched"][name], found["unpatched"][name]
        assert patched["before"] == patched["after"] == unpatched["before"] and patched["before"]["ids"] == ids
        assert patched["whole"] and patched["draft"] == unpatched["after"]["ids"]
        assert unpatched["after"]["architecture"] != unpatched["before"]["architecture"]
        assert unpatched["after"]["ids"] == (ids if name in copied_by_the_draft else [0]), name

    assert found["beside a draft"] == found["alone"] and found["alone"][0] == [1]
    if "qwen3next" in copied_by_the_draft:
        assert found["beside a draft, unpatched"] == found["alone"]
    else:
        assert found["beside a draft, unpatched"][0] == [0]
        assert found["beside a draft, unpatched"][1] != found["alone"][1]
