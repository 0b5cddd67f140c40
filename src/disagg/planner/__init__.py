"""Is splitting worth it, and which workers? Closed forms prune, the simulator decides."""
