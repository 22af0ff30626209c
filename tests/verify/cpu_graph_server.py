# SPDX-License-Identifier: Apache-2.0
"""SGLang's own server without a GPU, with prefill graphs on a tape: tests.verify.cpu_graph_server ARGUMENTS...

SGLang spawns its processes, and a spawned python process imports the main module of its parent: so the stand-ins are in
every process before sglang is imported there, as in cpu_sglang/launch.py.
"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from typing import Any

from cpu_sglang import graphs, launch, mamba, one_batch, prefill

one_batch.import_sglang(with_graphs=True)
# a server that is alone answers wrongly, and does not end
graphs.freed_memory_is_garbage = False


def schedule(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler; its mixers have kernels, its weights a size at which wrong states show, and graphs."""
    runner: Any = importlib.import_module("sglang.srt.model_executor.model_runner").ModelRunner
    load, capture = runner.load_model, runner.init_cuda_graphs

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        mamba.install(self.server_args)
        load(self, *args, **kwargs)
        one_batch.randomize(self.model)

    def init_cuda_graphs(self: Any, *args: Any, **kwargs: Any) -> None:
        capture(self, *args, **kwargs)
        prefill.capture_prefill(self)

    runner.load_model, runner.init_cuda_graphs = load_model, init_cuda_graphs
    with prefill.built_for_graphs():
        importlib.import_module("sglang.srt.managers.scheduler").run_scheduler_process(*arguments, **named)


if __name__ == "__main__":
    server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    server.launch_server = functools.partial(server.launch_server, run_scheduler_process_func=schedule)
    sys.argv[0] = launch.SERVER_MODULE
    # the main module stays this one, which spawned processes import
    runpy.run_module(launch.SERVER_MODULE, run_name="__main__", alter_sys=False)
