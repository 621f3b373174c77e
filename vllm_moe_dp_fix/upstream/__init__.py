# SPDX-License-Identifier: Apache-2.0
"""The fixes as patches for vLLM's own source, a series for each release.

``series`` holds them; ``scripts/make_patches.py`` makes them of the plugin's code.
"""
