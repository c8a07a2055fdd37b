"""Mistakes in train functions, and in what they hand over; in callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from kit import train_child as cases
from kit.loop_cases import own_loop
from torch import nn, optim

from ensemble import SWA, MemberCallback
from mistakes.of_train import CLASSES, IN_TURN, fails

# --- loops


def each_batch(do: Callable[[Any, Any, Any, Any], None]) -> Callable[[Any], None]:
    """A train function that does this with each batch."""

    def loop(member: Any) -> None:
        model = cases.plain(member.params)
        model, optimizer = member.prepare(model, optim.SGD(model.parameters(), lr=0.1))
        for _ in member.epochs():
            for batch in member.batches():
                do(member, model, optimizer, batch)

    return loop


def backward(member: Any, model: Any, optimizer: Any, batch: Any) -> None:
    member.backward(cases.loss(model, batch))


def backward_twice(member: Any, model: Any, optimizer: Any, batch: Any) -> None:
    backward(member, model, optimizer, batch)
    backward(member, model, optimizer, batch)


def step_beside(member: Any, model: Any, optimizer: Any, batch: Any) -> None:
    cases.loss(model, batch).mean().backward()
    optimizer.step()
    member.step()


def fail_later(member: Any, model: Any, optimizer: Any, batch: Any) -> None:
    x = batch["x"] if batch.step == 0 else torch.rand(len(batch["x"]), 9)
    member.backward(nn.functional.cross_entropy(model(x), batch["label"], reduction="none"))
    member.step()


def mix_loops(member: Any) -> None:
    net = nn.Linear(3, 2)
    member.prepare(net, optim.SGD(net.parameters(), lr=0.1))
    for _ in member.epochs():
        assert list(member.dataloader("train"))


def step_by_closure(member: Any) -> None:
    net = nn.Linear(6, 3)
    member.prepare(net, optim.LBFGS(net.parameters()))
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(net(batch["x"]).sum(1))
            member.step()


def read_all(member: Any) -> Any:
    for _ in range(3):
        yield from member.dataloader("train")


def foreign(
    read: Callable[[Any], Any] = read_all, states: tuple[tuple[str, Any], ...] = ()
) -> Callable[[Any], None]:
    """A loop that computes its own steps with the batches that it reads."""

    def loop(member: Any) -> None:
        model = cases.plain(member.params)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        member.prepare(model, optimizer)
        for name, value in states:
            member.state(name, value or optim.lr_scheduler.StepLR(optimizer, 1))
        for batch in read(member):
            optimizer.zero_grad()
            cases.loss(model, batch).mean().backward()
            optimizer.step()
        member.report(loss=1.0)

    return loop


def report_los(member: Any, epoch: int) -> None:
    member.report(los=1.0)


def read_for_ever(member: Any) -> Any:
    while True:
        yield from member.dataloader("train")


def read_one(member: Any) -> Any:
    for _, batch in zip(range(2), member.dataloader("train"), strict=False):
        yield batch


AFTER, OWN = ("member.step() comes after ", "after member.backward(losses)"), "computes its own steps"
NO_LOSS = "ranked by 'loss', which it did not report; did you mean 'los'?"
LOOPS = [
    *(
        fails(f"no call of prepare: {name}", loop, "member.prepare(model, optimizer)")
        for name, loop in (("nothing", lambda member: None), ("epochs", lambda member: list(member.epochs())))
    ),
    fails("batches without a step", each_batch(backward), "exactly once for each batch"),
    fails("two backward passes", each_batch(backward_twice), "once for each batch"),
    fails("steps beside the member's", each_batch(step_beside), *AFTER, *IN_TURN),
    fails("a closure in a loop", step_by_closure, "LBFGS computes ", *IN_TURN),
    fails("a later step that fails", each_batch(fail_later), "shapes cannot be multiplied", attempts=2),
    fails("loops that are mixed", mix_loops, "epoch 2 was left after 0 of 5 steps: ", *IN_TURN),
    fails("no end", foreign(read_for_ever), "beyond the last of 3 epochs", "epochs=", "15 steps"),
    fails("a foreign epoch that is left", foreign(read_one), "was left after 1 of 5 steps"),
    fails("mixup in a foreign loop", foreign(), "mixup=, validate_every=", OWN, mixup=0.2, validate_every=2),
    fails("accumulation in a foreign loop", foreign(), "accumulate=", OWN, accumulate=2),
    fails("weights of samples in a foreign loop", foreign(), "weights=", weights="bootstrap"),
    fails("an object without a state", foreign(states=(("a", object()),)), "no state_dict()"),
    fails("one name for two states", foreign(states=(("a", None), ("a", None))), "was called before"),
    *(
        fails(
            f"an epoch that is left in the middle: {options}",
            cases.ending("break within", 1),
            *("epoch 2 was left after 2 of 5 steps", "member.stop(reason)"),
            epochs=6,
            **options,
        )
        for options in (dict[str, Any](), {"keep": "best", "objective": "loss"})
    ),
    fails("no epoch", cases.ending("break before", -1), "has trained no epoch"),
    fails("a stop without a reason", own_loop(lambda member, epoch: member.stop(0.5)), "reason as text, got 0.5"),
    fails("accumulation without parts", own_loop(), "member.parts(batch)", accumulate=2),
    fails("mixup without mixing", cases.own_loop, "mixes nothing: train on member.mixup(batch)", mixup=0.3),
    fails("no measure", cases.own_loop, "call member.validate_with(measure) before the loop", validate_every=2),
    fails("no objective", own_loop(report_los), NO_LOSS, keep="best", objective="loss"),
]


# --- weights and predictions


def hand_over(weights: Any) -> Callable[[Any], None]:
    return own_loop(
        lambda member, epoch: member.report(loss=1.0), lambda member: member.use_weights(weights(member.model))
    )


def weigh_early(member: Any, epoch: int) -> None:
    member.use_weights(cases.plain({}).state_dict())


def predict_early(member: Any, epoch: int) -> None:
    member.report(loss=1.0)
    member.predictions("valid", torch.ones(1, 3) / 3, torch.zeros(1, dtype=torch.int64))


HANDED_OVER = [
    fails(
        "weights of another model",
        hand_over(lambda model: {f"net.{name}": value for name, value in model.state_dict().items()}),
        *("the weights are not this model's", 'Unexpected key(s) in state_dict: "net.'),
    ),
    fails("no weights", hand_over(lambda model: None), "needs a state_dict on rank 0"),
    fails("weights before the end", own_loop(weigh_early), "after the end of member.epochs()"),
    fails("early predictions", own_loop(predict_early), "after the end of member.epochs()", averaging=SWA(1)),
    fails(
        "predictions that do not fit their task",
        own_loop(at_the_end=lambda member: member.predictions("valid", torch.zeros(13), torch.arange(13))),
        "member.predictions('valid'), task classification: ",
    ),
]


# --- callbacks


class Wraps(MemberCallback):
    def wrap_loss(self, member: Any, loss: Any) -> Any:
        return loss


class Mixup(Wraps):
    """Named as ours."""


class Locked(MemberCallback):
    def begin_training(self, member: Any) -> None:
        self._lock = threading.Lock()

    def end_step(self, member: Any, *, applied: bool) -> None:
        raise AssertionError("it is refused before the first step")


CALLBACKS = [
    *(
        fails(
            f"a loss that a callback does not wrap: {kind.__name__}",
            own_loop(lambda member, epoch: member.report(loss=1.0)),
            f"{kind.__name__}: their loss is left out: train on member.wrap_loss(loss)",
            callbacks=[kind()],
        )
        for kind in (Wraps, Mixup)
    ),
    fails(
        "a callback whose state no checkpoint holds",
        CLASSES,
        "a checkpoint cannot hold the state of Locked._lock",
        callbacks=[Locked()],
    ),
]

# --- no pipeline


def alone(do: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A train function without a pipeline."""

    def train(member: Any) -> None:
        do(member)

    return train


def report_twice(member: Any) -> None:
    member.report(loss=1.0)
    member.report(loss=1.0)


def keep_and_report(member: Any) -> None:
    member.state("kept", torch.nn.Linear(1, 1))
    member.report(loss=1.0)


def prepare_and_report(member: Any) -> None:
    model = torch.nn.Linear(1, 1)
    member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    member.report(loss=1.0)


def read_batches(member: Any) -> None:
    for _ in member.epochs():
        list(member.batches())


NOTHING: dict[str, Any] = {"train": None, "epochs": 1}
BEST = {"keep": "best", "objective": "loss"}
NO_PIPELINE = [
    fails("no report", alone(lambda member: None), "has reported nothing", "member.report(", **NOTHING),
    fails("more reports than epochs", alone(report_twice), "was called 2 times", "epochs=", **NOTHING),
    *(
        fails(f"{train.__name__} on its own", alone(train), "begins again", "member.epochs()", **NOTHING)
        for train in (keep_and_report, prepare_and_report)
    ),
    fails("batches of no pipeline", alone(read_batches), "no train=", "train=Pipeline(source)", **NOTHING),
    fails("passes over no pipeline", alone(lambda member: list(member.dataloader())), "no train=", **NOTHING),
    fails("best weights without a model", alone(report_twice), "member.prepare()", **{**NOTHING, **BEST}),
]

ROWS = [*LOOPS, *HANDED_OVER, *CALLBACKS, *NO_PIPELINE]
