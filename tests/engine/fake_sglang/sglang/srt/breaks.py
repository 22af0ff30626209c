# SPDX-License-Identifier: Apache-2.0
"""An operation that is a break, and one that should be and is not."""

from sglang.srt.model_executor.breakable_cuda_graph import breakable_cuda_graph as graphs

log: list[list[object]] = []


def operation(x, out):
    log.append(["operation", x])
    out.append(x)


def stub(x, out):
    log.append(["stub", x])


def forgotten(x, out):
    log.append(["forgotten", x])
    out.append(x)


if graphs.FORM == "enable":
    broken_operation = graphs.eager_on_graph(True)(operation)
elif graphs.FORM == "stub":
    broken_operation = graphs.eager_on_graph(True, capture_stub=stub)(operation)
else:
    broken_operation = graphs.eager_on_graph(capture_stub=stub)(operation)


class Layer:
    if graphs.FORM == "object":

        @graphs.eager_on_graph
        def run(self, x, out):
            log.append(["run", x])
            out.append(x)
