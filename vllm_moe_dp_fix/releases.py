# SPDX-License-Identifier: Apache-2.0
"""All version knowledge: which releases were tested, which have which fault, which signatures.

A new vLLM release is added here, and nowhere else, after the tests ran against it.
"""

from __future__ import annotations

RELEASES = (
    *("0.19.0", "0.19.1"),
    *("0.20.0", "0.20.1", "0.20.2"),
    *("0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0"),
    *("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1"),
    *("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)

# fault -> releases that have it (PEP 440), among RELEASES
AFFECTED = {
    "F1a": ">=0.19.0,<=0.33.0",  # a one-element activation scale is gathered like a row a token
    "F1b": ">=0.19.0,<=0.22.1",  # a 0-dim static scale is lost in dispatch
    "F1c": ">=0.19.0,<=0.33.0",  # MXFP8 scales keep the row-major layout after dispatch
    "F1d": ">=0.19.0,<=0.33.0",  # no full copy of the experts on each rank
    "F2a": ">=0.19.0,<=0.33.0",  # all_gatherv leaves the NCCL group open
    "F2b": ">=0.19.0,<=0.33.0",  # all_gatherv checks nothing where the sizes are equal
    "F2c": ">=0.19.0,<=0.33.0",  # reduce_scatterv: bare asserts
    "F2d": ">=0.20.0,<=0.33.0",  # no all_gatherv/reduce_scatterv on CPU (0.19 broadcasts instead)
    "F3a": ">=0.19.0,<=0.19.1",  # per-expert 2-D MXFP4 weights: IndexError
    "F3b": ">=0.19.0,<=0.27.1",  # MXFP4 for gpt-oss alone (to 0.26.0), or no word why there is none
    "F3c": ">=0.19.0,<=0.22.1",  # MXFP4 shards begin at multiples of the padded size
    "F3d": ">=0.23.0,<=0.33.0",  # w2 weights and scales are cut apart
    "F3e": ">=0.19.0,<=0.27.1",  # floating-point scales are cast by value
    "F3f": ">=0.19.0,<=0.27.1",  # full-precision weights with --quantization mxfp4
    "F3g": ">=0.19.0,<=0.28.0",  # gpt-oss with per-expert 2-D tensors
    "F3h": ">=0.19.0,<=0.33.0",  # tensors of another shape or scheme are taken
    "F3i": ">=0.28.0,<=0.33.0",  # scales that are no powers of two are rounded
    "F4a": ">=0.23.0,<=0.33.0",  # NIXL EPLB: byte counts alone are compared, peer by peer
    "F4b": ">=0.20.0,<=0.33.0",  # a rank that fails alone leaves its peers waiting
    "F4c": ">=0.20.0,<=0.22.1",  # nothing is compared
    "F4d": ">=0.20.0,<=0.22.1",  # no barrier after the reads
}

# target -> parameter lists seen in RELEASES; anything else is not touched
SIGNATURES = {
    "MoEPrepareAndFinalizeNaiveDPEPModular.prepare": {
        "self, a1, topk_weights, topk_ids, num_experts, expert_map, "
        "apply_router_weight_on_input, quant_config, defer_input_quant",
    },
    "MoEPrepareAndFinalizeNaiveDPEPMonolithic.prepare": {
        "self, a1, router_logits, quant_config, defer_input_quant",
    },
    "_unwrap_scale_and_prepare_for_moe": {"scales, quant_config"},
    "VllmConfig.__post_init__": {"self"},
    "VllmConfig.needs_dp_coordinator": {"self"},
    "DPCoordinator.__init__": {
        "self, parallel_config, enable_wave_coordination",  # to 0.30.0
        "self, parallel_config, enable_wave_coordination, logging_config",
    },
    "wait_for_engine_startup": {
        "handshake_socket, addresses, core_engines, parallel_config, coordinated_dp, "
        "cache_config, proc_manager, coord_process",  # to 0.27.1
        "handshake_socket, core_engines, parallel_config, coordinated_dp, cache_config, launch",
    },
    "CoreEngineActorManager.__init__": {
        "self, vllm_config, addresses, executor_class, log_stats, placement_groups, local_dp_ranks",
    },
    "EngineCoreProc.run_engine_core": {"args, dp_rank, local_dp_rank, kwargs"},
    "EngineCoreClient.make_async_mp_client": {
        "vllm_config, executor_class, log_stats, client_addresses, client_count, "
        "client_index",  # to 0.29.0
        "vllm_config, executor_class, log_stats, client_addresses, client_count, "
        "client_index, renderer",
    },
    "CudaCommunicator.all_gatherv": {"self, input_, dim, sizes"},
    "CudaCommunicator.reduce_scatterv": {"self, input_, dim, sizes"},  # to 0.31.0
    "CudaCommunicator._reduce_scatterv": {"self, input_, dim, sizes, output"},  # from 0.32.0
    "CpuCommunicator.all_gatherv": {"self, input_, dim, sizes"},
    "CpuCommunicator.reduce_scatterv": {"self, input_, dim, sizes"},
    "Mxfp4Config.get_quant_method": {"self, layer, prefix"},
    "select_mxfp4_moe_backend": {"config"},  # of Mxfp4MoEMethod to 0.20.2
    "select_deepseek_v4_mxfp4_moe_backend": {"config"},  # from 0.21.0
    "NixlEplbCommunicator.__init__": {
        "self, cpu_group, expert_weights, cuda_stream",  # to 0.22.1
        "self, cpu_group, all_expert_weights, expert_buffer",  # 0.23.0, and from 0.29.0
        "self, cpu_group, all_expert_weights, expert_buffer, defer_remote_setup",
    },
    **{
        f"NixlEplbCommunicator.{name}": {"self"}
        for name in (
            *("_init_remote_agents", "_exchange_remote_send_meta"),
            "_ensure_remote_state",  # 0.24.0 to 0.28.0
        )
    },
    "NixlEplbCommunicator.add_recv": {
        "self, tensor, src_rank",  # to 0.20.2
        "self, tensors, src_rank, expert_id",
    },
    "NixlEplbCommunicator._get_or_create_xfer": {"self, src, total_bytes, recv_offset"},
    "NixlEplbCommunicator._create_peer_xfer": {"self, src, local_descs, remote_descs"},
    "NixlEplbCommunicator._wait_for_all_transfers": {"self, handles"},
    "NixlEplbCommunicator.execute": {
        "self",  # 0.20, and from 0.23.0
        "self, old_indices",  # 0.21.0 to 0.22.1
    },
    "GptOssModel._load_weights_mxfp4": {
        "self, ep_rank_end, ep_rank_start, heads_per_rank, head_start, weights, "
        "stacked_params_mapping",  # to 0.32.0
        "self, ep_rank_end, ep_rank_start, weights, stacked_params_mapping",  # from 0.33.0
    },
    **{
        f"{method}.{name}": {parameters}
        for method in ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod")
        for name, parameters in {
            "maybe_roundup_sizes": "self, hidden_size, intermediate_size_per_partition, "
            "act_dtype, moe_parallel_config",
            "create_weights": "self, layer, num_experts, hidden_size, "
            "intermediate_size_per_partition, params_dtype, extra_weight_attrs",
            "process_weights_after_loading": "self, layer",
        }.items()
    },
}
