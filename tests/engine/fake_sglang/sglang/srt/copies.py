# SPDX-License-Identifier: Apache-2.0
from sglang.srt.target import function
from sglang.srt.target import function as renamed


def use(x):
    return [function(x), renamed(x)]
