# SPDX-License-Identifier: Apache-2.0
"""Per-tensor FP8 for rows that lie on several ranks."""
