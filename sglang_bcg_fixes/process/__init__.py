# SPDX-License-Identifier: Apache-2.0
"""The plugin in one process: applied fixes, pending ones, and the report on both."""
