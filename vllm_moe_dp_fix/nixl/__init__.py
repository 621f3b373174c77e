# SPDX-License-Identifier: Apache-2.0
"""What the ranks of an EPLB group must agree about before NIXL moves experts."""
