# SPDX-License-Identifier: Apache-2.0
from sglang.srt.target import function


def outer(x):
    return ["outer", *function(x)]
