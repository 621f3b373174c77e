# SPDX-License-Identifier: Apache-2.0
"""Quantizing expert weights to MXFP4 while they load."""
