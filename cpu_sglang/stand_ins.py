# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that let a released, unmodified SGLang be imported and run on a machine without a GPU.

Everything of SGLang itself stays real. Packages that exist only as CUDA builds are replaced by modules whose every
attribute raises NotImplementedError when it is called, except the few functions written below in plain torch.
`touched` records which names were used, so that a test can assert how little was replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# "pkg.mod" -> names that were requested from that stand-in
touched: dict[str, set[str]] = {}

# "sglang::op" -> the python function that SGLang registered for CUDA, and we also for CPU
custom_ops: dict[str, types.FunctionType] = {}

PACKAGES_WITH_CUDA_BUILDS_ONLY = frozenset(
    {
        "sgl_kernel",
        "sgl_kernel.flash_attn",
        "sgl_kernel.flash_mla",
        "sgl_kernel.kvcacheio",
        "sgl_kernel.sparse_flash_attn",
        "sgl_kernel.speculative",
        "vllm",
        "vllm._custom_ops",
    }
)

# of kernels that are built when they are first called
BUILDER = "sglang.kernels.jit.utils.compile.ninja"

_installed = False
_rope_replaced = False
# torch forgets the operators of a Library that is garbage collected
_libraries_kept_alive: list[torch.library.Library] = []


def _rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate the first `cos_sin_cache.shape[-1]` values of every head of query and key, in place."""
    rotated_size = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, -1)
    for heads in (query, key):
        if heads is None:
            continue
        rotated = heads.view(positions.numel(), -1, head_size)[..., :rotated_size]
        if is_neox:
            first, second = rotated.float().chunk(2, -1)
            rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
        else:
            even, odd = rotated[..., ::2].float(), rotated[..., 1::2].float()
            rotated.copy_(torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2))


def _merge_state_v2(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge two partial attentions, each given as output and log-sum-exp."""
    log_sum = torch.logaddexp(s_a.float(), s_b.float())
    weight_a = (s_a - log_sum).exp().unsqueeze(-1)
    weight_b = (s_b - log_sum).exp().unsqueeze(-1)
    merged = (v_a.float() * weight_a + v_b.float() * weight_b).to(v_a.dtype)
    return (
        merged if v_merged is None else v_merged.copy_(merged),
        log_sum if s_merged is None else s_merged.copy_(log_sum),
    )


def _get_scheduler_metadata(batch_size: int = 1, **_: Any) -> Tensor:
    """Make a dummy work plan: plain torch needs none, only its shape matters."""
    return torch.zeros(1 + batch_size, dtype=torch.int32)


# the only callable attributes of the stand-ins
written_in_torch: dict[str, dict[str, Callable[..., Any]]] = {
    "sgl_kernel": {"merge_state_v2": _merge_state_v2},
    "sgl_kernel.flash_attn": {"get_scheduler_metadata": _get_scheduler_metadata},
    "vllm._custom_ops": {"rotary_embedding": _rotary_embedding},
}


class _NeedsGpu:
    """Placeholder that SGLang can import and pass around, but not call."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__} exists only in a CUDA build and cpu_sglang/stand_ins.py has no version of it "
            "in plain torch. Run this on a machine with a GPU, or choose a backend that does not need it."
        )

    def __repr__(self) -> str:
        return f"<stand-in for {self.__name__}>"


class _StandInModule(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        # a package, without modules in files
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        # python probes modules for dunder names (__file__, __version__, __wrapped__): leave those absent
        if name.startswith("__"):
            raise AttributeError(f"the stand-in for {self.__name__} has no {name}")
        touched.setdefault(self.__name__, set()).add(name)
        if name in written_in_torch.get(self.__name__, ()):
            return written_in_torch[self.__name__][name]
        return _NeedsGpu(f"{self.__name__}.{name}")


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in PACKAGES_WITH_CUDA_BUILDS_ONLY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _define_torchvision_operators() -> None:
    """Define the operators that torchvision needs to import; its CUDA build cannot load them here."""
    torchvision = importlib.util.find_spec("torchvision")
    if torchvision is None or torchvision.origin is None:
        return
    for extension in pathlib.Path(torchvision.origin).parent.glob("_C*.so"):
        with contextlib.suppress(OSError):
            torch.ops.load_library(extension)
            # torchvision's own operators exist, and defining one twice would abort the process
            return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries_kept_alive.append(library)


def _complete_torch_cpu() -> None:
    """Add the device context that SGLang's vendored FLA takes from torch.<device>, and torch.cpu lacks."""
    if not hasattr(torch.cpu, "device"):
        vars(torch.cpu)["device"] = lambda *_: contextlib.nullcontext()


def _register_custom_ops_for_cpu() -> None:
    """Register SGLang's custom operators, which are python functions for CUDA only, for the CPU too."""
    library_class: Any = torch.library.Library
    register = library_class.impl

    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        register(library, op_name, fn, dispatch_key, **options)
        if library.ns == "sglang" and dispatch_key == "CUDA":
            register(library, op_name, fn, "CPU", **options)
            custom_ops[f"sglang::{op_name.split('::')[-1].split('.')[0]}"] = fn

    library_class.impl = impl


def _pretend_an_sm_count(count: int = 4) -> None:
    """Report an SM count, by which the gated layer norm sizes its grid on any device."""
    if not torch.cuda.is_available():
        properties = types.SimpleNamespace(multi_processor_count=count, major=9, minor=0, name="none", total_memory=0)
        vars(torch.cuda)["get_device_properties"] = lambda *_: properties


def _build_no_cuda_kernels() -> None:
    """Have SGLang find at once that it cannot have its CUDA kernels; a compiler takes ten seconds, and cannot link."""
    # others before 0.5.18, and nothing that runs here asks for one of theirs
    with contextlib.suppress(ModuleNotFoundError):
        vars(importlib.import_module(BUILDER))["build"] = _NeedsGpu(f"{BUILDER}.build")


def install() -> None:
    """Call before sglang is imported. Calling it again does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    # packages that are really installed use their real loaders, because this finder comes last
    sys.meta_path.append(_StandInFinder())
    _define_torchvision_operators()
    _complete_torch_cpu()
    _pretend_an_sm_count()
    _register_custom_ops_for_cpu()
    if os.environ.get("TRITON_INTERPRET") == "1":
        from . import interpreter

        interpreter.install()


def after_import() -> None:
    """Call once sglang is importable, before a model is built. Calling it again does nothing."""
    global _rope_replaced
    if _rope_replaced:
        return
    _rope_replaced = True

    from sglang.srt.layers.rotary_embedding import factory

    rope_of_sglang = factory.get_rope_cpu

    # sglang's CPU factory knows deepseek_yarn only; its generic one has a native path for every other kind
    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        partial_rotary_factor: float = 1.0,
        device: Any = None,
    ) -> Any:
        arguments = (
            head_size,
            rotary_dim,
            max_position,
            base,
            is_neox_style,
            rope_scaling,
            dtype,
            partial_rotary_factor,
        )
        if rope_scaling and rope_scaling.get("rope_type") == "deepseek_yarn":
            return rope_of_sglang(*arguments, device)
        return factory.get_rope(*arguments)

    factory.get_rope_cpu = get_rope_cpu

    from sglang.srt import utils
    from sglang.srt.configs import update_config

    # sglang names the CPU only for its own CPU engine
    utils.get_device = utils.common.get_device = lambda device_id=None: "cpu"
    pad = update_config.update_intermediate_size

    # CPU only, and a single number: some models have a list, or none
    def update_intermediate_size(model_config: Any, *arguments: Any) -> Any:
        with contextlib.suppress(TypeError):
            return pad(model_config, *arguments)
        return model_config

    update_config.update_intermediate_size = update_intermediate_size
    _build_no_cuda_kernels()
