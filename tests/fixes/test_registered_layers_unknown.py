"""The real wrapper of attention backends with a model that another package has registered."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests import processes

CODE = """
import json, sys, types
from unittest import mock
from cpu_sglang import stand_ins
stand_ins.install()
from transformers import PretrainedConfig
from sglang.srt.configs.linear_attn_model_registry import LinearAttnModelSpec, register_linear_attn_model
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.linear import utils
from sglang_bcg_fixes.fixes.registered_layers_unknown import FIX
from sglang_bcg_fixes.engine.ledger import Ledger

class OfAnotherPackage(PretrainedConfig):
    full_attention_layer_ids = [1, 3]

class Linear:
    def __init__(self, runner):
        self.runner = runner

class Hybrid:
    def __init__(self, full, linear, layers):
        self.layers = layers

class Config(ModelConfig):
    def __init__(self, hf_config):
        self.hf_config = self.hf_text_config = hf_config
        self.dtype = None

register_linear_attn_model(LinearAttnModelSpec(config_class=OfAnotherPackage, backend_class_name="__main__.Linear",
    arch_names=["OfAnotherPackage"], hybrid_backend_class_name="__main__.Hybrid"))
utils.resolve_linear_attn_backends = lambda *args, **kwargs: None

def layers(before=None):
    config = Config(OfAnotherPackage(architectures=["OfAnotherPackage"]))
    if before is not None:
        config.full_attention_layer_ids = before
    runner = types.SimpleNamespace(model_config=config, use_mla_backend=False, is_draft_worker=False,
        server_args=mock.MagicMock())
    try:
        found = attention_registry.attn_backend_wrapper(runner, None).layers
    except AttributeError as error:
        found = str(error)
    return [found, vars(config).get("full_attention_layer_ids")]

found = {"without": layers(), "with a window, without": layers([2])}
Ledger().apply(FIX)
print("RESULT", json.dumps({**found, "with": layers(), "with a window": layers([2])}))
"""


@pytest.mark.parametrize("release", ["0.5.18", "0.5.20"])
def test_a_registered_model_says_which_layers_are_full(
    release_root: Callable[[str], pathlib.Path], release: str
) -> None:
    found, _ = processes.beside(release_root(release), "-c", CODE)
    assert found["without"] == ["'Config' object has no attribute 'full_attention_layer_ids'", None]
    assert found["with a window, without"] == [[2], [2]]
    assert found["with"] == [[1, 3], None]
    assert found["with a window"] == [[1, 3], [2]]
