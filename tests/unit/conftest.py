"""What several unit tests need."""

import gc

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group():
    """A process group of one, left only after the test has let go of its DDP module.

    A DDP that is the last owner of its group joins gloo's threads while it holds the
    interpreter lock, which such a thread may be waiting for.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    # DDP holds itself in cycles: without this it may go at any time later.
    gc.collect()
    dist.destroy_process_group()
