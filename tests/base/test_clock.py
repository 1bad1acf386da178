from ablate.base import clock


def test_an_hour_in_which_the_process_was_stopped_counts_as_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    read = clock.running_clock()
    seen = []
    for seconds in (2.0, 3600.0, 3.0):
        now[0] += seconds
        seen.append(read())
    assert seen == [2.0, 12.0, 15.0]
