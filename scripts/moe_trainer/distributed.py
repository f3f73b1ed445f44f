"""Process groups and random seeds: made for one trainer, taken down with it."""

import argparse
import os
import random
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch

from megascale_omni.ranks import all_or_none

from .errors import UsageError
from .peers import Peers
from .rendezvous import agreed_start


class Distributed:
    """Megatron's groups in the process's default group, which is made (of the launcher's ranks, or of one) if need be.

    `close` leaves the default group in place: a launcher's store cannot set up a second one. `leave` ends it.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.core import parallel_state

        if not torch.distributed.is_initialized():
            _init_process_group(args)
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        try:
            if self.world_size != args.world_size:
                raise UsageError(f"arguments were checked for {args.world_size} ranks, and there are {self.world_size}")
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=args.tensor_model_parallel_size,
                pipeline_model_parallel_size=args.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                distributed_timeout_minutes=_timeout(args).total_seconds() / 60,
                # On CPU the groups are gloo's already; only a distributed optimizer on nccl saves through a second set.
                create_gloo_process_groups=args.distributed_backend == "nccl",
            )
            _set_seed(args.seed)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        """Where this rank's model lives."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def agree(self, check: Callable[[], None]) -> None:
        """Run a check on every rank; what it raises on any, UsageError above all, is raised on all of them."""
        all_or_none(check, kind=UsageError)

    def close(self) -> None:
        """Destroy Megatron's groups."""
        from megatron.core import parallel_state
        from megatron.core.rerun_state_machine import destroy_rerun_state_machine

        groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
        parallel_state.destroy_model_parallel()
        destroy_rerun_state_machine()
        for group in groups:
            if group in torch.distributed.distributed_c10d._world.pg_map:  # all but those that an error left half made
                torch.distributed.destroy_process_group(group)


def start(args: argparse.Namespace) -> Peers | None:
    """Make the default process group, of the launcher's ranks or of one, in a process that trains once.

    Returns:
        What makes the ranks end together; None for one rank.
    """
    _init_process_group(args)
    if torch.distributed.get_world_size() == 1:
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    peers = Peers(store, rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size())
    torch.distributed.barrier()  # every rank can be heard from here on
    return peers


def leave(peers: Peers | None) -> None:
    """End the default process group, at the end of the process."""
    torch.distributed.destroy_process_group()
    if peers is not None:
        peers.close()


def _timeout(args: argparse.Namespace) -> timedelta:
    return timedelta(minutes=args.distributed_timeout_minutes)


def _init_process_group(args: argparse.Namespace) -> None:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UsageError(f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: no port is opened to the outside
    if world_size == 1:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            args.distributed_backend, store=store, rank=0, world_size=1, timeout=_timeout(args)
        )
    else:
        found, _, _ = next(torch.distributed.rendezvous("env://", rank, world_size, timeout=_timeout(args)))
        name = agreed_start(found, rank, world_size, _timeout(args))
        torch.distributed.init_process_group(
            args.distributed_backend,
            store=torch.distributed.PrefixStore(f"start {name}", found),
            rank=rank,
            world_size=world_size,
            timeout=_timeout(args),
        )


def _set_seed(seed: int) -> None:
    """As Megatron-LM does: stages differ; data-parallel ranks agree; experts have random numbers of their own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
