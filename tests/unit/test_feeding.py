"""What entered a script's training and what is wrong with it, from spans and loaders by hand."""

from dataclasses import replace

import pytest

from ddp_profiler.analysis.summary import summarize_run
from ddp_profiler.report import console
from ddp_profiler.schema import LoaderFacts, RankFeed, SpanKind, Variant
from tests.unit.span_columns import Spans
from tests.unit.test_left_out import script_info

SHARED = LoaderFacts(
    sampling="distributed",
    sampler="DistributedSampler",
    dataset="Samples",
    dataset_size=96,
    dataset_digest=7,
    num_replicas=2,
    replica=0,
    sampler_drop_last=False,
    samples=48,
    batch_size=4,
    drop_last=False,
    batches=12,
    workers=0,
    persistent_workers=False,
    pin_memory=False,
)
WHOLE = replace(
    SHARED, sampling="sequential", sampler="SequentialSampler", num_replicas=None, replica=None
)


def of_feeding(level):
    """The notes of a batch check but for those about the gradient's scale."""
    of_scale = ("The gradient's scale", "The loss is divided", "Autograd shows")
    return tuple(note for note in level.batch_check.notes if not note.startswith(of_scale))


def feeds(*loaders, digests=((1, 2), (3, 4)), **keywords):
    return tuple(
        RankFeed(rank, (loader,), shown, **keywords)
        for rank, (loader, shown) in enumerate(zip(loaders, digests, strict=False))
    )


RIGHT = feeds(SHARED, replace(SHARED, replica=1))


def rank(micro_batch=4, micro_steps=1, steps=8, data_ms=0.0, tokens=None, places=None, plain=4):
    """Steps of 100 ms, the first ones plain; tokens and places by step."""
    spans = Spans()
    for step in range(steps):
        place = {"step": step, "variant": int(Variant.INSTRUMENTED), "block": 2}
        if step < plain:
            place |= {"variant": int(Variant.PLAIN), "block": 1}
        begin = 100 * step
        count = tokens[step] if tokens else None
        if step >= plain:
            for micro_step in range(micro_steps):
                at, here = begin + 20 * micro_step, {**place, "micro_step": micro_step}
                spans.data(at, at + data_ms, **here)
                spans.forward(
                    at + data_ms,
                    at + data_ms + 5,
                    micro_batch,
                    value=count,
                    index=places[step] if places else -1,
                    **here,
                )
                spans.backward(at + 8, at + 10, at + 12, **here)
            spans.gradient(at + 9, at + 11, **here)
        spans.step(
            begin,
            begin + 100,
            **place,
            index=micro_steps,
            samples=micro_batch * micro_steps,
            value=count,
        )
    return spans.columns()


def summary_of(*ranks, loaders=RIGHT, accumulation=1, settings=None):
    info = script_info()
    level = replace(info.levels[0], micro_batch=4, accumulation=accumulation)
    facts = (replace(info.facts[0], feeds=loaders),)
    info = replace(info, levels=(level,), facts=facts)
    info = replace(info, settings={**info.settings, **(settings or {})})
    return summarize_run(info, dict(enumerate(ranks)))


def found(summary):
    return {f.id: f for f in summary.findings if f.severity != "info"}


def test_nothing_is_wrong_with_equal_ranks():
    summary = summary_of(rank(), rank())
    assert found(summary) == {}
    feeding = summary.levels[0].feeding
    assert [(r.micro_batch, r.micro_steps) for r in feeding.ranks] == [(4, 1)] * 2
    assert (feeding.tokens, feeding.incomplete, feeding.notes) == (None, (), ())
    assert (feeding.epoch.micro_steps, feeding.epoch.window) == (12, None)
    assert summary.levels[0].tokens_per_s is None


def test_studies_have_no_feeding():
    columns = rank()
    columns["index"][columns["kind"] == SpanKind.STEP] = -1
    assert summary_of(columns, columns, loaders=()).levels[0].feeding is None


# -- tokens ---------------------------------------------------------------------------------------


def test_tokens():
    # Plain steps 0 to 3, instrumented ones 4 to 7.
    first = [10, 20, 30, 40, 10, 20, 30, 40]
    second = [20, 20, 20, 20, 30, 20, 10, 40]
    level = summary_of(rank(tokens=first), rank(tokens=second)).levels[0]
    tokens = level.feeding.tokens
    assert (tokens.step_min, tokens.step_median, tokens.step_max) == (30, 40, 80)
    assert tokens.step_mean == (30 + 40 + 50 + 60) / 4
    assert [(r.step_min, r.step_median, r.step_max) for r in tokens.ranks] == [
        (10, 25, 40),
        (10, 20, 40),
    ]
    assert tokens.imbalance == pytest.approx((1.5 + 1 + 1.5 + 1) / 4)
    assert tokens.padding_fraction is None
    assert level.tokens_per_s == pytest.approx(45 / 0.1)
    assert of_feeding(level) == (
        "Samples are the same in every micro-step, tokens are not: 10 to 40 a step and rank; the "
        "rank with most has 1.25 times the mean over ranks, and the others wait for it (batches "
        "of similar length would help).",
    )
    assert (level.batch_check.observed, level.batch_check.ok) == (8, True)


def test_padding_is_computed_too():
    counts = [10, 20, 30, 40, 10, 20, 30, 40]
    columns = [rank(tokens=counts, places=[50] * 8), rank(tokens=counts[::-1], places=[50] * 8)]
    tokens = summary_of(*columns).levels[0].feeding.tokens
    assert tokens.padding_fraction == pytest.approx(1 - 25 / 50)
    # Both compute 50 in each step: nobody waits for the one with more tokens.
    assert tokens.imbalance == 1
    note = of_feeding(summary_of(*columns).levels[0])[0]
    assert note.endswith("10 to 40 a step and rank, beside 50.0 % padding.")


def test_equal_tokens_need_no_note():
    level = summary_of(rank(tokens=[16] * 8), rank(tokens=[16] * 8)).levels[0]
    assert (level.tokens_per_s, of_feeding(level)) == (pytest.approx(320), ())
    assert "tokens/s" in console.render(summary_of(rank(tokens=[16] * 8), rank(tokens=[16] * 8)))


# -- epochs ---------------------------------------------------------------------------------------


def test_what_an_epoch_repeats_is_named():
    loader = replace(SHARED, dataset_size=1001, samples=501, batches=126)
    level = summary_of(rank(), rank(), loaders=feeds(loader, loader)).levels[0]
    assert of_feeding(level) == (
        "An epoch of 1001 samples on 2 ranks: the sampler repeats 1 (501 a rank); the last "
        "micro-batch has 1 of 4.",
    )
    # A sampler that gives other numbers than torch's would is not explained by torch's rules.
    own = replace(loader, samples=400, batches=100)
    assert summary_of(rank(), rank(), loaders=feeds(own, own)).levels[0].feeding.epoch is None


def test_what_accelerate_repeats_is_named():
    loader = replace(SHARED, sampling="sharded", dataset_size=90, samples=48, batches=12)
    level = summary_of(rank(), rank(), loaders=feeds(loader, loader)).levels[0]
    assert of_feeding(level) == (
        "An epoch of 90 samples on 2 ranks: the sampler repeats 6 (48 a rank).",
    )


def test_windows_that_were_seen_end_the_epoch():
    loader = replace(SHARED, dataset_size=56, samples=28, batches=7)
    columns = rank(micro_steps=2)
    columns["index"][(columns["kind"] == SpanKind.STEP) & (columns["step"] == 3)] = 1
    columns["samples"][(columns["kind"] == SpanKind.STEP) & (columns["step"] == 3)] = 4
    summary = summary_of(columns, columns, loaders=feeds(loader, loader), accumulation=2)
    level = summary.levels[0]
    assert (level.feeding.epoch.window, level.feeding.epoch.left_over) == ("short", 1)
    assert of_feeding(level) == (
        "An epoch of 56 samples on 2 ranks: windows of 2 leave 1 of 7 micro-steps over, which "
        "make a step of 1.",
    )
    finding = found(summary)["incomplete-windows"]
    assert finding.severity == "warning"
    assert "1/2 of the mean over its samples" in finding.message
    assert "weighs 2 times one of a full window" in finding.message
    assert finding.evidence == "step 3: 1 of 2 micro-steps, 8 samples"


def test_a_small_last_batch_is_no_finding():
    columns = rank()
    columns["samples"][(columns["kind"] == SpanKind.STEP) & (columns["step"] == 3)] = 3
    summary = summary_of(columns, columns)
    assert len(summary.levels[0].feeding.incomplete) == 1
    assert found(summary) == {}


# -- the same samples -----------------------------------------------------------------------------


def test_equal_batches():
    summary = summary_of(rank(), rank(), loaders=feeds(WHOLE, WHOLE, digests=((1, 2), (1, 2, 3))))
    finding = found(summary)["same-samples"]
    assert (finding.severity, set(found(summary))) == ("error", {"same-samples"})
    assert "all ranks train on the same samples" in finding.message
    assert "sampler=DistributedSampler" in finding.message
    assert finding.evidence == "their first 2 batches were equal, value by value"


@pytest.mark.parametrize(
    "loaders",
    [
        # Made-up data: all batches are alike.
        feeds(SHARED, replace(SHARED, replica=1), digests=((1, 1), (1, 1))),
        feeds(replace(WHOLE, sampling="other"), replace(WHOLE, sampling="other")),
        # In order and with other values: a share, or values that are changed at random.
        feeds(WHOLE, WHOLE),
        # Each rank holds a share.
        feeds(
            replace(WHOLE, sampling="random"),
            replace(WHOLE, sampling="random", dataset_digest=8),
        ),
        feeds(*[replace(WHOLE, sampling="random", dataset_digest=None)] * 2),
        # The data set may take its share by itself.
        feeds(*[replace(WHOLE, sampling="random", holds_more=True)] * 2),
        feeds(*[replace(WHOLE, sampling="iterable", dataset_digest=3)] * 2),
        # What one rank trains on is not known.
        feeds(WHOLE, digests=((1, 2),)),
    ],
)
def test_where_shares_are_not_known_nothing_is_claimed(loaders):
    assert found(summary_of(rank(), rank(), loaders=loaders)) == {}


def test_each_rank_draws_from_all_samples():
    random = replace(WHOLE, sampling="random", sampler="RandomSampler")
    finding = found(summary_of(rank(), rank(), loaders=feeds(random, random)))
    assert set(finding) == {"no-distributed-sampler"}
    assert finding["no-distributed-sampler"].severity == "warning"
    assert finding["no-distributed-sampler"].evidence.startswith("RandomSampler over 96 samples")


def test_samplers_with_the_same_share():
    finding = found(summary_of(rank(), rank(), loaders=feeds(SHARED, SHARED)))["same-samples"]
    assert finding.evidence == "their samplers take share 0 of 2"
    assert "num_replicas and rank" in finding.message


# -- unequal ranks --------------------------------------------------------------------------------


def test_unequal_micro_batches():
    summary = summary_of(rank(), rank(micro_batch=1))
    assert set(found(summary)) == {"unequal-ranks"}
    finding = found(summary)["unequal-ranks"]
    assert finding.severity == "error"
    assert "a sample of rank 1 weighs 4 times one of rank 0" in finding.message
    assert finding.evidence == "samples a micro-step: 1 on rank 1, 4 on rank 0"
    assert summary.levels[0].batch_check.ok is False


def test_unequal_micro_steps():
    finding = found(summary_of(rank(micro_steps=2), rank(micro_steps=3), accumulation=2))
    assert finding["unequal-ranks"].evidence == "micro-steps a step: 2 on rank 0, 3 on rank 1"
    assert "a sample of rank 0 weighs 1.5 times one of rank 1" in finding["unequal-ranks"].message


def test_another_split_of_the_same_samples_weighs_no_less():
    finding = found(summary_of(rank(micro_steps=1), rank(micro_batch=2, micro_steps=2)))
    assert finding["unequal-ranks"].severity == "warning"
    assert "weighs" not in finding["unequal-ranks"].message


def test_what_the_user_expects_is_an_error_of_its_own():
    columns = rank(), rank(micro_batch=1)
    expects = {"settings": {"expect_global_batch": 8}}
    finding = found(summary_of(*columns, **expects))
    assert set(finding) == {"batch-mismatch", "unequal-ranks"}
    assert "declared 8, configured 8, observed 5" in finding["batch-mismatch"].evidence
    equal = found(summary_of(rank(), rank(), settings={"expect_global_batch": 16}))
    assert set(equal) == {"batch-mismatch"}


def test_unequal_epochs_are_known_before_a_step_is_measured():
    shorter = replace(WHOLE, dataset_size=44, batches=11)
    loaders = feeds(WHOLE, shorter)
    for columns in ((rank(), rank()), (Spans().columns(), Spans().columns())):
        summary = summary_of(*columns, loaders=loaders)
        finding = found(summary)["unequal-ranks"]
        assert finding.severity == "warning"
        assert "Rank 1 ends an epoch early" in finding.message
        assert finding.evidence == "micro-batches an epoch: 11 on rank 1, 12 on rank 0"
        assert "unequal numbers of" in console.render(summary)
    joined = feeds(WHOLE, shorter, joins=True)
    assert found(summary_of(rank(), rank(), loaders=joined)) == {}


# -- waiting for data -----------------------------------------------------------------------------


def test_all_ranks_wait_for_data():
    finding = found(summary_of(*[rank(data_ms=15, steps=12)] * 2))["data-waiting"]
    assert finding.severity == "warning"
    assert (finding.expected_gain_ms, finding.expected_gain_pct) == (15, 15)
    assert "num_workers=0" in finding.message
    assert finding.evidence == "15 % of the step; ms a step: rank 0 15.0, rank 1 15.0"


def test_one_rank_waits_for_data():
    workers = replace(SHARED, workers=2)
    loaders = feeds(workers, replace(workers, replica=1))
    a_little, much = rank(data_ms=1, steps=12), rank(data_ms=15, steps=12)
    finding = found(summary_of(a_little, much, loaders=loaders))["data-waiting"]
    assert "rank 1 waits for data" in finding.message
    assert "more than 2 workers" in finding.message
    assert "persistent_workers=True" in finding.message
    assert finding.evidence == "rank 1 15.0 ms a step, 15 % of it; the others 1.00 ms"
    lasting = replace(workers, persistent_workers=True)
    loaders = feeds(lasting, replace(lasting, replica=1))
    finding = found(summary_of(much, much, loaders=loaders))["data-waiting"]
    assert "persistent_workers" not in finding.message


@pytest.mark.parametrize("data_ms", [0.0, 0.9, 9.0])
def test_a_little_waiting_is_no_finding(data_ms):
    assert found(summary_of(*[rank(data_ms=data_ms, steps=12)] * 2)) == {}


def test_waiting_in_a_few_steps_is_no_finding():
    assert found(summary_of(*[rank(data_ms=15, steps=11)] * 2)) == {}


def test_one_fetch_that_was_held_up_is_no_finding():
    columns = rank(steps=24)
    late = (columns["kind"] == SpanKind.DATA) & (columns["step"] == 9)
    # 300 ms in one of 20 steps: 15 % of the time.
    columns["begin_ns"][late] -= 300_000_000
    assert found(summary_of(columns, columns)) == {}
