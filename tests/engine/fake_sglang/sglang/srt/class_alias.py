# SPDX-License-Identifier: Apache-2.0
from sglang.srt.target import Thing


class Other:
    borrowed = Thing.method
