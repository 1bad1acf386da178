import os
import subprocess
import sys
from functools import partial

import pytest

from ablate.base.errors import UserError
from ablate.data.workers import Workers
from tests.data import jobs
from tests.waiting import is_alive, wait_until


def squares(seconds):
    return [partial(jobs.wait_and_square, n, sec) for n, sec in enumerate(seconds)]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_results_come_in_the_order_of_the_jobs(number):
    units = []
    with Workers(number) as workers:
        results = list(workers.run(squares([0.3, 0, 0.1, 0, 0]), units.append))
    assert [square for square, _ in results] == [0, 1, 4, 9, 16]
    assert len({pid for _, pid in results}) == max(1, min(number, 5))
    assert (os.getpid() in {pid for _, pid in results}) == (number == 0)
    assert units == sorted(units)
    assert units[-1] == 10


def test_the_processes_serve_several_runs_and_go_with_the_context():
    with Workers(2) as workers:
        first = {pid for _, pid in workers.run(squares([0.1] * 4), lambda _units: None)}
        second = {pid for _, pid in workers.run(squares([0.1] * 4), lambda _units: None)}
        assert first == second
        assert all(map(is_alive, first))
    assert not any(map(is_alive, first))


def test_a_problem_keeps_its_place_and_comes_after_the_results_before_it():
    work = [*squares([0.3, 0.2]), partial(jobs.refuse, 7), *squares([0])]
    got = []
    with Workers(2) as workers, pytest.raises(UserError) as error:
        got.extend(workers.run(work, lambda _units: None))
    assert len(got) == 2
    assert str(error.value) == "shard.json.gz:7: is damaged (fetch it again)"


def test_an_error_of_the_system_is_passed_on():
    with Workers(1) as workers, pytest.raises(OSError, match="No space left") as error:
        list(workers.run([jobs.no_space], lambda _units: None))
    assert (error.value.errno, error.value.filename) == (28, "train.bin")


def test_a_killed_worker_is_one_line():
    with Workers(2) as workers, pytest.raises(UserError, match=r"was killed by signal 9 \(is memory short\?"):
        list(workers.run([*squares([5]), jobs.die], lambda _units: None))


def test_a_killed_idle_worker_is_one_line_too():
    with Workers(2) as workers:
        results = workers.run(squares([0, 30]), lambda _units: None)
        _, idle = next(results)
        os.kill(idle, 9)
        with pytest.raises(UserError, match="was killed by signal 9"):
            next(results)


def test_who_wants_no_more_waits_for_nothing():
    for_ever = 1e6  # seconds: beyond the test's own limit
    with Workers(2) as workers:
        results = workers.run(squares([0, for_ever, for_ever, for_ever]), lambda _units: None)
        assert next(results)[0] == 0
        results.close()
        assert [square for square, _ in workers.run(squares([0, 0]), lambda _units: None)] == [0, 1]


@pytest.mark.parametrize("signal", [9, 2])
def test_workers_end_with_their_parent(tmp_path, signal):
    program = f"""
from functools import partial
from ablate.data.workers import Workers
from tests.data import jobs
from tests.waiting import is_alive, wait_until
work = [partial(jobs.work_for_ever, {str(tmp_path)!r})] * 2
with Workers(2) as workers:
    list(workers.run(work, lambda _units: None))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, parent)
    parent.send_signal(signal)
    parent.communicate()
    wait_until(lambda: not any(is_alive(int(path.name)) for path in tmp_path.iterdir()))
