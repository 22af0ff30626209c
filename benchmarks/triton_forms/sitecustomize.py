# SPDX-License-Identifier: Apache-2.0
"""FORM=N: draw the form of each kernel from N where Triton would time several and take the fastest.

FORM=1 PYTHONPATH=benchmarks/triton_forms bcg-fixes verify --case kimi_linear_prefill_graph --once --arms patched
"""

from __future__ import annotations

import os
import random
from typing import Any

if "FORM" in os.environ:
    import triton.runtime.autotuner as tuner

    first = tuner.Autotuner.__init__

    def of_one_form(self: Any, kernel: Any, names: Any, forms: Any, *rest: Any, **more: Any) -> None:
        if forms:
            name = getattr(kernel, "__name__", "")
            forms = [random.Random(os.environ["FORM"] + name).choice(forms)]
            print(f"form {name}: {forms[0]}", flush=True)
        first(self, kernel, names, forms, *rest, **more)

    tuner.Autotuner.__init__ = of_one_form
