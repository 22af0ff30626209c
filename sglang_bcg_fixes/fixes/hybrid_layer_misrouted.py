# SPDX-License-Identifier: Apache-2.0
"""Crash at start or wrong answers with --speculative-adaptive (hybrid models)

Symptom: Up to 0.5.13.post1, with --speculative-adaptive and a draft that is part of the same checkpoint, a hybrid model
(Qwen3-Next, Qwen3.5, NemotronH, Bailing) crashes at start-up or silently computes some layers with the wrong attention.
Cause: get_config is cached, so the target and the draft share one configuration object; the draft changes it, and when
the target's backend is rebuilt from it, the list of full attention layers is the draft's.
Change: A draft gets its own copy of the configuration.
Remove when: No release before 0.5.14 has to be served.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from sglang_bcg_fixes.anatomy.launches import ADAPTIVE, HYBRID
from sglang_bcg_fixes.model import Workaround
from sglang_bcg_fixes.source.syntax import Definition
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, drifted, fixed, unknown, wrong

CONFIG = "sglang.srt.configs.model_config:ModelConfig"
# processes that never run a model load its configuration too; naming the runner's keeps their imports unchanged
RUNNERS_CONFIG = "sglang.srt.model_executor.model_runner:ModelConfig"
CACHED = "sglang.srt.utils.hf_transformers.config:get_config"


def probe(source: Source) -> Finding:
    own = source.need(f"{CONFIG}.__init__")
    read = [own.need_assignment_to("self.hf_config"), own.need_assignment_to("self.hf_text_config")]
    if not shares_configuration(source):
        if "copy.deepcopy" in read[0].calls:
            return fixed("each configuration is a copy of the cached one", *read)
        return drifted("the configuration is made", own)
    if not copy_would_be_in_time(own):
        return unknown("the draft's configuration is changed before it can be copied", own)
    read += [source.need(f"{CONFIG}._config_draft_model").header, source.need(CACHED)]
    return affected("the target and the draft share one cached configuration object", *read)


def shares_configuration(source: Source) -> bool:
    made = source.need(f"{CONFIG}.__init__").need_assignment_to("self.hf_config")
    cached = any("lru_cache" in item for item in source.need(CACHED).decorators)
    return cached and "get_config" in made.calls and "copy.deepcopy" not in made.calls


def copy_would_be_in_time(init: Definition) -> bool:
    """Check that both configurations exist before the draft begins to change them."""
    changes = [
        node.lineno
        for node in ast.walk(init.node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._config_draft_model"
    ]
    made = [init.need_assignment_to(name).node.lineno for name in ("self.hf_config", "self.hf_text_config")]
    return len(changes) == 1 and max(made) < changes[0]


def give_the_draft_its_own(self: Any) -> None:
    if self.is_draft_model:
        # copied together: one is the other or a part of it, and stays so
        self.hf_config, self.hf_text_config = copy.deepcopy((self.hf_config, self.hf_text_config))


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/pull/23331",),
    probe=probe,
    patches=(PatchPoint((f"{RUNNERS_CONFIG}._config_draft_model",), How.BEFORE, give_the_draft_its_own),),
    workarounds=(
        Workaround(
            flags="(leave out) --speculative-adaptive",
            option="--speculative-adaptive",
            effect="the target's list is made before there is a draft",
        ),
    ),
    verify=("qwen3_next_adaptive_speculation",),
    concerns=wrong(HYBRID, ADAPTIVE),
)
