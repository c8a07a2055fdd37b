"""An account as JSON values, which a snapshot of a run keeps (`ensemble.store.snapshot`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemble.meter.account import Account, NodeUse, Use
from ensemble.meter.origin import Origin
from ensemble.meter.proportional_split import Lag, Owner, UsageSpan
from ensemble.meter.usage_intervals import CpuUse, EnergyPart, NodeRecord, PowerInterval, Reservation, Samples


def encode(account: Account) -> dict[str, Any]:
    """The account as JSON values, for `decode`."""
    reader, sums = account.reader, account.sums
    return {
        "last_t": account.last_t,
        "last_seen": account.last_seen,
        "rays": [[*key, ticks] for key, ticks in account.rays.items()],
        "lags": {name: [lag.ahead, lag.highest] for name, lag in account.lags.items()},
        "start": reader.start,
        "started_t": reader.started_t,
        "last_usage": [[*key, *last] for key, last in reader.last_usage.items()],
        "last_power": reader.last_power,
        "last_feeder": [[*key, counts] for key, counts in reader.last_feeder.items()],
        "holds": _encode_holds(reader.holds),
        "unheld": _encode_holds(reader.unheld),
        "held": reader.held,
        "waited": reader.waited,
        "ranks": [[*key, ticks] for key, ticks in reader.ranks.items()],
        "declared": reader.declared,
        "devices": {m: devices for m, devices in reader.devices.items() if any(d is not None for d in devices)},
        "cohorts": reader.cohorts,
        "gpu_busy": [[*owner, node, ticks] for (owner, node), ticks in reader.gpu_busy.items()],
        "samples": {
            **vars(reader.samples),
            "by_member": [[*key, n] for key, n in reader.samples.by_member.items()],
            "by_stream": [[*key, counts] for key, counts in reader.samples.by_stream.items()],
        },
        "nodes": {name: _encode_node(node) for name, node in reader.nodes.items()},
        "sums": {
            "uses": [[*owner, node, *_encode_use(use)] for (owner, node), use in sums.uses.items()],
            "nodes": {name: vars(node) for name, node in sums.nodes.items()},
            "peaks": [[*key, watts] for key, watts in sums.peaks.items()],
            "metered": sums.metered,
        },
    }


def decode(kept: Mapping[str, Any]) -> Account:
    """The account of which `encode` returned these values."""
    account = Account()
    reader, sums = account.reader, account.sums
    account.last_t, account.last_seen = kept["last_t"], dict(kept["last_seen"])
    account.rays = {(a, b, c): ticks for a, b, c, ticks in kept["rays"]}
    account.lags = {name: Lag(*lag) for name, lag in kept["lags"].items()}
    reader.start, reader.started_t = kept["start"], kept["started_t"]
    reader.last_usage = {tuple(key): (t, ticks) for *key, t, ticks in kept["last_usage"]}
    reader.last_power = dict(kept["last_power"])
    reader.last_feeder = {tuple(key): counts for *key, counts in kept["last_feeder"]}
    for name, holds in (("holds", reader.holds), ("unheld", reader.unheld)):
        for member, node, devices, *rest in kept[name]:
            holds.setdefault(member, []).append(Reservation(node, tuple(devices), *rest))
    reader.held, reader.waited = dict(kept["held"]), dict(kept["waited"])
    reader.ranks = {(member, node): ticks for member, node, ticks in kept["ranks"]}
    reader.declared = {member: (cores, share) for member, (cores, share) in kept["declared"].items()}
    reader.devices, reader.cohorts = dict(kept["devices"]), dict(kept["cohorts"])
    reader.gpu_busy = {(Owner(a, b, c), node): ticks for a, b, c, node, ticks in kept["gpu_busy"]}
    consumed = {(member, cohort): n for member, cohort, n in kept["samples"]["by_member"]}
    streams = {(node, cohort): counts for node, cohort, counts in kept["samples"]["by_stream"]}
    reader.samples = Samples(**{**kept["samples"], "by_member": consumed, "by_stream": streams})
    reader.nodes = {name: _decode_node(node) for name, node in kept["nodes"].items()}
    for role, member, cohort, node, *use in kept["sums"]["uses"]:
        sums.uses[Owner(role, member, cohort), node] = _decode_use(*use)
    sums.nodes = {name: NodeUse(**node) for name, node in kept["sums"]["nodes"].items()}
    sums.peaks = {(what, name, node): watts for what, name, node, watts in kept["sums"]["peaks"]}
    sums.metered = [list(each) for each in kept["sums"]["metered"]]
    return account


def _encode_use(use: Use) -> list[Any]:
    return [use.cpu, use.cpu_origin, use.sm, [[*key, *share] for key, share in use.energy.items()]]


def _decode_use(cpu: int, origin: Origin, sm: int, energy: list[Any]) -> Use:
    return Use(cpu, origin, sm, 0, {(kind, method): (ticks, of) for kind, method, ticks, of in energy})


def _encode_span(span: UsageSpan) -> list[Any]:
    return [*span.owner, span.start, span.end, span.ticks, span.rate]


def _decode_span(role: str, member: str | None, cohort: int | None, *rest: Any) -> UsageSpan:
    return UsageSpan(Owner(role, member, cohort), *rest)


def _encode_node(node: NodeRecord) -> dict[str, Any]:
    return {
        "cores": node.cores,
        "gpus": [[gpu, *of] for gpu, of in node.gpus.items()],
        "power": [{**vars(each), "parts": [list(part) for part in each.parts]} for each in node.power],
        "cpu": [[*each.process, each.origin, *_encode_span(each.span)] for each in node.cpu],
        "reserved": [
            [what, [_encode_span(span) for span in spans]] for what, spans in node.reserved.items() if spans
        ],
        "busy": [[gpu, [_encode_span(span) for span in spans]] for gpu, spans in node.busy.items() if spans],
    }


def _decode_node(kept: Mapping[str, Any]) -> NodeRecord:
    def decode_part(
        kind: str, device: Any, ticks: int, origin: Origin, idle: int | None, activity: Any
    ) -> EnergyPart:
        by_owner = None if activity is None else tuple((Owner(*owner), sm) for owner, sm in activity)
        return EnergyPart(kind, device, ticks, origin, idle, by_owner)

    return NodeRecord(
        cores=kept["cores"],
        gpus={gpu: (parent, part) for gpu, parent, part in kept["gpus"]},
        power=[
            PowerInterval(**{**each, "parts": tuple(decode_part(*part) for part in each["parts"])})
            for each in kept["power"]
        ],
        cpu=[CpuUse((a, b, c), _decode_span(*span), origin) for a, b, c, origin, *span in kept["cpu"]],
        reserved={what: [_decode_span(*span) for span in spans] for what, spans in kept["reserved"]},
        busy={gpu: [_decode_span(*span) for span in spans] for gpu, spans in kept["busy"]},
    )


def _encode_holds(holds: Mapping[str, list[Reservation]]) -> list[list[Any]]:
    return [[member, *one] for member, hold in holds.items() for one in hold]
