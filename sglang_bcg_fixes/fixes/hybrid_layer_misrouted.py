"""A hybrid model's layers go to the wrong attention after its draft model was configured

Symptom: With --speculative-adaptive and a draft model that is part of the same checkpoint, a hybrid model (Qwen3-Next,
Qwen3.5, NemotronH, Bailing) crashes at start-up or computes some layers with the wrong attention, silently.
Cause: get_config is cached, so the target and the draft share one configuration object. The draft changes it, and when
the target's backend is built again from it, the ids of its full attention layers are wrong. Layers are routed by
membership of their id in that list.
Change: A fix would give each its own copy and route by the kind of the layer. This version only watches for it.
Remove when: No release before 0.5.14 has to be served.
"""

from __future__ import annotations

from sglang_bcg_fixes.mitigations import FIXED_SPECULATION
from sglang_bcg_fixes.model import Finding, Fix
from sglang_bcg_fixes.probe import Source, affected, fixed, unknown

CONFIG = "sglang.srt.configs.model_config:ModelConfig.__init__"
CACHED = "sglang.srt.utils.hf_transformers.config:get_config"


def probe(source: Source) -> Finding:
    own = source.need(CONFIG).need_assignment_to("self.hf_config")
    if "copy.deepcopy" in own.calls:
        return fixed("each model configuration is a copy of its own", own)
    cached = source.need(CACHED)
    if "get_config" in own.calls and any("lru_cache" in item for item in cached.decorators):
        return affected("the target and the draft share one cached configuration object", own, cached)
    return unknown("the configuration is made in a way that no known release does", own, cached)


FIX = Fix(
    id="hybrid_layer_misrouted",
    doc=__doc__,
    upstream=tuple(
        f"https://github.com/sgl-project/sglang/pull/{number}" for number in (23331, 26474, 26623, 27116, 27120)
    ),
    probe=probe,
    known={
        "513ee25e9b81": "ModelConfig.__init__'s self.hf_config, 0.5.11",
        "23d16644cbcb": "get_config, 0.5.11",
        "75aaecbd1913": "ModelConfig.__init__'s self.hf_config, 0.5.12 to 0.5.13.post1",
        "b74706995543": "get_config, 0.5.12 to 0.5.13.post1",
        "04e7de28dca1": "ModelConfig.__init__'s self.hf_config, 0.5.14 to 0.5.23",
    },
    mitigations=FIXED_SPECULATION,
)
