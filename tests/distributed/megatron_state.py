"""Megatron-Core's global state on the ranks of a pool. Imported by functions that ranks run, not by tests."""

import torch


def fresh_parallel_state(
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    vpp: int | None = None,
    etp: int | None = None,
    seed: int = 1234,
) -> None:
    """Megatron's parallel state, RNG tracker and counters as in a process that has just started.

    Every rank of the default group calls this; data-parallel sizes follow from its size. Without an accelerator stock
    is patched to run on the CPU (``megatron_ext.cpu``), and stays so.

    ``tp``, ``pp``, ``ep``, ``cp``: tensor, pipeline, expert and context parallel sizes; ``vpp``: model chunks a stage
    (None: no interleaving); ``etp``: tensor parallel size of experts (None: as ``tp``); ``seed``: of the RNG tracker.

    Raises:
        RuntimeError: (of stock) the sizes do not divide the number of ranks.
    """
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import random as megatron_random

    if not torch.cuda.is_available():
        from megatron_ext import cpu

        cpu.enable()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        distributed_timeout_minutes=2,
    )
    torch.manual_seed(seed)
    megatron_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
