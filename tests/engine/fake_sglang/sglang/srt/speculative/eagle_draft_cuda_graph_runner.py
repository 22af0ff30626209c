# SPDX-License-Identifier: Apache-2.0
"""A runner of graphs, which is ready when it has been built."""


class EAGLEDraftCudaGraphRunner:
    def __init__(self, eagle_worker):
        self.eagle_worker = eagle_worker
