# SPDX-License-Identifier: Apache-2.0
"""The layers of real models: a release's own prefill runner finds them by name, and we find them by structure.

    PYTHONPATH=<unpacked wheel>:. TRITON_INTERPRET=1 python -m tests.releases.layer_stacks OUT.json [MODEL...]

SGLang builds each model from a config.json, on torch's meta device, and then its prefill runner, as when a server
starts: everything up to the capture. SGLANG_PLUGINS and the flags of the environment are those of a server.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import pathlib
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cpu_sglang import one_batch, prefill
from sglang_bcg_fixes.anatomy import layer_stack

# the last method of each runner before anything is captured
BEFORE_CAPTURE = {
    "sglang.srt.model_executor.breakable_cuda_graph_runner": ("BreakableCudaGraphRunner", "_warmup"),
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner": ("PrefillCudaGraphRunner", "capture"),
}
# what a release says when it makes no graphs for a model
REFUSALS = {
    "not a language model": "no attribute `model`",
    "does not have a 'layers' attribute": "no attribute `layers`",
    "some layers do not apply Standard GQA": "layers without attention",
    "resolve inner layer_model": "no layers under the names it knows",
}
REFUSED = "refused: "
NO_NAME = f"{REFUSED}{REFUSALS['resolve inner layer_model']}"
WHOLE_MODEL = "the whole model"


class Model(NamedTuple):
    """`path` is where the layers are, None where no module is all of them and nothing else."""

    path: str | None
    config: dict[str, Any]


FOUR: dict[str, Any] = {"num_hidden_layers": 4}
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK: dict[str, Any] = {
    **FOUR,
    **MLA,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
# for models whose configuration comes with their code: no class knows a default
WRITTEN_OUT: dict[str, Any] = {
    **FOUR,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "model_max_length": 128,
    "rms_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bias": False,
}
TWO_ROPES: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
    }
}


def text(model_type: str, path: str | None = "model", **config: Any) -> Model:
    return Model(path, {"model_type": model_type, **FOUR, **config})


def image(model_type: str, path: str | None = "model", text: dict[str, Any] | None = None, **config: Any) -> Model:
    return Model(path, {"model_type": model_type, "text_config": {**FOUR, **(text or {})}, **config})


# by architecture; a word behind it tells two configurations of one apart
MODELS = {
    "LlamaForCausalLM": text("llama"),
    "LlamaForSequenceClassification": text("llama"),
    "LlamaEmbeddingModel": text("llama"),
    "MistralForCausalLM": text("mistral"),
    "Ministral3ForCausalLM": text("ministral3"),
    "MixtralForCausalLM": text("mixtral"),
    "Phi3ForCausalLM": text("phi3"),
    "PhiForCausalLM": text("phi"),
    "PersimmonForCausalLM": text("persimmon"),
    "Qwen2ForCausalLM": text("qwen2"),
    "Qwen2ForRewardModel": text("qwen2"),
    "Qwen3ForCausalLM": text("qwen3"),
    "Qwen3MoeForCausalLM": text("qwen3_moe"),
    "Qwen3NextForCausalLM": text("qwen3_next", full_attention_interval=2),
    "DeepseekV2ForCausalLM": text("deepseek_v2", **DEEPSEEK),
    "DeepseekV3ForCausalLM": text("deepseek_v3", **DEEPSEEK),
    "DeepseekV3ForCausalLMNextN": text("deepseek_v3", None, **DEEPSEEK),
    "DeepseekV4ForCausalLM": text(
        "deepseek_v4",
        **{
            **DEEPSEEK,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "q_lora_rank": 64,
            "o_lora_rank": 64,
            "o_groups": 4,
            "index_head_dim": 128,
            "index_n_heads": 4,
            "index_topk": 64,
            "sliding_window": 128,
            "compress_ratios": [0, 0, 4, 128],
            "compress_rope_theta": 10000.0,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 2,
            "hc_eps": 1e-6,
            "num_hash_layers": 1,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 7.0,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "num_nextn_predict_layers": 0,
        },
    ),
    "Gemma2ForCausalLM": text("gemma2", hidden_act="gelu_pytorch_tanh"),
    "Gemma3ForCausalLM": text("gemma3_text", **TWO_ROPES),
    "Gemma4ForCausalLM": text("gemma4_text"),
    "GptOssForCausalLM": text("gpt_oss", swiglu_limit=7.0),
    "BailingMoeV2ForCausalLM": text(
        "bailing_moe_v2",
        **WRITTEN_OUT,
        **MOE,
        embedding_dropout=0.0,
        num_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        use_qkv_bias=False,
        use_bias=False,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        routed_scaling_factor=1.0,
    ),
    "BailingMoeV2_5ForCausalLM": text("bailing_hybrid", layer_group_size=2, full_attention_type="gqa"),
    "BailingMoeV2_5ForCausalLM mla": text("bailing_hybrid", layer_group_size=2),
    "KimiLinearForCausalLM": text(
        "kimi_linear",
        **MLA,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        linear_attn_config={
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    ),
    "FalconH1ForCausalLM": text("falcon_h1", head_dim=64),
    "NemotronHForCausalLM": text("nemotron_h", hybrid_override_pattern="M*M-", n_groups=8),
    "GraniteForCausalLM": text("granite"),
    "GraniteMoeHybridForCausalLM": text("granitemoehybrid", layer_types=["mamba", "attention"] * 2),
    "Lfm2ForCausalLM": text("lfm2", layer_types=["conv", "full_attention"] * 2),
    "ZayaForCausalLM": text("zaya"),
    "Glm4ForCausalLM": text("glm4"),
    "Glm4MoeForCausalLM": text("glm4_moe"),
    "MiniMaxM2ForCausalLM": text("minimax_m2", scoring_func="sigmoid"),
    "CohereForCausalLM": text("cohere"),
    "Cohere2ForCausalLM": text("cohere2"),
    "Olmo2ForCausalLM": text("olmo2"),
    "Starcoder2ForCausalLM": text("starcoder2"),
    "StableLmForCausalLM": text("stablelm"),
    "InternLM2ForCausalLM": text("internlm2", **WRITTEN_OUT),
    "BaichuanForCausalLM": text("baichuan", **WRITTEN_OUT),
    "XverseMoeForCausalLM": text("xverse", **WRITTEN_OUT, num_experts=4, moe_top_k=2, num_shared_experts=1),
    "IQuestLoopCoderForCausalLM": text("iquestloopcoder", **WRITTEN_OUT, loop_num=2),
    "IQuestQ1MTP": Model(None, {"model_type": "iquest_q1", "fp32_residual_connection": False}),
    "GPT2LMHeadModel": text("gpt2", "transformer"),
    "GPTBigCodeForCausalLM": text("gpt_bigcode", "transformer"),
    "GPTJForCausalLM": text("gptj", "transformer"),
    "QWenLMHeadModel": text("qwen", "transformer", **WRITTEN_OUT),
    "ExaoneForCausalLM": text("exaone", "transformer", num_layers=4, pad_token_id=0),
    "DbrxForCausalLM": text("dbrx", "transformer", n_layers=4),
    "ChatGLMModel": text("chatglm", "transformer", num_layers=4),
    "OPTForCausalLM": text("opt", "model.decoder"),
    "WhisperForConditionalGeneration": text("whisper", None),
    "Qwen2VLForConditionalGeneration": image("qwen2_vl", vision_config={"in_chans": 3}),
    "Qwen2_5_VLForConditionalGeneration": image("qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": image("qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": image("qwen3_vl_moe"),
    "Qwen3_5ForConditionalGeneration": image("qwen3_5", text={"full_attention_interval": 2, **MROPE}),
    "Qwen3_5MoeForConditionalGeneration": image("qwen3_5_moe", text={"full_attention_interval": 2, **MROPE}),
    "Qwen3OmniMoeForConditionalGeneration": Model(
        "thinker.model", {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": FOUR}}
    ),
    "Qwen2AudioForConditionalGeneration": image("qwen2_audio", "language_model.model"),
    "Glm4vForConditionalGeneration": image("glm4v"),
    "Glm4vMoeForConditionalGeneration": image("glm4v_moe"),
    "GlmOcrForConditionalGeneration": image("glm_ocr"),
    "PaddleOCRVLForConditionalGeneration": text("paddleocr_vl"),
    "DotsOCRForCausalLM": text("dots_ocr", "model.model"),
    "Sarashina2VisionForCausalLM": text("sarashina2_vision", "llm.model", **WRITTEN_OUT),
    "Gemma3ForConditionalGeneration": image("gemma3", "language_model.model", text=TWO_ROPES),
    "Gemma3nForConditionalGeneration": image(
        "gemma3n", "language_model", text={"num_kv_shared_layers": 0, "rope_local_base_freq": 10000.0}
    ),
    "Gemma4ForConditionalGeneration": image(
        "gemma4", "language_model", text={"is_heterogeneous": False}, vision_config={}
    ),
    "InternVLChatModel": Model(
        "language_model.model",
        {
            "model_type": "internvl_chat",
            "llm_config": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **FOUR},
            "vision_config": {"num_hidden_layers": 2, "norm_type": "layer_norm", "qkv_bias": True},
        },
    ),
    "LlavaLlamaForCausalLM": text("llava", "language_model.model", **WRITTEN_OUT, mm_hidden_size=64),
    "Llama4ForConditionalGeneration": image("llama4", "language_model.model"),
    "KimiK25ForConditionalGeneration": image(
        "kimi_k25",
        "language_model.model",
        text={"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **DEEPSEEK},
        vision_config={
            "vt_hidden_size": 64,
            "vt_num_attention_heads": 4,
            "vt_num_hidden_layers": 2,
            "vt_intermediate_size": 64,
        },
    ),
    "MllamaForConditionalGeneration": image("mllama", None, text={"cross_attention_layers": [1]}),
    "MuseSparkForConditionalGeneration": image("muse_spark", "model.language_model"),
}


def architecture_of(name: str) -> str:
    return name.partition(" ")[0]


class AboutToCapture(Exception):
    """Carries the runner out of its constructor."""


class Weightless(TorchFunctionMode):
    """Some models ask for CUDA memory, and some read the numbers of a `linspace`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.linspace:
            kwargs["device"] = "cpu"
        elif str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


class Said(logging.Handler):
    """Log records since it was last emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def messages(self, logger: str) -> list[str]:
        return [record.getMessage() for record in self.records if record.name.startswith(logger)]


def stop_before_capture() -> None:
    def stop(self: Any) -> None:
        raise AboutToCapture(self)

    for module_name, (runner, method) in BEFORE_CAPTURE.items():
        with contextlib.suppress(ModuleNotFoundError):
            setattr(getattr(importlib.import_module(module_name), runner), method, stop)


def build(name: str) -> tuple[Any, Any]:
    return build_of(architecture_of(name), MODELS[name].config)


def build_of(architecture: str, config: dict[str, Any], is_draft: bool = False) -> tuple[Any, Any]:
    """SGLang's own configuration and model for a config.json; a draft's is its target's."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        AutoConfig.register(model_type, type(model_type, (PretrainedConfig,), {"model_type": model_type}))
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        draft = {"is_draft_model": True} if is_draft else {}
        model_config = ModelConfig(folder, trust_remote_code=False, enable_multimodal=True, dtype="bfloat16", **draft)
    initialize: Any = loader._initialize_model
    with bfloat16(), torch.device("meta"), Weightless(), empty_towers_for_those_of_timm():
        return model_config, initialize(model_config, LoadConfig(load_format="dummy"))


@contextlib.contextmanager
def empty_towers_for_those_of_timm() -> Iterator[None]:
    """timm is not installed, and an image tower says nothing about the layers of the text."""
    from transformers import AutoModel

    from_config: Any = AutoModel.from_config

    def tower(*args: Any, **kwargs: Any) -> Any:
        try:
            return from_config(*args, **kwargs)
        except ImportError as error:
            if "timm" not in str(error):
                raise
            return torch.nn.Identity()

    with unittest.mock.patch.object(AutoModel, "from_config", tower):
        yield


@contextlib.contextmanager
def bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def start_runner(model_runner: Any, model_config: Any, model: Any, said: Said, is_draft: bool = False) -> str:
    """Put the model into SGLang's ModelRunner and let it make its prefill runner; where that finds the layers."""
    module = importlib.import_module(type(model_runner).__module__)
    model_runner.model, model_runner.model_config, model_runner.attention_layers = model, model_config, []
    model_runner.is_multimodal = model_config.is_multimodal
    if hasattr(module, "resolve_layer_indices"):
        known = {
            "model": model,
            "model_config": model_config,
            "is_draft_worker": is_draft,
            "draft_model_idx": None,
            "spec_algorithm": model_runner.spec_algorithm,
        }
        taken = inspect.signature(module.resolve_layer_indices).parameters
        model_runner.layer_info = module.resolve_layer_indices(**{name: known[name] for name in taken})
    try:
        prefill.capture_prefill(model_runner)
    except AboutToCapture as stopped:
        (runner,) = stopped.args
        return path_in(model, runner.layer_model) if hasattr(runner, "layer_model") else WHOLE_MODEL
    except Exception as error:
        messages = [*said.messages("sglang."), str(error)]
        reasons = [REFUSALS[words] for words in REFUSALS for message in messages if words in message]
        if not reasons:
            raise
        return REFUSED + reasons[0]
    raise RuntimeError("the runner was made without a stop before its capture")


def path_in(model: Any, module: Any) -> str:
    return next(path or "the model itself" for path, part in model.named_modules() if part is module)


def text_attention(model: Any) -> list[Any]:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    return [part for part in model.modules() if isinstance(part, RadixAttention | RadixLinearAttention)]


def examine(model_runner: Any, name: str, said: Said) -> dict[str, Any]:
    try:
        model_config, model = build(name)
    except Exception as error:
        return {"not built": f"{type(error).__name__}: {error}"[:300]}
    said.records.clear()
    by_name = start_runner(model_runner, model_config, model, said)
    # where the release refuses the model before it has collected them
    collected = [layer for layer in model_runner.attention_layers if layer is not None]
    try:
        by_structure = layer_stack.resolve(model, collected or text_attention(model)).path
    except layer_stack.Unresolved as reason:
        by_structure = f"{REFUSED}{reason}"
    return {"by name": by_name, "by structure": by_structure, "warnings": said.messages("sglang_bcg_fixes")}


def start() -> tuple[Any, Said, Any]:
    """Start a server that captures nothing; return its model runner, what is said, and the architectures it knows."""
    one_batch.import_sglang(with_graphs=True)
    stop_before_capture()
    one_batch.load_plugins()
    model_runner = one_batch.load("llama", dtype="bfloat16").model_runner
    from sglang.srt.models.registry import ModelRegistry

    said = Said()
    logging.getLogger().addHandler(said)
    logging.getLogger("sglang").setLevel(logging.INFO)
    return model_runner, said, ModelRegistry.get_supported_archs()


def main(out: str, *names: str) -> None:
    model_runner, said, known = start()
    report = {name: examine(model_runner, name, said) for name in names or MODELS if architecture_of(name) in known}
    pathlib.Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
