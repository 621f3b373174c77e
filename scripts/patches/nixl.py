# SPDX-License-Identifier: Apache-2.0
"""Patches for EPLB over NIXL."""

from __future__ import annotations

from packaging.version import Version

from scripts.patches.build import IN_VLLM, PLUGIN, Change, Tree, faults_in
from scripts.patches.edit import Source
from scripts.patches.tests_from import regression_tests
from vllm_moe_dp_fix.fixes.nixl_eplb_validator import F4A, F4B, F4C, F4D
from vllm_moe_dp_fix.registry import EPLB_COMMUNICATOR

FIX = "nixl_eplb_validator"
RECORD = f"vllm_moe_dp_fix.fixes.{FIX}"
FILE = EPLB_COMMUNICATOR.replace(".", "/") + ".py"
PACKAGE = "vllm.distributed.eplb.nixl"
NAMES = {"vllm_moe_dp_fix.nixl": PACKAGE, "_moe_dp_fix_": "_nixl_", **IN_VLLM}
CLASS = "NixlEplbCommunicator"
TESTS = {
    "F4a": "other_dtype_is_refused",
    "F4b": "failure_reaches_the_peers",
    "F4c": "other_size_is_refused",
    "F4d": "rank_waits_for_its_readers",
}


def _zero_copy(tree: Tree) -> bool:
    """Peers read the expert weights themselves, not a buffer that they are packed in."""
    return Version(tree.release) >= Version("0.23.0")


def _vendor(tree: Tree, *names: str) -> None:
    for name in names:
        tree.vendor(f"{PACKAGE}.{name}", PLUGIN / "nixl" / f"{name}.py", NAMES)


def _test(tree: Tree, *faults: str, named: bool = False) -> None:
    """The regression tests, those of the patches before included."""
    extra = ""
    if named:
        extra = NAMED_TEST + (UNREADABLE_TEST if _zero_copy(tree) else "")
    tree.add(
        "tests/distributed/test_eplb_nixl.py",
        regression_tests(
            "EPLB over NIXL, with agents and a group that are none.",
            RECORD,
            {f"_probe_{f.lower()}": TESTS[f] for f in faults_in(faults, tree.release)},
            EPLB_COMMUNICATOR,
            ("_move", "_Wrapper") if named else (),
            ("import pytest",) if named else (),
            extra,
        ),
    )


def _set_up(tree: Tree) -> None:
    has_addresses = _zero_copy(tree)
    _vendor(tree, "__init__", "exchange", "layout", "report", "setup")
    if has_addresses:
        _vendor(tree, "addresses")

    def edit(source: Source) -> None:
        last = source.parameters(f"{CLASS}.__init__")[-1]
        source.split(f"{CLASS}.__init__", "_set_up", INIT[last])
        if has_addresses:
            source.replace(PEERS, "dict[int, addresses.PeerTensors] = {}\n")
        source.replace_body(f"{CLASS}._init_remote_agents", "setup.meet_peers(self)")
        if has_addresses:
            addresses_of_peers = ADDRESSES
        elif "self._peer_partition_bytes" in source.text:  # to 0.20.2
            addresses_of_peers = PACKED.format("base, self._peer_partition_bytes, device_id")
        else:
            addresses_of_peers = PACKED.format("base, device_id")
        source.replace_body(f"{CLASS}._exchange_remote_send_meta", addresses_of_peers)
        if source.has(f"{CLASS}._init_remote_state"):  # from 0.24.0
            source.replace("(uses ``all_gather_object`` twice)", "(all ranks gather twice)")
        if source.has(f"{CLASS}._ensure_remote_state"):  # to 0.28.0
            source.replace_body(f"{CLASS}._ensure_remote_state", DEFERRED)
        source.add_import(PACKAGE, "addresses, setup" if has_addresses else "setup")

    tree.edit(FILE, edit)
    _test(tree, "F4a", "F4b", "F4c")


INIT = {  # by its last parameter
    "cuda_stream": """
        with setup.setting_up(self, cpu_group, [expert_weights]):
            self._set_up(cpu_group, expert_weights, cuda_stream)
        """,
    "defer_remote_setup": """
        with setup.setting_up(
            self, cpu_group, all_expert_weights, expert_buffer, defer_remote_setup
        ):
            self._set_up(
                cpu_group, all_expert_weights, expert_buffer, defer_remote_setup
            )
        """,
    "expert_buffer": """
        with setup.setting_up(self, cpu_group, all_expert_weights, expert_buffer):
            self._set_up(cpu_group, all_expert_weights, expert_buffer)
        """,
}
PEERS = """\
dict[
            int, dict[tuple[int, int], tuple[int, int, int]]
        ] = {}
"""
ADDRESSES = """
peers = setup.exchange_addresses(
    self,
    [t for layer_tensors in self._all_expert_weights for t in layer_tensors],
)
# add_recv uses base_ptr + src_row * bytes_per_expert to compute
# the remote RDMA address for each expert.
self._remote_send_meta.update(addresses.by_tensor(setup.layout_of(self), peers))
"""
PACKED = """
peers = setup.exchange_addresses(self, [self._send_buffer])
for peer, ((base,), device_id) in peers.items():
    self._remote_send_meta[peer] = ({})
"""
DEFERRED = """
if not self._remote_state_initialized:
    with setup.exchanging_later(self):
        self._init_remote_state()
"""


def _named(tree: Tree) -> None:
    _vendor(tree, "transfers")

    def edit(source: Source) -> None:
        if _zero_copy(tree):
            source.replace(READ, NAMED_READ)
        else:
            handle = "xfer_handle" if source.has(f"{CLASS}._get_or_create_xfer") else "xfer_h"
            start = f"self._nixl_wrapper.transfer({handle})\n"
            remember = f"transfers.remember(self, {handle}, src)\n"
            source.replace(start, f"{remember}{' ' * 16}{start}")
        source.split(
            f"{CLASS}._wait_for_all_transfers",
            "_poll_transfers",
            """
            with transfers.waiting_for(self, handles):
                self._poll_transfers(handles)
            """,
        )
        imported = f"from {PACKAGE} import {'addresses, ' if _zero_copy(tree) else ''}setup"
        source.replace(f"{imported}\n", f"{imported}, transfers\n")

    tree.edit(FILE, edit)
    _test(tree, "F4a", "F4b", "F4c", named=True)


READ = """\
        local_h, remote_h, xfer_h = self._create_peer_xfer(
            src_rank, local_descs, remote_descs
        )
        self._nixl_wrapper.transfer(xfer_h)
"""
NAMED_READ = """\
        with transfers.reading(self, src_rank, expert_id):
            local_h, remote_h, xfer_h = self._create_peer_xfer(
                src_rank, local_descs, remote_descs
            )
            transfers.remember(self, xfer_h, src_rank)
            self._nixl_wrapper.transfer(xfer_h)
"""
NAMED_TEST = """

def test_failed_transfer_is_named() -> None:
    class Failing(_Wrapper):
        def check_xfer_state(self, _: object) -> str:
            return "ERR"

    with pytest.raises(RuntimeError, match="state=ERR: rank 0 from rank 1"):
        _move(eplb_communicator, Failing, lambda *_, **__: True)
"""
UNREADABLE_TEST = """

def test_expert_that_cannot_be_read_is_named() -> None:
    class Failing(_Wrapper):
        def make_prepped_xfer(self, *_: object) -> None:
            raise OSError("no such memory")

    with pytest.raises(RuntimeError, match="layer 0, expert 2 cannot be read"):
        _move(eplb_communicator, Failing, lambda *_, **__: True)
"""


def _readers(tree: Tree) -> None:
    def edit(source: Source) -> None:
        given = ", ".join(source.parameters(f"{CLASS}.execute")[1:])
        source.split(
            f"{CLASS}.execute",
            "_move",
            f"""
            with transfers.leaving_together(self):
                self._move({given})
            """,
        )

    tree.edit(FILE, edit)
    _test(tree, "F4a", "F4b", "F4c", "F4d", named=True)


CHANGES = (
    Change(
        fix=FIX,
        faults=("F4a", "F4b", "F4c"),
        title="[Bugfix][EPLB] Compare what NIXL ranks hold, and fail on all of them",
        message="""
NIXL READs copy bytes between the expert weights of ranks. What those hold
is hardly compared before: not at all up to 0.22.1, by byte counts and peer
by peer from 0.23.0 on. Another dtype or memory order of the same size
passes, and experts are corrupted silently; an error says neither what
differs nor on which ranks. A rank that fails alone, because it cannot
register its memory or reach a peer, leaves the others waiting for the
30 minutes of the process group.

The two exchanges of the set-up say more now. The first one has each rank's
failure, if any, or else a digest of what it holds; a rank that fails before
takes part in it all the same. The second one says whether the peers could
be reached. So all ranks raise one error, which names the ranks, the tensors
and what differs. Both exchanges have a time limit, work with stateless
groups, and carry addresses instead of a dictionary with the sizes.
""",
        upstream=(*F4A.upstream, *F4B.upstream, *F4C.upstream),
        make=_set_up,
    ),
    Change(
        fix=FIX,
        faults=("F4b",),
        title="[EPLB] Say which NIXL transfer failed",
        message="""
"NIXL transfer failed with state=ERR" names neither the peer nor the layer
nor the expert, and a read that cannot begin raises NIXL's bare error.
""",
        upstream=F4B.upstream,
        make=_named,
    ),
    Change(
        fix=FIX,
        faults=("F4d",),
        title="[Bugfix][EPLB] Do not pack anew while NIXL peers still read",
        message="""
A rank leaves execute() when its own READs are done, and packs the next
layer into the send buffer that slower peers still read from: they get
experts of another layer.

All ranks leave together. A rank whose transfers failed says so to those
that wait for it.
""",
        upstream=F4D.upstream,
        make=_readers,
    ),
)
