# SPDX-License-Identifier: Apache-2.0
from sglang.srt import target

IN_ORDER = [len, target.function]
