"""The machine: facts and peak rates."""

import sys

import jax

from dflash_aot.benchmarks.record import READ_BYTES, SQUARE, count_cores, measure_peaks, read_machine


def test_machine_facts_are_those_of_this_machine():
    site = read_machine(0.25)
    assert site.cores == count_cores() >= 1
    assert site.memory_bytes > 1 << 28 and site.processor and site.load[0] == 0.25
    assert (site.python, site.versions["jax"]) == (sys.version.split()[0], jax.__version__)


def test_peak_rates_leave_out_the_first_calls():
    calls = []
    found = measure_peaks(lambda: calls.append("read"), lambda: calls.append("multiply"), 2)
    assert (calls.count("read"), calls.count("multiply")) == (3, 3)
    assert len(found.bytes_per_second) == len(found.flops_per_second) == 2
    assert min(found.bytes_per_second) > 2 * READ_BYTES and min(found.flops_per_second) > SQUARE**3  # almost no time
