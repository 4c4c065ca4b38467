"""What a script's loaders, batches and inputs tell, without disturbing any of them."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_profiler.measure.scripts import feeding
from ddp_profiler.measure.scripts.feeding import (
    FeedWatch,
    Tokens,
    batch_digest,
    describe,
    number_of_tokens,
    parameter_names,
    state_digest,
)

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2))


def facts(*args, **keywords):
    return describe(iter(DataLoader(*args, **keywords)))


def test_a_distributed_sampler():
    sampler = DistributedSampler(DATA, 3, 1, drop_last=True)
    found = facts(DATA, 4, sampler=sampler, drop_last=True)
    assert (found.sampling, found.sampler, found.dataset) == (
        "distributed",
        "DistributedSampler",
        "TensorDataset",
    )
    assert (found.dataset_size, found.num_replicas, found.replica) == (20, 3, 1)
    assert (found.samples, found.batch_size, found.batches) == (6, 4, 1)
    assert (found.sampler_drop_last, found.drop_last) == (True, True)
    assert (found.workers, found.persistent_workers, found.pin_memory) == (0, False, False)


@pytest.mark.parametrize(
    ("keywords", "sampling"),
    [
        ({}, "sequential"),
        ({"shuffle": True}, "random"),
        ({"sampler": RandomSampler(DATA, replacement=True)}, "other"),
        ({"sampler": WeightedRandomSampler([1.0] * 20, 20)}, "other"),
    ],
)
def test_samplers_that_know_of_no_ranks(keywords, sampling):
    found = facts(DATA, 8, **keywords)
    assert (found.sampling, found.samples, found.batches) == (sampling, 20, 3)


class Moody(Sampler):
    """Draws random numbers when it is asked for its length."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        self.asked += 1
        return int(torch.randint(4, 5, ()))


def test_a_sampler_of_unknown_make_is_not_asked():
    for keywords in ({"sampler": Moody()}, {"batch_sampler": BatchSampler(Moody(), 2, False)}):
        iterator = iter(DataLoader(DATA, **keywords))
        before = torch.get_rng_state()
        found = describe(iterator)
        assert torch.equal(torch.get_rng_state(), before)
        assert (found.sampling, found.samples, found.batches) == ("other", None, None)


def test_exotic_loaders():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

        def __len__(self):
            raise AssertionError("asked")

    assert facts(Stream(), 2).sampling == "iterable"
    assert facts(DATA, batch_size=None).batch_size is None
    assert facts([1, 2, 3], batch_sampler=[[0, 1], [2]]).sampling == "other"
    watch = FeedWatch(lambda: None)
    watch.meet(object())
    watch.fetched(object(), None, compares=True)
    watch.trained(None)
    assert (watch.loaders, watch.digests) == ([], [])


def test_accelerate_deals_batches_out():
    data_loader = pytest.importorskip("accelerate.data_loader")
    for splits, samples in ((False, 12), (True, 10)):
        shard = data_loader.BatchSamplerShard(BatchSampler(range(20), 4, False), 2, 1, splits)
        found = facts(DATA, batch_sampler=shard)
        # A range is no sampler whose length is known.
        assert (found.sampling, found.batches) == ("sharded", None)
        whole = BatchSampler(RandomSampler(DATA), 4, False)
        found = facts(DATA, batch_sampler=data_loader.BatchSamplerShard(whole, 2, 1, splits))
        assert (found.num_replicas, found.replica, found.dataset_size) == (2, 1, 20)
        assert (found.batch_size, found.samples) == (2 if splits else 4, samples)


def test_only_what_trains_is_a_feed():
    changes = []
    watch = FeedWatch(lambda: changes.append(len(watch.loaders)))
    train, evaluate = DataLoader(DATA, 4), DataLoader(DATA, 10)
    for epoch in range(2):
        iterator = iter(train)
        for _ in range(2):
            watch.meet(iterator)
            batch = next(iterator)
            watch.fetched(iterator, batch, compares=epoch == 0)
            watch.trained(4)
        iterator = iter(evaluate)
        watch.meet(iterator)
        watch.fetched(iterator, next(iterator), compares=epoch == 0)
        watch.evaluated()
    assert [loader.batch_size for loader in watch.loaders] == [4]
    assert len(set(watch.digests)) == 2
    assert changes == [1, 1]


def test_a_share_of_a_batch_is_not_compared():
    watch = FeedWatch(lambda: None)
    iterator = iter(DataLoader(DATA, 4))
    watch.meet(iterator)
    watch.fetched(iterator, next(iterator), compares=True)
    watch.trained(2)
    assert watch.digests == []


def test_digests_of_batches():
    x = torch.arange(20000.0).reshape(200, 100)
    assert batch_digest([x]) == batch_digest((x.clone(),)) == batch_digest({"x": x})
    changed = x.clone()
    changed[100, 0] += 1
    assert (
        len({batch_digest(t) for t in (x, changed, x.T, x[1:], x.half(), x.to(torch.int64))}) == 6
    )
    assert batch_digest(x.to(torch.bfloat16)) is not None
    assert batch_digest(["a", 1]) is None


class Files(Dataset):
    def __init__(self, names):
        self.names = names
        self.transform = nn.Sequential(nn.Identity())
        self.cache = {}

    def __getitem__(self, index):
        raise AssertionError("read")


def test_digests_of_data_sets():
    names = [f"file{i}" for i in range(100)]
    assert state_digest(Files(names)) == state_digest(Files(list(names))) is not None
    assert state_digest(Files(names[::2])) != state_digest(Files(names[1::2]))
    x = torch.arange(1000.0)
    alike = {state_digest(TensorDataset(t)) for t in (x, x.clone())}
    assert len(alike) == 1
    assert state_digest(TensorDataset(x[:500])) != state_digest(TensorDataset(x[500:]))
    shares = [Subset(DATA, list(range(r, 20, 2))) for r in range(2)]
    assert state_digest(shares[0]) != state_digest(shares[1])
    a, b = np.arange(10.0), np.arange(10.0) + 1
    assert state_digest([a]) == state_digest([a.copy()]) != state_digest([b])


def test_functions_with_other_arguments_have_other_digests():
    """What is looked into is put into lists that are gone at once; another may have their place."""
    digests = {state_digest(Files([partial(max, 0), partial(max, n)])) for n in range(20)}
    assert len(digests) == 20


def test_a_data_set_that_takes_the_place_of_another_has_a_digest_of_its_own():
    watch = FeedWatch(lambda: None)

    def digest_of(dataset):
        iterator = iter(DataLoader(dataset, 4))
        watch.meet(iterator)
        watch.fetched(iterator, None, compares=False)
        watch.trained(4)
        return watch.loaders[-1].dataset_digest

    first, second = (TensorDataset(torch.full((20, 2), float(n))) for n in range(2))
    found = digest_of(first)
    # As if the first had been freed, and the second had got its address.
    watch._of_datasets[id(second)] = watch._of_datasets.pop(id(first))
    watch.loaders.clear()
    assert digest_of(second) == state_digest(second) != found


def test_a_digest_is_taken_once_of_each_data_set(monkeypatch):
    taken = []
    monkeypatch.setattr(feeding, "state_digest", lambda dataset: taken.append(dataset) or 7)
    watch = FeedWatch(lambda: None)
    for _ in range(3):
        watch.meet(iter(DataLoader(DATA, 4)))
    assert taken == [DATA]


@pytest.mark.parametrize("calls_ddp", [False, True])
def test_an_evaluation_before_training_feeds_nothing(calls_ddp):
    """All ranks evaluate the same samples: that is no mistake, and not what they train on."""
    watch = FeedWatch(lambda: None)
    evaluation = iter(DataLoader(DATA, 10))
    for _ in range(2):
        watch.meet(evaluation)
        watch.fetched(evaluation, next(evaluation), compares=True, evaluates=True)
        if calls_ddp:
            watch.evaluated()
    training = iter(DataLoader(DATA, 4))
    batches = []
    for _ in range(2):
        watch.meet(training)
        batches.append(next(training))
        watch.fetched(training, batches[-1], compares=True)
        watch.trained(4)
    assert [loader.batch_size for loader in watch.loaders] == [4]
    assert watch.digests == [batch_digest(batch) for batch in batches]


def test_training_in_evaluation_mode_is_fed_all_the_same():
    watch = FeedWatch(lambda: None)
    iterator = iter(DataLoader(DATA, 4))
    for _ in range(2):
        watch.meet(iterator)
        watch.fetched(iterator, next(iterator), compares=True, evaluates=True)
        watch.trained(4)
    assert [loader.batch_size for loader in watch.loaders] == [4]
    assert len(watch.digests) == 2


def test_what_cannot_be_seen_has_no_digest():
    class Slots:
        __slots__ = ("share",)

    for hidden in (Slots(), iter([1]), memoryview(b"1"), torch.ones(1, device="meta")):
        assert state_digest(Files([hidden])) is None
    own = Files([])
    own.names = own
    assert state_digest(own) is not None


class Share(Dataset):
    """Holds all samples and gives a rank's share of them."""

    def __init__(self, held, ranks):
        self.held = held
        self.name = "a name that is longer than the data set has samples"
        self.ranks = ranks

    def __len__(self):
        return 40 // self.ranks

    def __getitem__(self, index):
        return torch.ones(2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "held",
    [
        torch.ones(40, 2),
        np.ones(40),
        list(range(40)),
        (torch.ones(40), torch.ones(40)),
        {"x": torch.ones(40)},
        TensorDataset(torch.ones(40)),
    ],
    ids=lambda held: type(held).__name__,
)
def test_a_data_set_that_may_take_a_share(held, ranks):
    """With its share left to __getitem__ its length is less than what it holds."""
    data = Share(held, ranks)
    for shown in (data, Subset(data, range(4))):
        assert facts(shown, 4, shuffle=True).holds_more == (ranks == 2)
    # What a part of torch's own data sets leaves over is no share of a rank.
    assert not facts(Subset(DATA, [1, 2]), 2).holds_more


IDS = torch.zeros(2, 6, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("args", "named", "found"),
    [
        ((IDS,), {}, Tokens(12)),
        (({"input_ids": IDS, "labels": IDS},), {}, Tokens(12)),
        ((), {"labels": IDS[:, :4], "input_ids": IDS}, Tokens(12)),
        ((), {"input_ids": IDS, "attention_mask": MASK}, Tokens(6, 12)),
        ((), {"attention_mask": MASK, "input_ids": IDS}, Tokens(6, 12)),
        ((IDS, MASK), {}, Tokens(6, 12)),
        ((IDS,), {"src_key_padding_mask": MASK == 0}, Tokens(6, 12)),
        ((IDS,), {"attention_mask": MASK[None]}, Tokens(12)),
        ((torch.ones(2, 6),), {}, None),
        ((torch.ones(2, 6), IDS[:, 0]), {}, None),
        ((torch.zeros(2, 3, 8, 8, dtype=torch.uint8),), {}, None),
        ((torch.ones(2, 3),), {"labels": IDS}, None),
        (((["a"] * 2, [0.5], IDS),), {}, Tokens(12)),
    ],
)
def test_tokens(args, named, found):
    class Model(nn.Module):
        def forward(self, input_ids, attention_mask=None, **others):
            pass

    names = parameter_names(Model())
    assert names == ("input_ids", "attention_mask")
    assert number_of_tokens((args, named), names) == found
