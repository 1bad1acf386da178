"""The evaluations of a run: what is asked of a log once, however many rows it has."""

from ablate.run.evaluations import Places, RunRows


def test_whether_the_batch_grows_is_asked_once_for_a_whole_log(monkeypatch):
    asked = []
    check = Places._check_batch
    monkeypatch.setattr(
        Places, "_check_batch", lambda places: asked.append(check(places))
    )
    run = RunRows(places=Places(lambda step: 2 * step))
    for step in range(1, 50):
        run.add({"step": step, "samples": 8 * step, "val_loss": 9 - step / 50})
    assert [row["tokens"] for row in run.evaluations().rows] == [
        2.0 * step for step in range(1, 50)
    ]
    assert len(asked) == 1
