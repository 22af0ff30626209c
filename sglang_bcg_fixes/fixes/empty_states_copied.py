# SPDX-License-Identifier: Apache-2.0
"""The server ends at its first write to host memory (HiCache, Ling 2.5 and Ring 2.5)

Symptom: With --enable-hierarchical-cache the server starts and answers. The first prefix that is copied to host memory
ends it. 0.5.21 to 0.5.23 say `RecursionError: maximum recursion depth exceeded`. 0.5.16 to 0.5.20 say
`transfer_mamba: item_size must be positive`, where --hicache-io-backend is kernel, the default.
Cause: Lightning attention has no convolution, so that state has no elements. SGLang copies it all the same. Since
0.5.21 slots with gaps between are gathered first, and the same function copies what has been gathered. Slots without
elements always count as slots with gaps, so the function calls itself without end. The kernel refuses a state without
bytes in every release that has it.
Change: Nothing is copied of a state without elements, in either direction. Other states are copied as before.
Remove when: No release that copies empty states has to be served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_bcg_fixes.anatomy.launches import HOST_CACHE, named
from sglang_bcg_fixes.anatomy.workarounds import HOST_CACHE_OFF
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, drifted, ends

if TYPE_CHECKING:
    from torch import Tensor

# the newer place first
POOLS = tuple(f"sglang.srt.mem_cache.{module}:MambaPoolHost" for module in ("pool_host.mamba", "memory_pool_host"))
WRITE = tuple(f"{pool}._copy_tensor_all_layers_lf_pf" for pool in POOLS)
LOAD = tuple(f"{pool}._copy_tensor_pf_lf" for pool in POOLS)
WRITE_ALL = tuple(f"{pool}.backup_from_device_all_layer" for pool in POOLS)
LOAD_ALL = tuple(f"{pool}.load_to_device_per_layer" for pool in POOLS)
STRIDED = tuple(f"{pool}._slots_are_strided" for pool in POOLS)
GATHERS = "MambaPoolHost._slots_are_strided"


def probe(source: Source) -> Finding:
    write, load = source.need(*WRITE), source.need(*LOAD)
    write_all, load_all = source.need(*WRITE_ALL), source.need(*LOAD_ALL)
    if "transfer_kv_all_layer_mla_lf_pf" in write.calls:
        return absent("states are copied by kernels that are not known to refuse empty ones", write, load)
    read = (write, load, write_all, load_all)
    if "transfer_kv_mamba_lf_pf" not in write.calls or "transfer_kv_mamba_pf_lf" not in load.calls:
        return drifted("states are copied", *read)
    if any(caller.mentions("conv_state_elem_sizes") for caller in (write_all, load_all)):
        return drifted("states of convolutions are copied", *read)
    if GATHERS not in write.calls | load.calls:
        return affected("a kernel that refuses empty states is given them", *read)
    strided = source.need(*STRIDED)
    if not strided.mentions("tensor.stride(0) != tensor[0].numel()"):
        return drifted("slots with gaps between are gathered", *read, strided)
    return affected("states without elements are gathered without end", *read, strided)


def write_unless_empty(original: Callable[..., None], src_layers: Any, dst: Tensor, *rest: Any, **options: Any) -> None:
    # the host's side has the same elements in a slot, and always a slot
    if dst.numel():
        original(src_layers, dst, *rest, **options)


def load_unless_empty(original: Callable[..., None], src: Tensor, *rest: Any, **options: Any) -> None:
    if src.numel():
        original(src, *rest, **options)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(WRITE, How.AROUND, write_unless_empty), PatchPoint(LOAD, How.AROUND, load_unless_empty)),
    workarounds=HOST_CACHE_OFF,
    verify=("ling_host_memory",),
    concerns=ends(HOST_CACHE, named("BailingMoeV2_5*")),
)
