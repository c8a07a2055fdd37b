"""The queue of members waiting to be placed, and user requests about single members.

A member is declared in the log before it waits here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ensemble.controller.actions import Add, EndTrial, Propose
from ensemble.controller.attempt_commands import AttemptCommands
from ensemble.controller.changes import abbreviate
from ensemble.controller.clones import declare_clone, describe_lineage
from ensemble.controller.session_state import SessionState
from ensemble.controller.waitlist import PendingRetry
from ensemble.spec import Ensemble, Identity, Member, SpecError, unknown_name
from ensemble.spec.identity import find_declared, make_lineage, select_warm
from ensemble.spec.member import as_member
from ensemble.spec.nodes import merge_selections
from ensemble.store import MemberState, RunDir
from ensemble.store.member import ENDED

#: Of a request about several members: what is done, refusals that are named, answers where nothing is to be done.
WORDS = {"cancel": "cancelling", "pause": "pausing", "resume": "resuming"}
MOST_REFUSED = 3
PAUSED_ALREADY, NOTHING_LEFT = "paused already", "nothing is left to cancel"
NO_COHORT = -1  # the cohort of a member that was paused before it was placed


class RefusedError(Exception):
    """A request cannot be fulfilled; the message is one line for the user."""


class MemberQueue:
    """The waiting members; if `streaming`, they are proposed when there is room, else all at the start."""

    def __init__(
        self,
        session: SessionState,
        commands: AttemptCommands,
        ensemble: Ensemble,
        run_dir: RunDir,
        *,
        streaming: bool,
    ) -> None:
        self._session, self._commands = session, commands
        self._waitlist = session.waitlist
        self._ensemble, self._run_dir, self._streaming = ensemble, run_dir, streaming
        self._state, self._log, self._actions = session.run, session.log, session.actions
        self._all_paused = False
        self._to_cancel = 0  # members that are cancelled as soon as they are proposed

    def open(self, redeclared: Mapping[str, Identity], unstartable: Mapping[str, str]) -> None:
        """Queue the unfinished members of an earlier start, redeclared or without their weights; propose the rest
        of a list.
        """
        for member in list(self._state.members.values()):
            if member.checkpoint or member.state in ENDED:  # else the log may have lost what is there
                self._session.remove_leftovers(member.id)
            if member.id in redeclared:
                self._declare(redeclared[member.id])
            if member.state == "waiting":
                nodes = self._select_nodes(member)
                identity = _identity(member.identity | {"first_epoch": member.first_epoch, "nodes": nodes})
                if nodes != member.identity.get("nodes"):
                    self._log("member", **identity.as_dict())
                self._waitlist.add(identity)
        for name, why in unstartable.items():
            self.give_up(name, why)
        if not self._streaming:
            self.propose(self._waitlist.trials_left)

    def _select_nodes(self, member: MemberState) -> dict[str, Any] | None:
        """The nodes that a member selects, as they are declared now: a resume may declare other ones."""
        listed = self._ensemble.members
        if member.identity.get("added") or (listed is not None and member.number >= len(listed)):
            return member.identity.get("nodes")
        own = None if listed is None else as_member(member.number, listed[member.number]).nodes
        return merge_selections(self._ensemble.resources.nodes, own)

    def count_trials_left(self) -> int:
        """The trials that may be proposed now: none while the whole run is paused."""
        return 0 if self._all_paused else self._waitlist.trials_left

    def propose(self, count: int) -> None:
        """Ask for the next members; each answer is a `proposed` or an `impossible` event."""
        self._waitlist.propose(count)
        self._actions += [Propose()] * count

    def handle_proposal(self, event: Mapping[str, Any]) -> None:
        """Queue a proposed member, or log that the proposal was impossible."""
        identity: Identity = event["identity"]
        self._declare(identity)
        if event["type"] == "impossible":
            failed = {"error": event["error"], "reason": event.get("reason", "impossible"), "retry": False}
            self._log("failed", member=identity.member, attempt=0, **failed)
        elif self._to_cancel:
            self._to_cancel -= 1
            self._session.cancel(identity)
        else:
            self._waitlist.add(identity)
        self._session.placement_due = True

    def give_up(self, member: str, why: str) -> None:
        """Let a member fail that waits in vain; a resume, perhaps on other nodes, tries it again."""
        self._withdraw(member)
        state = self._state.members[member]
        self._log("failed", member=member, attempt=state.attempt, error=why, reason="error", retry=False)
        self._actions.append(EndTrial(state.number, "failed"))
        self._session.placement_due = True

    # -- requests -----------------------------------------------------------------------------------------------

    def fulfil(self, request: Mapping[str, Any], until: float) -> str | None:
        """Fulfil a request about one member, several, or all of them.

        Args:
            until: the time by which a member must have written its checkpoint.

        Returns:
            What was done; None where `handle_addition` returns it later.
        """
        verb, member = request["verb"], request.get("member")
        if verb not in ("cancel", "pause", "resume", "add"):
            raise RefusedError(f"there is no request {verb!r} (valid: stop, cancel, pause, resume, add)")
        stopping = self._session.stop_reason is not None
        if stopping and verb != "cancel":
            raise RefusedError("the run is being stopped; `ensemble resume` goes on with it")
        if verb == "add":
            self._add(request)
            return None
        if verb in WORDS and request.get("members") is not None:
            return self._fulfil_each(request, until)
        if member is not None and member not in self._state.members:
            raise RefusedError(f"there is no member {member!r}")
        if member is not None and (state := self._state.members[member].state) in ENDED:
            raise RefusedError(f"{member} has ended already ({state})")
        names = [str(member)] if member is not None else list(self._state.members)
        if verb == "cancel":
            return self._cancel(names, every=member is None and not stopping)
        if verb == "pause":
            return self._pause(names, until, every=member is None)
        return self._resume(names, every=member is None)

    def _fulfil_each(self, request: Mapping[str, Any], until: float) -> str:
        """Fulfil a request about several members; returns for how many, and why not for the others."""
        verb, members = str(request["verb"]), request["members"]
        if not isinstance(members, list) or not members or not all(isinstance(name, str) for name in members):
            raise RefusedError("`members` must be a list of names")
        refused, names = [], list(dict.fromkeys(members))
        for member in names:
            try:
                answer = self.fulfil({"verb": verb, "member": member}, until)
            except RefusedError as error:
                refused.append(str(error))
            else:
                refused += [f"{member}: {answer}"] if answer in (PAUSED_ALREADY, NOTHING_LEFT) else []
        more = f" and {len(refused) - MOST_REFUSED} more" if len(refused) > MOST_REFUSED else ""
        why = "; ".join(refused[:MOST_REFUSED]) + more
        if len(refused) == len(names):
            raise RefusedError(why)
        return f"{WORDS[verb]} {len(names) - len(refused)} of {len(names)}{f'; {why}' if why else ''}"

    def _declare(self, identity: Identity) -> None:
        self._log("member", **identity.as_dict())

    def _cancel(self, members: list[str], *, every: bool) -> str:
        done = []
        for member in self._list_unfinished(members):
            if not self._commands.cancel(member):
                self._session.cancel(self._withdraw(member)[0])
            done.append(member)
        search = self._ensemble.search
        if every and search is not None and not search.has_trials:
            self._waitlist.trials_left = 0
        if every and (proposable := min(self._waitlist.trials_left, self._waitlist.trials_ready)) > 0:
            first = self._next_number()
            done += [f"member-{first + number}" for number in range(proposable)]
            self._to_cancel += proposable
            self.propose(proposable)
        if every and search is not None and search.population is not None:
            self._waitlist.trials_left = 0  # no generation follows
        self._session.placement_due = True
        return f"cancelling {abbreviate(done)}" if done else NOTHING_LEFT

    def _pause(self, members: list[str], until: float, *, every: bool) -> str:
        self._all_paused |= every
        done = [member for member in self._list_unfinished(members) if not self._commands.is_held(member)]
        pruned = [member for member in done if self._commands.is_being_pruned(member)]
        if pruned and not every:
            raise RefusedError(f"{pruned[0]} is being ended by the pruner: it cannot be paused any more")
        done = [member for member in done if member not in pruned]
        for member in done:
            if not self._commands.pause(member, until):
                self._waitlist.add_paused(self._withdraw(member))
                self._log("paused", member=member, attempt=self._state.members[member].attempt)
        self._session.placement_due = True
        return f"pausing {abbreviate(done)}" if done else PAUSED_ALREADY

    def _resume(self, members: list[str], *, every: bool) -> str:
        done = [member for member in self._list_unfinished(members) if self._commands.is_held(member)]
        held_back = every and self._all_paused and bool(self._waitlist.trials_left)
        self._all_paused &= not every
        for member in done:
            if not self._commands.unpause(member):
                self._let_return(*self._withdraw(member))
                self._log("resumed", member=member, attempt=self._state.members[member].attempt)
        self._session.placement_due = True
        if not done and not held_back:
            raise RefusedError("nothing is paused" if every else f"{members[0]} is not paused")
        return f"resuming {abbreviate(done)}" if done else "trials are proposed again"

    def _next_number(self) -> int:
        return 1 + max((member.number for member in self._state.members.values()), default=-1)

    def _add(self, request: Mapping[str, Any]) -> None:
        source, warm = request.get("from"), request.get("warm", False)
        try:
            if source is None and not warm:
                add = Add(request, Member(**request["declared"]))
            else:
                add = self._clone(request, source, warm)
            declared = self._ensemble.identify(self._next_number(), add.declared)
            unplaceable = self._session.nodes.explain_unplaceable(declared)
        except (SpecError, TypeError, KeyError) as error:
            raise RefusedError(str(error)) from None
        if unplaceable is not None:
            raise RefusedError(unplaceable)
        self._actions.append(add)

    def _clone(self, request: Mapping[str, Any], source: object, warm: object) -> Add:
        """The action that adds a clone."""
        if not isinstance(source, str) or not isinstance(warm, bool):
            raise RefusedError("a clone needs the name of a member in `from`, and true or false in `warm`")
        members = self._state.members
        if source not in members:
            raise RefusedError(unknown_name("there is no member", source, list(members)))
        parent = members[source]
        search = self._ensemble.search
        points = [] if search is None else search.sample(search.seed)
        names = [name for params in (*(member.params for member in members.values()), *points) for name in params]
        if (request.get("declared") or {}).get("start") is not None:
            raise RefusedError("a clone starts as its member did, or with its weights: leave out start= or from=")
        declared = declare_clone(parent, request.get("declared") or {}, self._ensemble, warm=warm, names=names)
        if not warm:
            begun = select_warm(parent.identity.get("lineage"))
            if begun is None or begun["from"] in members:  # a clone of a clone has weights of its own
                return Add(request, declared, self._descend(make_lineage(source), parent))
            copy = self._run_dir.initial_weights(source)
            return Add(request, dataclasses.replace(declared, start=str(copy)), self._descend(begun, parent))
        if parent.checkpoint is None:
            hint = "" if parent.state in ENDED else "; a pause makes it write one"
            why = f"{parent.explain_no_checkpoint()}{hint}"
            raise RefusedError(f"no clone can start with the weights of {source}: {why}")
        lineage = make_lineage(source, warm=True, code=parent.find_other_code(self._state.header.code))
        lineage = self._descend(lineage, parent)
        return Add(request, declared, lineage, self._run_dir.valid_checkpoint(parent), parent.checkpoint)

    def _descend(self, lineage: dict[str, Any], parent: MemberState) -> dict[str, Any]:
        """The lineage of a clone; where it has callbacks of another member than `from`, with that one's number."""
        number, begun = int(parent.identity["number"]), parent.identity.get("lineage")
        is_declared = number < len(self._ensemble.members or ())
        declared = number if is_declared else find_declared(number, begun)
        has_own = self._ensemble.find_own_callbacks(number, begun) is not None
        if not has_own or lineage["from"] == f"member-{declared}":
            return lineage
        return {**lineage, "declared": declared}

    def handle_addition(self, identity: Identity) -> str:
        """Queue an added member; returns what was done, for the user."""
        session = self._session
        others = [member.params for member in self._state.members.values()]
        cohorts = Counter(cohort for _, cohort in session.live.list_feeders_read())
        self._declare(identity)
        if cohorts and not self._waitlist.waiting and not self._streaming:
            # It joins the cohort with the most members, at the boundary of an epoch.
            self._waitlist.add_returning([(identity, cohorts.most_common(1)[0][0])])
        else:
            self._waitlist.add(identity)
        session.placement_due = True
        unknown = _list_unknown(identity.params, others)
        note = f"; no other member has {unknown}" if unknown and not self._streaming else ""
        note += describe_lineage(identity.lineage)
        note += f"; the search does not learn from it: {identity.outside}" if identity.outside else ""
        return f"{identity.member} is waiting{note}"

    def _let_return(self, identity: Identity, cohort: int | None) -> None:
        """Return a member to its cohort, or to the waiting members where that cohort has ended."""
        read = {cohort for _, cohort in self._session.live.list_feeders_read()}
        if cohort is None or cohort in read | self._waitlist.cohorts:
            self._waitlist.add_returning([(identity, cohort)])
        else:
            self._waitlist.add(identity)

    def _list_unfinished(self, members: Iterable[str]) -> list[str]:
        """The given members that have not ended."""
        return [member for member in members if self._state.members[member].state not in ENDED]

    def _withdraw(self, member: str) -> PendingRetry:
        """Remove a member without processes from where it waits."""
        item = self._waitlist.withdraw(member)
        return (self._waitlist.withdraw_waiting(member), NO_COHORT) if item is None else item


def _list_unknown(params: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The hyperparameters that no other member has, which may be misspelt."""
    return " or ".join(repr(name) for name in params if not any(name in other for other in others))


def _identity(fields: dict[str, Any]) -> Identity:
    names = {field.name for field in dataclasses.fields(Identity)}
    return Identity(**{name: value for name, value in fields.items() if name in names})
