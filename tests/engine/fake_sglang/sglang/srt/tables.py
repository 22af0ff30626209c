# SPDX-License-Identifier: Apache-2.0
"""Places that `from X import Y` rebinding does not reach; each is imported by the test that is about it."""

from sglang.srt import target

BY_NAME = {"function": target.function}
