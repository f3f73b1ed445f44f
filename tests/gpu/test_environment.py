"""What ``megascale env`` says where there is an accelerator."""

import torch

from megascale_omni.cli.env import environment


def test_every_accelerator_is_named_with_its_memory():
    gpus = environment()["gpus"]
    assert [gpu["name"] for gpu in gpus] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert [gpu["memory_bytes"] for gpu in gpus] == [
        torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())
    ]
