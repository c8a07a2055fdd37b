"""Names the metrics of a run: families, as Prometheus calls them, each with its type, labels and help.

A *family* has one name and one set of labels; each combination of values of the labels is a *series*. A counter
only grows, also when a run is continued and when the server is started anew, because it is computed from the event
log; a gauge goes up and down. Names follow https://prometheus.io/docs/practices/naming/: base units, the unit in
the name, `_total` behind a counter, `_info` behind a family that has nothing but its labels.
"""

from __future__ import annotations

from ensemble.executors.metrics import Family

_ORIGIN = "The label origin says how the figure was obtained: measured, attributed or estimated."
_LATE = (
    "What a run in progress has used in about the last minute is not in it yet, since it may still be corrected."
)
RUN, MEMBER, STREAM = ("run",), ("run", "member"), ("run", "node", "cohort")

RUN_INFO = Family(
    "ensemble_run_info",
    "info",
    "A run: the name of its ensemble, its id, its executor, whether it is a list or a search, and its objective.",
    (*RUN, "name", "run_id", "executor", "mode", "objective", "direction"),
)
RUN_MEMBERS = Family("ensemble_run_members", "gauge", "Members by state.", (*RUN, "state"))
RUN_PROGRESS = Family("ensemble_run_progress_ratio", "gauge", "Epochs trained over all epochs to train.", RUN)
RUN_BEST = Family(
    "ensemble_run_best_objective",
    "gauge",
    "The objective of the best member so far, on the validation split; its name is the label metric.",
    (*RUN, "metric"),
)
RUN_COMBINED = Family(
    "ensemble_run_combined_figure",
    "gauge",
    "A figure of the combined model, of its best member and of the mean of its members (label of), on the split "
    "that the label names; better says in which direction the figure is better.",
    (*RUN, "figure", "of", "split", "better"),
)
RUN_COMBINED_BOUND = Family(
    "ensemble_run_combined_figure_bound",
    "gauge",
    "The ends (label end: low, high) of the 95 % interval of a figure of ensemble, best, or their difference.",
    (*RUN, "figure", "of", "end"),
)
RUN_UNCERTAINTY = Family(
    "ensemble_run_uncertainty",
    "gauge",
    "Mean uncertainty of the combined model's predictions by part: total, aleatoric, epistemic, disagreement.",
    (*RUN, "part"),
)
RUN_RATE = Family(
    "ensemble_run_samples_per_second", "gauge", "Samples that all members in training train on per second.", RUN
)
RUN_MODELS = Family(
    "ensemble_run_models_per_minute",
    "gauge",
    "Models trained per minute, as in MLPerf HPC; absent until one is done, and after a resume.",
    RUN,
)
RUN_UPDATED = Family(
    "ensemble_run_updated_timestamp_seconds", "gauge", "Time of the last event of the run, in Unix seconds.", RUN
)
RUN_FAILED = Family(
    "ensemble_run_failed_attempts_total",
    "counter",
    "Attempts of members that have failed, by cause, tried again or not.",
    (*RUN, "reason"),
)
RUN_FAILURES_IN_ROW = Family(
    "ensemble_run_failures_in_row",
    "gauge",
    "Attempts that have failed since a member of the run last ended an epoch.",
    RUN,
)
RUN_LOST_FEEDERS = Family(
    "ensemble_run_streams_without_feeder",
    "gauge",
    "Streams whose feeder has ended and has no successor yet: their members prepare for themselves.",
    RUN,
)
RUN_CPU = Family(
    "ensemble_run_cpu_seconds_total",
    "counter",
    "CPU time of the run's processes, by role. Processes of Ray count from a minute after they were first seen.",
    (*RUN, "role"),
)
RUN_ENERGY = Family(
    "ensemble_run_energy_joules_total",
    "counter",
    f"Energy of the run's nodes by role; the roles idle and other are not the run's own use. {_LATE} {_ORIGIN}",
    (*RUN, "role", "origin"),
)
RUN_PREPARED = Family(
    "ensemble_run_samples_prepared_total", "counter", "Samples prepared, by feeders and by members.", RUN
)
RUN_CONSUMED = Family("ensemble_run_samples_consumed_total", "counter", "Samples that reached a member.", RUN)
RUN_REUSE = Family(
    "ensemble_run_reuse_ratio", "gauge", "How often a prepared sample was used: consumed over prepared.", RUN
)
LEFT_OUT = Family(
    "ensemble_members_left_out",
    "gauge",
    "Members of the run that should have series of their own, and have none because there are too many.",
    RUN,
)
MEMBER_INFO = Family(
    "ensemble_member_info",
    "info",
    "A member: its state, node and stream group (label cohort).",
    (*MEMBER, "state", "node", "cohort"),
)
MEMBER_PROGRESS = Family(
    "ensemble_member_progress_ratio", "gauge", "How much of its training a member has done.", MEMBER
)
MEMBER_EPOCHS = Family("ensemble_member_epochs", "gauge", "Epochs that a member has finished.", MEMBER)
MEMBER_OBJECTIVE = Family(
    "ensemble_member_objective",
    "gauge",
    "The objective after the last epoch, on the validation split; its name is the label metric.",
    (*MEMBER, "metric"),
)
MEMBER_RATE = Family(
    "ensemble_member_samples_per_second", "gauge", "Samples per second that a member trains on.", MEMBER
)
MEMBER_WAITED = Family(
    "ensemble_member_data_wait_seconds_total",
    "counter",
    "Seconds that a member has waited for data, in epochs that have ended.",
    MEMBER,
)
MEMBER_CPU = Family(
    "ensemble_member_cpu_seconds_total",
    "counter",
    "CPU time of a member's own processes, start-up included.",
    MEMBER,
)
MEMBER_ENERGY = Family(
    "ensemble_member_energy_joules_total",
    "counter",
    f"Energy of a member without its part of what serves several members. {_LATE} {_ORIGIN}",
    (*MEMBER, "origin"),
)
MEMBER_POWER = Family(
    "ensemble_member_power_watts",
    "gauge",
    f"Mean power of a member in about the last minute in which it held a place; provisional. {_ORIGIN}",
    (*MEMBER, "origin"),
)
STREAM_PREPARED = Family(
    "ensemble_stream_samples_prepared_total", "counter", "Samples that feeders have prepared for a stream.", STREAM
)
STREAM_CONSUMED = Family(
    "ensemble_stream_samples_consumed_total", "counter", "Samples of a stream that reached a member.", STREAM
)
STREAM_SKIPPED = Family(
    "ensemble_stream_samples_skipped_total",
    "counter",
    "Samples that could not be prepared and were left out, as on_error=skip asks for.",
    STREAM,
)
STREAM_REUSE = Family(
    "ensemble_stream_reuse_ratio", "gauge", "How often a prepared sample of a stream was used.", STREAM
)
STREAM_WORKERS = Family("ensemble_stream_workers", "gauge", "Preparation workers of a stream's feeder.", STREAM)
STREAM_LEVEL = Family(
    "ensemble_stream_queue_level_ratio",
    "gauge",
    "How full a part of a stream's pipeline is, 0 to 1: the ring, its workers, the members that wait.",
    (*STREAM, "queue"),
)
NODE_POWER = Family(
    "ensemble_node_power_watts",
    "gauge",
    f"Power of a whole node in its last interval, other programs included. {_ORIGIN}",
    (*RUN, "node", "origin"),
)
NODE_EXCLUDED = Family(
    "ensemble_node_excluded",
    "gauge",
    "1: nothing is placed on a node now; the reason is lost, unusable, draining, resting or avoided.",
    (*RUN, "node", "reason"),
)
NODE_QUARANTINED = Family(
    "ensemble_node_quarantined_gpus", "gauge", "GPUs of a node that the run uses no more.", (*RUN, "node")
)
NODE_FREE = Family(
    "ensemble_node_free_bytes",
    "gauge",
    "Free space of a node by place (run directory, /tmp, /dev/shm), as last logged: again when it is a fifth off.",
    (*RUN, "node", "place"),
)
NODE_CLOCK = Family(
    "ensemble_node_clock_offset_seconds",
    "gauge",
    "By how much a node's clock is ahead of the controller's at least (below 0: behind); 0 where it may be right.",
    (*RUN, "node"),
)

FAMILIES = (
    *(RUN_INFO, RUN_MEMBERS, RUN_PROGRESS, RUN_BEST, RUN_RATE, RUN_MODELS, RUN_UPDATED, RUN_CPU, RUN_ENERGY),
    *(RUN_COMBINED, RUN_COMBINED_BOUND, RUN_UNCERTAINTY),
    *(RUN_PREPARED, RUN_CONSUMED, RUN_REUSE, LEFT_OUT),
    *(MEMBER_INFO, MEMBER_PROGRESS, MEMBER_EPOCHS, MEMBER_OBJECTIVE, MEMBER_RATE, MEMBER_WAITED, MEMBER_CPU),
    *(MEMBER_ENERGY, MEMBER_POWER),
    *(STREAM_PREPARED, STREAM_CONSUMED, STREAM_SKIPPED, STREAM_REUSE, STREAM_WORKERS, STREAM_LEVEL),
    NODE_POWER,
    *(RUN_FAILED, RUN_FAILURES_IN_ROW, RUN_LOST_FEEDERS),
    *(NODE_EXCLUDED, NODE_QUARANTINED, NODE_FREE, NODE_CLOCK),
)
