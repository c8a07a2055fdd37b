"""Pure scheduling decisions: packing, placement, cohorts, flotillas and memory grants. No processes, no clock."""
