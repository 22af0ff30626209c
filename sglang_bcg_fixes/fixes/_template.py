# SPDX-License-Identifier: Apache-2.0
"""One line that says what goes wrong, without a full stop at the end

Symptom: The user's view: the wrong answer, the crash, the flags it takes.
Cause: The code responsible, and why it is wrong.
Change: The fix, and where it does nothing.
Remove when: The first release whose source is right.

`make fix ID=<id>` copies this file to fixes/<id>.py and prints the next steps, those of CONTRIBUTING.md. The file name
is the id; the flag SGLANG_BCG_FIX_<ID> and the page docs/fixes/<id>.md follow from it, and nothing else has to be
registered. Delete this paragraph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_bcg_fixes.anatomy.launches import PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, affected, fixed, wrong

MODULE = "sglang.srt.some_module"


def probe(source: Source) -> Finding:
    # a missing definition makes the verdict unknown by itself
    method = source.need(f"{MODULE}:SomeClass.some_method")
    if "the_right_call" in method.calls:
        return fixed("some_method makes the right call", method)
    return affected("some_method does not make the right call", method)


def body(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, *args, **kwargs)


FIX = Fix(
    upstream=("https://github.com/sgl-project/sglang/issues/0",),
    probe=probe,
    patches=(PatchPoint(where=(f"{MODULE}:SomeClass.some_method",), how=How.AROUND, body=body),),
    workarounds=PREFILL_GRAPHS_OFF,
    # of lab/verify/cases.py; without one, leave this out and name the fix in ON_NO_GPU, tests/releases/test_verdicts.py
    verify=("the GPU case that shows it",),
    concerns=wrong(PREFILL_GRAPHS),
)
