"""Synthetic samples and files read as bytes."""

import gc
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ddp_profiler.errors import InputError
from ddp_profiler.workload.data import (
    ByteDataset,
    PooledDataset,
    synthetic_classes,
    synthetic_pairs,
    synthetic_tokens,
)


def test_samples_repeat_with_the_pool():
    data = PooledDataset(torch.arange(3), length=7)
    assert len(data) == 7
    assert [int(data[i]) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    for index in (-1, 7):
        with pytest.raises(IndexError, match=f"sample {index} of 7"):
            data[index]


def test_default_length_and_pool():
    data = synthetic_pairs(0)
    assert len(data) == 1_048_576
    assert torch.equal(data[5][0], data[5 + 1024][0])
    assert not torch.equal(data[5][0], data[6][0])


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: synthetic_tokens(seed, vocab=256, context=8),
        lambda seed: synthetic_classes(seed, shape=(4,), classes=3),
        synthetic_pairs,
    ],
)
def test_samples_depend_on_the_seed_and_nothing_else(make):
    def first(seed):
        torch.rand(3)
        sample = make(seed)[3]
        return sample if isinstance(sample, torch.Tensor) else sample[0]

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def test_tokens_fit_the_vocabulary():
    data = synthetic_tokens(0, vocab=5, context=16)
    tokens = torch.stack([data[i] for i in range(1024)])
    assert tokens.shape == (1024, 17)
    assert tokens.dtype is torch.int64
    assert tokens.unique().tolist() == [0, 1, 2, 3, 4]


def test_features_have_the_asked_type():
    features, target = synthetic_classes(0, shape=(3, 4, 4), classes=2, dtype=torch.bfloat16)[0]
    assert features.shape == (3, 4, 4)
    assert features.dtype is torch.bfloat16
    assert target.dtype is torch.int64
    assert [t.dtype for t in synthetic_pairs(0, dtype=torch.float64)[0]] == [torch.float64] * 2


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(10)))
    return path


def test_bytes_are_context_inputs_and_their_shifted_targets(text):
    data = ByteDataset(text, 4)
    assert len(data) == 2  # (10 - 1) // 4
    assert data[0].tolist() == [0, 1, 2, 3, 4]
    assert data[1].tolist() == [4, 5, 6, 7, 8]
    assert data[0].dtype is torch.int64
    with pytest.raises(IndexError, match="sample 2 of 2"):
        data[2]


@pytest.mark.parametrize(("context", "samples"), [(1, 9), (3, 3), (8, 1), (9, 1)])
def test_number_of_samples(text, context, samples):
    data = ByteDataset(text, context)
    assert len(data) == samples
    assert len(data[samples - 1]) == context + 1


def test_any_bytes_will_do(tmp_path):
    path = tmp_path / "not-utf-8"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert ByteDataset(str(path), 3)[0].tolist() == [255, 254, 0, 128]


def test_pickles_without_the_content(tmp_path):
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" * 1_000_000)
    data = ByteDataset(path, 10)
    data[0]
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[7], data[7])


def test_loads_in_workers_with_a_share_for_each_rank(text):
    data = ByteDataset(text, 1)
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False, drop_last=True)
        loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1)
        seen += [row[0] for batch in loader for row in batch.tolist()]
    assert sorted(seen) == list(range(8))


def refused(path, context=4):
    with pytest.raises(InputError) as caught:
        ByteDataset(path, context)
    return str(caught.value).splitlines()


def test_missing_file(tmp_path):
    path = tmp_path / "none.txt"
    assert refused(path) == [
        f"--data {path} does not exist (current folder: {Path.cwd()}).",
        "Correct the path, or leave --data out for synthetic data.",
    ]


def test_folder(tmp_path):
    assert refused(tmp_path) == [f"--data {tmp_path} is a folder.", "Give one text file."]


def test_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert refused(path) == [f"--data {path} is not a regular file.", "Give one text file."]


def test_unreadable_file(text, monkeypatch):
    def denied(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)  # The tests may run as root, who may read all.
    assert refused(text) == [
        f"--data {text} cannot be read: Permission denied.",
        "Make the file readable, or give another one.",
    ]


def test_path_through_a_file(text):
    assert (
        refused(text / "inside")[0] == f"--data {text / 'inside'} cannot be read: Not a directory."
    )


def test_empty_file(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    assert refused(path) == [
        f"--data {path} is empty; one sample of context 4 needs 5 bytes.",
        "Give a longer file or a shorter context.",
    ]


def test_too_short_a_file(text):
    assert refused(text, 10)[0] == (
        f"--data {text} has 10 bytes; one sample of context 10 needs 11 bytes."
    )
    text.write_bytes(b"a")
    assert (
        refused(text, 1)[0] == f"--data {text} has 1 byte; one sample of context 1 needs 2 bytes."
    )


CHANGED = "can no longer be read as it was at the start"


@pytest.mark.parametrize("opened", [False, True], ids=["before use", "in use"])
@pytest.mark.parametrize("left", [b"", b"abc", bytes(8)])
def test_file_that_shrinks(text, opened, left):
    data = ByteDataset(text, 4)
    if opened:
        assert data[1].tolist() == [4, 5, 6, 7, 8]
    text.write_bytes(left)  # The same file, cut: a map of it would end the process by SIGBUS.
    with pytest.raises(InputError, match=f"{CHANGED}: it had 10 bytes and is shorter now"):
        data[1]


def test_file_that_vanishes_before_use(text):
    data = ByteDataset(text, 4)
    text.unlink()
    with pytest.raises(InputError, match=f"{CHANGED}: No such file"):
        data[0]


def test_file_that_shrinks_under_a_worker(text):
    data = ByteDataset(text, 4)
    data[0]
    text.write_bytes(b"abc")
    with pytest.raises(InputError, match=CHANGED):
        list(DataLoader(data, num_workers=1))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_what_this_process_reads(tmp_path, method):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    data = ByteDataset(path, 5)
    here = torch.stack([data[i] for i in range(len(data))])
    loader = DataLoader(data, batch_size=10, num_workers=1, multiprocessing_context=method)
    # Reads on both sides at once: no place in the file is shared.
    batches = []
    for batch in loader:
        assert torch.equal(data[50], here[50])
        batches.append(batch)
    assert torch.equal(torch.cat(batches), here)


def test_descriptor_is_closed_with_the_data_set(text):
    data = ByteDataset(text, 4)
    data[0]
    descriptor = data._descriptor
    os.fstat(descriptor)
    del data
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
