"""Where each option and callback of a framework is placed: one mechanism, a table for each class that has options.

An option has the framework's own effect, to the bit; or it is refused by name before training; or it has no
meaning in a run, and the table says why. What is in no table, as of a newer version, is refused as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.train.job import TrainingError

ONE_WORKER = "a member of this adapter has one worker; train(member) with DistributedDataParallel has several"


@dataclass(frozen=True)
class Options:
    """The options of one class of a framework; a table has reasons for names, several names apart by blanks.

    Attributes:
        owner: the class, for messages.
        same: names of those with the framework's own effect.
        refused: names -> what to do instead.
        void: names -> why they have no meaning in a run.
    """

    owner: str
    same: str
    refused: Mapping[str, str]
    void: Mapping[str, str]

    @property
    def rows(self) -> Iterator[tuple[str, list[str], str]]:
        """The three tables as rows: the table, names, and the reason."""
        yield "same effect", self.same.split(), ""
        yield from (("refused", names.split(), why) for names, why in self.refused.items())
        yield from (("no meaning here", names.split(), why) for names, why in self.void.items())

    def place(self, name: str) -> tuple[str, str]:
        """The table in which an option is, and the reason."""
        for table, names, why in self.rows:
            if name in names:
                return table, why
        return "refused", "this version of the adapter does not know it; leave it out"

    def check(
        self, log: Callable[[str], None], values: Mapping[str, Any], usual: Mapping[str, Any], **members: Any
    ) -> None:
        """Refuse options before training, and log those that are set and have no meaning.

        Args:
            values: of the options; those in `usual` set nothing.
            members: the values of those that the member says.

        Raises:
            TrainingError: it names each that is refused, with its value and what to do instead.
        """
        wrong = []
        for name, value in values.items():
            if _is_same(value, members.get(name, usual.get(name))):
                continue
            table, why = self.place(name)
            shown = "..." if "token" in name else repr(value)
            if table == "refused":
                has = f"the member has {members[name]!r}; " if name in members else ""
                wrong.append(f"{self.owner} has {name}={shown}: {has}{why}")
            elif why:
                log(f"{self.owner} has {name}={shown}, which has no meaning here: {why}")
        if wrong:
            raise TrainingError("; ".join(wrong))

    def check_objects(self, callbacks: Iterable[Any]) -> None:
        """Raise TrainingError where one is, or is derived from, what is refused; those of users are used."""
        reasons = {name: why for names, why in self.refused.items() for name in names.split()}
        for name in (kind.__name__ for callback in callbacks for kind in type(callback).__mro__):
            if name in reasons:
                raise TrainingError(f"{self.owner}'s {name} does not work with a member's loop: {reasons[name]}")


def _is_same(value: Any, usual: Any) -> bool:
    """Whether two values say the same: of batches 1 is one, and 1.0 are all."""
    is_count = type(usual) is float and type(value) is int and value > 0
    return value is usual or (bool(value == usual) and not is_count)
