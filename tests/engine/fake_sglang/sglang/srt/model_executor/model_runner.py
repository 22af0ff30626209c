# SPDX-License-Identifier: Apache-2.0
"""The runner that every batch of a server passes through, and that a runner of graphs is built from."""


class ModelRunner:
    def forward(self, forward_batch, reinit_attn_backend=False):
        from sglang.srt import target

        return target.function(forward_batch)
