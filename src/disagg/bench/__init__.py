"""Load and its measurement: workloads, arrivals, traces, percentiles. What a benchmark and the simulator share."""
