# SPDX-License-Identifier: Apache-2.0
active = False


def is_in_breakable_cuda_graph():
    return active
