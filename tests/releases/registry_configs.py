# SPDX-License-Identifier: Apache-2.0
"""Configurations of architectures that no tiny server is run of, such as drafts; and what is read instead of built."""

from __future__ import annotations

from typing import Any, NamedTuple

from cpu_sglang.architectures import CONFIGURATIONS, EXPERTS, SAME_CODE, SIZES
from tests.releases.layer_stacks import MODELS, REFUSALS, REFUSED, architecture_of

FEW_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}


def of_server(name: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGURATIONS[name].config, **changes}


def of_stack(name: str, **changes: Any) -> dict[str, Any]:
    return {**MODELS[name].config, **changes}


GIGACHAT: dict[str, Any] = {
    "model_type": "gigachat3_5",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "layer_types": ["linear_attention", "attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    **FEW_EXPERTS,
}
SPARSE = of_server("DeepseekV32ForCausalLM")
GEMMA4 = of_stack("Gemma4ForConditionalGeneration")
TARGETS: dict[str, dict[str, Any]] = {
    "DiffusionGemmaForBlockDiffusion": {
        **GEMMA4,
        "text_config": {**GEMMA4["text_config"], **EXPERTS, "top_k_experts": 2, "enable_moe_block": True},
    },
    "EmbeddingGemma2Model": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "GigaChat35ForCausalLM": GIGACHAT,
    "Glm5NextForConditionalGeneration": {
        "model_type": "glm5_next",
        "text_config": {"num_hidden_layers": 4, "vocab_size": 128, "hidden_size": 256, **FEW_EXPERTS},
        "vision_config": {"swiglu_limit": 7.0},
    },
    "GlmMoeDsaForCausalLM": SPARSE,
    "HYV4ForCausalLM": {**SPARSE, "model_type": "hy_v4"},
    # a server is run of mixers and attention alone: published checkpoints have feed-forward layers too
    "NemotronHForCausalLM": of_stack("NemotronHForCausalLM"),
    "InternS2MobiusForConditionalGeneration": of_server(
        "Qwen3_5MoeForConditionalGeneration", model_type="interns2_mobius"
    ),
    "Qwen4ExpForConditionalGeneration": of_server("Qwen3_5MoeForConditionalGeneration", model_type="qwen4_exp"),
    # of a checkpoint that is a draft
    "Eagle3DeepseekV2ForCausalLM": of_server("DeepseekV3ForCausalLM", num_hidden_layers=1, q_lora_rank=64),
    "IQuestQ1MTP": {**SIZES, **EXPERTS, "model_type": "iquest_q1_mtp", "num_hidden_layers": 1, "rotary_dim": 16},
    "LlamaForCausalLMEagle": of_server("LlamaForCausalLM", num_hidden_layers=1),
    "LlamaForCausalLMEagle3": of_server("LlamaForCausalLM", num_hidden_layers=1, draft_vocab_size=64),
    "MistralForCausalLMEagle": of_server("MistralForCausalLM", num_hidden_layers=1),
    "MistralLarge3ForCausalLMEagle": of_server("DeepseekV3ForCausalLM", num_hidden_layers=1),
    "Qwen2ForCausalLMEagle": of_server("Qwen2ForCausalLM", num_hidden_layers=1),
}
# whose servers run with other kinds of layers than most checkpoints have, by which the runner decides
OF_OTHER_LAYERS = {"NemotronHForCausalLM"}
# what SGLang makes of a target's checkpoint where it is loaded once more as the draft
DRAFT_OF = {
    "BailingMoeForCausalLMNextN": "BailingMoeV2ForCausalLM",
    "DeepseekV3ForCausalLMNextN": "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLMNextN": "DeepseekV4ForCausalLM",
    "Ernie4_5_MoeForCausalLMMTP": "Ernie4_5_MoeForCausalLM",
    "ExaoneMoEForCausalLMMTP": "ExaoneMoEForCausalLM",
    "GigaChat35ForCausalLMNextN": "GigaChat35ForCausalLM",
    "Glm4MoeForCausalLMNextN": "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLMNextN": "Glm4MoeLiteForCausalLM",
    "Glm5NextForConditionalGenerationNextN": "Glm5NextForConditionalGeneration",
    "GlmMoeDsaForCausalLMNextN": "GlmMoeDsaForCausalLM",
    "GlmOcrForConditionalGenerationNextN": "GlmOcrForConditionalGeneration",
    "HYV3ForCausalLMNextN": "HYV3ForCausalLM",
    "HYV4ForCausalLMNextN": "HYV4ForCausalLM",
    "LongcatFlashForCausalLMNextN": "LongcatFlashForCausalLM",
    "MiMoMTP": "MiMoForCausalLM",
    "MiMoV2MTP": "MiMoV2ForCausalLM",
    "NemotronHForCausalLMMTP": "NemotronHForCausalLM",
    "Qwen3MoeForCausalLMMTP": "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLMMTP": "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLMMTP": "Qwen3_5ForConditionalGeneration",
    "Qwen4ExpForCausalLMMTP": "Qwen4ExpForConditionalGeneration",
}
PREDICTS_ONE = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1, "mtp_hybrid_override_pattern": "*E"}
DRAFTS_OF_THEIR_OWN = {
    *("Dots3NoteForCausalLMNextN", "InklingForConditionalGenerationMTP", "Step3p5MTP"),
    *("Eagle3DeepseekV2ForCausalLM", "IQuestQ1MTP", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"),
    *("MistralForCausalLMEagle", "MistralLarge3ForCausalLMEagle", "Qwen2ForCausalLMEagle"),
}
# whose speculative workers never ask for a prefill graph
UNASKED = {
    *("DFlash2BeamDraftModel", "DFlash2DraftModel", "DFlashDraftModel", "DFlashLagunaForCausalLM"),
    *("DSparkDraftModel", "DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark", "Gemma4AssistantForCausalLM"),
    *("Gemma4UnifiedAssistantForCausalLM", "Lfm2DSparkDraftModel", "LiLiCorrDraftModel", "LingDSparkModel"),
    *("MiniMaxDFlash2DraftModel", "MuseGlimmerAssistantModel", "Qwen3DSparkModel"),
}
CAPTURED, NEVER = "captured", "never"
# what the runner says, by what the models lack
NO_MODEL, NO_LAYERS, NO_ATTENTION = (
    f"{REFUSED}{REFUSALS[words]}"
    for words in ("not a language model", "does not have a 'layers' attribute", "some layers do not apply Standard GQA")
)


class Read(NamedTuple):
    """Evidence from the release's model file; `answer` is an architecture whose layers these are, or its own."""

    file: str
    line: str
    answer: str
    layers_of: tuple[str, ...] = ()


# models that cannot be built here: their configurations come with their code, or they import what is not there
READ = {
    "BailingMM2NativeForConditionalGeneration": Read(
        "bailing_mm.py", "self.model = BailingMoeV2ForCausalLM(", "BailingMoeV2ForCausalLM"
    ),
    "BailingMMNativeForConditionalGeneration": Read(
        "bailing_mm.py", "self.model = BailingMoeV2ForCausalLM(", "BailingMoeV2ForCausalLM"
    ),
    "BailingMoeV3VLForConditionalGeneration": Read(
        "bailing_mm_v3.py", "self.model = BailingMoeV3ForCausalLM(", "BailingMoeV3ForCausalLM"
    ),
    "DeciLMForCausalLM": Read("nemotron_nas.py", "if not self._is_no_op_attention:", NO_ATTENTION, ("no attention",)),
    "DeepseekOCRForCausalLM": Read("deepseek_ocr.py", "self.model = DeepseekV2ForCausalLM(", "DeepseekV2ForCausalLM"),
    "DeepseekVL2ForCausalLM": Read(
        "deepseek_vl2.py", "self.language_model = DeepseekV2ForCausalLM(", "DeepseekV2ForCausalLM"
    ),
    "Dots3NoteForCausalLM": Read(
        "dots3_common/modeling.py", "self.layers, self.start_layer, self.end_layer = make_pp_layers(", CAPTURED
    ),
    "Dots3NoteForCausalLMNextN": Read("dots3_common/nextn.py", "self.heads = nn.ModuleList(", NO_LAYERS),
    "Ernie4_5_VLMoeForConditionalGeneration": Read(
        "ernie45_moe_vl.py", "self.self_attn = Ernie4_5_VLMoeAttention(", CAPTURED
    ),
    "FalconMambaForCausalLM": Read("falcon_mamba.py", "self.mixer = MambaMixer1(", NO_ATTENTION, ("MambaMixer1",)),
    "Gemma4UnifiedForConditionalGeneration": Read(
        "gemma4_unified.py", "self.language_model = Gemma4TextModel(", "Gemma4ForConditionalGeneration"
    ),
    "InklingForConditionalGeneration": Read("inkling.py", "self.attn = InklingAttention(", CAPTURED),
    "InklingForConditionalGenerationMTP": Read("inkling.py", "self.model = InklingMTPLayer(", NO_LAYERS),
    "LightOnOCRForConditionalGeneration": Read(
        "lightonocr.py", "self.language_model = Qwen3ForCausalLM(", "Qwen3ForCausalLM"
    ),
    "LlavaForConditionalGeneration": Read(
        "llava.py", "self.language_model = language_model_cls(", "MistralForCausalLM"
    ),
    "MambaForCausalLM": Read("falcon_mamba.py", "self.mixer = MambaMixer1(", NO_ATTENTION, ("MambaMixer1",)),
    "MiDashengLMModel": Read("midashenglm.py", "self.language_model = Qwen2ForCausalLM(", "Qwen2ForCausalLM"),
    "MiMoV2ASRForCausalLM": Read("mimo_v2_asr.py", "class MiMoV2ASRForCausalLM(MiMoForCausalLM", "MiMoForCausalLM"),
    "MiniCPMO": Read("minicpmo.py", "self.llm = self.init_llm(", NO_MODEL),
    "MiniCPMV": Read("minicpmv.py", "self.llm = self.init_llm(", NO_MODEL),
    "MiniCPMV4_6ForConditionalGeneration": Read("minicpmv.py", "self.llm = self.init_llm(", NO_MODEL),
    "MiniCPMV4_7ForConditionalGeneration": Read("minicpmv.py", "self.llm = self.init_llm(", NO_MODEL),
    "Mistral3ForConditionalGeneration": Read(
        "mistral.py", "class Mistral3ForConditionalGeneration(LlavaForConditionalGeneration", "MistralForCausalLM"
    ),
    "MossVLForConditionalGeneration": Read(
        "moss_vl.py", "self.cross_attn = MossVLTextCrossAttention(", NO_ATTENTION, ("MossVLTextCrossAttention",)
    ),
    "MultiModalityCausalLM": Read(
        "deepseek_janus_pro.py", "self.language_model = LlamaForCausalLM(", "LlamaForCausalLM"
    ),
    "MuseGlimmerForCausalLM": Read("muse_glimmer.py", "self.self_attn = MuseGlimmerAttention(", CAPTURED),
    "MuseGlimmerForConditionalGeneration": Read("muse_glimmer.py", "self.self_attn = MuseGlimmerAttention(", CAPTURED),
    "NemotronH_Nano_Omni_Reasoning_V3": Read(
        "nano_nemotron_vl.py", "self.language_model = NemotronHForCausalLM(", "NemotronHForCausalLM"
    ),
    "NemotronH_Nano_VL_V2": Read(
        "nano_nemotron_vl.py", "self.language_model = NemotronHForCausalLM(", "NemotronHForCausalLM"
    ),
    "NemotronH_Omni_Reasoning_V3": Read(
        "nano_nemotron_vl.py", "self.language_model = NemotronHForCausalLM(", "NemotronHForCausalLM"
    ),
    "POINTSV15ChatModel": Read("points_v15_chat.py", "self.llm = Qwen2ForCausalLM(", NO_MODEL),
    "Phi4MMForCausalLM": Read("phi4mm.py", "self.language_model = LlamaForCausalLM(", "LlamaForCausalLM"),
    "PixtralForConditionalGeneration": Read(
        "pixtral.py", "self.language_model = MistralLarge3ForCausalLM(", "MistralLarge3ForCausalLM"
    ),
    "PixtralVisionModel": Read("pixtral.py", "class PixtralVisionModel(PixtralHFVisionModel", NO_MODEL),
    "Step3p5MTP": Read("step3p5_mtp.py", "self.mtp_block = Step3p5DecoderLayer(", NO_LAYERS),
    "StepVLForConditionalGeneration": Read(
        "step3_vl_10b.py", "self.language_model = Qwen3ForCausalLM(", "Qwen3ForCausalLM"
    ),
    "UnlimitedOCRForCausalLM": Read("unlimited_ocr.py", "self.model = DeepseekForCausalLM(", "DeepseekForCausalLM"),
    "VoxtralForConditionalGeneration": Read(
        "voxtral.py", "self.language_model = LlamaForCausalLM(", "LlamaForCausalLM"
    ),
}
# neither built nor read
NOT_EXAMINED = {
    "InternS1ProForConditionalGeneration": "SGLang cannot build it: `InternS1ProTextDecoderLayer.__init__() got an "
    "unexpected keyword argument 'start_layer'`",
    "MindSporeForCausalLM": "its layers are MindSpore's, which runs on Ascend",
}


def config_of(name: str) -> tuple[str, dict[str, Any]] | None:
    """The architecture and the rest of a config.json of which SGLang makes this one; None where we have none."""
    if name in DRAFT_OF:
        target = DRAFT_OF[name]
        found = config_of(target)
        assert found is not None
        changes = {**PREDICTS_ONE}
        if "text_config" in found[1]:
            changes["text_config"] = {**found[1]["text_config"], **PREDICTS_ONE}
        return target, {**found[1], **changes}
    for architecture in (name, SAME_CODE.get(name, name)):
        if architecture in TARGETS:
            return name, TARGETS[architecture]
        # layers are enough, and those configurations need no weights
        if architecture in {architecture_of(each) for each in MODELS} and architecture not in CONFIGURATIONS:
            return name, MODELS[architecture].config
        if architecture in CONFIGURATIONS:
            return name, CONFIGURATIONS[architecture].config
    return None
