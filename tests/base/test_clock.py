from ablate.base import clock


def test_an_hour_in_which_the_process_was_stopped_counts_as_seconds(monkeypatch):
    times = iter([100.0, 102.0, 3702.0, 3705.0])
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(times))
    read = clock.running_clock()
    assert [read(), read(), read()] == [2.0, 12.0, 15.0]
