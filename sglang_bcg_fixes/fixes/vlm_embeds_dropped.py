"""Embeddings of images do not reach the replayed prefill graph

Symptom: A multimodal model answers as if there were no image, with HTTP 200, or every prompt to it fails with "Boolean
value of Tensor is ambiguous" (0.5.13). It takes a choice: --enforce-piecewise-cuda-graph next to
--enable-breakable-cuda-graph before 0.5.14, an explicit breakable prefill backend later; the defaults leave out the
models that are hit, to 0.5.15 all multimodal ones.
Cause: Replay puts a function in the place of the layers' forward. What that function is not written to pass on is lost:
to 0.5.12.post1 and on 0.5.15 the embeddings (the graph looks the text's up by itself), in every release the deepstack
embeddings that Qwen3-VL adds to its first layers. On 0.5.13 it asks for the truth value of a whole tensor.
Change: A fix would run a batch without a graph when it carries what the graph does not take. This version only watches
for it.
Remove when: Every release that has to be served passes deepstack embeddings to the graph, or refuses such a batch.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, affected, fixed

OLD_RUNNER = "sglang.srt.model_executor.breakable_cuda_graph_runner:BreakableCudaGraphRunner"
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner"
REPLAY = "replay_layer_forward"
DEEPSTACK_MODEL = "sglang.srt.models.qwen3_vl:Qwen3LLMModel.forward"
DEEPSTACK = "input_deepstack_embeds"


def probe(source: Source) -> Finding:
    captured = source.need(f"{OLD_RUNNER}._run_forward", f"{RUNNER}._run_forward")
    if "self.layer_model.forward" not in captured.calls:
        return affected("the whole model is captured without images, looking up the text's embeddings", captured)
    replay = source.need(
        f"{RUNNER}._execute_body_capture.{REPLAY}",
        f"{RUNNER}.execute.{REPLAY}",
        f"{OLD_RUNNER}.replay.{REPLAY}",
    )
    read = [captured, replay]
    wrong = []
    if not (captured.mentions("input_embeds") or "_build_layer_model_forward_kwargs" in captured.calls):
        wrong.append("the layers are captured without input_embeds")
    if replay.mentions("layer_kwargs.get('input_embeds') or"):
        wrong.append("replay takes the truth value of the embeddings, which raises an error")
    load = source.find(f"{RUNNER}.load_batch")
    if load:
        given = load.need_assignment_to("input_embeds")
        read.append(given)
        if given.mentions("Backend.BREAKABLE"):
            wrong.append("the captured graph is given no input_embeds")
    deepstack = source.find(DEEPSTACK_MODEL)
    if deepstack and DEEPSTACK in deepstack.parameters and not replay.mentions(DEEPSTACK):
        read.append(deepstack.header)
        wrong.append("replay drops the deepstack embeddings of Qwen3-VL")
    if wrong:
        return affected("; ".join(wrong), *read)
    return fixed("the graph is given the embeddings of images", *read)


FIX = Fix(
    id="vlm_embeds_dropped",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "d3f5e503307d": "BreakableCudaGraphRunner._run_forward, 0.5.11",
        "c9bf8cf00098": "BreakableCudaGraphRunner._run_forward, 0.5.12 to 0.5.12.post1",
        "4fe631693d49": "BreakableCudaGraphRunner.replay.replay_layer_forward, 0.5.12 to 0.5.12.post1",
        "2cce5011aa83": "Qwen3LLMModel.forward's header, 0.5.12 to 0.5.23",
        "54c00dd3c4de": "BreakableCudaGraphRunner._run_forward, 0.5.13 to 0.5.13.post1",
        "55bdbed7f2ee": "BreakableCudaGraphRunner.replay.replay_layer_forward, 0.5.13 to 0.5.13.post1",
        "dfcad89732ce": "PrefillCudaGraphRunner._run_forward, 0.5.14 to 0.5.15.post1",
        "2d2686fe144f": "PrefillCudaGraphRunner.execute.replay_layer_forward, 0.5.14",
        "63dec184a917": "PrefillCudaGraphRunner.load_batch's input_embeds, 0.5.14 and 0.5.16 to 0.5.23",
        "89ba34adfe3c": "PrefillCudaGraphRunner.execute.replay_layer_forward, 0.5.15 to 0.5.15.post1",
        "64072b6df364": "PrefillCudaGraphRunner.load_batch's input_embeds, 0.5.15 to 0.5.15.post1",
        "416ac7d101d4": "PrefillCudaGraphRunner._run_forward, 0.5.16 to 0.5.18",
        "e255be0276a9": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.16",
        "c490197f4d4e": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.17 to 0.5.20",
        "9b08284819f1": "PrefillCudaGraphRunner._run_forward, 0.5.19 to 0.5.21",
        "8f59668a67b7": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.21",
        "2add49383b22": "PrefillCudaGraphRunner._run_forward, 0.5.22 to 0.5.23",
        "071826bbae84": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.22",
        "595ba4ba9c7a": "PrefillCudaGraphRunner._execute_body_capture.replay_layer_forward, 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
