from __future__ import annotations

from ensemble.train.hyperparameters import Hyperparameters


def test_what_user_code_adds_or_takes_out_is_no_hyperparameter_that_nobody_reads() -> None:
    params = Hyperparameters({"lr": 0.1, "momentun": 0.9, "depth": 2, "width": 8})
    params["classes"] = 10
    assert params.setdefault("width", 4) == 8 and params.pop("depth") == 2 and params["lr"] == 0.1
    assert params.unread == ["momentun"]


def test_a_key_counts_as_read_however_it_is_read() -> None:
    for read in ("get", "pop", "setdefault", "__getitem__", "__contains__"):
        params = Hyperparameters({"lr": 0.1, "depth": 2})
        getattr(params, read)("lr")
        assert params.unread == ["depth"], read
    for read in ("keys", "values", "items", "copy", "__iter__"):
        params = Hyperparameters({"lr": 0.1, "depth": 2})
        assert list(getattr(params, read)()) and params.unread == [], read
    params = Hyperparameters({"lr": 0.1})
    assert dict(**params) == {"lr": 0.1} and params.unread == []
