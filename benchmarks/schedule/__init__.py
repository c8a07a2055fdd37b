"""`python -m benchmarks schedule`: how well the scheduler uses a machine, and how fast its controller is.

**Real**: members of uneven step times trained by the real controller, in MLPerf HPC's figures, against one after
another and against all at once without sharing.

**Simulated**: the scheduler's own decisions on a virtual clock, held against the real runs, then as many members
and devices as FLEET had, and thousands.

**Throughput**: the reports that the controller records in a second.
"""
