"""The one table of metrics and the counters that fill it. Reads no clock."""
