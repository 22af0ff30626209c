# SPDX-License-Identifier: Apache-2.0
"""What every batch of a server goes through, and what a runner of graphs is built from."""


class ModelRunner:
    def forward(self, forward_batch, reinit_attn_backend=False):
        from sglang.srt import target

        return target.function(forward_batch)
