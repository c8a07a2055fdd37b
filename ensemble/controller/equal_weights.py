"""Explains why members that were declared to differ have trained to equal weights."""

from __future__ import annotations

from ensemble.spec import Identity
from ensemble.spec.identity import select_warm

_SEEDED = "remove torch.manual_seed or seed_everything from your code (each member has its own seed already)"


def explain_equal_weights(one: Identity, other: Identity) -> str | None:
    """Return the remark on a member whose weights equal another's; None if they were declared alike.

    Members that start with weights of others are not compared.
    """
    names = {*one.params, *other.params}
    options = sorted(name for name in names if one.params.get(name) != other.params.get(name))
    if select_warm(one.lineage) or select_warm(other.lineage) or (one.seed == other.seed and not options):
        return None
    causes = [f"seed differs: {_SEEDED}"] if one.seed != other.seed else []
    causes += [f"params differ: does your code read {', '.join(options)}?"] if options else []
    return f"its weights equal those of {other.member}, whose {'; and whose '.join(causes)}"
