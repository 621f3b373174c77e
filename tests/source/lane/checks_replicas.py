# SPDX-License-Identifier: Apache-2.0
"""Independent replicas: engine processes that vLLM's own code starts, greets and configures.

The executor alone is ours (``recorder``). Each check raises where the ranks are not whole engines
of their own; it knows nothing of the plugin.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import psutil
from world import Rank

INTERMEDIATE, EXPERTS, HIDDEN = 128, 8, 64
START_TIMEOUT_S = 60
REPORTS = "REPLICAS_REPORTS"


@functools.cache
def model_config() -> Any:
    """A small Qwen3-MoE, looked at by vLLM as any model; made before there is a plugin."""
    from vllm.engine.arg_utils import EngineArgs

    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 1000,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    no_plugins = mock.patch("vllm.plugins.plugins_loaded", True)
    with tempfile.TemporaryDirectory() as folder, no_plugins:
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True)
        return arguments.create_model_config()


def vllm_config(**parallel: Any) -> Any:
    """As ``vllm serve`` makes it."""
    from vllm.config import CacheConfig, ParallelConfig, VllmConfig

    model = model_config()
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=16),
        parallel_config=ParallelConfig(is_moe_model=model.is_moe, **parallel),
    )


def recorder() -> Any:
    """The executor's class; it can be imported only beside a vLLM."""
    from recorder import Recorder

    return Recorder


# --- starting -------------------------------------------------------------------------------


@contextlib.contextmanager
def reports() -> Iterator[Callable[[], dict[int, dict[str, Any]]]]:
    """Where the engines' executors write, and what they wrote."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {REPORTS: folder}):
        yield lambda: {
            int(path.stem): json.loads(path.read_text())
            for path in sorted(Path(folder).glob("*.json"))
        }


def started_by(method: str) -> Any:
    """Forks engine processes, or spawns them; vLLM sets this when it makes a configuration."""
    return mock.patch.dict(os.environ, {"VLLM_WORKER_MULTIPROC_METHOD": method})


@contextlib.contextmanager
def limited(what: str, seconds: int = START_TIMEOUT_S) -> Iterator[None]:
    """Raises where something does not come up; ends all processes that it started."""

    def late(*_: object) -> None:
        raise AssertionError(f"{what} does not come up in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def start(config: Any, is_online: bool = True) -> Any:
    """The client that vLLM makes, with the engines it starts."""
    from vllm.v1.engine.core_client import EngineCoreClient

    if is_online:
        return EngineCoreClient.make_async_mp_client(config, recorder(), False)
    return EngineCoreClient.make_client(True, False, config, recorder(), False)


def whole(found: dict[int, dict[str, Any]], indices: set[int]) -> None:
    """The engines with these numbers came up, each on its own and with all experts."""
    for index, report in found.items():
        if report["experts"] != "whole":
            raise AssertionError(f"engine {index} has experts {report['experts']}")
        want = {"engine": "EngineCoreProc", "dp_size": 1, "world": 1, "is_moe": True}
        got = {name: report[name] for name in want}
        if got != want:
            raise AssertionError(f"engine {index} is {got}")
    if set(found) != indices:
        raise AssertionError(f"engines {sorted(found)} came up, not {sorted(indices)}")
    if len({report["instance"] for report in found.values()}) != len(found):
        raise AssertionError("engines that know no rank would share their memory by its name")


@contextlib.contextmanager
def waves() -> Iterator[Callable[[], list[bool]]]:
    """Whether each coordinator that is forked coordinates waves."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    run = DPCoordinatorProc.run_coordinator
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def run_coordinator(*args: Any, **kwargs: Any) -> None:
        os.write(writer, b"w" if kwargs["enable_wave_coordination"] else b"-")
        run(*args, **kwargs)

    def seen() -> list[bool]:
        with contextlib.suppress(BlockingIOError):
            return [flag == ord("w") for flag in os.read(reader, 16)]
        return []

    with mock.patch.object(DPCoordinatorProc, "run_coordinator", run_coordinator):
        yield seen


@contextlib.contextmanager
def _one_server() -> Iterator[tuple[Any, dict[int, dict[str, Any]], list[bool]]]:
    """One front end and two engines: its client, their reports, and whether there are waves."""
    config = vllm_config(data_parallel_size=2, data_parallel_size_local=2)
    with (
        started_by("fork"),
        reports() as found,
        waves() as coordinated,
        limited("2 engines"),
    ):
        client = start(config)
        yield client, found(), coordinated()
        client.shutdown()


def one_server(rank: Rank) -> None:
    with _one_server() as (client, found, coordinated):
        whole(found, {0, 1})
        if coordinated != [False]:
            raise AssertionError("there is no coordinator that leaves waves alone")
        if client.vllm_config.parallel_config.data_parallel_size != 2:
            raise AssertionError("the front end does not know its ranks any more")
        if len(client.core_engines) != 2:
            raise AssertionError(f"the front end talks to {len(client.core_engines)} engines")


def spawned(rank: Rank) -> None:
    """Such a process chooses its engine before it loads the plugin."""
    config = vllm_config(
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_rank=1,
        data_parallel_external_lb=True,
        data_parallel_rpc_port=_free_port(),
    )
    with started_by("spawn"), reports() as found, limited("the server of rank 1", _alone_s()):
        client = start(config)
        whole(found(), {1})
        client.shutdown()


def without_setting(rank: Rank) -> None:
    """Nobody asks for replicas: vLLM's own engines, in step, with shared experts."""
    with _one_server() as (_, found, coordinated):
        _in_step(found, 2, coordinated)


def server_for_each_rank_without_setting(rank: Rank) -> None:
    with _two_servers(2, data_parallel_external_lb=True) as (found, coordinated):
        _in_step(found, 2, coordinated)


def server_for_each_node_without_setting(rank: Rank) -> None:
    with _two_servers(4, data_parallel_hybrid_lb=True) as (found, coordinated):
        _in_step(found, 4, coordinated)


def _in_step(found: dict[int, dict[str, Any]], ranks: int, coordinated: list[bool]) -> None:
    for index, report in found.items():
        want = ["DPEngineCoreProc", ranks, ranks, f"shared among {ranks} ranks", index]
        got = [report[name] for name in ("engine", "dp_size", "world", "experts", "index")]
        if got != want:
            raise AssertionError(f"engine {index} is {got}")
    if set(found) != set(range(ranks)):
        raise AssertionError(f"engines {sorted(found)} came up, not {ranks}")
    if coordinated != [True]:
        raise AssertionError("the coordinator has no waves")


def server_for_each_rank(rank: Rank) -> None:
    """External load balancing: rank 1 needs nothing of rank 0, which is started after it."""
    port = _free_port()
    for data_parallel_rank in (1, 0):
        config = vllm_config(
            data_parallel_size=2,
            data_parallel_size_local=1,
            data_parallel_rank=data_parallel_rank,
            data_parallel_external_lb=True,
            data_parallel_rpc_port=port,
        )
        with (
            started_by("fork"),
            reports() as found,
            waves() as coordinated,
            limited(f"the server of rank {data_parallel_rank}", _alone_s()),
        ):
            client = start(config)
            whole(found(), {data_parallel_rank})
            if coordinated():
                raise AssertionError("a server with one engine has a coordinator")
            client.shutdown()


def server_for_each_node(rank: Rank) -> None:
    """Hybrid load balancing: two servers, each with the engines of its node; one coordinator."""
    with _two_servers(4, data_parallel_hybrid_lb=True) as (found, coordinated):
        whole(found, {0, 1, 2, 3})
        if coordinated != [False]:
            raise AssertionError("there is no coordinator that leaves waves alone")


@contextlib.contextmanager
def _two_servers(
    ranks: int, **parallel: Any
) -> Iterator[tuple[dict[int, dict[str, Any]], list[bool]]]:
    """Each with half of the engines; what they report, and whether coordinators have waves."""
    port, half = _free_port(), ranks // 2
    configs = [
        vllm_config(
            data_parallel_size=ranks,
            data_parallel_size_local=half,
            data_parallel_rank=first_rank,
            data_parallel_rpc_port=port,
            **parallel,
        )
        for first_rank in (0, half)
    ]

    def second_server() -> None:
        # Its engines tell it first, and then the coordinator, that they are ready.
        _client = start(configs[1])
        signal.pause()

    with (
        started_by("fork"),
        reports() as found,
        waves() as coordinated,
        limited("the servers of two nodes"),
        _beside(second_server),
    ):
        start(configs[0]).shutdown()
        yield found(), coordinated()


def headless(rank: Rank) -> None:
    """A second node that has engines alone."""
    from vllm.v1.engine.utils import CoreEngineProcManager

    port = _free_port()
    options = {"data_parallel_size": 2, "data_parallel_size_local": 1}
    options |= {"data_parallel_rpc_port": port}
    front = vllm_config(**options)
    node = vllm_config(data_parallel_rank=1, **options)

    def engines() -> None:
        manager = CoreEngineProcManager(
            local_engine_count=1,
            start_index=1,
            local_start_index=0,
            vllm_config=node,
            local_client=False,
            handshake_address=f"tcp://127.0.0.1:{port}",
            executor_class=recorder(),
            log_stats=False,
        )
        while manager.processes[0].is_alive():
            time.sleep(0.1)

    with (
        started_by("fork"),
        reports() as found,
        limited("a front end and a node without one"),
        _beside(engines),
    ):
        client = start(front)
        whole(found(), {0, 1})
        if found()[1]["local"] != 0:
            raise AssertionError("the second node's engine takes another node's device")
        client.shutdown()


def sharded_node(rank: Rank) -> None:
    """A node that was not told of replicas says so, and does not wait for ranks that never come."""
    _refuses_greeting({})


def sharded_front_end(rank: Rank) -> None:
    """A node of replicas says so where rank 0 was not told of them, and joins nobody."""
    _refuses_greeting(
        {
            "data_parallel_master_ip": "127.0.0.1",
            "data_parallel_master_port": _free_port(),
            "data_parallel_size": 2,
        }
    )


def _refuses_greeting(sent: dict[str, Any]) -> None:
    """The engine of rank 1, to which the front end of rank 0 sends this of its configuration."""
    from vllm.v1.engine import core

    port = _free_port()
    config = vllm_config(data_parallel_size=2, data_parallel_rank=1)
    reader, writer = os.pipe()

    def engine() -> None:
        try:
            core.EngineCoreProc.run_engine_core(
                dp_rank=1,
                vllm_config=config,
                local_client=False,
                handshake_address=f"tcp://127.0.0.1:{port}",
                executor_class=recorder(),
                log_stats=False,
            )
        except Exception as error:
            os.write(writer, str(error).encode())

    with (
        _front_end(port, sent),
        limited("an engine that waits for others", _alone_s()),
        _beside(engine),
    ):
        text = os.read(reader, 4096).decode()
    if "VLLM_MOE_DP_FIX_EXPERTS alike on all nodes" not in text:
        raise AssertionError(text)


@contextlib.contextmanager
def _front_end(port: int, sent: dict[str, Any]) -> Iterator[None]:
    """Greets an engine as ``wait_for_engine_startup`` does: one that stands alone, with nothing."""
    import msgspec
    import zmq
    from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses

    def greet() -> None:
        identity, _ = front.recv_multipart()
        message = EngineHandshakeMetadata(EngineZmqAddresses([], []), sent)
        front.send_multipart((identity, msgspec.msgpack.encode(message)))

    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.bind(f"tcp://127.0.0.1:{port}")
    threading.Thread(target=greet, daemon=True).start()
    yield
    context.destroy(linger=0)


def offline(rank: Rank) -> None:
    """``LLM`` on rank 1 of VLLM_DP_SIZE=2: it comes up alone, on its own device."""
    with _offline_rank():
        config = vllm_config()
    with started_by("fork"), reports() as found, limited("rank 1", _alone_s()):
        client = start(config, is_online=False)
        whole(found(), {0})
        if found()[0]["local"] != 1:
            raise AssertionError(f"rank 1 takes device {found()[0]['local']}")
        if client.dp_engines_running() or client.is_dp:
            raise AssertionError("the client waits for waves")
        client.shutdown()


def offline_in_process(rank: Rank) -> None:
    """Without an engine process: the configuration itself is that of one rank."""
    with _offline_rank():
        parallel = vllm_config().parallel_config
    if parallel.data_parallel_size != 1 or parallel.data_parallel_rank != 0:
        raise AssertionError("the engine would wait for other ranks")
    if parallel.data_parallel_rank_local != 1:
        raise AssertionError(f"rank 1 takes device {parallel.data_parallel_rank_local}")


@contextlib.contextmanager
def _offline_rank() -> Iterator[None]:
    variables = {
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_RANK": "1",
        "VLLM_DP_RANK_LOCAL": "1",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(_free_port()),
    }
    with mock.patch.dict(os.environ, variables):
        yield


def ray_actors(rank: Rank) -> None:
    """The class that Ray is given for each engine. Ray itself is a twin that takes notes."""
    from vllm.v1.engine import core, utils

    taken: list[type] = []

    def remote(actor: type) -> Any:
        taken.append(actor)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=mock.MagicMock()))

    ray = ModuleType("ray")
    ray.__dict__.update(
        remote=remote,
        get=lambda _: None,
        is_initialized=lambda: True,
        util=SimpleNamespace(get_current_placement_group=lambda: None),
    )
    parts = ("runtime_env", "util", "util.scheduling_strategies")
    twins = {"ray": ray} | {f"ray.{part}": mock.MagicMock() for part in parts}
    config = vllm_config(data_parallel_size=2, data_parallel_size_local=2)
    with mock.patch.dict(sys.modules, twins):
        manager = object.__new__(utils.CoreEngineActorManager)
        manager.__init__(
            config,
            addresses=None,
            executor_class=recorder(),
            log_stats=False,
            placement_groups=[None, None],
            local_dp_ranks=[0, 1],
        )
    if set(taken) != {core.EngineCoreActor}:
        names = sorted({actor.__name__ for actor in taken})
        raise AssertionError(f"engine 0 has experts shared among 2 ranks: {', '.join(names)}")
    if core.DPMoEEngineCoreActor.__name__ != "DPMoEEngineCoreActor":
        raise AssertionError("other models' actors are replaced as well")


REFUSED = {
    "enable_expert_parallel": (True, "--enable-expert-parallel"),
    "enable_eplb": (True, "--enable-eplb"),
    "enable_elastic_ep": (True, "--enable-elastic-ep"),
    "enable_dbo": (True, "--enable-dbo"),
    "ubatch_size": (2, "--ubatch-size"),
    "enable_fault_tolerance": (True, "--enable-fault-tolerance"),
    "distributed_executor_backend": ("external_launcher", "external launcher"),
    "nnodes": (2, "--nnodes"),
}


def refusals(rank: Rank) -> None:
    """What ties the ranks together is refused where vLLM makes its configuration, with a remedy."""
    from vllm.config import KVTransferConfig, ParallelConfig

    known = ParallelConfig.__dataclass_fields__
    for option, (value, named) in REFUSED.items():
        if option in known:
            _refused(named, option, value)
    for connector in ("MoRIIOConnector", "P2pNcclConnector"):
        one = {"kv_connector": connector, "kv_role": "kv_both"}
        nested = {"kv_connector_extra_config": {"connectors": [one]}}
        for options in (one, one | nested | {"kv_connector": "MultiConnector"}):
            _refused(connector, "kv_transfer_config", KVTransferConfig(**options))


def _refused(named: str, option: str, value: Any) -> None:
    # vLLM itself refuses some of these where there is no CUDA, so they are set afterwards.
    config = vllm_config()
    config.parallel_config.data_parallel_size = 2
    setattr(config if option.endswith("_config") else config.parallel_config, option, value)
    try:
        config.__post_init__()
    except ValueError as error:
        text = str(error)
    else:
        raise AssertionError(f"{option} ties ranks together that shall be independent")
    for word in (named, "VLLM_MOE_DP_FIX_EXPERTS=replicated", "VLLM_MOE_DP_FIX_EXPERTS=sharded"):
        if word not in text:
            raise AssertionError(f"the refusal of {option} does not speak of {word}: {text}")


def by_memory(rank: Rank) -> None:
    """``auto``: replicas where a full copy leaves half of the memory, else sharded experts."""
    from vllm.platforms import current_platform

    def is_coordinated(memory: float, **parallel: Any) -> bool:
        with (
            mock.patch("psutil.virtual_memory", return_value=SimpleNamespace(total=memory)),
            mock.patch.object(current_platform, "get_device_total_memory", return_value=memory),
        ):
            config = vllm_config(
                data_parallel_size=2,
                data_parallel_size_local=1,
                data_parallel_external_lb=True,
                **parallel,
            )
        return bool(config.needs_dp_coordinator)

    # Two layers of experts and attention, and the embeddings.
    layer = EXPERTS * 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN * 32 * (4 + 2)
    weights = model_config().dtype.itemsize * (2 * layer + 2 * 1000 * HIDDEN)
    if is_coordinated(2.001 * weights):
        raise AssertionError("sharded, though half of the memory is left")
    if not is_coordinated(1.999 * weights):
        raise AssertionError("replicas, though less than half of the memory is left")
    if not is_coordinated(100 * weights, enable_expert_parallel=True):
        raise AssertionError("replicas, though expert parallelism is asked for")


def _alone_s() -> int:
    """How long to wait for a rank that is started alone; without a fix it waits for the others."""
    return START_TIMEOUT_S if os.environ.get("VLLM_PLUGINS") else 6


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _beside(run: Callable[[], None]) -> Iterator[None]:
    """Runs something in a forked process until the block ends."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(START_TIMEOUT_S)
            run()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                process.kill()
        os.waitpid(pid, 0)
