# SPDX-License-Identifier: Apache-2.0
"""One file per defect; its name is the id, and flag and page follow from it. Start with `make fix`."""
