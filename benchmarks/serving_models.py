# SPDX-License-Identifier: Apache-2.0
"""Models in published sizes with random weights: Qwen3.5 with its tower and image processor, and models of text.

    python benchmarks/serving_models.py FOLDER NAME [--without-weights]     # for `--load-format dummy`

qwen3_5_4b has 16 of its 32 layers and qwen3_5_35b_a3b 8 of its 40, so that several servers fit on one GPU; their
weights are drawn on the GPU if there is one. Qwen3 is whole but for its vocabulary, gpt_oss_20b has 4 of its 24
layers, in bfloat16, and qwen3_moe was never published. The others are those of mamba2_model and hybrid_models in
benchmarks/bench, with a tokenizer. Words of every tokenizer are numbers.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_bcg_fixes import flags
from sglang_bcg_fixes.lab.verify import models
from sglang_bcg_fixes.lab.verify.models import OF_IMAGES, Shapes, norms, options, weights

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench import hybrid_models, mamba2_model
from benchmarks.bench.gdn_layer import SHAPES, Shape
from benchmarks.bench.mamba2_model import Sizes, attention, common
from benchmarks.bench.model import HEAD, PERIOD, gated_attention, linear_attention

POSITIONS = 2304
# the four markers of images and the end follow the words
WORDS, VOCABULARY = 248_064, 248_320
NUMBERED = {name: WORDS + number for number, name in enumerate(OF_IMAGES)}
# what an image may have, so that it is not shrunk
PIXELS = {"shortest_edge": 256**2, "longest_edge": 4096**2}
END = "<|end|>"
# safetensors of one file are read at once
LAYERS_PER_FILE = 4


@dataclasses.dataclass(frozen=True)
class Tower:
    depth: int
    hidden: int
    inner: int
    heads: int = 16


@dataclasses.dataclass(frozen=True)
class Published:
    """Sizes of one model; without `experts`, `inner` is that of a dense layer."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    tower: Tower
    experts: int = 0
    chosen: int = 0
    gdn: Shape = SHAPES["qwen3_5_4b"]
    words: int = WORDS
    vocabulary: int = VOCABULARY

    @property
    def architecture(self) -> str:
        return "Qwen3_5MoeForConditionalGeneration" if self.experts else "Qwen3_5ForConditionalGeneration"

    @property
    def kind(self) -> str:
        return "qwen3_5_moe" if self.experts else "qwen3_5"


MODELS = {
    "qwen3_5_4b": Published(16, 2560, 9216, 16, 4, Tower(24, 1024, 4096)),
    "qwen3_5_35b_a3b": Published(8, 2048, 512, 16, 2, Tower(27, 1152, 4304), experts=256, chosen=8),
}
Files = dict[str, dict[str, Any]]


def qwen3(sizes: Sizes, order: tuple[int, ...]) -> models.Model:
    layer = {**qwen3_attention(sizes), **models.mlp("mlp.", sizes.inner, sizes.hidden)}
    return models.Model(
        "Qwen3ForCausalLM",
        "qwen3",
        sizes.key_heads,
        (layer,) * len(set(order)),
        hybrid_models.ends(sizes.hidden, "norm"),
        options(f"{common(sizes)} attention_bias=false"),
        order=order,
    )


def qwen3_attention(sizes: Sizes) -> Shapes:
    return {
        **norms("input_layernorm", "post_attention_layernorm", size=sizes.hidden),
        **attention("self_attn.", sizes),
        **norms("self_attn.q_norm", "self_attn.k_norm", size=sizes.head),
    }


def qwen3_moe(sizes: Sizes, experts: int, chosen: int, order: tuple[int, ...]) -> models.Model:
    dense = qwen3(sizes, order)
    layer = {**qwen3_attention(sizes), **weights("mlp.", gate=(experts, sizes.hidden))}
    for number in range(experts):
        layer |= models.mlp(f"mlp.experts.{number}.", sizes.inner, sizes.hidden)
    of_experts = options(
        f"""num_experts={experts} num_experts_per_tok={chosen} moe_intermediate_size={sizes.inner}
        norm_topk_prob=true decoder_sparse_step=1 mlp_only_layers=[]"""
    )
    return dataclasses.replace(
        dense,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layers=(layer,) * len(dense.layers),
        config={**dense.config, **of_experts},
    )


def gpt_oss(sizes: Sizes, experts: int, chosen: int, layers: int) -> models.Model:
    hidden, inner = sizes.hidden, sizes.inner
    projections = attention("self_attn.", sizes)
    layer = {
        **norms("input_layernorm", "post_attention_layernorm", size=hidden),
        **projections,
        **{name.replace(".weight", ".bias"): shape[:1] for name, shape in projections.items()},
        "self_attn.sinks": (sizes.heads,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    kinds = ",".join(('"sliding_attention"', '"full_attention"')[number % 2] for number in range(layers))
    return models.Model(
        "GptOssForCausalLM",
        "gpt_oss",
        sizes.key_heads,
        (layer,),
        hybrid_models.ends(hidden, "norm"),
        options(
            f"""{common(sizes)} num_local_experts={experts} num_experts_per_tok={chosen} swiglu_limit=7.0
            layer_types=[{kinds}] sliding_window=128 attention_bias=true"""
        ),
        order=(0,) * layers,
    )


TEXT = {
    **mamba2_model.MODELS,
    **hybrid_models.MODELS,
    "qwen3_0_6b": qwen3(Sizes(1024, 3072, 16, 8), (0, 1, 2, 3) * 7),
    "qwen3_1_7b": qwen3(Sizes(2048, 6144, 16, 8), (0, 1, 2, 3) * 7),
    "qwen3_8b": qwen3(Sizes(4096, 12288, 32, 8), (0, 1, 2, 3) * 9),
    "qwen3_moe": qwen3_moe(Sizes(1024, 256, 16, 8), 64, 8, (0, 1) * 4),
    "gpt_oss_20b": gpt_oss(Sizes(2880, 2880, 64, 8, 64), 32, 4, 4),
}


def feed_forward(of: Published) -> Shapes:
    if not of.experts:
        return models.mlp("mlp.", of.inner, of.hidden)
    return {
        **weights("mlp.", gate=(of.experts, of.hidden), shared_expert_gate=(1, of.hidden)),
        **models.mlp("mlp.shared_expert.", of.inner, of.hidden),
        "mlp.experts.gate_up_proj": (of.experts, 2 * of.inner, of.hidden),
        "mlp.experts.down_proj": (of.experts, of.hidden, of.inner),
    }


def layer(of: Published, number: int) -> Shapes:
    is_full = number % PERIOD == PERIOD - 1
    mixer = gated_attention(of.hidden, of.heads, of.key_heads) if is_full else linear_attention(of.hidden, of.gdn)
    return {**norms("input_layernorm", "post_attention_layernorm", size=of.hidden), **mixer, **feed_forward(of)}


def ends(of: Published) -> Shapes:
    tower = models.tower_ends(of.tower.hidden, of.hidden, POSITIONS)
    return {
        **weights("model.language_model.", embed_tokens=(of.vocabulary, of.hidden)),
        **weights(lm_head=(of.vocabulary, of.hidden)),
        **norms("model.language_model.norm", size=of.hidden),
        **{f"model.visual.{name}": shape for name, shape in tower.items()},
    }


def files(of: Published) -> Iterator[tuple[str, Shapes]]:
    """Shapes of each checkpoint file."""
    yield "ends", ends(of)
    shapes = models.tower_block(of.tower.hidden, of.tower.inner).items()
    yield "tower", {f"model.visual.blocks.{n}.{name}": s for n in range(of.tower.depth) for name, s in shapes}
    for first in range(0, of.layers, LAYERS_PER_FILE):
        numbers = range(first, min(first + LAYERS_PER_FILE, of.layers))
        named = {f"model.language_model.layers.{n}.{name}": s for n in numbers for name, s in layer(of, n).items()}
        yield f"layers-{first}", named


def config(of: Published) -> dict[str, Any]:
    of_experts = options(
        f"""num_experts={of.experts} num_experts_per_tok={of.chosen} moe_intermediate_size={of.inner}
        shared_expert_intermediate_size={of.inner} norm_topk_prob=true decoder_sparse_step=1 mlp_only_layers=[]"""
    )
    rope = """{"rope_type":"default","rope_theta":10000000,"partial_rotary_factor":0.25,"""
    rope += """"mrope_section":[11,11,10],"mrope_interleaved":true}"""
    text = options(
        f"""model_type="{of.kind}_text" num_hidden_layers={of.layers} hidden_size={of.hidden}
        intermediate_size={of.inner} num_attention_heads={of.heads} num_key_value_heads={of.key_heads}
        head_dim={HEAD} vocab_size={of.vocabulary} hidden_act="silu" rms_norm_eps=1e-6
        max_position_embeddings=262144 tie_word_embeddings=false full_attention_interval={PERIOD}
        attention_bias=false attn_output_gate=true linear_conv_kernel_dim={of.gdn.width}
        linear_key_head_dim={of.gdn.head} linear_value_head_dim={of.gdn.head} linear_num_key_heads={of.gdn.key_heads}
        linear_num_value_heads={of.gdn.value_heads} partial_rotary_factor=0.25 rope_parameters={rope}
        torch_dtype="bfloat16" bos_token_id=0 eos_token_id=1 pad_token_id=0"""
    )
    tower = options(
        f"""model_type="{of.kind}" depth={of.tower.depth} hidden_size={of.tower.hidden}
        intermediate_size={of.tower.inner} num_heads={of.tower.heads} in_channels=3 patch_size={models.PATCH}
        temporal_patch_size=2 spatial_merge_size=2 num_position_embeddings={POSITIONS}
        out_hidden_size={of.hidden} hidden_act="gelu_pytorch_tanh" deepstack_visual_indexes=[]"""
    )
    start, end, image, video = (of.words + number for number in range(len(OF_IMAGES)))
    tokens = options(
        f"vision_start_token_id={start} vision_end_token_id={end} image_token_id={image} video_token_id={video}"
    )
    return {
        **options('torch_dtype="bfloat16" tie_word_embeddings=false bos_token_id=0 eos_token_id=1'),
        "architectures": [of.architecture],
        "model_type": of.kind,
        **tokens,
        "text_config": {**text, **(of_experts if of.experts else {})},
        "vision_config": tower,
    }


def tokenizer(words: int, markers: Sequence[str]) -> Files:
    """Build files of a tokenizer of numbers.

    Its end is no number: a special token is found inside words, too, so that "1" would cut 217 in three.
    """
    specials = (*markers, END)
    shared = models.tokenizer(models.NUMBERED)
    (marker, *_) = shared["added_tokens"]
    made = {
        **shared,
        "added_tokens": [{**marker, "id": words + n, "content": name} for n, name in enumerate(specials)],
        "model": {**shared["model"], "vocab": {str(number): number for number in range(words)}},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 262144}
    ends = dict.fromkeys(("unk_token", "pad_token", "eos_token"), END)
    return {"tokenizer.json": made, "tokenizer_config.json": {**settings, **ends}}


def processors(of: Published) -> Files:
    """Files of the tokenizer and the image processor: those of verify's tiny model, with this vocabulary."""
    shared, made = models.PROCESSORS, tokenizer(of.words, OF_IMAGES)
    # the markers are no words: bench_serving draws its prompts from the words
    made["tokenizer_config.json"] = {**shared["tokenizer_config.json"], **made["tokenizer_config.json"]}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        made[name] = {**shared[name], "size": PIXELS}
    return made


def make_text(of: models.Model, folder: pathlib.Path, has_weights: bool = True) -> None:
    """Write it with a tokenizer of its words, whose end takes the place of the last."""
    files = {"config.json": of.config_json(), **tokenizer(models.VOCABULARY - 1, ())}
    models.write(files, of.tensors(0) if has_weights else {}, folder)


def make(of: Published, folder: pathlib.Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": config(of), **processors(of)}.items():
        (folder / name).write_text(json.dumps(content))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    for part, shapes in files(of):
        with torch.device(device):
            drawn = {name: models.values(name, shape, 0, source) for name, shape in shapes.items()}
            finished = models.with_norms_of_a_tower_of_one(drawn)
        name = f"model-{part}.safetensors"
        index |= dict.fromkeys(finished, name)
        save_file({key: each.to(torch.bfloat16).cpu().contiguous() for key, each in finished.items()}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main(folder: str, name: str, *options: str) -> None:
    without_weights = options == ("--without-weights",)
    if options and (not without_weights or name in MODELS):
        raise SystemExit(f"{' '.join(options)}: only --without-weights, of a model of text")
    if name in MODELS:
        make(MODELS[name], pathlib.Path(folder))
    elif name in TEXT:
        make_text(TEXT[name], pathlib.Path(folder), has_weights=not without_weights)
    else:
        names = [*MODELS, *TEXT]
        raise SystemExit(f"no model '{name}'{flags.nearest(name, names)}; there are {', '.join(names)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
