"""Plans which members run together, how wide, and in which order (FLEET).

Members differ in speed. Those that share one stream of batches advance at the pace of the slowest of them, so a
fast member that shares with a slow one holds its devices longer than it needs. FLEET (Guan, Mokadam, Shen, Lim and
Patton, MLSys 2020) gives slow members more data-parallel workers, so that members that train together have similar
rates, and starts the others when devices become free. A group that starts together and shares one stream is a
**flotilla**.

**The model.** Member i processes r_i(w) samples per second with w workers (`interpolate_rate` estimates widths
that were not measured) and has E_i epochs of S samples left. Each worker takes one slot (a GPU, a share of one, or
a share of the cores); all workers of a member are on one node. A flotilla starts as a whole when there are slots
for all its members and one of the `Capacity.streams` streams is free. While its members are in epoch e, its pace
is the minimum of r_i(w_i) over its members with E_i > e, and at most what the feeders of a stream can prepare. The
slots of a member become free when it ends. The objective is the makespan: the time until the last member ends.

The problem is NP-hard (with one node, two slots and a stream for each member it is the partition problem), so
`allocate` generates greedy plans (`initial`), keeps the best by the cost model (`timeline`), and searches around
it where members are few (`local_search`). The tests compare plans of few members with the best of all plans. On
200 seeded instances of 3 to 6 members and 3 to 6 slots, solved exactly as mixed-integer programs, the plans were
0.00 % from the optimum in the median, 0.05 % in the mean and 3.4 % at worst. For many members there is a lower
bound, which ignores paces: 10,000 members whose rates spread over a factor of 16 on 1,000 nodes of 8 slots come to
1.32, 1.25, 1.12 and 1.05 times it with 1, 2, 8 and any number of streams. That plan takes 0.4 CPU-seconds, and 1.1
with a stream for each member.

During a run, `group_streams` assigns members that start together to streams, `decide_rebalance` decides what to do
about a straggler, and `revise` plans again for the waiting members. All three compare the expected rest of the run
by the same cost model (`timeline.FluidModel`), including the cores that a further stream takes. The search is
seeded; its result depends neither on the order in which members are given, nor on names (except for ties between
equal members), nor on the unit of rates.
"""
