"""Sleeps that are exact in the mean: with a clock of our own, and once with the real one."""

import threading
import time

import pytest

from ddp_profiler.workload import pacing
from ddp_profiler.workload.pacing import Pacer, Schedule, precise_sleep


class World:
    """A clock, and a sleep that ends late by the next of some given times."""

    def __init__(self, late=()):
        self.now = 100.0
        self.late = list(late)
        self.asked = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.asked.append(seconds)
        self.now += seconds + (self.late.pop(0) if self.late else 0.0)

    def pacer(self):
        return Pacer(self.clock, self.sleep)


def test_a_late_end_shortens_the_next_sleep():
    world = World(late=[0.002, 0.001, 0.0])
    pacer = world.pacer()
    for _ in range(4):
        pacer.sleep(0.010)
    assert world.asked == pytest.approx([0.010, 0.008, 0.009, 0.010])
    assert pacer.debt_s == pytest.approx(0.0)
    assert world.now == pytest.approx(100.040)


def test_a_debt_longer_than_the_sleep_is_carried_on():
    world = World(late=[0.025])
    pacer = world.pacer()
    for _ in range(4):
        pacer.sleep(0.010)
    assert world.asked == pytest.approx([0.010, 0.005])
    assert world.now == pytest.approx(100.040)


def test_a_long_stall_is_not_made_up_for():
    world = World(late=[10.0])
    pacer = world.pacer()
    pacer.sleep(0.010)
    assert pacer.debt_s == Pacer.MAX_DEBT_S


def test_work_between_sleeps_is_not_made_up_for():
    world = World()
    pacer = world.pacer()
    for _ in range(3):
        pacer.sleep(0.010)
        world.now += 0.004
    assert world.asked == pytest.approx([0.010] * 3)


def test_no_time_is_no_sleep():
    world = World()
    world.pacer().sleep(0)
    world.pacer().sleep(-1)
    assert world.asked == []


def test_finish_counts_the_work_since_begin():
    world = World(late=[0.001])
    pacer = world.pacer()
    begin = pacer.clock()
    world.now += 0.003
    pacer.finish(0.010, begin)
    assert world.asked == pytest.approx([0.007])
    begin = pacer.clock()
    world.now += 0.020
    pacer.finish(0.010, begin)
    assert len(world.asked) == 1
    assert pacer.debt_s == pytest.approx(0.001)


def test_each_thread_has_its_own_debt():
    pacers = [pacing._of_thread.pacer]
    thread = threading.Thread(target=lambda: pacers.append(pacing._of_thread.pacer))
    thread.start()
    thread.join()
    assert pacers[0] is not pacers[1]
    assert pacing._of_thread.pacer is pacers[0]


def test_real_sleeps_are_exact_in_the_mean_and_idle():
    precise_sleep(0.001)
    begin, cpu = time.perf_counter(), time.thread_time()
    for _ in range(100):
        precise_sleep(0.002)
    wall, cpu = time.perf_counter() - begin, time.thread_time() - cpu
    assert 0.190 < wall < 0.4
    assert cpu < 0.5 * wall


def test_a_schedule_absorbs_small_gaps_and_late_ends():
    world = World(late=[0.0002] * 4)
    schedule = Schedule(world.clock, world.sleep)
    start = world.now
    for _ in range(4):
        begin = schedule.begin()
        world.now += 0.0005
        schedule.finish(0.010, begin)
        world.now += 0.0003
    assert world.now - start == pytest.approx(0.040 + 0.0002 + 0.0003)


def test_a_schedule_does_not_absorb_a_delay():
    world = World()
    schedule = Schedule(world.clock, world.sleep)
    start = world.now
    schedule.finish(0.010, schedule.begin())
    world.now += 0.005
    schedule.finish(0.010, schedule.begin())
    assert world.now - start == pytest.approx(0.025)
