"""The prefill runner calls a model's layers with arguments that they do not take

Symptom: The server stops at start-up while prefill graphs are captured, with a TypeError about input_embeds or with an
error from a batch used as positions; or the positions are those of nobody. Which models depends on the release: Phi and
Persimmon in all from 0.5.12, Cohere, Baichuan and XverseMoe on 0.5.13 to 0.5.18, on 0.5.13 also every model that spells
it inputs_embeds, Qwen3-Next, NemotronH, Kimi-Linear, Falcon-H1, Bailing linear, Granite MoE and StarCoder2 among them.
Cause: The runner calls the layers by position, or with a keyword that not every model has: three positional arguments
on 0.5.12, a keyword input_embeds besides on 0.5.13, four positional ones from 0.5.14, three and what the signature
names from 0.5.19. Phi and Persimmon take forward_batch before positions.
Change: A fix would bind every argument by the name of the parameter. This version only watches for it.
Remove when: Every release that has to be served binds these arguments by name.
"""

from __future__ import annotations

import ast

from sglang_bcg_fixes.mitigations import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Definition, Source, absent, affected, fixed, unknown

RUNNERS = (
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner._run_forward",
    "sglang.srt.model_executor.breakable_cuda_graph_runner:BreakableCudaGraphRunner._run_forward",
)
CALLEE = "self.layer_model.forward"
PASSED = ("input_ids", "positions", "forward_batch", "input_embeds")
UNUSUAL = (
    "baichuan:BaiChuanModel",
    "commandr:CohereModel",
    "persimmon:PersimmonModel",
    "phi:PhiModel",
    "phi3_small:Phi3SmallModel",
    "xverse_moe:XverseModel",
)
OTHERWISE_SPELLED = (
    "bailing_moe_linear:BailingMoELinearModel",
    "falcon_h1:FalconH1Model",
    "granitemoe:GraniteMoeModel",
    "kimi_linear:KimiLinearModel",
    "nemotron_h:NemotronHModel",
    "orion:OrionModel",
    "qwen3_next:Qwen3NextModel",
    "solar:SolarModel",
    "starcoder2:Starcoder2Model",
)


def probe(source: Source) -> Finding:
    runner = source.need(*RUNNERS)
    calls = [node for node in ast.walk(runner.node) if isinstance(node, ast.Call) and ast.unparse(node.func) == CALLEE]
    if not calls:
        return absent("the whole model is captured, called as it always is", runner)
    if len(calls) > 1:
        return unknown("the runner calls the layers in more than one way", runner)
    keywords = {keyword.arg for keyword in calls[0].keywords}
    models = (*UNUSUAL, *OTHERWISE_SPELLED) if "input_embeds" in keywords else UNUSUAL
    read = [runner]
    troubles: dict[str, list[str]] = {}
    for model in models:
        forward = source.find(f"sglang.srt.models.{model}.forward")
        trouble = misfit(forward, len(calls[0].args), keywords) if forward else None
        if forward and trouble:
            troubles.setdefault(trouble, []).append(model.partition(":")[2])
            read.append(forward.header)
    if troubles:
        return affected("; ".join(f"{trouble}: {', '.join(models)}" for trouble, models in troubles.items()), *read)
    return fixed("every model takes its layers' arguments as they are passed", *read)


def misfit(forward: Definition, positional: int, keywords: set[str | None]) -> str | None:
    """What is wrong with passing the first arguments of PASSED by position and these by keyword, or None."""
    assert isinstance(forward.node, ast.FunctionDef)
    arguments = forward.node.args
    parameters = [argument.arg for argument in arguments.args[1:]]
    if positional > len(parameters) or ("input_embeds" in keywords and "input_embeds" not in parameters):
        return "no parameter input_embeds"
    for passed, parameter in zip(PASSED[:positional], parameters, strict=False):
        if passed != parameter and parameter in PASSED:
            return f"{passed} is taken for {parameter}"
    required = parameters[: len(parameters) - len(arguments.defaults)]
    missing = [name for name in required[positional:] if name not in keywords]
    # what is passed as **kwargs is chosen by the names in the signature
    if missing and None not in keywords:
        return f"{missing[0]} is required and not passed"
    return None


FIX = Fix(
    id="stack_call_signature",
    doc=__doc__,
    upstream=(),
    probe=probe,
    known={
        "d3f5e503307d": "BreakableCudaGraphRunner._run_forward, 0.5.11",
        "c9bf8cf00098": "BreakableCudaGraphRunner._run_forward, 0.5.12 to 0.5.12.post1",
        "1633900711cc": "headers of PersimmonModel, PhiModel, 0.5.12 to 0.5.23",
        "ab692e01f776": "Phi3SmallModel.forward's header, 0.5.12 to 0.5.13.post1",
        "54c00dd3c4de": "BreakableCudaGraphRunner._run_forward, 0.5.13 to 0.5.13.post1",
        "089d482940aa": "headers of BaiChuanModel, CohereModel, XverseModel, 0.5.13 to 0.5.18",
        "0d7b5253938b": "BailingMoELinearModel.forward's header, 0.5.13 to 0.5.13.post1",
        "33dda69f86b9": "headers of FalconH1, GraniteMoe, Qwen3Next, Starcoder2 models, 0.5.13 to 0.5.13.post1",
        "2fbea756c840": "KimiLinearModel.forward's header, 0.5.13 to 0.5.13.post1",
        "18b8c2b606ee": "NemotronHModel.forward's header, 0.5.13 to 0.5.13.post1",
        "b73da55aacf6": "OrionModel.forward's header, 0.5.13 to 0.5.13.post1",
        "e8f114294f17": "SolarModel.forward's header, 0.5.13 to 0.5.13.post1",
        "dfcad89732ce": "PrefillCudaGraphRunner._run_forward, 0.5.14 to 0.5.15.post1",
        "416ac7d101d4": "PrefillCudaGraphRunner._run_forward, 0.5.16 to 0.5.18",
        "9b08284819f1": "PrefillCudaGraphRunner._run_forward, 0.5.19 to 0.5.21",
        "2add49383b22": "PrefillCudaGraphRunner._run_forward, 0.5.22 to 0.5.23",
    },
    mitigations=PREFILL_GRAPHS_OFF,
)
