# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts: cut into whole blocks, checked as they load, quantized where they are not."""
