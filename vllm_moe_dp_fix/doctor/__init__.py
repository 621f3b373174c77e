# SPDX-License-Identifier: Apache-2.0
"""``vllm-moe-dp-fix doctor``: what will go wrong with a serve command, told before it is run.

It starts nothing and loads no weights. ``command`` parses with vLLM's own parser, ``checkpoint``
reads configurations and safetensors headers, ``facts`` puts together what matters, ``verdicts``
judges each fault from that alone, ``environment`` looks around, and ``report`` collects all of it.
"""
