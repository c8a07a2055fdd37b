"""Plans which members run together, how wide, and in which order (FLEET); see docs/concepts/flotillas.md.

`allocate` generates greedy plans (`initial`), keeps the best by the cost model (`timeline`) and searches around it
(`local_search`). During a run `group_streams` assigns members to streams, `decide_rebalance` decides about a
straggler, and `revise` plans again for the waiting members.
"""
