# SPDX-License-Identifier: Apache-2.0
"""Uneven all-gather and reduce-scatter, as functions of a device communicator."""
