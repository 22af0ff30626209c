# SPDX-License-Identifier: Apache-2.0
"""SGLang's parts by release: graph runners, layer stacks, graph pools, its own flags."""
