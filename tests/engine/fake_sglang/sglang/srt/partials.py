# SPDX-License-Identifier: Apache-2.0
import functools

from sglang.srt import target

bound = functools.partial(target.function, 1)
