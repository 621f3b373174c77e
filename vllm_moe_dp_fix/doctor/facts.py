# SPDX-License-Identifier: Apache-2.0
"""What the verdicts rest on."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_moe_dp_fix.doctor.checkpoint import ExpertTensor
from vllm_moe_dp_fix.doctor.schemes import Scheme
from vllm_moe_dp_fix.replicas.memory import FullCopy

# All-to-all back ends that gather and reduce; "naive" and "pplx" became the first one.
_GATHERING = ("allgather_reducescatter", "naive", "pplx")


@dataclass(frozen=True)
class Facts:
    """One deployment.

    Attributes:
        version: vLLM's.
        platform: vLLM's name of it: ``cuda``, ``rocm``, ``cpu`` and so on.
        capability: Of the GPU, major and minor, where it is known.
        experts: Routed experts of a layer, 0 in a dense model.
        widths: The intermediate sizes of an expert that occur.
        replicated: Every rank holds all experts.
        setting: How the layout of the experts was asked for.
        full_copy: A full copy of the weights beside a device's memory, where both are known.
        tensors: Those of routed experts, from the safetensors headers; None without headers.
        loads: The checkpoint's tensors go through the model's loader.
        nixl_by_default: EPLB takes NIXL where nothing is said and it can be imported.
        nixl_missing: Why NIXL cannot be imported here, '' where it can.
        nixl_failure: Why it cannot register memory here, '' where it can.
    """

    version: str
    platform: str = "cuda"
    capability: tuple[int, int] | None = None
    model_type: str = ""
    experts: int = 0
    widths: tuple[int, ...] = ()
    hidden: int = 0
    dp: int = 1
    tp: int = 1
    pcp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    replicated: bool = False
    setting: str = "sharded"
    full_copy: FullCopy | None = None
    all2all: str = "allgather_reducescatter"
    moe_backend: str = "auto"
    fp8_dispatch: str = "auto"
    scheme: Scheme = field(default_factory=Scheme)
    tensors: tuple[ExpertTensor, ...] | None = None
    loads: bool = True
    lora: bool = False
    eplb: bool = False
    communicator: str | None = None
    nixl_by_default: bool = True
    nixl_missing: str = ""
    nixl_failure: str = ""

    @property
    def ranks(self) -> int:
        """The ranks among which vLLM shares a layer's experts out, whole or cut."""
        return self.tp if self.replicated else self.dp * self.pcp * self.tp

    @property
    def expert_tp(self) -> int:
        """The ranks over which an expert is cut."""
        return 1 if self.expert_parallel else self.ranks

    @property
    def is_gpt_oss(self) -> bool:
        return self.model_type == "gpt_oss"

    @property
    def no_gather(self) -> str:
        """Why activations are not gathered over the ranks, '' where they are."""
        if not self.experts:
            return "the model is dense"
        if self.replicated:
            return "every rank holds all experts and gathers nothing"
        if self.dp == 1 and not (self.expert_parallel and self.pcp > 1):
            return "there is one data-parallel rank, so nothing is gathered"
        if self.expert_parallel and self.all2all not in _GATHERING:
            return f"the all-to-all back end {self.all2all} has a dispatch of its own"
        return ""
