# SPDX-License-Identifier: Apache-2.0
"""The server of this process, as its first model runner shows it, and the fixes and kernels that concern it.

Everything is read by name. What is not there, or not as expected, is not known, and then everything concerns the
server: nothing is hidden by a guess.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sglang_bcg_fixes.anatomy import launches
from sglang_bcg_fixes.concern import Harm, Launch
from sglang_bcg_fixes.model import Decision
from sglang_bcg_fixes.process import procfs
from sglang_bcg_fixes.source.syntax import collector_paused
from sglang_bcg_fixes.source.tree import Source

SCHEDULER = "scheduler"
STRUCT_FIELDS = "__struct_fields__"
PARALLEL = "sglang.srt.distributed.parallel_state"
# by the first number of a GPU's compute capability
CHIPS = {8: launches.AMPERE, 9: launches.HOPPER, 10: launches.BLACKWELL, 12: launches.BLACKWELL}

logger = logging.getLogger("sglang_bcg_fixes")


@dataclasses.dataclass(frozen=True)
class Served:
    """One server's model in this rank; `concerned` has the ids of what may matter to it."""

    model: str
    port: int | None
    rank: str
    concerned: frozenset[str]
    # how many schedulers there are, if that is known
    ranks: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.model, "port": self.port, "rank": self.rank, "ranks": self.ranks}


@collector_paused()
def seen(model_runner: Any, source: Source, decisions: Iterable[Decision[Any]]) -> Served:
    """Read what a model runner was made from."""
    arguments = getattr(model_runner, "server_args", None)
    launch = launch_of(model_runner, arguments, source)
    concerned = frozenset(each.id for each in decisions if launch is None or touches(each, launch))
    source.forget()
    port = getattr(arguments, "port", None)
    return Served(
        model=", ".join(launch.architectures if launch else ()) or "unknown model",
        port=port if isinstance(port, int) else None,
        rank=rank_of_this_process(),
        concerned=concerned,
        ranks=schedulers_of(arguments),
    )


def schedulers_of(arguments: Any) -> int | None:
    """The schedulers of a server; None where some run on other machines, or SGLang decides their number later."""
    named = (getattr(arguments, name, None) for name in ("tp_size", "pp_size"))
    sizes = [size for size in named if isinstance(size, int)]
    alone = [getattr(arguments, name, None) for name in ("dp_size", "nnodes")]
    # a diffusion LLM has no pipeline stages, whatever is asked for
    later = (getattr(arguments, "attn_dp_size", None) or 1) > 1 or getattr(arguments, "dllm_algorithm", None)
    if alone != [1, 1] or later:
        return None
    return math.prod(sizes) if len(sizes) == 2 else None


def touches(decision: Decision[Any], launch: Launch) -> bool:
    """False only where every concern of it is known not to hold, or to be merely possible."""
    concerns = decision.subject.concerns
    try:
        real = [concern for concern in concerns if concern.harm is not Harm.POSSIBLE]
        return not concerns or any(concern.touches(launch) for concern in real)
    except Exception:
        # another package may have declared it
        logger.debug("bcg-fixes: %s may concern this model, its conditions failed", decision.whose, exc_info=True)
        return True


def launch_of(model_runner: Any, arguments: Any, source: Source) -> Launch | None:
    try:
        config = model_runner.model_config.hf_config.to_dict()
        options = options_of(arguments)
        found = chip() if str(getattr(model_runner, "device", "")).startswith("cuda") else ""
    except Exception:
        logger.debug("bcg-fixes: the model of this server is not known", exc_info=True)
        return None
    return Launch(source, config, options, found) if isinstance(config, Mapping) else None


def options_of(arguments: Any) -> dict[str, list[str]]:
    """The options of a server, from the values that it was started with or has since resolved."""
    defaults = dict(defaults_of(type(arguments)))
    found = {
        f"--{name.replace('_', '-')}": list(words(value))
        for name, value in values_of(arguments).items()
        if value not in (None, False) and (name not in defaults or value != defaults[name])
    }
    graphs: Any = getattr(arguments, "cuda_graph_config", None)
    backend = getattr(getattr(graphs, "prefill", None), "backend", None)
    chosen = getattr(arguments, "_cuda_graph_config_locked", ())
    if isinstance(graphs, dict):
        # as it was given: SGLang keeps elsewhere what it resolves
        found[launches.CONFIG] = [json.dumps(graphs)]
    elif isinstance(backend, str):
        # SGLang has decided, where the option alone would leave it open
        found.pop(launches.CONFIG, None)
        found[launches.BACKEND] = list(words(backend))
        found[launches.DECODE_BACKEND] = list(words(graphs.decode.backend))
        if ("prefill", "bs") in chosen:
            found[launches.PREFILL_BUCKETS] = list(words(graphs.prefill.bs))
    return found


def values_of(arguments: Any) -> dict[str, Any]:
    names = getattr(arguments, STRUCT_FIELDS, None)
    return {name: getattr(arguments, name) for name in names} if names else dict(vars(arguments))


def defaults_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The defaults of a dataclass or, from 0.5.20 on, a struct; a marker that no value equals stands for none."""
    fields: Iterable[Any] = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    if hasattr(kind, STRUCT_FIELDS):
        # SGLang has imported it
        fields = importlib.import_module("msgspec.structs").fields(kind)
    for field in fields:
        yield field.name, field.default_factory() if callable(field.default_factory) else field.default


def words(value: Any) -> Iterator[str]:
    """The words after an option with this value; an object that no word stands for has none."""
    if isinstance(value, enum.Enum):
        yield from words(value.value)
    elif isinstance(value, str | int | float) and value is not True:
        yield str(value)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from words(each)


def chip() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or torch.version.hip:
        return ""
    return CHIPS.get(torch.cuda.get_device_capability()[0], "")


def rank_of_this_process() -> str:
    """Such as TP0, or DP1 TP0, by the title that SGLang gives a scheduler, or by its group."""
    title = procfs.title(os.getpid()) or ""
    if title.startswith(f"{SCHEDULER}_"):
        return title.removeprefix(f"{SCHEDULER}_").replace("_", " ")
    # there is no group before a model is built, and none of this name in a later SGLang
    group = getattr(sys.modules.get(PARALLEL), "_TP", None)
    number = getattr(group, "rank_in_group", None)
    if isinstance(number, int):
        return f"TP{number}"
    return "TP0" if title == SCHEDULER else multiprocessing.current_process().name
