from __future__ import annotations

from ensemble.train.hyperparameters import Hyperparameters


def test_what_user_code_adds_or_takes_out_is_no_hyperparameter_that_nobody_reads() -> None:
    params = Hyperparameters({"lr": 0.1, "momentun": 0.9, "depth": 2, "width": 8})
    params["classes"] = 10
    assert params.setdefault("width", 4) == 8 and params.pop("depth") == 2 and params["lr"] == 0.1
    assert params.unused == ["momentun"]


def test_what_was_looked_for_is_suggested_for_a_misspelt_key() -> None:
    params = Hyperparameters({"leraning_rate": 0.1, "momentum": 0.9, "colour": 3})
    params.get("learning_rate", 0.01), params["momentum"], params.get("momentun"), params.get(7)
    assert params.unused == ["leraning_rate", "colour"]
    assert params.suggest("leraning_rate") == "learning_rate" and params.suggest("colour") is None
    params = Hyperparameters({"leraning_rate": 0.1})
    assert "lr" not in params, "as an optimizer that is named asks"
    assert params.suggest("leraning_rate") == "lr"


def test_a_key_counts_as_read_however_it_is_read() -> None:
    for read in ("get", "pop", "setdefault", "__getitem__", "__contains__"):
        params = Hyperparameters({"lr": 0.1, "depth": 2})
        getattr(params, read)("lr")
        assert params.unused == ["depth"], read
    for read in ("keys", "values", "items", "copy", "__iter__"):
        params = Hyperparameters({"lr": 0.1, "depth": 2})
        assert list(getattr(params, read)()) and params.unused == [], read
    params = Hyperparameters({"lr": 0.1})
    assert dict(**params) == {"lr": 0.1} and params.unused == []
